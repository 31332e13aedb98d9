"""Readers without a rank: all keys of one read are of one step, however fast the training goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.promise import Promise
from kvd.client.cluster.engine import Engine
from kvd.core.requests import DescribeKey
from kvd.errors import KeyNotFound, NotAllowed, RequestTimeout, ShapeMismatch, StoreClosed, VersionUnavailable
from kvd.protocol.messages import NO_RUN
from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

KEYS = [f"layer {number}" for number in range(8)]
SIZE = 3000  # float32: three slices of the smallest size
LATE = 5  # the step in which the key "late" is made

Step = Callable[[kvd.KVStore, int], None]


def ones(value: float = 1.0, size: int = SIZE) -> np.ndarray[Any, Any]:
    return np.full(size, value, np.float32)


def small_slices(num_workers: int = 2, num_servers: int = 2, **settings: Any) -> LocalCluster:
    return LocalCluster(num_workers, num_servers, slice_bytes=4096, **settings)


def observer(cluster: LocalCluster, **settings: Any) -> kvd.Observer:
    return kvd.Observer(**{**cluster.settings, "scheduler": cluster.address, **settings})


@contextmanager
def training(cluster: LocalCluster, step: Step, keys: Sequence[str], **settings: Any) -> Iterator[None]:
    """Every worker makes step after step, from 1 on, until the block ends."""
    over, last = threading.Event(), threading.Event()
    agree = threading.Barrier(cluster.num_workers, action=lambda: last.set() if over.is_set() else None)
    begun = threading.Event()

    def program(store: kvd.KVStore) -> None:
        store.init(list(keys), [ones(0) for _ in keys])
        number = 0
        while not last.is_set():
            number += 1
            step(store, number)
            agree.wait(60)
            begun.set()

    thread = threading.Thread(target=lambda: cluster.run(program, **settings))
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        over.set()
        thread.join(60)
        assert not thread.is_alive()


def layer_by_layer(store: kvd.KVStore, number: int) -> None:
    """Every key becomes the number of the step."""
    for key in KEYS:
        store.pushpull_async(key, ones(number / 2))
    store.pull(KEYS)


def unevenly(store: kvd.KVStore, number: int) -> None:
    """Two keys in each step, one in every other, and one that is made later."""
    store.pushpull("a", ones(number / 2))
    if number % 2 == 0:
        store.pushpull("rare", ones(number / 2))
    if number == LATE:
        store.init("late", ones(0))
    if number >= LATE:
        store.pushpull("late", ones(number / 2))
    store.pushpull("b", ones(number / 2))


def content(value: np.ndarray[Any, Any]) -> float:
    """The number that fills an array."""
    assert value.min() == value.max()
    return float(value[0])


# ── one step ──


def test_all_keys_of_a_read_are_of_one_step() -> None:
    with small_slices() as cluster, training(cluster, layer_by_layer, KEYS), observer(cluster) as reader:
        seen: list[int] = []
        while len(seen) < 60:
            reading = reader.read(KEYS)
            assert {content(value) for value in reading.values} == {reading.version}
            assert reading.versions == dict.fromkeys(KEYS, reading.version)
            seen.append(reading.version)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]


def test_keys_with_fewer_pushes_are_read_as_they_were_after_the_step() -> None:
    keys = ["rare", "b", "late", "a", "still"]
    first = ["a", "b", "rare", "still"]
    with small_slices() as cluster, training(cluster, unevenly, first), observer(cluster) as reader:
        reader.wait_for(LATE + 1)
        for _ in range(40):
            version, versions, values = reader.read(keys)
            assert [content(value) for value in values] == [version - version % 2, version, version, version, 0]
            assert [versions[key] for key in keys] == [version // 2, version, version - LATE + 1, version, 0]


def test_after_the_workers_have_left_the_last_step_is_read_of_all_keys() -> None:
    with small_slices() as cluster:

        def program(store: kvd.KVStore) -> None:
            store.init(["a", "b", "rare"], [ones(0)] * 3)
            for number in (1, 2, 3, 4):
                unevenly(store, number)

        cluster.run(program)
        with observer(cluster) as reader:
            assert [content(value) for value in reader.pull(["a", "b", "rare"])] == [4, 4, 4]
            assert reader.version() == 4


def test_one_key_is_read_as_it_is() -> None:
    """It needs no other keys to be of one step with."""
    with small_slices(1) as cluster, observer(cluster) as reader:
        store = cluster.store()
        store.init(["a", "rare"], [ones(0), ones(0)])
        store.pushpull("a", ones(1))
        store.pushpull("a", ones(2))
        store.pushpull("rare", ones(2))
        assert content(reader.pull("rare")) == 2
        assert content(reader.pull("a")) == 2
        assert [content(value) for value in reader.pull(["a", "rare"])] == [1, 0]  # step 2 may go on
        store.pushpull("a", ones(3))
        assert [content(value) for value in reader.pull(["a", "rare"])] == [2, 2]


def test_a_reader_that_came_before_the_run_reads_it_at_once() -> None:
    """It asks the scheduler for the view from time to time only; here it does so while it reads."""
    with small_slices(1) as cluster, observer(cluster) as reader:
        session = reader._cluster._engine.session
        session._pace.next_send = time.monotonic() + 3600
        store = cluster.store()
        store.init("w", ones(7))
        assert session.run == NO_RUN
        session._pace.next_send = time.monotonic() + 0.3
        assert content(reader.pull("w")) == 7


# ── versions ──


def test_a_version_that_is_named() -> None:
    with small_slices(1) as cluster, observer(cluster) as reader:
        store = cluster.store()
        store.init(["a", "b"], [ones(0), ones(0)])
        assert reader.version() == 0
        for number in (1, 2, 3):
            store.pushpull(["a", "b"], [ones(number), ones(10 * number)])
        assert reader.version() == 3
        assert reader.wait_for(2) == 3
        assert [content(value) for value in reader.pull(["a", "b"], version=2)] == [2, 20]
        assert [content(value) for value in reader.pull(["a", "b"], version=3)] == [3, 30]
        with pytest.raises(VersionUnavailable, match=r"version 1 is not kept any more.* 2 to 3 ") as gone:
            reader.pull(["a", "b"], version=1)
        assert (gone.value.version, gone.value.oldest, gone.value.newest) == (1, 2, 3)
        with pytest.raises(VersionUnavailable, match=r"version 4 is not complete yet.* 2 to 3 .*wait_for"):
            reader.pull("a", version=4)
        store.push("a", ones(4)).wait()
        with pytest.raises(VersionUnavailable, match="not complete yet"):
            reader.pull(["a", "b"], version=4)


def test_waiting_for_a_version() -> None:
    with small_slices() as cluster, training(cluster, layer_by_layer, KEYS), observer(cluster) as reader:
        goal = reader.version() + 5
        assert reader.wait_for(goal) >= goal
        with pytest.raises(RequestTimeout, match="not at 1000000000 yet"):
            reader.wait_for(10**9, timeout=0.05)


# ── arguments ──


def test_what_is_read_where() -> None:
    with small_slices(1) as cluster, observer(cluster) as reader:
        store = cluster.store()
        store.init([7, "b"], [ones(1), np.arange(6, dtype=np.int64).reshape(2, 3)])
        assert content(reader.pull(7)) == 1
        outs = [ones(0), np.zeros((2, 3), np.int64)]
        assert reader.pull(["7", "b"], out=outs)[1] is outs[1]
        assert content(outs[0]) == 1
        assert outs[1].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert reader.pull([]) == []
        rows = reader.keys()
        assert [row["key"] for row in rows] == ["7", "b"]
        assert sorted(server["keys"] for server in reader.status()["servers"]) == [1, 2]
        with pytest.raises(ShapeMismatch):
            reader.pull("b", out=np.zeros((3, 2), np.int64))
        with pytest.raises(KeyNotFound, match="no key is called 'c'"):
            reader.pull(["b", "c"])
        for version in (-1, 1.5, True):
            with pytest.raises(NotAllowed, match="a version"):
                reader.pull("b", version=version)  # type: ignore[arg-type]


def test_a_run_that_begins_while_a_key_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key was not there when it was asked for, and the reader knows the run by the time of the answer."""
    submit = Engine.submit

    def slowly(engine: Engine, request: Any, *arguments: Any, **more: Any) -> Promise:
        promise = submit(engine, request, *arguments, **more)
        if isinstance(request, DescribeKey) and engine.session.run == NO_RUN:
            promise.exception(30)
            with monkeypatch.context() as context:
                context.setattr(Engine, "submit", submit)
                cluster.store().init("a", ones(1))
            wait_until(lambda: engine.session.run != NO_RUN, "the reader knows the run")
        return promise

    with small_slices(1) as cluster, observer(cluster) as reader:
        monkeypatch.setattr(Engine, "submit", slowly)
        assert content(reader.pull("a")) == 1


