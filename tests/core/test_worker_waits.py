"""Calls that wait for long: which deadline ends them, what the log and the error say, and when a worker is blocked."""

from __future__ import annotations

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, ServerPeer
from kvd.errors import RequestTimeout
from kvd.protocol.messages import (
    BarrierWait,
    Command,
    Delete,
    ErrorCode,
    HeartbeatAck,
    Lookup,
    Push,
    Quiet,
)
from tests.core.fakes import member, server_id, uint8
from tests.core.waits_harness import ANSWER_S, ROUND_S, WaitingWorker

SERVER = ServerPeer(server_id(0))
NOT_FOR_USERS = ("transfer", "initkeys", "describekey", "control", "lookup", "enter", "kvd:", "user:")


def check_words(text: str) -> None:
    assert not [word for word in NOT_FOR_USERS if word in text.lower()], text


# ── which deadline ends a call ──


def test_a_call_that_waits_for_a_worker_outlives_the_deadline_of_servers() -> None:
    worker = WaitingWorker()
    call = worker.pushpull()
    request = worker.hold()
    worker.wait(ROUND_S - 1)
    assert worker.is_open(call)
    worker.answered(request)
    assert worker.error(call) is None


def test_it_ends_at_the_deadline_of_rounds_and_names_the_worker() -> None:
    worker = WaitingWorker()
    call = worker.pushpull()
    worker.hold(last=50)
    worker.wait(ROUND_S + 1)
    error = worker.error(call)
    assert isinstance(error, RequestTimeout)
    assert (error.outcome, error.waiting_for) == ("unknown", ("worker 1",))
    assert "pushpull of 'w' (push 1) did not finish within 1800 s" in str(error)
    assert "worker 1 (node worker-1, host b, pid 4242): alive, heard of" in str(error)
    assert "has not pushed 'w' since push 50" in str(error)
    check_words(str(error))


def test_a_silent_server_ends_it_after_the_deadline_of_servers() -> None:
    worker = WaitingWorker()
    worker.silent.add(SERVER)
    call = worker.pushpull()
    worker.wait(ANSWER_S - 1)
    assert worker.is_open(call)
    worker.wait(1)
    error = worker.error(call)
    assert error.waiting_for == ("server 0",)
    assert "server 0 (node server-0, host b, pid 4242, tcp://server0): no answer for 60 s" in str(error)
    check_words(str(error))


def test_a_server_that_falls_silent_ends_it_that_long_after_its_last_word() -> None:
    worker = WaitingWorker()
    call = worker.pushpull()
    worker.hold()
    worker.wait(300)
    worker.silent.add(SERVER)
    worker.wait(ANSWER_S - ANSWER_S / 3 - 1)
    assert worker.is_open(call)
    worker.wait(ANSWER_S / 3 + 2)
    assert worker.error(call).waiting_for == ("server 0",)


def test_a_server_that_answers_but_does_not_have_the_request_still_owes_it() -> None:
    worker = WaitingWorker()
    call = worker.pushpull()
    worker.wait(ANSWER_S + 1)
    error = worker.error(call)
    assert error.waiting_for == ("server 0",)
    assert "it answers, and has not finished this yet" in str(error)


def test_one_lost_answer_ends_nothing() -> None:
    worker = WaitingWorker()
    call = worker.pushpull()
    worker.hold()
    for _ in range(30):
        worker.silent.add(SERVER)
        worker.wait(ANSWER_S / 3)
        worker.silent.clear()
        worker.wait(ANSWER_S / 3)
    assert worker.is_open(call)


def test_of_two_servers_the_silent_one_ends_the_call() -> None:
    spec = uint8(8192)
    worker = WaitingWorker("k", servers=2)
    worker.harness.know("big", spec=spec)
    item = requests.Item("big", spec, "source", None)
    call = worker.call(requests.Transfer((item,), push=True, pull=False))
    pushes = [send for send in worker.harness.sent if isinstance(send.message, Push)]
    assert {send.peer for send in pushes} == {ServerPeer(server_id(0)), ServerPeer(server_id(1))}
    worker.hold(key="big")
    silent = pushes[1].peer
    worker.silent.add(silent)
    worker.wait(ANSWER_S + 1)
    rank = int(silent) - server_id(0)
    assert worker.error(call).waiting_for == ("worker 1", f"server {rank}")


