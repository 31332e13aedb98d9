"""The worker: pushes and pulls become requests, and answers completions."""

from __future__ import annotations

import pytest

from kvd.core import calls
from kvd.core.calls import Versions
from kvd.core.machine import Connect, Copy, Span
from kvd.errors import (
    ConfigError,
    DtypeMismatch,
    KeyNotFound,
    NotAllowed,
    ProtocolError,
    RemoteError,
    RequestTimeout,
    ShapeMismatch,
)
from kvd.protocol.messages import (
    Attach,
    Done,
    Lookup,
    Part,
    Pull,
    Push,
    Refused,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.core_fakes import SLICE, copies, member, of, one, server_id, uint8, welcome
from tests.core.worker_bench import Bench, ready

# ── joining ──


def test_a_worker_has_joined_when_all_servers_know_it() -> None:
    bench = Bench(servers=2, joined=False)
    bench.attach = False
    call = bench.call(calls.JoinCluster())
    bench.step(welcome(0))
    bench.look()
    assert [connect.address for connect in of(Connect, bench.effects)] == [
        "tcp://scheduler",
        "tcp://server0",
        "tcp://server1",
    ]
    for _ in range(2):
        assert call not in bench.done
        bench.reply(bench.take(Attach), Done)
    assert bench.result(call) == 0


def test_a_worker_waits_for_servers_that_are_not_there_yet() -> None:
    bench = Bench(servers=2, joined=False)
    call = bench.call(calls.JoinCluster(), timeout_s=5)
    bench.step(welcome(0))
    bench.members.pop(("server", 1))
    bench.look()
    assert call not in bench.done
    bench.wait(5)
    error = bench.error(call)
    assert isinstance(error, RequestTimeout)
    assert (error.outcome, error.waiting_for) == ("not_sent", ("server 1",))
    again = bench.call(calls.JoinCluster())
    bench.look(member("server", 1))
    assert bench.result(again) == 0


def test_who_hears_nothing_waits_for_the_scheduler() -> None:
    bench = Bench(joined=False)
    call = bench.call(calls.JoinCluster(), timeout_s=2)
    bench.wait(2)
    assert bench.error(call).waiting_for == ("scheduler",)


def test_an_observer_is_there_with_the_first_view() -> None:
    bench = Bench(role="observer", joined=False, servers=2)
    call = bench.call(calls.JoinCluster())
    bench.step(welcome(-1))
    bench.members.pop(("server", 1))
    bench.look()
    assert bench.result(call) == -1
    assert not bench.waiting(Attach)


# ── pushes and pulls ──


def test_a_push_a_pull_and_a_pushpull() -> None:
    bench = ready()
    push = bench.push("w")
    send = bench.take(Push)
    assert send.peer == server_id(0)
    assert send.message == Push(send.message.request, (Part("w", 0, 1),), 0, 1, False)  # type: ignore[union-attr]
    assert send.payload == (Span("source w", 0, 1),)
    pull = bench.pull("w")
    assert bench.clocks(Pull) == [("w", 0, 1)]  # after the push: its version
    bench.reply(send, Done)
    assert bench.result(push) == [None]
    effects = bench.values(Pull, (1,), b"a")
    assert copies(effects) == [("target w", 0, Span(b"a", 0, 1))]
    assert bench.result(pull) == [Versions(1, 1)]
    both = bench.push("w", pull=True)
    effects = bench.values(Push, (2,), b"b")
    assert copies(effects) == [("target w", 0, Span(b"b", 0, 1))]
    assert bench.result(both) == [Versions(2, 2)]
    assert bench.result(bench.call(calls.ClockOf("w"))) == 2


def test_a_large_value_goes_in_slices_to_their_servers() -> None:
    bench = Bench(servers=2)
    spec = uint8(2 * SLICE + 5)
    bench.know("w", spec=spec)
    call = bench.push("w", spec=spec, pull=True)
    sends = [bench.take(Push) for _ in range(3)]
    expected = [bench.machine.view.server_of("w", index) for index in range(3)]
    assert sorted(set(expected)) == [0, 1]
    got = {send.message.parts[0].slice_index: (send.peer, send.payload) for send in sends}  # type: ignore[union-attr]
    spans = [(0, SLICE), (SLICE, SLICE), (2 * SLICE, 5)]
    assert got == {index: (server_id(expected[index]), (Span("source w", *spans[index]),)) for index in range(3)}
    copied = []
    for number, send in enumerate(reversed(sends)):
        index = send.message.parts[0].slice_index  # type: ignore[union-attr]
        message = Values(send.message.request, (1 + number,))  # type: ignore[union-attr]
        copied += copies(bench.say(send.peer, message, bytes(spans[index][1])))
    assert sorted((offset, source.nbytes) for _, offset, source in copied) == spans
    assert bench.result(call) == [Versions(1, 3)]


def test_many_small_keys_share_a_message() -> None:
    bench = ready("a", "b", "c")
    call = bench.push("a", "b", "c", pull=True, samples=5, priority=3)
    send = bench.take(Push)
    assert [tuple(part) for part in send.message.parts] == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]  # type: ignore[union-attr]
    assert send.payload == tuple(Span(f"source {key}", 0, 1) for key in "abc")
    bench.sent.append(send)
    effects = bench.values(Push, (1, 1, 1), b"x", b"y", b"z")
    assert [(target, source.offset) for target, _, source in copies(effects)] == [
        ("target a", 0),
        ("target b", 8),
        ("target c", 16),
    ]
    assert bench.result(call) == [Versions(1, 1)] * 3


