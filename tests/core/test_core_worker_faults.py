"""The worker: deadlines, deaths, restarts."""

from __future__ import annotations

from kvd.core import calls
from kvd.core.machine import Copy, Garbled, Halt
from kvd.errors import NodeLost, ProtocolError, RequestTimeout
from kvd.protocol.messages import (
    Command,
    Pull,
    Push,
    Refused,
    Values,
)
from tests.core.core_fakes import SLICE, member, of, one, server_id, uint8
from tests.core.worker_bench import Bench, ready

# ── deadlines ──


def test_a_call_that_did_not_get_its_turn_was_not_sent() -> None:
    bench = ready()
    for _ in range(2):
        bench.push("w")
    call = bench.push("w", timeout_s=5)
    bench.wait(4.9)
    assert call not in bench.done
    bench.wait(0.2)
    error = bench.error(call)
    assert isinstance(error, RequestTimeout)
    assert error.outcome == "not_sent"
    assert "'w'" in str(error)
    bench.settle()
    bench.push("w")
    assert [clock for _, _, clock in bench.clocks()][-1] == 3  # it took no clock


def test_a_push_that_was_sent_may_have_happened_and_goes_on() -> None:
    bench = ready()
    call = bench.push("w", timeout_s=5)
    bench.wait(5)
    error = bench.error(call)
    assert (error.outcome, error.waiting_for) == ("unknown", ("server 0",))
    assert "its pushes are still on their way" in str(error)
    flush = bench.call(calls.Flush())
    bench.settle()
    assert bench.result(flush) is None


def test_when_a_part_has_arrived_the_outcome_is_unknown() -> None:
    bench = Bench(servers=1, credit=SLICE)
    spec = uint8(2 * SLICE)
    bench.know("w", spec=spec)
    call = bench.push("w", spec=spec, timeout_s=5)
    assert len(bench.waiting(Push)) == 1  # the credit lets one go
    bench.wait(5)
    assert bench.error(call).outcome == "unknown"


def test_the_silent_the_missing_and_the_dead_are_named() -> None:
    bench = ready(servers=2)
    bench.members.pop(("worker", 1))
    bench.look(member("server", 1, "dead"))
    call = bench.call(calls.Barrier("b"), timeout_s=1)
    bench.wait(1)
    assert bench.error(call).waiting_for == ("server 1", "worker 1", "scheduler")


def test_a_late_answer_settles_the_push_and_never_writes_into_the_target() -> None:
    bench = ready()
    call = bench.push("w", pull=True, timeout_s=5)
    bench.wait(5)
    assert bench.error(call).outcome == "unknown"
    send = next(send for send in bench.sent if isinstance(send.message, Push))
    flush = bench.call(calls.Flush())
    effects = bench.say(send.peer, Values(send.message.request, (1,)), b"a")  # type: ignore[union-attr]
    assert of(Copy, effects) == []
    assert bench.result(flush) is None


def test_a_late_answer_to_a_pull_is_ignored() -> None:
    bench = ready()
    call = bench.pull("w", timeout_s=5)
    send = bench.take(Pull)
    bench.wait(5)
    assert bench.error(call).outcome == "unknown"
    assert of(Copy, bench.say(send.peer, Values(send.message.request, (0,)), b"a")) == []  # type: ignore[union-attr]


def test_many_short_calls_leave_nothing_behind() -> None:
    bench = ready()
    for _ in range(1000):
        bench.call(calls.ClockOf("w"))
    assert len(bench.machine._deadlines) < 200
    bench.wait(61)
    assert len(bench.machine._deadlines) == 0


def test_the_machine_asks_to_be_woken_for_deadlines_retries_and_heartbeats() -> None:
    bench = ready()
    assert bench.machine.next_deadline() == 1.0  # a heartbeat
    bench.pull("w", timeout_s=0.5)
    assert bench.machine.next_deadline() == 0.5


# ── dead workers ──