def test_a_deadline_that_the_program_chose_stays() -> None:
    worker = WaitingWorker()
    call = worker.pushpull(timeout_s=100.0)
    worker.hold()
    worker.wait(99)
    assert worker.is_open(call)
    worker.wait(1)
    assert worker.error(call).waiting_for == ("worker 1",)


def test_a_short_deadline_still_names_the_worker() -> None:
    worker = WaitingWorker()
    call = worker.pushpull(timeout_s=0.5)
    worker.hold(last=3)
    worker.wait(0.6)
    assert worker.error(call).waiting_for == ("worker 1",)
    assert "has not pushed 'w' since push 3" in str(worker.error(call))
    assert not worker.logged


# ── calls that wait behind others ──


@pytest.mark.parametrize("what", ["push", "pull", "flush", "staged first"])
def test_a_call_that_waits_behind_others_waits_for_the_same_worker(what: str) -> None:
    worker = WaitingWorker()
    for clock in (1, 2):  # the push window is full then
        worker.pushpull()
        worker.hold(clock=clock)
    worker.pushpull()
    item = requests.Item("w", uint8(1), "more", None)
    behind: dict[str, requests.Request] = {
        "push": requests.Transfer((item,), push=True, pull=False),
        "pull": requests.Transfer((item._replace(source=None, target="there"),), push=False, pull=True),
        "flush": requests.Flush(),
        "staged first": requests.Control((Command(0, "x"),), staged_first=True),
    }
    call = worker.call(behind[what])
    worker.wait(10 * ANSWER_S)
    assert worker.is_open(call)
    worker.wait(ROUND_S)
    error = worker.error(call)
    assert error.waiting_for == ("worker 1",)
    assert error.outcome == "not_sent" or what == "flush"
    check_words(str(error))


def test_an_init_of_another_rank_waits_for_rank_0() -> None:
    worker = WaitingWorker(rank=1)
    item = requests.Item("new", uint8(1), "source", None)
    call = worker.call(requests.InitKeys((item,)))
    worker.hold(Lookup, rank=0, key="new", clock=0)
    worker.wait(11)
    assert worker.logged == [
        "init of 'new' has waited 10 s for worker 0 (node worker-0, host b, pid 4242): alive, heard of 0.4 s ago, "
        "has not made 'new'"
    ]
    worker.wait(ROUND_S)
    assert worker.error(call).waiting_for == ("worker 0",)


def test_a_notice_names_the_process_that_ended_once() -> None:
    worker = WaitingWorker()
    worker.ended = "its process 4242 ended"
    worker.pushpull()
    worker.hold()
    worker.wait(11)
    assert worker.logged == [
        "pushpull of 'w' (push 1) has waited 10 s for worker 1 (node worker-1, host b, pid 4242): its process 4242 "
        "ended, has not pushed 'w' yet. Start worker 1 again under the same node id, as `kvd launch --restart N` does; "
        'or start the scheduler with on_worker_loss = "shrink", and the other workers continue without a worker that '
        "dies"
    ]


def test_a_broadcast_of_another_rank_waits_for_rank_0() -> None:
    worker = WaitingWorker(rank=1)
    call = worker.call(requests.DescribeKey("new", wait=True))
    worker.harness.refuse(Lookup, ErrorCode.KEY_NOT_FOUND)
    worker.hold(Lookup, rank=0, key="new", clock=0)
    worker.wait(ROUND_S + 1)
    error = worker.error(call)
    assert error.waiting_for == ("worker 0",)
    assert str(error).startswith("broadcast of 'new' did not finish")


def test_a_deletion_waits_for_the_worker_that_has_not_deleted_the_key() -> None:
    worker = WaitingWorker()
    call = worker.call(requests.DeleteKeys(("w",)))
    later = worker.pushpull()
    worker.hold(Delete)
    worker.wait(ANSWER_S + 1)
    assert worker.is_open(call)
    assert worker.logged[0].startswith("delete of 'w' has waited 10 s for worker 1 (")
    assert worker.logged[0].endswith("has not deleted 'w' (1 more call waits, too)")
    worker.wait(ROUND_S)
    for error in (worker.error(call), worker.error(later)):
        assert error.waiting_for == ("worker 1",)
        assert "has not deleted 'w'" in str(error)
        check_words(str(error))


