"""The worker: pushes and pulls become requests, and answers completions."""

from __future__ import annotations

import pytest

from kvd.core import requests
from kvd.core.machine import Connect, Copy, Span
from kvd.core.requests import Versions
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
    ErrorCode,
    Lookup,
    NotYetReason,
    Part,
    Pull,
    Push,
    Refused,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, copies, member, of, one, server_id, uint8, welcome
from tests.core.worker_harness import Harness, ready

# ── joining ──


def test_a_worker_has_joined_when_all_servers_know_it() -> None:
    harness = Harness(servers=2, joined=False)
    harness.attach = False
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(0))
    harness.look()
    assert [connect.address for connect in of(Connect, harness.effects)] == [
        "tcp://scheduler",
        "tcp://server0",
        "tcp://server1",
    ]
    for _ in range(2):
        assert call not in harness.done
        harness.reply(harness.take(Attach), Done)
    assert harness.result(call) == 0


def test_a_worker_waits_for_servers_that_are_not_there_yet() -> None:
    harness = Harness(servers=2, joined=False)
    call = harness.call(requests.JoinCluster(), timeout_s=5)
    harness.step(welcome(0))
    harness.members.pop(("server", 1))
    harness.look()
    assert call not in harness.done
    harness.wait(5)
    error = harness.error(call)
    assert isinstance(error, RequestTimeout)
    assert (error.outcome, error.waiting_for) == ("not_sent", ("server 1",))
    again = harness.call(requests.JoinCluster())
    harness.look(member("server", 1))
    assert harness.result(again) == 0


def test_who_hears_nothing_waits_for_the_scheduler() -> None:
    harness = Harness(joined=False)
    call = harness.call(requests.JoinCluster(), timeout_s=2)
    harness.wait(2)
    assert harness.error(call).waiting_for == ("scheduler",)


def test_an_observer_is_there_with_the_first_view() -> None:
    harness = Harness(role="observer", joined=False, servers=2)
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(-1))
    harness.members.pop(("server", 1))
    harness.look()
    assert harness.result(call) == -1
    assert not harness.waiting(Attach)


# ── pushes and pulls ──


def test_a_push_a_pull_and_a_pushpull() -> None:
    harness = ready()
    push = harness.push("w")
    send = harness.take(Push)
    assert send.peer == server_id(0)
    assert send.message == Push(send.message.request, (Part("w", 0, 1),), 0, 1, False)  # type: ignore[union-attr]
    assert send.payload == (Span("source w", 0, 1),)
    pull = harness.pull("w")
    assert harness.clocks(Pull) == [("w", 0, 1)]  # after the push: its version
    harness.reply(send, Done)
    assert harness.result(push) == [None]
    effects = harness.values(Pull, (1,), b"a")
    assert copies(effects) == [("target w", 0, Span(b"a", 0, 1))]
    assert harness.result(pull) == [Versions(1, 1)]
    both = harness.push("w", pull=True)
    effects = harness.values(Push, (2,), b"b")
    assert copies(effects) == [("target w", 0, Span(b"b", 0, 1))]
    assert harness.result(both) == [Versions(2, 2)]
    assert harness.result(harness.call(requests.ClockOf("w"))) == 2


def test_a_large_value_goes_in_slices_to_their_servers() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE + 5)
    harness.know("w", spec=spec)
    call = harness.push("w", spec=spec, pull=True)
    sends = [harness.take(Push) for _ in range(3)]
    expected = [harness.machine.view.server_of("w", index) for index in range(3)]
    assert sorted(set(expected)) == [0, 1]
    got = {send.message.parts[0].slice_index: (send.peer, send.payload) for send in sends}  # type: ignore[union-attr]
    spans = [(0, SLICE), (SLICE, SLICE), (2 * SLICE, 5)]
    assert got == {index: (server_id(expected[index]), (Span("source w", *spans[index]),)) for index in range(3)}
    copied = []
    for number, send in enumerate(reversed(sends)):
        index = send.message.parts[0].slice_index  # type: ignore[union-attr]
        message = Values(send.message.request, (1 + number,))  # type: ignore[union-attr]
        copied += copies(harness.say(send.peer, message, bytes(spans[index][1])))
    assert sorted((offset, source.nbytes) for _, offset, source in copied) == spans
    assert harness.result(call) == [Versions(1, 3)]


