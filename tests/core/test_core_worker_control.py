"""The worker: flush, barriers, leaving, and control."""

from __future__ import annotations

from kvd.core import calls
from kvd.core.machine import SCHEDULER, Connect, Disconnect, Span
from kvd.errors import (
    BarrierBroken,
    NodeLost,
    NotAllowed,
    ProtocolError,
    ShapeMismatch,
)
from kvd.protocol.messages import (
    Command,
    CommandResult,
    Done,
    Enter,
    FetchState,
    Leave,
    ListKeys,
    Lookup,
    Pull,
    Push,
    Refused,
    Staged,
    StatusQuery,
    StatusReport,
)
from tests.core.core_fakes import SLICE, cluster, from_scheduler, member, of, one, server_id, uint8
from tests.core.worker_bench import Bench, ready

# ── flush, barrier, leave ──


def test_flush_waits_for_every_push_before_it() -> None:
    bench = ready("a", "b")
    for _ in range(3):
        bench.push("a")
    bench.push("b")
    flush = bench.call(calls.Flush())
    bench.push("b")
    later = bench.call(calls.Flush())
    for key in ("a", "a", "b", "a"):
        assert flush not in bench.done
        send = next(send for send in bench.sent if isinstance(send.message, Push) and send.message.parts[0].key == key)
        bench.sent.remove(send)
        bench.reply(send, Done)
    assert bench.result(flush) is None
    assert later not in bench.done
    bench.settle()
    assert bench.result(later) is None
    assert bench.result(bench.call(calls.Flush())) is None


def test_flush_does_not_wait_for_a_push_that_never_began() -> None:
    bench = ready()
    for _ in range(2):
        bench.push("w")
    late = bench.push("w", timeout_s=5)
    flush = bench.call(calls.Flush())
    bench.wait(5)
    assert bench.error(late).outcome == "not_sent"
    bench.settle()
    bench.settle()
    assert bench.result(flush) is None
    wrong = bench.push("w", spec=uint8(9))
    assert isinstance(bench.error(wrong), ShapeMismatch)
    assert bench.result(bench.call(calls.Flush())) is None


def test_barriers_count_their_generations_by_name() -> None:
    bench = Bench()
    for name, generation in (("a", 0), ("b", 0), ("a", 1)):
        call = bench.call(calls.Barrier(name))
        send = bench.take(Enter)
        assert (send.peer, send.message) == (SCHEDULER, Enter(send.message.request, name, generation))  # type: ignore[union-attr]
        bench.reply(send, Done)
        assert bench.result(call) is None


def test_a_broken_barrier_names_who_is_missing_and_the_next_is_another() -> None:
    bench = Bench()
    call = bench.call(calls.Barrier("a"))
    bench.refuse(Enter, "BarrierBroken", nodes=("worker 1",))
    error = bench.error(call)
    assert isinstance(error, BarrierBroken)
    assert error.missing == ("worker 1",)
    bench.call(calls.Barrier("a"))
    assert one(bench.waiting(Enter)).generation == 1


def test_a_barrier_that_was_not_entered_is_tried_again_at_the_same_generation() -> None:
    bench = Bench()
    call = bench.call(calls.Barrier("a"), timeout_s=1)
    bench.wait(1)
    assert bench.error(call).outcome == "unknown"
    bench.sent.clear()
    bench.call(calls.Barrier("a"))
    bench.refuse(Enter, "NotAllowed")
    bench.call(calls.Barrier("a"))
    assert one(bench.waiting(Enter)).generation == 0


def test_who_left_the_rounds_pulls_the_newest_and_pushes_no_more() -> None:
    bench = ready()
    leave = bench.call(calls.LeaveRounds("done"))
    assert one(bench.waiting(Leave)).state == "done"
    bench.reply(bench.take(Leave), Done)
    assert bench.result(leave) is None
    assert isinstance(bench.error(bench.push("w")), NotAllowed)
    assert isinstance(bench.error(bench.call(calls.InitKeys((calls.Item("v", uint8(1), "s"),)))), NotAllowed)
    bench.pull("w")
    assert bench.clocks(Pull) == [("w", 0, -1)]
    assert bench.machine.next_deadline() is not None  # it stays: heartbeats go on


