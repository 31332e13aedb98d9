"""When a worker is blocked, and how a deadlock ends its calls."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import CensusTaken, ServerPeer
from kvd.errors import Deadlock
from kvd.protocol.messages import WaitNews, WaitQuery, Waits
from tests.core.fakes import server_id
from tests.core.waits_harness import WaitingWorker

SERVER = ServerPeer(server_id(0))


def blocked_worker() -> tuple[WaitingWorker, int]:
    worker = WaitingWorker()
    call = worker.pushpull()
    worker.hold()
    worker.census = CensusTaken(True, 5, (call,))
    worker.wait(10)
    return worker, call


def test_a_worker_whose_threads_all_wait_is_blocked() -> None:
    worker, _ = blocked_worker()
    report = worker.reports[-1]
    assert report.blocked
    assert report.lines == ("pushpull of 'w' (push 1) waits for worker 1 to push 'w'",)
    worker.wait(10)
    assert worker.reports[-1].blocked
    assert worker.reports[-1].stamp == report.stamp


@pytest.mark.parametrize(
    "why",
    [
        "a thread works",
        "nobody waits",
        "a wait has a timeout",
        "under way",
        "a server is silent",
        "old view",
        "not all",
    ],
)
def test_it_is_not_blocked_if(why: str) -> None:
    worker = WaitingWorker("w", "v")
    call = worker.pushpull(timeout_s=50.0 if why == "a wait has a timeout" else None)
    worker.hold()
    if why == "under way":
        worker.pushpull("v")
    worker.census = CensusTaken(why != "a thread works", 5, () if why == "nobody waits" else (call,))
    if why == "a server is silent":
        worker.silent.add(SERVER)
    if why == "old view":
        worker.harness.look()  # the answers of the servers still come from the view before
    if why == "not all":
        answer = worker._answer_one

        def in_part(peer: Any, question: Any) -> None:
            if isinstance(question, WaitQuery):
                worker.harness.say(peer, Waits(question.request, tuple(worker.held), (), False))
            else:
                answer(peer, question)

        worker._answer_one = in_part  # type: ignore[method-assign]
    worker.wait(12)
    assert [report.blocked for report in worker.reports] == [False]


@pytest.mark.parametrize("what", ["a call", "an answer", "a thread"])
def test_whatever_happens_changes_the_stamp(what: str) -> None:
    worker = WaitingWorker("w", "v")
    worker.pushpull("v")
    earlier = worker.hold(key="v")
    call = worker.pushpull("w")
    worker.hold()
    worker.census = CensusTaken(True, 5, (call,))
    worker.wait(10)
    stamp = worker.reports[-1].stamp
    if what == "a call":
        worker.call(requests.ClockOf("w"))
    elif what == "an answer":
        worker.answered(earlier)
    else:
        worker.census = CensusTaken(True, 6, (call,))
    worker.wait(10)
    assert worker.reports[-1].stamp > stamp


def test_it_looks_again_when_the_scheduler_asks() -> None:
    worker, _ = blocked_worker()
    count = worker.queries
    worker.news(WaitNews(0, check=77))
    assert worker.queries == count + 1
    assert [report.check for report in worker.reports] == [0, 77]
    assert worker.reports[0].stamp == worker.reports[1].stamp


def test_a_deadlock_ends_the_calls_that_threads_wait_for() -> None:
    worker, call = blocked_worker()
    lines = ("worker 0: pushpull of 'w'", "worker 1: barrier 'x'")
    worker.news(WaitNews(0, stamp=worker.reports[-1].stamp, deadlock=lines))
    error = worker.error(call)
    assert isinstance(error, Deadlock)
    assert (error.waits, error.waiting_for, error.outcome) == (lines, ("worker 1",), "unknown")
    assert all(line in str(error) for line in lines)


def test_a_handle_that_nobody_waits_for_outlives_a_deadlock() -> None:
    worker = WaitingWorker("w", "v")
    alone = worker.pushpull("v")
    worker.hold(key="v")
    call = worker.pushpull("w")
    worker.hold(key="w")
    worker.census = CensusTaken(True, 1, (call,))
    worker.wait(10)
    worker.news(WaitNews(0, stamp=worker.reports[-1].stamp, deadlock=("x",)))
    assert isinstance(worker.error(call), Deadlock)
    assert worker.is_open(alone)


@pytest.mark.parametrize("what", ["another stamp", "a call since"])
def test_a_verdict_on_another_moment_ends_nothing(what: str) -> None:
    worker, call = blocked_worker()
    stamp = worker.reports[-1].stamp
    if what == "a call since":
        worker.call(requests.ClockOf("w"))
    worker.news(WaitNews(0, stamp=stamp + (what == "another stamp"), deadlock=("x",)))
    assert worker.is_open(call)
