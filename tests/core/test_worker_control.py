"""The worker: flush, barriers, leaving, and control."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Connect, Disconnect, Span
from kvd.errors import BarrierBroken, NodeLost, NotAllowed, ProtocolError, ShapeMismatch
from kvd.protocol.messages import (
    Command,
    CommandResult,
    Departure,
    Done,
    Enter,
    ErrorCode,
    FetchState,
    Leave,
    ListKeys,
    NodeName,
    Pull,
    Push,
    Refused,
    Staged,
    StatusQuery,
    StatusReport,
    Taken,
)
from tests.core.fakes import SLICE, cluster, from_scheduler, member, of, one, server_id, uint8
from tests.core.worker_harness import Harness, ready

# ── flush, barrier, leave ──


def test_flush_waits_for_every_push_before_it() -> None:
    harness = ready("a", "b")
    for _ in range(3):
        harness.push("a")
    harness.push("b")
    flush = harness.call(requests.Flush())
    harness.push("b")
    later = harness.call(requests.Flush())
    for key in ("a", "a", "b", "a"):
        assert flush not in harness.done
        send = next(
            send for send in harness.sent if isinstance(send.message, Push) and send.message.parts[0].key == key
        )
        harness.sent.remove(send)
        harness.reply(send, Done)
    assert harness.result(flush) is None
    assert later not in harness.done
    harness.settle()
    assert harness.result(later) is None
    assert harness.result(harness.call(requests.Flush())) is None


def test_flush_does_not_wait_for_a_push_that_never_started() -> None:
    harness = ready()
    for _ in range(2):
        harness.push("w")
    late = harness.push("w", timeout_s=5)
    flush = harness.call(requests.Flush())
    harness.wait(5)
    assert harness.error(late).outcome == "not_sent"
    harness.settle()
    harness.settle()
    assert harness.result(flush) is None
    wrong = harness.push("w", spec=uint8(9))
    assert isinstance(harness.error(wrong), ShapeMismatch)
    assert harness.result(harness.call(requests.Flush())) is None


def test_a_push_that_the_server_keeps_ends_its_call_and_counts_later() -> None:
    harness = ready("w")
    push = harness.push("w")
    before = [harness.call(requests.Flush(kept=kept)) for kept in (True, False)]
    send: Any = harness.take(Push)
    refused = Refused(send.message.request, ErrorCode.NOT_ALLOWED, "the workers' optimizers differ", taken=Taken.KEPT)
    harness.say(send.peer, refused)
    assert str(harness.error(push)) == "the workers' optimizers differ"
    assert harness.result(before[1]) is None
    assert before[0] not in harness.done
    assert harness.result(harness.call(requests.Flush(kept=False))) is None
    assert harness.result(harness.call(requests.ClockOf("w"))) == 1
    harness.say(send.peer, refused)  # a copy
    harness.reply(send, Done)
    assert harness.result(before[0]) is None
    assert harness.result(harness.call(requests.Flush())) is None


def test_a_flush_may_end_when_a_worker_of_a_round_is_dead() -> None:
    harness = ready("w")
    push = harness.push("w")
    patient, other = harness.call(requests.Flush()), harness.call(requests.Flush(past_deaths=False))
    send: Any = harness.take(Push)
    lost = (NodeName("worker", 1),)
    refused = Refused(send.message.request, ErrorCode.NODE_LOST, "w waits for worker 1, which died", "w", nodes=lost)
    harness.say(send.peer, refused)
    assert isinstance(harness.error(push), NodeLost)
    assert str(harness.error(other)) == "w waits for worker 1, which died"
    assert patient not in harness.done
    later = harness.call(requests.Flush(past_deaths=False))
    assert later not in harness.done  # the worker may be back by now: the next probe tells
    harness.say(send.peer, refused)
    assert isinstance(harness.error(later), NodeLost)
    last = harness.call(requests.Flush(past_deaths=False))
    harness.reply(send, Done)
    assert harness.result(patient) is harness.result(last) is None


def test_barriers_count_their_generations_by_name() -> None:
    harness = Harness()
    for name, generation in (("a", 0), ("b", 0), ("a", 1)):
        call = harness.call(requests.Barrier(name))
        send = harness.take(Enter)
        assert (send.peer, send.message) == (SCHEDULER, Enter(send.message.request, name, generation))  # type: ignore[union-attr]
        harness.reply(send, Done)
        assert harness.result(call) is None


def test_a_broken_barrier_names_the_missing_workers_and_is_still_to_be_passed() -> None:
    harness = Harness()
    call = harness.call(requests.Barrier("a"))
    harness.refuse(Enter, ErrorCode.BARRIER_BROKEN, nodes=(NodeName("worker", 1),))
    error = harness.error(call)
    assert isinstance(error, BarrierBroken)
    assert error.missing == ("worker 1",)
    harness.call(requests.Barrier("a"))
    assert one(harness.waiting(Enter)).generation == 0


def test_a_barrier_that_timed_out_is_entered_again_at_the_same_generation() -> None:
    harness = Harness()
    call = harness.call(requests.Barrier("a"), timeout_s=1)
    harness.wait(1)
    assert harness.error(call).outcome == "unknown"
    harness.sent.clear()
    harness.call(requests.Barrier("a"))
    harness.refuse(Enter, ErrorCode.NOT_ALLOWED)
    harness.call(requests.Barrier("a"))
    assert one(harness.waiting(Enter)).generation == 0


def test_a_worker_that_left_the_rounds_pulls_the_newest_version_and_cannot_push() -> None:
    harness = ready()
    leave = harness.call(requests.Depart(Departure.DONE))
    assert one(harness.waiting(Leave)).departure is Departure.DONE
    harness.reply(harness.take(Leave), Done)
    assert harness.result(leave) is None
    assert isinstance(harness.error(harness.push("w")), NotAllowed)
    assert isinstance(harness.error(harness.call(requests.InitKeys((requests.Item("v", uint8(1), "s"),)))), NotAllowed)
    harness.pull("w")
    assert harness.clocks(Pull) == [("w", 0, -1)]
    assert harness.machine.next_deadline() is not None  # it stays: heartbeats go on


def test_a_worker_that_left_the_cluster_sends_no_heartbeats() -> None:
    harness = Harness()
    harness.call(requests.Depart(Departure.LEFT))
    harness.reply(harness.take(Leave), Done)
    harness.sent.clear()
    harness.wait(30)
    assert harness.sent == []


def test_a_worker_whose_leave_is_refused_still_pushes() -> None:
    harness = Harness()
    call = harness.call(requests.Depart(Departure.LEFT))
    harness.refuse(Leave, ErrorCode.PROTOCOL_ERROR)
    assert isinstance(harness.error(call), ProtocolError)
    harness.know("w")
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


# ── control ──


def test_a_message_to_every_server_is_answered_in_rank_order() -> None:
    harness = Harness(servers=2)
    call = harness.call(requests.Control((Command(0, "ping"),), payload="body", nbytes=4))
    first, second = harness.take(Command), harness.take(Command)
    assert first.payload == (Span("body", 0, 4),)
    harness.say(second.peer, CommandResult(second.message.request), b"two")  # type: ignore[union-attr]
    assert call not in harness.done
    harness.say(first.peer, CommandResult(first.message.request), b"one")  # type: ignore[union-attr]
    assert [payload for _, payload, _ in harness.result(call)] == [b"one", b"two"]


def test_messages_to_some_servers_and_the_first_error() -> None:
    harness = Harness(servers=2)
    call = harness.call(requests.Control((ListKeys(0, "a"), ListKeys(0, "b")), (1, 0)))
    sends = sorted([harness.take(ListKeys), harness.take(ListKeys)], key=lambda send: send.message.request)  # type: ignore[union-attr]
    assert [(send.peer, send.message.after) for send in sends] == [(server_id(1), "a"), (server_id(0), "b")]  # type: ignore[union-attr]
    for send, text in zip(sends, ("first", "second"), strict=True):
        harness.say(send.peer, Refused(send.message.request, ErrorCode.NOT_ALLOWED, text))  # type: ignore[union-attr]
    assert (str(harness.error(call)), harness.error(call).node) == ("first", "server 1")
    assert harness.result(harness.call(requests.Control((), ()))) == []


def test_control_waits_until_the_pushes_before_it_are_staged() -> None:
    harness = ready()
    for _ in range(3):
        harness.push("w")
    call = harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    harness.staged()
    assert not harness.waiting(Command)
    harness.settle()
    harness.staged()
    assert not harness.waiting(Command)
    harness.settle()
    harness.staged()
    assert len(harness.waiting(Command)) == 1
    harness.say(server_id(0), CommandResult(one(harness.waiting(Command)).request))
    assert len(harness.result(call)) == 1


def test_control_does_not_wait_for_a_push_that_never_started() -> None:
    harness = ready()
    for _ in range(2):
        harness.push("w")
    harness.push("w", timeout_s=5)
    harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    timed = harness.call(requests.Control((Command(0, "y"),), staged_first=True), timeout_s=1)
    for send in [send for send in harness.sent if isinstance(send.message, Push)]:
        harness.reply(send, Staged)
    harness.wait(5)
    assert harness.error(timed).outcome == "not_sent"
    assert [command.head for command in harness.waiting(Command)][:1] == ["x"]


def test_messages_to_the_slices_of_a_key() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    messages = tuple(FetchState(0, "w", index) for index in range(2))
    harness.call(requests.SliceControl("w", messages, ("a", "b"), (3, 4)))
    sends = [harness.take(FetchState) for _ in range(2)]
    servers = [server_id(harness.machine.view.partition_of("w", index)) for index in range(2)]
    by_index = {send.message.index: (send.peer, send.payload) for send in sends}  # type: ignore[union-attr]
    assert by_index == {0: (servers[0], (Span("a", 0, 3),)), 1: (servers[1], (Span("b", 0, 4),))}
    harness.call(requests.SliceControl("w", messages))
    assert [send.payload for send in harness.sent if isinstance(send.message, FetchState)] == [(), ()]


def test_the_scheduler_status_is_its_payload_and_size() -> None:
    harness = Harness(role="observer")
    call = harness.call(requests.SchedulerStatus())
    send = harness.take(StatusQuery)
    harness.say(SCHEDULER, StatusReport(send.message.request), b"{}")  # type: ignore[union-attr]
    assert harness.result(call) == (b"{}", 2)


def test_an_observer_pulls_but_does_not_push_or_init() -> None:
    harness = ready(role="observer")
    assert isinstance(harness.error(harness.push("w")), NotAllowed)
    assert isinstance(harness.error(harness.call(requests.InitKeys((requests.Item("v", uint8(1), "s"),)))), NotAllowed)
    harness.pull("w")
    assert harness.clocks(Pull) == [("w", 0, -1)]
    assert harness.result(harness.call(requests.Depart(Departure.LEFT))) is None
    assert not harness.waiting(Leave)


def test_a_pull_of_any_version() -> None:
    harness = ready()
    harness.pull("w", any_version=True)
    assert harness.clocks(Pull) == [("w", 0, -1)]


def test_explain() -> None:
    harness = ready()
    harness.push("w")
    assert harness.machine.explain(0.0) == {
        "role": "worker",
        "rank": 0,
        "view": [1, 1],
        "calls_open": 1,
        "requests_open": 1,
        "step": 1,
        "clocks": {"w": 1},
    }
    assert harness.machine.epoch == (1, 1)


def test_a_worker_that_was_replaced_fails_all_calls_and_sends_nothing() -> None:
    harness = ready()
    open_calls = [
        harness.push("w"),
        harness.pull("w"),
        harness.call(requests.Barrier("b")),
        harness.call(requests.Flush()),
    ]
    harness.step(from_scheduler(Refused(0, ErrorCode.REPLACED, "stop")))
    later = harness.pull("w")
    for call in (*open_calls, later):
        assert isinstance(harness.error(call), NotAllowed)
    harness.sent.clear()
    harness.wait(60)
    assert harness.sent == []


def test_a_worker_connects_to_a_restarted_server_and_drops_the_old_connection() -> None:
    harness = ready()
    effects = harness.restart_server()
    assert one(of(Connect, effects)).peer == server_id(0, 1)
    assert one(of(Disconnect, effects)).peer == server_id(0)
    assert isinstance(harness.error(harness.pull("w")), NodeLost)


def test_a_pull_in_async_mode_waits_for_the_own_push() -> None:
    harness = ready(settings=cluster(mode="async"))
    harness.push("w")
    harness.pull("w")
    assert harness.clocks(Pull) == [("w", 0, 1)]


def test_a_worker_leaves_again_when_the_scheduler_has_forgotten_it() -> None:
    harness = Harness()
    harness.call(requests.Depart(Departure.DONE))
    harness.reply(harness.take(Leave), Done)
    harness.look(member("worker", 0))
    harness.look(member("worker", 0))
    harness.reply(harness.take(Leave), Done)
    assert not harness.waiting(Leave)


@pytest.mark.parametrize("departure", [Departure.FAILED, Departure.LEFT])
def test_a_worker_that_has_gone_says_nothing_more_whatever_view_comes_late(departure: Departure) -> None:
    """After an error, it would otherwise leave the rounds in good order, and they would go on without it."""
    harness = Harness()
    harness.call(requests.Depart(departure))
    harness.reply(harness.take(Leave), Done)
    harness.look(member("worker", 0))
    assert not harness.waiting(Leave)


def test_a_call_on_two_unknown_keys_fails_once() -> None:
    harness = Harness()
    call = harness.pull("a", "b")
    harness.missing()
    assert harness.error(call).key == "a"
    assert len(harness.machine._outbox) == 0
