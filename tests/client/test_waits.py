"""Calls that wait for other workers: who is named, which deadline counts, and when it is a deadlock."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import Deadlock, RequestTimeout
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import ones

DAEMONS: dict[str, Any] = {"server_timeout_s": 60.0, "worker_timeout_s": 60.0, "request_timeout_s": 90.0}
SERVER_DEADLINE_S = 4.0
UNHURRIED_DEADLINE_S = 8.0  # where every answer must come within it, however busy the machine is
WORKERS: dict[str, Any] = {
    "server_timeout_s": 1.0,
    "worker_timeout_s": 1.0,
    "request_timeout_s": SERVER_DEADLINE_S,
    "round_timeout_s": 300.0,
    "notice_s": 0.5,
}
SOON = {"round_timeout_s": SERVER_DEADLINE_S}
UNHURRIED = {"request_timeout_s": UNHURRIED_DEADLINE_S}
NOT_FOR_USERS = ("transfer", "initkeys", "describekey", "control", "lookup", "kvd:", "user:")
Ending = Any


def endings(*programs: Callable[[kvd.KVStore], Any], **settings: Any) -> list[Ending]:
    """Runs a program per rank, each in its thread, and returns what it returned or raised. No worker leaves before all
    programs have ended. The keys "a" and "b" exist."""
    with LocalCluster(len(programs), 2, **DAEMONS) as cluster:

        def run(rank: int) -> Ending:
            kv = cluster.store(node_id=f"worker-{rank}", preferred_rank=rank, **{**WORKERS, **settings})
            for key in ("a", "b"):
                kv.init(key, np.zeros(4, np.float32))
            try:
                return programs[rank](kv)
            except kvd.KvdError as error:
                return error

        with ThreadPoolExecutor(len(programs)) as pool:
            return list(pool.map(run, range(len(programs))))


def timeout_of(ending: Ending) -> RequestTimeout:
    """The error, whose text is for users."""
    assert isinstance(ending, RequestTimeout), ending
    assert not [word for word in NOT_FOR_USERS if word in str(ending).lower()], ending
    return ending


def nothing(kv: kvd.KVStore) -> None:
    """A program that does nothing."""


# ── deadlines ──


def test_a_worker_may_be_busy_for_longer_than_a_server_may_owe_an_answer() -> None:
    done = threading.Event()

    def busy(kv: kvd.KVStore) -> float:
        done.wait(1.3 * UNHURRIED_DEADLINE_S)
        kv.barrier("evaluated")
        return float(kv.pushpull("a", ones())[0])

    def waiting(kv: kvd.KVStore) -> float:
        kv.barrier("evaluated")
        return float(kv.pushpull("a", ones())[0])

    def pushing(kv: kvd.KVStore) -> float:
        handle = kv.pushpull_async("a", ones())
        kv.barrier("evaluated")
        return float(handle.wait()[0])

    assert endings(waiting, busy, pushing, **UNHURRIED) == [3.0, 3.0, 3.0]


def test_a_worker_that_closes_waits_for_one_that_is_busy() -> None:
    def program(kv: kvd.KVStore) -> bool:
        if kv.rank == 1:
            threading.Event().wait(1.3 * UNHURRIED_DEADLINE_S)
        return True

    with LocalCluster(2, 1, **DAEMONS) as cluster:
        assert cluster.run(program, **{**WORKERS, **UNHURRIED}) == [True, True]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda kv: kv.pushpull("a", ones()), "pushpull of 'a' (push 1) did not finish within"),
        (lambda kv: kv.push("a", ones()).wait(), "has not pushed 'a' yet"),
        (lambda kv: (kv.push("a", ones()), kv.flush()), "flush did not finish within"),
        (lambda kv: kv.barrier("here"), "barrier 'here' did not finish within"),
        (lambda kv: kv.barrier(), "has not come to it"),
        (lambda kv: kv.broadcast("a", ones()), "broadcast of 'a'"),
        (lambda kv: kv.delete("a"), "has not deleted 'a'"),
        (lambda kv: kv.close(), "close did not finish within"),
        (lambda kv: kv.join(), None),
    ],
    ids=["pushpull", "push", "flush", "barrier", "unnamed barrier", "broadcast", "delete", "close", "join"],
)
def test_the_error_names_the_worker_that_does_not_come(call: Callable[[kvd.KVStore], Any], says: str | None) -> None:
    mine, _ = endings(call, nothing, **SOON)
    if says is None:
        assert mine is None  # it waits for nobody
        return
    error = timeout_of(mine)
    assert error.waiting_for == ("worker 1",)
    assert says in str(error)
    assert f"worker 1 (node worker-1, host {socket.gethostname()}, pid {os.getpid()}): alive, heard of" in str(error)


@pytest.mark.parametrize("call", ["init", "broadcast"])
def test_what_only_rank_1_calls_waits_for_rank_0(call: str) -> None:
    _, mine = endings(nothing, lambda kv: getattr(kv, call)("new", ones()), **SOON)
    error = timeout_of(mine)
    assert error.waiting_for == ("worker 0",)
    assert str(error).startswith(f"{call} of 'new' did not finish within")
    assert "has not made 'new'" in str(error)


def test_a_timeout_of_the_program_counts_and_names_the_worker() -> None:
    mine, _ = endings(lambda kv: kv.barrier("here", timeout=1.5), nothing)
    assert timeout_of(mine).waiting_for == ("worker 1",)


def test_the_log_says_for_whom_a_call_waits(caplog: pytest.LogCaptureFixture) -> None:
    def busy(kv: kvd.KVStore) -> None:
        wait_until(lambda: [text for text in caplog.messages if "has waited" in text], "the log says for whom")
        kv.pushpull("a", ones())

    with caplog.at_level(logging.WARNING, logger="kvd.node"):
        endings(lambda kv: kv.pushpull("a", ones()), busy)
    (first, *_) = [text for text in caplog.messages if "has waited" in text]
    assert first.startswith("pushpull of 'a' (push 1) has waited ")
    assert " s for worker 1 (node worker-1" in first
    assert "has not pushed 'a' yet" in first


# ── deadlocks ──


def test_keys_in_opposite_order_are_a_deadlock() -> None:
    both = endings(lambda kv: kv.pushpull("a", ones()), lambda kv: kv.pushpull("b", ones()))
    assert [type(error) for error in both] == [Deadlock, Deadlock]
    assert [timeout_of(error).waiting_for for error in both] == [("worker 1",), ("worker 0",)]
    assert both[0].waits == both[1].waits
    here = f"host {socket.gethostname()}, pid {os.getpid()}"
    assert both[0].waits == (
        f"worker 0 (node worker-0, {here}): pushpull of 'a' (push 1) waits for worker 1 to push 'a'",
        f"worker 1 (node worker-1, {here}): pushpull of 'b' (push 1) waits for worker 0 to push 'b'",
    )


def test_a_barrier_too_few_is_a_deadlock() -> None:
    def too_few(kv: kvd.KVStore) -> Any:
        return kv.pushpull("a", ones())

    def one_more(kv: kvd.KVStore) -> Any:
        kv.barrier("more")
        return kv.pushpull("a", ones())

    all_of_them = endings(too_few, one_more, too_few)
    assert [type(error) for error in all_of_them] == [Deadlock] * 3
    assert all_of_them[1].waiting_for == ("worker 0", "worker 2")


def test_a_deletion_that_another_worker_does_not_come_to_is_a_deadlock() -> None:
    both = endings(lambda kv: kv.delete("a"), lambda kv: kv.barrier("here"))
    assert [type(error) for error in both] == [Deadlock, Deadlock]
    assert both[0].waits[0].endswith("delete of 'a' waits for worker 1 to delete 'a'")


def test_all_threads_of_a_worker_may_be_stuck() -> None:
    def two_threads(kv: kvd.KVStore) -> Ending:
        errors: list[Any] = []

        def other() -> None:
            try:
                kv.flush()
            except kvd.KvdError as error:
                errors.append(error)

        kv.push("b", ones())
        thread = threading.Thread(target=other)
        thread.start()
        try:
            kv.barrier("x")
        except Deadlock as error:
            thread.join(60)
            return [type(error), *map(type, errors)]

    def program(kv: kvd.KVStore) -> Any:
        return kv.broadcast("a", ones())

    mine, others = endings(two_threads, program)
    assert mine == [Deadlock, Deadlock]
    assert isinstance(others, Deadlock)


def test_a_worker_whose_other_thread_may_still_call_is_not_stuck() -> None:
    may_end = threading.Event()

    def two_threads(kv: kvd.KVStore) -> Any:
        def other() -> None:
            kv.push("b", ones())
            may_end.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            return kv.pushpull("a", ones())
        finally:
            may_end.set()
            thread.join()

    both = endings(two_threads, lambda kv: kv.barrier("x"), **SOON)
    assert [type(error) for error in both] == [RequestTimeout] * 2


def test_a_wait_with_a_timeout_is_not_stuck() -> None:
    def poll(kv: kvd.KVStore) -> str:
        handle = kv.pushpull_async("a", ones())
        with pytest.raises(RequestTimeout, match="is not done after 3"):
            handle.wait(timeout=3)
        kv.push("b", ones())
        return "went on"

    assert endings(poll, lambda kv: kv.pushpull("b", ones()).tolist()) == ["went on", [2.0] * 4]


def test_a_handle_that_nobody_waits_for_blocks_nobody() -> None:
    gone_on = threading.Event()

    def first(kv: kvd.KVStore) -> str:
        handle = kv.pushpull_async("a", ones())
        gone_on.wait(3)  # longer than it takes to look for a deadlock
        kv.push("b", ones()).wait()
        return str(handle.done())

    assert endings(first, lambda kv: kv.pushpull("b", ones()).tolist()) == ["False", [2.0] * 4]


@pytest.mark.asyncio
async def test_a_worker_in_an_event_loop_is_never_stuck() -> None:
    with LocalCluster(2, 1, **DAEMONS) as cluster:
        settings = {**cluster.settings, **WORKERS, **SOON, "scheduler": cluster.address}
        stores = await asyncio.gather(*[kvd.aio.create("dist_sync", **settings) for _ in range(2)])
        one, other = sorted(stores, key=lambda kv: kv.rank)
        await asyncio.gather(*[kv.init(key, ones()) for kv in stores for key in ("a", "b")])
        both = await asyncio.gather(one.pushpull("a", ones()), other.pushpull("b", ones()), return_exceptions=True)
        assert [type(error) for error in both] == [RequestTimeout] * 2
        assert [error.waiting_for for error in both] == [("worker 1",), ("worker 0",)]  # type: ignore[union-attr]
        for kv in stores:
            await kv.__aexit__(RuntimeError, None, None)
