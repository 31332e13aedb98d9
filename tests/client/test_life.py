"""How a store ends: closed, left by an error, forgotten, interrupted, in a forked child, in an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls import exits
from kvd.client.facades.blocking import backend_of
from kvd.errors import ConnectError, NotAllowed, StoreClosed
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import CALLS, FORKS, SLOW_TO_JUDGE, UNREACHABLE, Pair, failed_workers, ones
from tests.waiting import wait_until_inside


def fail_after(_: Any) -> None:
    raise ZeroDivisionError


def worker_states(kv: kvd.KVStore) -> dict[int, str]:
    members = engine_of(kv).machine.view.members
    return {rank: member.state for (role, rank), member in members.items() if role == "worker"}


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_closed_store_says_so(kind: str) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = kvd.create("local") if kind == "local" else cluster.store()
        kv.init("w", ones())
        kv.close()
        kv.close()
        for call in CALLS.values():
            with pytest.raises(StoreClosed, match="closed"):
                call(kv)
        assert kv.type == kind
        assert kv.rank == 0


@pytest.mark.asyncio
async def test_a_blocking_call_in_an_event_loop_names_the_other_facade() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = await asyncio.to_thread(cluster.store)
        for call in (*CALLS.values(), lambda kv: kv.close()):
            with pytest.raises(NotAllowed, match=r"kvd\.aio"):
                call(kv)
        with pytest.raises(NotAllowed, match=r"kvd\.aio\.create"):
            kvd.create("local")
        await asyncio.to_thread(kv.init, "w", ones())
        await asyncio.to_thread(kv.close)


def test_close_waits_for_the_others_unless_told_not_to() -> None:
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.open_stores()
        closing = threading.Thread(target=one.close)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        other.close()
        closing.join(10)
        assert not closing.is_alive()
    with LocalCluster(2, 1) as cluster:
        one, other = cluster.open_stores()
        one.set_barrier_before_exit(False)
        begun = time.monotonic()
        one.close()
        assert time.monotonic() - begun < 2
        wait_until(lambda: worker_states(other)[one.rank] == "left", "the others see it go")


def test_the_others_do_not_wait_for_a_worker_that_left() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float32))
        kv.set_barrier_before_exit(False)
        return [float(kv.pushpull("w", ones())[0]) for _ in range(2 if kv.rank else 4)]

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program) == [[2, 2, 1, 1], [2, 2]]


def test_a_with_block_that_fails_leaves_at_once(slow_cluster: LocalCluster, slow_pair: Pair) -> None:
    one, _ = slow_pair
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError), one:
        fail_after(one.push("w", ones()))  # its round never closes: nobody waits for that
    assert time.monotonic() - begun < 2
    assert failed_workers(slow_cluster) == [one.rank]


def test_leaving_by_an_error_does_not_wait_for_a_dead_scheduler() -> None:
    with LocalCluster(1, 1, **SLOW_TO_JUDGE) as cluster:
        kv = cluster.store()
        cluster.scheduler.stop()
        begun = time.monotonic()
        with pytest.raises(ZeroDivisionError), kv:
            raise ZeroDivisionError
        assert time.monotonic() - begun < 3


def test_calls_under_way_end_when_the_store_is_closed(slow_pair: Pair) -> None:
    one, _ = slow_pair
    waiting = [
        one.pushpull_async("w", ones()),
        one.pull_async("w"),
        one.pull_async("w", out=ones()),
        one.broadcast_async("w", ones()),
        backend_of(one).rounds.flush(None),
        backend_of(one).rounds.barrier("b", None),
        backend_of(one).rounds.join(),
    ]
    caught: list[BaseException] = []

    def block() -> None:
        try:
            one.pull("w")
        except BaseException as error:  # noqa: BLE001
            caught.append(error)

    thread = threading.Thread(target=block)
    thread.start()
    wait_until_inside(thread, "pull")
    one.__exit__(RuntimeError, None, None)
    for handle in waiting:
        with pytest.raises(StoreClosed):
            handle.wait(5)
    thread.join(5)
    assert [type(error) for error in caught] == [StoreClosed]


def test_calls_and_close_at_the_same_time_never_hang() -> None:
    for _ in range(5):
        with LocalCluster(1, 1) as cluster:
            kv = cluster.store()
            kv.init("w", np.zeros(4, np.float32))
            ended: list[bool] = []

            def work(kv: kvd.KVStore = kv, ended: list[bool] = ended) -> None:
                try:
                    while True:
                        kv.pushpull("w", ones())
                        kv.pull("w")
                        kv.flush()
                except StoreClosed:
                    ended.append(True)
                except NotAllowed as error:
                    ended.append("left the rounds" in str(error))

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
                wait_until_inside(thread, "pushpull")
            closers = [threading.Thread(target=kv.close) for _ in range(2)]
            for thread in closers:
                thread.start()
            for thread in [*closers, *threads]:
                thread.join(10)
            assert ended == [True] * 3


def test_nothing_stays_behind() -> None:
    def descriptors() -> int:
        gc.collect()  # the servers of this cluster are objects of this process, and their memory has descriptors
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        with LocalCluster(1, 1) as cluster, cluster.store() as kv:
            kv.init("w", ones(100_000))
            kv.pull("w")
        with pytest.raises(ConnectError):
            kvd.create("dist_sync", **UNREACHABLE)

    cycle()
    before, threads = descriptors(), threading.active_count()
    for _ in range(4):
        cycle()
    wait_until(lambda: descriptors() <= before and threading.active_count() <= threads, "all is given back", 5)


@pytest.mark.parametrize("end", [None, RuntimeError])
def test_only_open_stores_are_kept_for_the_end_of_the_process(end: type[Exception] | None) -> None:
    with LocalCluster(1, 1) as cluster:
        kept = set(exits._stores)
        kv = cluster.store()
        assert exits._stores - kept == {kv._life}
        kv.__exit__(end, None, None)
        assert exits._stores == kept
        local = kvd.create("local")
        assert exits._stores == kept
        local.close()


FORGETS = """
import numpy as np, kvd
from concurrent.futures import ThreadPoolExecutor
def main():
    with ThreadPoolExecutor() as pool:  # each waits for the other
        coming = pool.submit(kvd.create, "dist_sync", node_id="second") if {second} else None
        kv = kvd.create("dist_sync")
        other = coming.result() if {second} else None
    for store in (kv, other):
        if store is not None:
            handle = store.init_async("w", np.zeros(4, np.float32))
    handle.wait()
    for store in (kv, other):
        if store is not None:
            store.push("w", np.ones(4, np.float32))