def test_who_has_gone_sends_no_heartbeats() -> None:
    bench = Bench()
    bench.call(calls.LeaveRounds("left"))
    bench.reply(bench.take(Leave), Done)
    bench.sent.clear()
    bench.wait(30)
    assert bench.sent == []


def test_a_leave_that_is_refused() -> None:
    bench = Bench()
    call = bench.call(calls.LeaveRounds("angry"))
    bench.refuse(Leave, "ProtocolError")
    assert isinstance(bench.error(call), ProtocolError)
    bench.know("w")
    bench.push("w")
    assert bench.clocks() == [("w", 0, 1)]


# ── control ──


def test_a_message_to_every_server_is_answered_in_rank_order() -> None:
    bench = Bench(servers=2)
    call = bench.call(calls.Control((Command(0, "ping"),), payload="body", nbytes=4))
    first, second = bench.take(Command), bench.take(Command)
    assert first.payload == (Span("body", 0, 4),)
    bench.say(second.peer, CommandResult(second.message.request), b"two")  # type: ignore[union-attr]
    assert call not in bench.done
    bench.say(first.peer, CommandResult(first.message.request), b"one")  # type: ignore[union-attr]
    assert [payload for _, payload, _ in bench.result(call)] == [b"one", b"two"]


def test_messages_to_some_servers_and_the_first_error() -> None:
    bench = Bench(servers=2)
    call = bench.call(calls.Control((ListKeys(0, "a"), ListKeys(0, "b")), (1, 0)))
    sends = sorted([bench.take(ListKeys), bench.take(ListKeys)], key=lambda send: send.message.request)  # type: ignore[union-attr]
    assert [(send.peer, send.message.after) for send in sends] == [(server_id(1), "a"), (server_id(0), "b")]  # type: ignore[union-attr]
    for send, text in zip(sends, ("first", "second"), strict=True):
        bench.say(send.peer, Refused(send.message.request, "NotAllowed", text))  # type: ignore[union-attr]
    assert (str(bench.error(call)), bench.error(call).node) == ("first", "server 1")
    assert bench.result(bench.call(calls.Control((), ()))) == []


def test_control_that_waits_until_the_pushes_before_it_have_arrived() -> None:
    bench = ready()
    for _ in range(3):
        bench.push("w")
    call = bench.call(calls.Control((Command(0, "x"),), staged_first=True))
    bench.staged()
    assert not bench.waiting(Command)
    bench.settle()
    bench.staged()
    assert not bench.waiting(Command)
    bench.settle()
    bench.staged()
    assert len(bench.waiting(Command)) == 1
    bench.say(server_id(0), CommandResult(one(bench.waiting(Command)).request))
    assert len(bench.result(call)) == 1


def test_control_does_not_wait_for_a_push_that_never_began() -> None:
    bench = ready()
    for _ in range(2):
        bench.push("w")
    bench.push("w", timeout_s=5)
    bench.call(calls.Control((Command(0, "x"),), staged_first=True))
    timed = bench.call(calls.Control((Command(0, "y"),), staged_first=True), timeout_s=1)
    for send in [send for send in bench.sent if isinstance(send.message, Push)]:
        bench.reply(send, Staged)
    bench.wait(5)
    assert bench.error(timed).outcome == "not_sent"
    assert [command.head for command in bench.waiting(Command)][:1] == ["x"]


