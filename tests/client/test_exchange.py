"""The exchange of values between writers: what it knows of its store, and assignments in each type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

import kvd
from kvd.client.facades.exchange import Exchange
from kvd.errors import NotAllowed, ShapeMismatch
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import SLOW_TO_JUDGE, init_all

SIZES = {"one": 3, "two": 5}


@pytest.mark.parametrize(
    ("kind", "distributed", "versioned"),
    [("local", False, True), ("dist_sync", True, True), ("dist_async", True, False)],
)
def test_what_it_knows_of_its_store(kind: str, distributed: bool, versioned: bool) -> None:
    with LocalCluster(1, 1) as cluster:
        settings = {"round_timeout_s": 50.0, "request_timeout_s": 50.0}
        kv = cluster.store(kind, **settings) if distributed else kvd.create(kind, **settings)
        exchange = Exchange(kv)
        assert exchange.store is kv
        assert (exchange.distributed, exchange.versioned, exchange.timeout_s) == (distributed, versioned, 50.0)
        assert exchange.late_workers() == ()
        assert exchange.gone_workers() == {}


@pytest.mark.asyncio
async def test_in_an_event_loop_it_can_be_made_and_is_used_in_threads() -> None:
    kv = await kvd.aio.create("local")
    exchange = Exchange(kvd.KVStore(kv._backend))
    assert not exchange.distributed
    calls: list[Callable[[], None]] = [
        lambda: exchange.make(SIZES),
        lambda: exchange.assign({"one": np.zeros(3, np.uint8)}, []),
    ]
    for call in calls:
        with pytest.raises(NotAllowed, match=r"kvd\.aio"):
            call()
        await asyncio.to_thread(call)


def test_keys_that_exist_keep_their_values() -> None:
    with kvd.create("local") as kv:
        exchange = Exchange(kv)
        exchange.make(SIZES)
        exchange.assign({"one": np.arange(3, dtype=np.uint8)}, ["two"])
        exchange.make(SIZES)
        assert kv.pull("one").tolist() == [0, 1, 2]
        assert kv.pull("two").tolist() == [0] * 5


@pytest.mark.parametrize(
    ("kind", "settings"), [("dist_sync", {}), ("dist_async", {}), ("dist_async", {"staleness": 0})], ids=str
)
def test_every_worker_takes_what_the_writer_of_a_key_assigns(kind: str, settings: dict[str, int]) -> None:
    """With an optimizer, too, the value replaces the stored one bit for bit."""

    def program(kv: kvd.KVStore) -> list[list[int]]:
        kv.set_optimizer(kvd.optimizer.SGD(0.5))
        exchange = Exchange(kv)
        exchange.make(SIZES)
        mine, other = ("one", "two") if kv.rank == 0 else ("two", "one")
        for turn in range(1, 4):
            exchange.assign({mine: np.full(SIZES[mine], 10 * turn + kv.rank, np.uint8)}, [other])
        kv.flush()
        kv.barrier("assigned")
        return [kv.pull(name).tolist() for name in SIZES]

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program, kind, **settings) == [[[30] * 3, [31] * 5]] * 2


def test_a_later_call_raises_the_error_of_an_assignment_that_does_not_fit() -> None:
    for make in (lambda: kvd.create("local"), None):
        with LocalCluster(1, 1) as cluster:
            kv = cluster.store() if make is None else make()
            exchange = Exchange(kv)
            exchange.make(SIZES)
            exchange.assign({"one": np.zeros(4, np.uint8)}, [])
            with pytest.raises(ShapeMismatch):
                kv.flush()


def test_late_and_gone_workers_are_named() -> None:
    with LocalCluster(2, 1, **{**SLOW_TO_JUDGE, "worker_timeout_s": 1.0}) as cluster:
        zero, one = cluster.open_stores()
        init_all([zero, one])
        exchange = Exchange(zero)
        zero.push("w", np.ones(4, np.float32))
        wait_until(lambda: exchange.late_workers() == ("worker 1",), "the server waits for worker 1")
        assert exchange.gone_workers() == {}
        one.__exit__(RuntimeError, None, None)
        wait_until(lambda: exchange.gone_workers() == {1: True}, "worker 1 is declared dead")


def test_a_worker_that_left_the_rounds_is_gone_and_not_dead() -> None:
    with LocalCluster(2, 1) as cluster:
        zero, one = cluster.open_stores()
        one.join()
        wait_until(lambda: Exchange(zero).gone_workers() == {1: False}, "worker 1 has left the rounds")


def test_without_servers_a_timeout_names_no_late_worker() -> None:
    with LocalCluster(1, 1, worker_timeout_s=20.0, server_timeout_s=0.5) as cluster:
        kv = cluster.store()
        exchange = Exchange(kv)
        cluster.servers[0].stop()
        assert exchange.late_workers() == ()


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_an_error_that_is_kept_is_raised_once(kind: str) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = kvd.create("local") if kind == "local" else cluster.store()
        kv.init(["a", "b"], [np.zeros(1), np.zeros(1)])
        exchange = Exchange(kv)
        for use in (lambda: kv.push("a", np.ones(1)), kv.flush):
            error = NotAllowed("in a callback", key="a")
            exchange.keep_error(["a"], error)
            kv.push("b", np.ones(1)).wait()  # it is not about this key
            with pytest.raises(NotAllowed) as raised:
                use()
            assert raised.value is error
            use()
