"""The worker: deadlines, deaths, restarts."""

from __future__ import annotations

from kvd.core import requests
from kvd.core.machine import SCHEDULER, CallerPeer, Copy, Halt, InvalidFrame
from kvd.errors import NodeLost, ProtocolError, RequestTimeout
from kvd.protocol.messages import (
    Command,
    ErrorCode,
    NodeName,
    OptimizerQuery,
    Pull,
    Push,
    Refused,
    Values,
)
from tests.core.fakes import SLICE, member, of, one, server_id, uint8, welcome
from tests.core.worker_harness import Harness, ready

# ── deadlines ──


def test_a_call_that_times_out_in_the_queue_was_not_sent() -> None:
    harness = ready()
    for _ in range(2):
        harness.push("w")
    call = harness.push("w", timeout_s=5)
    harness.wait(4.9)
    assert call not in harness.done
    harness.wait(0.2)
    error = harness.error(call)
    assert isinstance(error, RequestTimeout)
    assert error.outcome == "not_sent"
    assert "'w'" in str(error)
    harness.settle()
    harness.push("w")
    assert [clock for _, _, clock in harness.clocks()][-1] == 3  # it took no clock


def test_a_sent_push_that_times_out_has_an_unknown_outcome_and_goes_on() -> None:
    harness = ready()
    call = harness.push("w", timeout_s=5)
    harness.wait(5)
    error = harness.error(call)
    assert (error.outcome, error.waiting_for) == ("unknown", ("server 0",))
    assert "its pushes are still on their way" in str(error)
    flush = harness.call(requests.Flush())
    harness.settle()
    assert harness.result(flush) is None


def test_a_push_that_was_sent_in_part_has_an_unknown_outcome() -> None:
    harness = Harness(servers=1, credit=SLICE)
    spec = uint8(2 * SLICE)
    harness.know("w", spec=spec)
    call = harness.push("w", spec=spec, timeout_s=5)
    assert len(harness.waiting(Push)) == 1  # the credit allows one
    harness.wait(5)
    assert harness.error(call).outcome == "unknown"


def test_a_timeout_names_missing_and_dead_nodes() -> None:
    harness = ready(servers=2)
    harness.members.pop(("worker", 1))
    harness.look(member("server", 1, "dead"))
    call = harness.call(requests.Barrier("b"), timeout_s=1)
    harness.wait(1)
    assert harness.error(call).waiting_for == ("server 1", "worker 1", "scheduler")


def test_a_late_answer_settles_the_push_and_is_not_copied() -> None:
    harness = ready()
    call = harness.push("w", pull=True, timeout_s=5)
    harness.wait(5)
    assert harness.error(call).outcome == "unknown"
    send = next(send for send in harness.sent if isinstance(send.message, Push))
    flush = harness.call(requests.Flush())
    effects = harness.say(send.peer, Values(send.message.request, (1,)), b"a")  # type: ignore[union-attr]
    assert of(Copy, effects) == []
    assert harness.result(flush) is None


def test_a_late_answer_to_a_pull_is_ignored() -> None:
    harness = ready()
    call = harness.pull("w", timeout_s=5)
    send = harness.take(Pull)
    harness.wait(5)
    assert harness.error(call).outcome == "unknown"
    assert of(Copy, harness.say(send.peer, Values(send.message.request, (0,)), b"a")) == []  # type: ignore[union-attr]


def test_a_pull_that_times_out_lets_the_rounds_go_on() -> None:
    harness = ready()
    harness.push("w")
    harness.settle()
    late = harness.pull("w", timeout_s=1.0)
    harness.push("w")
    harness.settle()
    held_back = harness.push("w")  # its round would replace version 1, which is being pulled
    assert harness.waiting(Push) == []
    harness.wait(1.0)
    assert isinstance(harness.error(late), RequestTimeout)
    harness.settle()
    assert harness.result(held_back) == [None]


def test_the_death_of_a_server_is_not_that_of_one_that_is_yet_to_come() -> None:
    harness = Harness(servers=2, joined=False)
    del harness.members["server", 1]
    harness.step(welcome(0))
    harness.look()
    harness.look(member("server", 0, "dead"))
    lost, waits = (harness.call(requests.Control((OptimizerQuery(0),), (rank,))) for rank in (0, 1))
    assert isinstance(harness.error(lost), NodeLost)
    assert waits not in harness.done


def test_completed_calls_leave_no_deadlines_behind() -> None:
    harness = ready()
    for _ in range(1000):
        harness.call(requests.ClockOf("w"))
    assert len(harness.machine._calls.deadlines) < 200
    harness.wait(61)
    assert len(harness.machine._calls.deadlines) == 0


def test_the_machine_asks_to_be_woken_for_deadlines_retries_and_heartbeats() -> None:
    harness = ready()
    assert harness.machine.next_deadline() == 1.0  # a heartbeat
    harness.pull("w", timeout_s=0.5)
    assert harness.machine.next_deadline() == 0.25  # a look at what it waits for, before its deadline


# ── dead workers ──