def test_several_threads_may_read_at_once() -> None:
    with small_slices() as cluster, training(cluster, layer_by_layer, KEYS), observer(cluster) as reader:

        def read(number: int) -> list[kvd.Reading]:
            return [reader.read(KEYS[number:]) for _ in range(10)]

        with ThreadPoolExecutor(3) as pool:
            readings = [reading for some in pool.map(read, range(3)) for reading in some]
    assert all({content(value) for value in reading.values} == {reading.version} for reading in readings)


@pytest.mark.parametrize("servers", [0, 1])
def test_calls_end_when_it_is_closed(servers: int) -> None:
    """Whether it waits for a step, or for the cluster to be complete."""
    with LocalCluster(1, 1) as cluster:
        scheduler = cluster.start("scheduler", num_workers=1, num_servers=1) if servers == 0 else cluster.scheduler
        try:
            reader = observer(cluster, scheduler=scheduler.address)
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(reader.wait_for, 5) if servers else pool.submit(reader.pull, "a")
                assert not wait([call], timeout=0.3).done
                reader.close()
                with pytest.raises(StoreClosed):
                    call.result(30)
        finally:
            if servers == 0:
                scheduler.stop()


def test_a_cluster_without_its_servers() -> None:
    with LocalCluster(1, 1) as cluster:
        scheduler = cluster.start("scheduler", num_workers=1, num_servers=2)
        try:
            short = {"request_timeout_s": 2.0, "server_timeout_s": 0.5, "worker_timeout_s": 0.5}
            with observer(cluster, scheduler=scheduler.address, **short) as reader:
                assert reader.status()["missing"][:2] == ["server 0", "server 1"]
                with pytest.raises(RequestTimeout, match="it waits for server 0, server 1: see kvd status"):
                    reader.pull("a")
        finally:
            scheduler.stop()