def test_who_takes_no_part_brings_no_bytes() -> None:
    bench = ready()
    bench.push("w", how=2, pull=True)
    assert bench.take(Push).payload == ()


def test_an_empty_list_of_keys_is_done_at_once() -> None:
    bench = ready()
    assert bench.result(bench.push()) == []
    assert bench.result(bench.pull()) == []
    assert bench.result(bench.call(calls.Flush())) is None


def test_calls_on_a_key_keep_their_order_and_the_window() -> None:
    bench = ready()
    first, second, third = bench.push("w"), bench.push("w"), bench.push("w")
    pull = bench.pull("w")
    assert bench.clocks() == [("w", 0, 1), ("w", 0, 2)]  # rounds_ahead is 2
    assert bench.clocks(Pull) == []
    bench.settle()
    assert bench.result(first) == [None]
    assert bench.clocks() == [("w", 0, 2), ("w", 0, 3)]
    assert bench.clocks(Pull) == [("w", 0, 3)]
    bench.settle()
    bench.settle()
    assert {first, second, third} <= set(bench.done)
    assert pull not in bench.done


def test_keys_do_not_wait_for_each_other_but_a_call_waits_for_all_of_its_keys() -> None:
    bench = ready("a", "b")
    for _ in range(3):
        bench.push("a")
    bench.push("a", "b")
    bench.pull("b")
    assert bench.clocks() == [("a", 0, 1), ("a", 0, 2)]
    assert bench.clocks(Pull) == []
    bench.settle()
    bench.settle()
    assert bench.clocks()[-2:] == [("a", 0, 4), ("b", 0, 1)]
    assert bench.clocks(Pull) == [("b", 0, 1)]


def test_a_push_of_one_key_twice_is_refused() -> None:
    bench = ready()
    assert isinstance(bench.error(bench.push("w", "w")), NotAllowed)
    bench.push("w")
    assert bench.clocks() == [("w", 0, 1)]


@pytest.mark.parametrize(("spec", "error"), [(uint8(2), ShapeMismatch), (KeySpec("int8", (1,), SLICE), DtypeMismatch)])
def test_a_value_that_does_not_fit_is_refused_here(spec: KeySpec, error: type[Exception]) -> None:
    bench = ready()
    assert isinstance(bench.error(bench.push("w", spec=spec)), error)
    bench.call(calls.Move((calls.Item("w", None, None, "target"),), False, True))
    assert bench.clocks(Pull) == [("w", 0, 0)]  # without a spec nothing is checked; the failed push took no clock


def test_a_key_is_looked_up_once_for_all_calls_that_wait() -> None:
    bench = Bench()
    pull = bench.pull("w")
    describe = bench.call(calls.DescribeKey("w"))
    assert len(bench.waiting(Lookup)) == 1
    bench.refuse(Lookup, "KeyNotFound", key="w")
    for call in (pull, describe):
        error = bench.error(call)
        assert isinstance(error, KeyNotFound)
        assert (error.key, error.node) == ("w", "server 0")
    again = bench.call(calls.DescribeKey("w"))
    bench.found()
    assert bench.result(again) == uint8(1)


def test_who_wants_to_wait_for_a_key_is_not_failed_with_those_who_do_not() -> None:
    bench = Bench()
    pull = bench.pull("w")
    describe = bench.call(calls.DescribeKey("w", wait=True))
    bench.refuse(Lookup, "KeyNotFound", key="w")
    assert isinstance(bench.error(pull), KeyNotFound)
    assert describe not in bench.done
    assert one(bench.waiting(Lookup)).wait
    bench.found()
    assert bench.result(describe) == uint8(1)