def test_many_small_keys_share_a_message() -> None:
    harness = ready("a", "b", "c")
    call = harness.push("a", "b", "c", pull=True, samples=5, priority=3)
    send = harness.take(Push)
    assert [tuple(part) for part in send.message.parts] == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]  # type: ignore[union-attr]
    assert send.payload == tuple(Span(f"source {key}", 0, 1) for key in "abc")
    harness.sent.append(send)
    effects = harness.values(Push, (1, 1, 1), b"x", b"y", b"z")
    assert [(target, source.offset) for target, _, source in copies(effects)] == [
        ("target a", 0),
        ("target b", 8),
        ("target c", 16),
    ]
    assert harness.result(call) == [Versions(1, 1)] * 3


def test_who_takes_no_part_brings_no_bytes() -> None:
    harness = ready()
    harness.push("w", how=2, pull=True)
    assert harness.take(Push).payload == ()


def test_an_empty_list_of_keys_is_done_at_once() -> None:
    harness = ready()
    assert harness.result(harness.push()) == []
    assert harness.result(harness.pull()) == []
    assert harness.result(harness.call(requests.Flush())) is None


def test_calls_on_a_key_keep_their_order_and_the_window() -> None:
    harness = ready()
    first, second, third = harness.push("w"), harness.push("w"), harness.push("w")
    pull = harness.pull("w")
    assert harness.clocks() == [("w", 0, 1), ("w", 0, 2)]  # rounds_ahead is 2
    assert harness.clocks(Pull) == []
    harness.settle()
    assert harness.result(first) == [None]
    assert harness.clocks() == [("w", 0, 2), ("w", 0, 3)]
    assert harness.clocks(Pull) == [("w", 0, 3)]
    harness.settle()
    harness.settle()
    assert {first, second, third} <= set(harness.done)
    assert pull not in harness.done


def test_keys_do_not_wait_for_each_other_but_a_call_waits_for_all_of_its_keys() -> None:
    harness = ready("a", "b")
    for _ in range(3):
        harness.push("a")
    harness.push("a", "b")
    harness.pull("b")
    assert harness.clocks() == [("a", 0, 1), ("a", 0, 2)]
    assert harness.clocks(Pull) == []
    harness.settle()
    harness.settle()
    assert harness.clocks()[-2:] == [("a", 0, 4), ("b", 0, 1)]
    assert harness.clocks(Pull) == [("b", 0, 1)]


def test_a_push_of_one_key_twice_is_refused() -> None:
    harness = ready()
    assert isinstance(harness.error(harness.push("w", "w")), NotAllowed)
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


@pytest.mark.parametrize(("spec", "error"), [(uint8(2), ShapeMismatch), (KeySpec("int8", (1,), SLICE), DtypeMismatch)])
def test_a_value_that_does_not_fit_is_refused_here(spec: KeySpec, error: type[Exception]) -> None:
    harness = ready()
    assert isinstance(harness.error(harness.push("w", spec=spec)), error)
    harness.call(requests.Transfer((requests.Item("w", None, None, "target"),), False, True))
    assert harness.clocks(Pull) == [("w", 0, 0)]  # without a spec nothing is checked; the failed push took no clock


def test_a_key_is_looked_up_once_for_all_calls_that_wait() -> None:
    harness = Harness()
    pull = harness.pull("w")
    describe = harness.call(requests.DescribeKey("w"))
    assert len(harness.waiting(Lookup)) == 1
    harness.refuse(Lookup, ErrorCode.KEY_NOT_FOUND, key="w")
    for call in (pull, describe):
        error = harness.error(call)
        assert isinstance(error, KeyNotFound)
        assert (error.key, error.node) == ("w", "server 0")
    again = harness.call(requests.DescribeKey("w"))
    harness.found()
    assert harness.result(again) == uint8(1)


def test_who_wants_to_wait_for_a_key_is_not_failed_with_those_who_do_not() -> None:
    harness = Harness()
    pull = harness.pull("w")
    describe = harness.call(requests.DescribeKey("w", wait=True))
    harness.refuse(Lookup, ErrorCode.KEY_NOT_FOUND, key="w")
    assert isinstance(harness.error(pull), KeyNotFound)
    assert describe not in harness.done
    assert one(harness.waiting(Lookup)).wait
    harness.found()
    assert harness.result(describe) == uint8(1)