def test_a_dead_worker_ends_the_call_and_not_the_push() -> None:
    harness = ready()
    call = harness.push("w", pull=True)
    send = harness.take(Push)
    request = send.message.request  # type: ignore[union-attr]
    lost = (NodeName("worker", 1),)
    refused = Refused(request, ErrorCode.NODE_LOST, "worker 1 died", "w", nodes=lost, last_seen_s=21.5)
    harness.say(send.peer, refused)
    error = harness.error(call)
    assert isinstance(error, NodeLost)
    assert (error.node, error.last_seen_s) == ("worker 1", 21.5)
    flush = harness.call(requests.Flush(), timeout_s=600)
    harness.wait(3)
    probe = one(harness.waiting(Push))
    assert probe.probe
    harness.say(send.peer, refused)
    effects = harness.say(send.peer, Values(probe.request, (1,)), b"a")
    assert of(Copy, effects) == []
    assert harness.result(flush) is None


def test_a_dead_worker_ends_a_pull() -> None:
    harness = ready()
    call = harness.pull("w")
    harness.refuse(Pull, ErrorCode.NODE_LOST, nodes=(NodeName("worker", 1),))
    assert harness.error(call).node == "worker 1"
    harness.pull("w")
    harness.refuse(Pull, ErrorCode.NODE_LOST)
    assert len(harness.machine._outbox) == 0


def test_a_push_refused_for_a_dead_worker_counts_as_staged() -> None:
    harness = ready()
    harness.push("w")
    harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    harness.refuse(Push, ErrorCode.NODE_LOST, nodes=(NodeName("worker", 1),))
    assert len(harness.waiting(Command)) == 1


# ── dead and restarted servers ──


def test_a_dead_server_ends_the_calls_and_gets_its_pushes_when_it_is_back() -> None:
    harness = ready()
    push, pull = harness.push("w"), harness.pull("w")
    harness.look(member("server", 0, "dead", last_seen_s=5.0))
    for call in (push, pull, harness.push("w"), harness.pull("w")):
        error = harness.error(call)
        assert isinstance(error, NodeLost)
        assert (error.node, error.last_seen_s, error.reason) == ("server 0", 5.0, "no heartbeat")
    harness.look(member("server", 0))
    flush = harness.call(requests.Flush())
    harness.settle()
    assert harness.result(flush) is None
    harness.push("w")
    assert harness.clocks()[-1] == ("w", 0, 2)


def test_calls_that_queue_behind_the_pushes_of_a_dead_server_are_told() -> None:
    """The window of the key is full and stays so: without the server nobody settles its pushes."""
    harness = ready()
    under_way = [harness.push("w") for _ in range(2)]
    queued = [harness.push("w"), harness.pull("w")]
    harness.look(member("server", 0, "dead", last_seen_s=5.0))
    for call in (*under_way, *queued, harness.push("w"), harness.pull("w")):
        error = harness.error(call)
        assert isinstance(error, NodeLost)
        assert error.node == "server 0"
    harness.look(member("server", 0))
    flush = harness.call(requests.Flush())
    for _ in under_way:
        harness.settle()
    assert harness.result(flush) is None
    harness.push("w")
    assert harness.clocks()[-1] == ("w", 0, 3)


def test_a_restarted_server_has_lost_its_keys() -> None:
    harness = ready()
    calls_open = [harness.push("w") for _ in range(3)]
    flush = harness.call(requests.Flush())
    queued = harness.pull("w")
    harness.sent.clear()
    harness.restart_server()
    for call in (*calls_open, queued, harness.push("w"), harness.pull("w")):
        error = harness.error(call)
        assert isinstance(error, NodeLost)
        assert error.node == "server 0"
    assert harness.result(flush) is None
    assert harness.result(harness.call(requests.Flush())) is None
    harness.wait(10)
    assert harness.waiting(Push) == harness.waiting(Pull) == []


def test_a_control_that_waited_goes_to_the_restarted_server() -> None:
    harness = ready()
    harness.push("w")
    harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    harness.restart_server()
    assert harness.take(Command).peer == server_id(0, 1)


def test_a_look_up_in_flight_to_a_restarted_server_fails() -> None:
    harness = Harness()
    call = harness.pull("w")
    harness.restart_server()
    assert isinstance(harness.error(call), NodeLost)
    harness.pull("w")
    assert harness.sent[-1].peer == server_id(0, 1)


def test_keys_of_other_servers_survive_a_restart() -> None:
    harness = Harness(servers=2)
    names = {harness.machine.view.partition_of(f"k{number}", 0): f"k{number}" for number in range(9)}
    harness.know(names[0], names[1])
    harness.restart_server(1)
    assert isinstance(harness.error(harness.pull(names[1])), NodeLost)
    call = harness.pull(names[0])
    harness.values(Pull, (0,), b"a")
    assert len(harness.result(call)) == 1


# ── the scheduler ──


def test_an_unreadable_answer_to_the_join_fails_the_node() -> None:
    harness = Harness(joined=False)
    call = harness.call(requests.JoinCluster())
    assert of(Halt, harness.step(InvalidFrame(CallerPeer(b"someone"), "junk"))) == []
    harness.step(InvalidFrame(SCHEDULER, "junk"))
    assert isinstance(harness.error(call), ProtocolError)
    assert isinstance(harness.error(harness.call(requests.Flush())), ProtocolError)


def test_an_unreadable_frame_after_the_join_fails_nothing() -> None:
    harness = ready()
    call = harness.push("w")
    harness.step(InvalidFrame(SCHEDULER, "junk"))
    harness.settle()
    assert harness.result(call) == [None]