def test_a_node_that_has_not_joined_knows_no_keys() -> None:
    bench = Bench(joined=False)
    assert isinstance(bench.error(bench.pull("w")), NotAllowed)
    assert isinstance(bench.error(bench.call(calls.InitKeys((calls.Item("w", uint8(1), "s"),)))), NotAllowed)


# ── what is refused ──


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("NotAllowed", NotAllowed),
        ("KeyNotFound", KeyNotFound),
        ("ProtocolError", ProtocolError),
        ("ConfigError", ConfigError),
        ("SomethingNew", RemoteError),
    ],
)
def test_refusals_become_errors(word: str, kind: type[Exception]) -> None:
    bench = ready()
    call = bench.pull("w")
    bench.refuse(Pull, word)
    error = bench.error(call)
    assert type(error) is kind
    assert str(error) == "because"


def test_a_push_that_nobody_took_gives_its_clock_back() -> None:
    bench = ready()
    call = bench.push("w")
    bench.refuse(Push, "NotAllowed")
    assert isinstance(bench.error(call), NotAllowed)
    bench.push("w")
    assert bench.clocks() == [("w", 0, 1)]


def test_a_push_that_was_taken_in_part_breaks_the_key_until_rewind() -> None:
    bench = Bench(servers=2)
    spec = uint8(2 * SLICE)
    bench.know("w", spec=spec)
    call = bench.push("w", spec=spec)
    bench.settle()
    bench.refuse(Push, "NotAllowed")
    assert isinstance(bench.error(call), NotAllowed)
    error = bench.error(bench.push("w", spec=spec))
    assert isinstance(error, NotAllowed)
    assert "call rewind" in str(error)
    bench.result(bench.call(calls.Rewind(0)))
    bench.push("w", spec=spec)
    assert [clock for _, _, clock in bench.clocks()] == [1, 1]


@pytest.mark.parametrize("kind", ["short", "count", "done"])
def test_an_answer_that_is_none(kind: str) -> None:
    bench = ready()
    call = bench.pull("w")
    if kind == "short":
        effects = bench.values(Pull, (0,), b"")
        assert of(Copy, effects) == []
    elif kind == "count":
        bench.values(Pull, (0, 0), b"a", b"b")
    else:
        bench.reply(bench.take(Pull), Done)
    assert isinstance(bench.error(call), ProtocolError)


def test_answers_to_nothing_and_from_others_are_ignored() -> None:
    bench = ready()
    call = bench.pull("w")
    send = bench.take(Pull)
    request = send.message.request  # type: ignore[union-attr]
    bench.say(server_id(7), Values(request, (0,)), b"a")
    bench.say(server_id(0), Values(request + 99, (0,)), b"a")
    bench.say(server_id(0), Refused(0, "ProtocolError", "what?"))
    assert call not in bench.done


def test_a_push_out_of_turn_is_sent_again_soon_and_given_up_at_last() -> None:
    bench = ready()
    call = bench.push("w", timeout_s=3000.0)
    for _ in range(500):
        if call in bench.done:
            break
        bench.refuse(Push, "clock", expected=7)
        bench.wait(1.0)
    assert isinstance(bench.error(call), NotAllowed)


def test_a_server_that_does_not_know_the_worker_is_told_again() -> None:
    bench = ready()
    bench.attach = False
    call = bench.push("w")
    bench.refuse(Push, "attach")
    assert len(bench.waiting(Attach)) == 1
    bench.reply(bench.take(Attach), Done)
    bench.wait(0.1)
    bench.settle()
    assert bench.result(call) == [None]


def test_the_first_error_ends_the_waiting_and_the_rest_is_still_settled() -> None:
    bench = Bench(servers=2)
    spec = uint8(2 * SLICE)
    bench.know("w", spec=spec)
    call = bench.push("w", spec=spec)
    bench.refuse(Push, "NotAllowed")
    assert isinstance(bench.error(call), NotAllowed)
    flush = bench.call(calls.Flush())
    assert flush not in bench.done
    bench.settle()
    assert bench.result(flush) is None


def test_servers_that_do_not_know_the_worker_are_told_once() -> None:
    bench = ready()
    bench.attach = False
    for _ in range(2):
        bench.push("w")
    for _ in range(2):
        bench.refuse(Push, "attach")
    assert len(bench.waiting(Attach)) == 1
    bench.refuse(Attach, "NotAllowed")
    assert not bench.waiting(Attach)