def test_messages_to_the_slices_of_a_key() -> None:
    bench = Bench(servers=2)
    spec = uint8(2 * SLICE)
    bench.know("w", spec=spec)
    messages = tuple(FetchState(0, "w", index) for index in range(2))
    bench.call(calls.SliceControl("w", messages, ("a", "b"), (3, 4)))
    sends = [bench.take(FetchState) for _ in range(2)]
    servers = [server_id(bench.machine.view.server_of("w", index)) for index in range(2)]
    by_index = {send.message.index: (send.peer, send.payload) for send in sends}  # type: ignore[union-attr]
    assert by_index == {0: (servers[0], (Span("a", 0, 3),)), 1: (servers[1], (Span("b", 0, 4),))}
    bench.call(calls.SliceControl("w", messages))
    assert [send.payload for send in bench.sent if isinstance(send.message, FetchState)] == [(), ()]


def test_the_scheduler_s_status() -> None:
    bench = Bench(role="observer")
    call = bench.call(calls.SchedulerStatus())
    send = bench.take(StatusQuery)
    bench.say(SCHEDULER, StatusReport(send.message.request), b"{}")  # type: ignore[union-attr]
    assert bench.result(call) == (b"{}", 2)


def test_an_observer_asks_and_takes_part_in_nothing() -> None:
    bench = ready(role="observer")
    assert isinstance(bench.error(bench.push("w")), NotAllowed)
    assert isinstance(bench.error(bench.call(calls.InitKeys((calls.Item("v", uint8(1), "s"),)))), NotAllowed)
    bench.pull("w")
    assert bench.clocks(Pull) == [("w", 0, -1)]
    assert bench.result(bench.call(calls.LeaveRounds("left"))) is None
    assert not bench.waiting(Leave)


def test_any_version() -> None:
    bench = ready()
    bench.pull("w", any_version=True)
    assert bench.clocks(Pull) == [("w", 0, -1)]


def test_explain() -> None:
    bench = ready()
    bench.push("w")
    assert bench.machine.explain(0.0) == {
        "role": "worker",
        "rank": 0,
        "view": [1, 1],
        "calls_open": 1,
        "requests_open": 1,
        "clocks": {"w": 1},
    }
    assert bench.machine.view_number == (1, 1)


def test_a_worker_that_was_replaced_fails_everything_and_is_quiet() -> None:
    bench = ready()
    open_calls = [bench.push("w"), bench.pull("w"), bench.call(calls.Barrier("b")), bench.call(calls.Flush())]
    bench.step(from_scheduler(Refused(0, "replaced", "stop")))
    later = bench.pull("w")
    for call in (*open_calls, later):
        assert isinstance(bench.error(call), NotAllowed)
    bench.sent.clear()
    bench.wait(60)
    assert bench.sent == []


def test_a_server_s_new_address_is_connected_to_and_the_old_one_let_go() -> None:
    bench = ready()
    effects = bench.restart_server()
    assert one(of(Connect, effects)).peer == server_id(0, 1)
    assert one(of(Disconnect, effects)).peer == server_id(0)
    assert isinstance(bench.error(bench.pull("w")), NodeLost)


def test_settings_of_async_pull_after_own_push() -> None:
    bench = ready(settings=cluster(mode="async"))
    bench.push("w")
    bench.pull("w")
    assert bench.clocks(Pull) == [("w", 0, 1)]


def test_a_scheduler_that_forgot_that_this_worker_left_is_told_again() -> None:
    bench = Bench()
    bench.call(calls.LeaveRounds("done"))
    bench.reply(bench.take(Leave), Done)
    bench.look(member("worker", 0))
    bench.look(member("worker", 0))
    bench.reply(bench.take(Leave), Done)
    assert not bench.waiting(Leave)


def test_a_call_of_two_keys_that_cannot_be_had_ends_once() -> None:
    bench = Bench()
    call = bench.pull("a", "b")
    bench.refuse(Lookup, "KeyNotFound", key="a")
    assert bench.error(call).key == "a"
    bench.refuse(Lookup, "KeyNotFound", key="b")
    assert len(bench.machine._outbox) == 0