def test_a_node_that_has_not_joined_knows_no_keys() -> None:
    harness = Harness(joined=False)
    assert isinstance(harness.error(harness.pull("w")), NotAllowed)
    assert isinstance(harness.error(harness.call(requests.InitKeys((requests.Item("w", uint8(1), "s"),)))), NotAllowed)


# ── what is refused ──


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.NOT_ALLOWED, NotAllowed),
        (ErrorCode.KEY_NOT_FOUND, KeyNotFound),
        (ErrorCode.PROTOCOL_ERROR, ProtocolError),
        (ErrorCode.CONFIG_ERROR, ConfigError),
        (ErrorCode.REMOTE_ERROR, RemoteError),
    ],
)
def test_refusals_become_errors(code: ErrorCode, kind: type[Exception]) -> None:
    harness = ready()
    call = harness.pull("w")
    harness.refuse(Pull, code)
    error = harness.error(call)
    assert type(error) is kind
    assert str(error) == "because"


def test_a_push_that_nobody_took_gives_its_clock_back() -> None:
    harness = ready()
    call = harness.push("w")
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


def test_a_push_that_was_taken_in_part_breaks_the_key_until_rewind() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    call = harness.push("w", spec=spec)
    harness.settle()
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    error = harness.error(harness.push("w", spec=spec))
    assert isinstance(error, NotAllowed)
    assert "call rewind" in str(error)
    harness.result(harness.call(requests.Rewind(0)))
    harness.push("w", spec=spec)
    assert [clock for _, _, clock in harness.clocks()] == [1, 1]


@pytest.mark.parametrize("kind", ["short", "count", "done"])
def test_an_answer_that_is_none(kind: str) -> None:
    harness = ready()
    call = harness.pull("w")
    if kind == "short":
        effects = harness.values(Pull, (0,), b"")
        assert of(Copy, effects) == []
    elif kind == "count":
        harness.values(Pull, (0, 0), b"a", b"b")
    else:
        harness.reply(harness.take(Pull), Done)
    assert isinstance(harness.error(call), ProtocolError)


def test_answers_to_nothing_and_from_others_are_ignored() -> None:
    harness = ready()
    call = harness.pull("w")
    send = harness.take(Pull)
    request = send.message.request  # type: ignore[union-attr]
    harness.say(server_id(7), Values(request, (0,)), b"a")
    harness.say(server_id(0), Values(request + 99, (0,)), b"a")
    harness.say(server_id(0), Refused(0, ErrorCode.PROTOCOL_ERROR, "what?"))
    assert call not in harness.done


def test_a_push_out_of_turn_is_sent_again_soon_and_given_up_at_last() -> None:
    harness = ready()
    call = harness.push("w", timeout_s=3000.0)
    for _ in range(500):
        if call in harness.done:
            break
        harness.postpone(Push, NotYetReason.OUT_OF_TURN, next_clock=7)
        harness.wait(1.0)
    assert isinstance(harness.error(call), NotAllowed)


def test_a_server_that_does_not_know_the_worker_is_told_again() -> None:
    harness = ready()
    harness.attach = False
    call = harness.push("w")
    harness.postpone(Push, NotYetReason.NOT_ATTACHED)
    assert len(harness.waiting(Attach)) == 1
    harness.reply(harness.take(Attach), Done)
    harness.wait(0.1)
    harness.settle()
    assert harness.result(call) == [None]


def test_the_first_error_ends_the_waiting_and_the_rest_is_still_settled() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    call = harness.push("w", spec=spec)
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    flush = harness.call(requests.Flush())
    assert flush not in harness.done
    harness.settle()
    assert harness.result(flush) is None


def test_servers_that_do_not_know_the_worker_are_told_once() -> None:
    harness = ready()
    harness.attach = False
    for _ in range(2):
        harness.push("w")
    for _ in range(2):
        harness.postpone(Push, NotYetReason.NOT_ATTACHED)
    assert len(harness.waiting(Attach)) == 1
    harness.refuse(Attach, ErrorCode.NOT_ALLOWED)
    assert not harness.waiting(Attach)