def test_a_barrier_waits_for_the_worker_that_does_not_come() -> None:
    worker = WaitingWorker()
    call = worker.call(requests.Barrier("user:epoch"))
    worker.barriers = (BarrierWait("user:epoch", (1,)),)
    worker.wait(25)
    assert (
        worker.logged[-1] == ("barrier 'epoch' has waited 20 s for worker 1 (node worker-1): has not come to it")
        or "has not come to it" in worker.logged[-1]
    )
    worker.wait(ROUND_S)
    error = worker.error(call)
    assert error.waiting_for == ("worker 1",)
    check_words(str(error))


def test_a_silent_scheduler_ends_a_barrier() -> None:
    worker = WaitingWorker()
    worker.silent.add(SCHEDULER)
    call = worker.call(requests.Barrier("user:epoch"))
    worker.wait(ANSWER_S + 1)
    assert worker.error(call).waiting_for == ("scheduler",)
    assert "the scheduler at tcp://scheduler, last heard" in str(worker.error(call))


# ── notices ──


def test_the_log_explains_a_wait_in_doubling_intervals() -> None:
    worker = WaitingWorker()
    worker.pushpull()
    worker.hold(clock=1, last=50)
    worker.wait(9.9)
    assert worker.logged == []
    worker.wait(0.1)
    assert worker.logged == [
        "pushpull of 'w' (push 1) has waited 10 s for worker 1 (node worker-1, host b, pid 4242): alive, heard of "
        "0.4 s ago, has not pushed 'w' since push 50"
    ]
    worker.wait(310)
    waited = [text.split(" has waited ")[1].split(" s ")[0] for text in worker.logged]
    assert waited == ["10", "20", "40", "80", "160", "320"]


def test_all_waiting_calls_are_asked_about_at_once() -> None:
    worker = WaitingWorker("a", "b", "c")
    for key in "abc":
        worker.pushpull(key)
        worker.hold(key=key)
        worker.wait(0.01)
    worker.wait(10)
    assert worker.queries == 1
    assert len(worker.logged) == 1
    worker.wait(10)
    assert "(2 more calls wait, too)" in worker.logged[-1]


def test_calls_that_end_in_time_cause_no_question() -> None:
    worker = WaitingWorker()
    for _ in range(50):
        worker.pushpull()
        request = worker.hold()
        worker.wait(5)
        worker.answered(request)
        worker.harness.sent.clear()  # what was sent a second time
    assert worker.queries == 0
    worker.wait(100)
    assert worker.queries == 0


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("dead", "worker 1 (node worker-1, host b, pid 4242): is dead (no heartbeat)"),
        ("", "worker 1: has not joined yet"),
    ],
)
def test_it_says_how_the_worker_is(state: str, says: str) -> None:
    worker = WaitingWorker()
    worker.pushpull()
    worker.hold()
    if state:
        worker.harness.look(member("worker", 1, state))
    else:
        del worker.harness.members["worker", 1]
        worker.harness.look()
    worker.wait(10)
    assert says in worker.logged[-1]


def test_an_observer_asks_no_scheduler() -> None:
    worker = WaitingWorker(role="observer")
    call = worker.call(requests.Transfer((requests.Item("w", uint8(1), None, "t"),), push=False, pull=True))
    worker.wait(ANSWER_S + 1)
    assert worker.error(call).waiting_for == ("server 0",)
    assert worker.reports == []


def test_a_quiet_node_of_any_role_is_named() -> None:
    """What the scheduler calls a role is a text, spaces in it or not."""
    worker = WaitingWorker("w")
    worker.harness.say(SCHEDULER, HeartbeatAck((Quiet("a b :", 8, 3.0),)))
    worker.pushpull()
    worker.silent.add(SERVER)
    worker.wait(11.0)
    assert "a b : 8" in worker.logged[0]