def test_a_closed_observer_says_so() -> None:
    with small_slices(1) as cluster, observer(cluster) as reader:
        reader.close()
        with pytest.raises(StoreClosed):
            reader.version()


def test_it_does_not_block_an_event_loop() -> None:
    async def program() -> None:
        kvd.Observer()

    with pytest.raises(NotAllowed, match="to_thread"):
        asyncio.run(program())


def test_asynchronous_training_gives_the_newest_values() -> None:
    with LocalCluster(1, 2) as cluster, observer(cluster) as reader:
        store = cluster.store("dist_async")
        store.init(["a", "b"], [ones(0), ones(0)])
        store.pushpull("a", ones(1))
        store.pushpull("a", ones(2))
        store.pushpull("b", ones(1))
        assert reader.read(["a", "b"]).versions == {"a": 2, "b": 1}
        assert [content(value) for value in reader.pull(["a", "b"])] == [2, 1]
        assert reader.version() == 1
        with pytest.raises(NotAllowed, match=r"asynchronously.*pull the newest"):
            reader.pull("a", version=1)
        with pytest.raises(NotAllowed, match="asynchronously"):
            reader.wait_for(1)


def test_it_reads_while_the_scheduler_is_gone() -> None:
    with LocalCluster(1, 1, processes=True) as cluster, observer(cluster) as reader:
        store = cluster.store()
        store.init("a", ones(1))
        assert content(reader.pull("a")) == 1
        assert isinstance(cluster.scheduler, ProcessNode)
        cluster.scheduler.kill()
        store.pushpull("a", ones(2))
        assert content(reader.pull("a")) == 2