main()
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("raise SystemExit(0)", 0),
        ("raise RuntimeError('no')", 1),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('no data')", 1),
    ],
)
def test_a_script_that_forgets_close_leaves_in_good_order(
    end: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        script = cluster.script(FORGETS.format(second=False, end=end), 1)
        kv = cluster.store(node_id="worker-0")
        kv.init("w", np.zeros(4, np.float32))
        if status == 0:
            assert kv.pushpull("w", ones()).tolist() == [2] * 4  # what it pushed last has arrived
        kv.set_barrier_before_exit(status == 0)  # one that failed is not met again
        kv.close()
        output, _ = script.communicate(timeout=60)
        assert script.returncode == status, output.decode()
        assert b"atexit" not in output
    assert ("worker 1: its program ended with an error" in caplog.text) == (status != 0)


LOCAL_FORGETS = """
import numpy as np, kvd
kv = kvd.create("local")
handle = kv.push("missing", np.ones(4, np.float32))
{then}
"""


@pytest.mark.parametrize(
    ("then", "is_raised"),
    [
        ("", True),
        ("handle.exception()", False),
        ("raise SystemExit(0)", True),
        ("raise SystemExit(3)", False),
        ("raise RuntimeError('no')", False),
    ],
)
def test_the_unobserved_error_of_a_local_store_is_raised_when_the_script_ends_well(then: str, is_raised: bool) -> None:
    with LocalCluster(1, 1) as cluster:
        output, _ = cluster.script(LOCAL_FORGETS.format(then=then), 0).communicate(timeout=60)
    assert (b"KeyNotFound: no key is called 'missing'" in output) == is_raised, output.decode()


def test_a_script_with_two_stores_that_forgets_both() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        begun = time.monotonic()
        script = cluster.script(FORGETS.format(second=True, end=""), 1)
        output, _ = script.communicate(timeout=30)
        assert script.returncode == 0, output.decode()
        assert output == b""
        assert time.monotonic() - begun < SLOW_TO_JUDGE["worker_timeout_s"]


AIO_FORGETS = """
import asyncio, numpy as np, kvd
async def main():
    kv = await kvd.aio.create("dist_sync")
    await kv.init("w", np.zeros(4, np.float32))
    await kv.push("w", np.ones(4, np.float32))
asyncio.run(main())
"""


def test_an_async_script_that_forgets_close() -> None:
    with LocalCluster(2, 1, **SLOW_TO_JUDGE) as cluster:
        script = cluster.script(AIO_FORGETS, 1)
        kv = cluster.store(node_id="worker-0")
        kv.init("w", np.zeros(4, np.float32))
        assert kv.pushpull("w", ones()).tolist() == [2] * 4
        kv.close()
        output, _ = script.communicate(timeout=60)
        assert (script.returncode, output) == (0, b"")


def test_a_forked_child_does_not_use_the_store_of_its_parent() -> None:
    with LocalCluster(1, 2) as cluster:
        output, _ = cluster.script(FORKS.format(type="dist_sync"), 0).communicate(timeout=30)
        assert output.decode().splitlines() == ["fine"]