def test_a_dead_worker_ends_the_waiting_and_not_the_push() -> None:
    bench = ready()
    call = bench.push("w", pull=True)
    send = bench.take(Push)
    refused = Refused(send.message.request, "NodeLost", "worker 1 died", ("worker 1",), "w", 0, 21.5)  # type: ignore[union-attr]
    bench.say(send.peer, refused)
    error = bench.error(call)
    assert isinstance(error, NodeLost)
    assert (error.node, error.last_seen_s) == ("worker 1", 21.5)
    flush = bench.call(calls.Flush(), timeout_s=600)
    bench.wait(3)
    probe = one(bench.waiting(Push))
    assert probe.probe
    bench.say(send.peer, refused)
    effects = bench.say(send.peer, Values(probe.request, (1,)), b"a")
    assert of(Copy, effects) == []
    assert bench.result(flush) is None


def test_a_dead_worker_ends_a_pull() -> None:
    bench = ready()
    call = bench.pull("w")
    bench.refuse(Pull, "NodeLost", nodes=("worker 1",))
    assert bench.error(call).node == "worker 1"
    bench.pull("w")
    bench.refuse(Pull, "NodeLost")
    assert len(bench.machine._outbox) == 0


def test_the_loss_of_a_worker_says_that_the_bytes_are_there() -> None:
    bench = ready()
    bench.push("w")
    bench.call(calls.Control((Command(0, "x"),), staged_first=True))
    bench.refuse(Push, "NodeLost", nodes=("worker 1",))
    assert len(bench.waiting(Command)) == 1


# ── dead and restarted servers ──


def test_a_dead_server_ends_the_waiting_and_gets_its_pushes_when_it_is_back() -> None:
    bench = ready()
    push, pull = bench.push("w"), bench.pull("w")
    bench.look(member("server", 0, "dead", last_seen_s=5.0))
    for call in (push, pull, bench.push("w"), bench.pull("w")):
        error = bench.error(call)
        assert isinstance(error, NodeLost)
        assert (error.node, error.last_seen_s, error.reason) == ("server 0", 5.0, "no heartbeat")
    bench.look(member("server", 0))
    flush = bench.call(calls.Flush())
    bench.settle()
    assert bench.result(flush) is None
    bench.push("w")
    assert bench.clocks()[-1] == ("w", 0, 2)


def test_a_server_that_was_started_anew_has_lost_its_keys() -> None:
    bench = ready()
    calls_open = [bench.push("w") for _ in range(3)]
    flush = bench.call(calls.Flush())
    queued = bench.pull("w")
    bench.sent.clear()
    bench.restart_server()
    for call in (*calls_open, queued, bench.push("w"), bench.pull("w")):
        error = bench.error(call)
        assert isinstance(error, NodeLost)
        assert error.node == "server 0"
    assert bench.result(flush) is None
    assert bench.result(bench.call(calls.Flush())) is None
    bench.wait(10)
    assert bench.waiting(Push) == bench.waiting(Pull) == []


def test_control_that_waited_goes_to_the_new_server() -> None:
    bench = ready()
    bench.push("w")
    bench.call(calls.Control((Command(0, "x"),), staged_first=True))
    bench.restart_server()
    assert bench.take(Command).peer == server_id(0, 1)


def test_a_look_up_on_its_way_to_a_server_that_is_started_anew_fails() -> None:
    bench = Bench()
    call = bench.pull("w")
    bench.restart_server()
    assert isinstance(bench.error(call), NodeLost)
    bench.pull("w")
    assert bench.sent[-1].peer == server_id(0, 1)


def test_other_servers_keys_live_on() -> None:
    bench = Bench(servers=2)
    names = {bench.machine.view.server_of(f"k{number}", 0): f"k{number}" for number in range(9)}
    bench.know(names[0], names[1])
    bench.restart_server(1)
    assert isinstance(bench.error(bench.pull(names[1])), NodeLost)
    call = bench.pull(names[0])
    bench.values(Pull, (0,), b"a")
    assert len(bench.result(call)) == 1


# ── the scheduler ──


def test_a_scheduler_that_speaks_another_language_ends_it() -> None:
    bench = Bench(joined=False)
    call = bench.call(calls.JoinCluster())
    assert of(Halt, bench.step(Garbled("someone", "junk"))) == []
    bench.step(Garbled("scheduler", "junk"))
    assert isinstance(bench.error(call), ProtocolError)
    assert isinstance(bench.error(bench.call(calls.Flush())), ProtocolError)


def test_garbage_from_a_scheduler_that_was_understood_ends_nothing() -> None:
    bench = ready()
    call = bench.push("w")
    bench.step(Garbled("scheduler", "junk"))
    bench.settle()
    assert bench.result(call) == [None]
