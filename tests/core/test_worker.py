"""The worker: pushes and pulls become requests, and their answers complete the calls."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

from kvd.core import requests
from kvd.core.machine import Connect, Received, ServerPeer, Span
from kvd.core.requests import Versions
from kvd.errors import (
    DtypeMismatch,
    KeyNotFound,
    NotAllowed,
    RequestTimeout,
    ShapeMismatch,
)
from kvd.protocol.messages import (
    Attach,
    Done,
    Epoch,
    ErrorCode,
    Lookup,
    MemberState,
    Part,
    Pull,
    Push,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, copies, from_scheduler, member, of, one, server_id, uint8, view, welcome
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


def test_a_worker_waits_for_workers_that_have_never_come() -> None:
    harness = Harness(servers=1, joined=False)
    call = harness.call(requests.JoinCluster())
    visit = harness.call(requests.JoinCluster(wait_for_workers=False))
    harness.step(welcome(0))
    harness.members.pop(("worker", 1))
    harness.look()
    assert harness.result(visit) == 0
    assert call not in harness.done
    harness.look(member("worker", 1))
    assert harness.result(call) == 0


@pytest.mark.parametrize("state", list(MemberState))
def test_a_worker_does_not_wait_for_one_that_came_whatever_became_of_it(state: MemberState) -> None:
    harness = Harness(servers=1, joined=False)
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(0))
    harness.look(member("worker", 1, state))
    assert harness.result(call) == 0


def test_a_call_that_stopped_waiting_for_the_cluster_ends_once() -> None:
    harness = Harness(servers=1, joined=False)
    calls = [harness.call(requests.JoinCluster(wait_for_workers=wait), timeout_s=1) for wait in (True, False)]
    harness.wait(1)
    for call in calls:
        assert isinstance(harness.error(call), RequestTimeout)
    harness.step(welcome(0))
    harness.look()
    assert len(harness.done) == 2


def test_a_server_that_does_not_answer_the_attach_is_not_reached() -> None:
    harness = Harness(servers=2, joined=False)
    harness.attach = False
    harness.step(welcome(0))
    harness.look()
    first = harness.take(Attach)
    harness.reply(first, Done)
    assert [server.rank for server in harness.machine.unreached_servers()] == [1]


def test_a_worker_that_hears_nothing_waits_for_the_scheduler() -> None:
    harness = Harness(joined=False)
    call = harness.call(requests.JoinCluster(), timeout_s=2)
    harness.wait(2)
    assert harness.error(call).waiting_for == ("scheduler",)


def test_an_observer_has_joined_with_the_first_view() -> None:
    harness = Harness(role="observer", joined=False, servers=2)
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(-1))
    harness.members.pop(("server", 1))
    harness.look()
    assert harness.result(call) == -1
    assert not harness.waiting(Attach)


def test_a_late_view_of_the_cluster_says_nothing_of_the_run() -> None:
    """A reader that had to wait is sent the view of the cluster, which counts its epochs for itself."""
    harness = Harness(role="observer", joined=False)
    settings, everybody = harness.settings, harness.members.values()
    harness.step(welcome(-1)._replace(run=7))
    harness.step(from_scheduler(view(settings, everybody), (1, 2))._replace(run=7))
    assert harness.machine.view.is_up_to_date
    harness.step(from_scheduler(view(settings, everybody), (1, 9)))
    assert harness.machine.view.is_up_to_date
    harness.step(Received(ServerPeer(server_id(0)), 1, Epoch(1, 3), Done(1), run=7))
    assert not harness.machine.view.is_up_to_date  # the server knows a newer one


# ── pushes and pulls ──


def test_a_push_a_pull_and_a_pushpull() -> None:
    harness = ready()
    push = harness.push("w")
    send = harness.take(Push)
    assert send.peer == server_id(0)
    assert send.message == Push(send.message.request, (Part("w", 0, 1),), 0, 1, False, step=1)  # type: ignore[union-attr]
    assert send.payload == (Span("source w", 0, 1),)
    pull = harness.pull("w")
    assert harness.clocks(Pull) == [("w", 0, 1)]  # it waits for the version of the push
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
    expected = [harness.machine.view.partition_of("w", index) for index in range(3)]
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
    assert [part[:3] for part in send.message.parts] == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]  # type: ignore[union-attr]
    assert send.payload == tuple(Span(f"source {key}", 0, 1) for key in "abc")
    harness.sent.append(send)
    effects = harness.values(Push, (1, 1, 1), b"x", b"y", b"z")
    assert [(target, source.offset) for target, _, source in copies(effects)] == [
        ("target a", 0),
        ("target b", 8),
        ("target c", 16),
    ]
    assert harness.result(call) == [Versions(1, 1)] * 3


def test_an_absent_push_has_no_payload() -> None:
    harness = ready()
    harness.push("w", how=2, pull=True)
    assert harness.take(Push).payload == ()


def test_an_empty_list_of_keys_is_done_at_once() -> None:
    harness = ready()
    assert harness.result(harness.push()) == []
    assert harness.result(harness.pull()) == []
    assert harness.result(harness.call(requests.Flush())) is None


def test_calls_on_a_key_keep_their_order_and_stay_within_the_window() -> None:
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


def test_a_push_says_under_which_clocks_it_sets_out_and_before_it_does() -> None:
    harness = ready("a", "b")
    said: list[tuple[str, list[int], int]] = []

    def says(what: str) -> dict[str, Any]:
        return {"sets_out": lambda clocks: said.append((what, list(clocks), len(harness.sent)))}

    harness.push("b", **says("one"))
    harness.push("a", "b", **says("both"))
    harness.push("b", **says("waits"))
    harness.push("a", spec=uint8(2), **says("refused"))
    assert [(what, clocks) for what, clocks, _ in said] == [("one", [1]), ("both", [1, 2])]
    assert said[0][2] == 0  # nothing had been sent
    harness.settle()
    assert [(what, clocks) for what, clocks, _ in said[2:]] == [("waits", [3])]


@pytest.mark.parametrize(("keys", "twice"), [("w w", "w"), ("a w w", "w"), ("a w b w c", "w"), ("w a a", "a")])
def test_a_call_that_pushes_a_key_twice_is_refused_with_its_name(keys: str, twice: str) -> None:
    names = keys.split()
    harness = ready(*sorted({*names, "w"}))
    error = harness.error(harness.push(*names))
    assert isinstance(error, NotAllowed)
    assert error.key == twice
    assert f"key {twice!r} is pushed twice" in str(error)
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


@pytest.mark.parametrize(("spec", "error"), [(uint8(2), ShapeMismatch), (KeySpec("int8", (1,), SLICE), DtypeMismatch)])
def test_a_value_of_another_shape_or_dtype_is_refused_before_it_is_sent(spec: KeySpec, error: type[Exception]) -> None:
    harness = ready()
    assert isinstance(harness.error(harness.push("w", spec=spec)), error)
    harness.call(requests.Transfer((requests.Item("w", None, None, "target"),), False, True))
    assert harness.clocks(Pull) == [("w", 0, 0)]  # without a spec nothing is checked; the failed push took no clock


def test_one_look_up_serves_all_calls_that_wait_for_the_key() -> None:
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


def test_a_call_that_waits_for_a_key_does_not_fail_with_those_that_do_not_wait() -> None:
    harness = Harness()
    pull = harness.pull("w")
    describe = harness.call(requests.DescribeKey("w", wait=True))
    harness.refuse(Lookup, ErrorCode.KEY_NOT_FOUND, key="w")
    assert isinstance(harness.error(pull), KeyNotFound)
    assert describe not in harness.done
    assert one(harness.waiting(Lookup)).wait
    harness.found()
    assert harness.result(describe) == uint8(1)


def test_calls_on_keys_are_refused_before_the_node_has_joined() -> None:
    harness = Harness(joined=False)
    assert isinstance(harness.error(harness.pull("w")), NotAllowed)
    assert isinstance(harness.error(harness.call(requests.InitKeys((requests.Item("w", uint8(1), "s"),)))), NotAllowed)


def test_a_completed_pull_keeps_nothing_of_the_program_alive() -> None:
    class Target:
        """What an array is: something that a weak reference can watch."""

    harness = ready()
    target = Target()
    watch = ref(target)
    item = requests.Item("w", uint8(1), None, target)
    call = harness.call(requests.Transfer((item,), push=False, pull=True))
    gc.disable()
    try:
        harness.values(Pull, (0,), b"a")
        assert harness.result(call) == [Versions(0, 0)]
        harness.effects.clear()
        harness.sent.clear()
        del target, item
        assert watch() is None
    finally:
        gc.enable()
