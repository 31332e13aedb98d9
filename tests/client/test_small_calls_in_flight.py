"""Small pushes and pulls with handles, many of them in flight: prepared frames are sent, and change no result."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
import kvd.aio
from kvd.client.cluster.small_calls import SmallCalls
from kvd.client.facades.blocking import backend_of
from kvd.core.worker.machine import WorkerMachine
from kvd.testing.cluster import LocalCluster
from tests.client.harness import MEGABYTE, ONE_PUSH

KEYS = tuple(f"w{number}" for number in range(8))
ROUNDS = 12


class Taken:
    """How many calls began with frames, and ended without a step of the machine."""

    def __init__(self) -> None:
        self.begun = self.ended = 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    taken, begin, end = Taken(), SmallCalls.begin, WorkerMachine.answered

    def beginning(way: SmallCalls, *arguments: Any) -> Any:
        handle = begin(way, *arguments)
        taken.begun += handle is not None
        return handle

    def ending(machine: WorkerMachine, *arguments: Any) -> Any:
        call = end(machine, *arguments)
        taken.ended += call is not None
        return call

    monkeypatch.setattr(SmallCalls, "begin", beginning)
    monkeypatch.setattr(WorkerMachine, "answered", ending)
    return taken


def fly(store: kvd.KVStore, most: int, *, keys: int = len(KEYS), dtype: Any = np.float32, rounds: int = ROUNDS) -> None:
    """Always has so many calls in flight. Each value is overwritten as soon as its call has returned."""
    flying: deque[tuple[int, kvd.Handle, Any]] = deque()

    def land() -> None:
        number, handle, out = flying.popleft()
        assert handle.wait() is out
        assert (out == np.asarray(2 * (number % 50) + 1, dtype)).all(), (number, out)

    value = np.empty((3, 5), dtype)
    for number in range(rounds * keys):
        if len(flying) == most:
            land()
        value[...] = number % 50 + store.rank
        out = np.empty((3, 5), dtype)
        flying.append((number, store.pushpull_async(KEYS[number % keys], value, out), out))
        value[...] = 99
    while flying:
        land()


def init(store: kvd.KVStore, dtype: Any = np.float32) -> None:
    store.init(list(KEYS), [np.zeros((3, 5), dtype) for _ in KEYS])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "float16", ml_dtypes.bfloat16])
def test_values_of_every_dtype(taken: Taken, dtype: Any) -> None:
    def program(store: kvd.KVStore) -> None:
        init(store, dtype)
        fly(store, 8, dtype=dtype)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.begun >= taken.ended > 2 * len(KEYS)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("most", "keys"), [(3, 8), (8, 8), (7, 2), (20, 8)])
def test_as_many_as_there_are_keys_and_more(taken: Taken, servers: int, most: int, keys: int) -> None:
    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, most, keys=keys)

    with LocalCluster(2, servers) as cluster:
        cluster.run(program)
    assert taken.begun > 0


@pytest.mark.parametrize("settings", [{"path": "tcp"}, {"path": "ipc"}], ids=str)
def test_the_same_sums_without_the_way(taken: Taken, settings: dict[str, Any]) -> None:
    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)

    with LocalCluster(2, 1, **settings) as cluster:
        cluster.run(program)
    assert taken.begun == 0


def test_other_calls_come_between(taken: Taken) -> None:
    """The values of the calls in flight are those of the time of the call."""
    together = threading.Barrier(2, timeout=60)

    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)
        others: list[Callable[[], Any]] = [
            store.flush,
            store.barrier,
            lambda: store.pushpull(list(KEYS[:3]), [np.ones((3, 5), np.float32) for _ in range(3)]),
            lambda: store.pushpull_async(KEYS[0], np.ones((3, 5), np.float64), cast=True).wait(),
            lambda: store.pushpull_async(KEYS[0], np.ones((3, 5), np.float32), samples=2).wait(),
            lambda: store.pull(KEYS[0]),
        ]
        for other in others:
            value, outs = np.full((3, 5), store.rank, np.float32), list(np.empty((len(KEYS), 3, 5), np.float32))
            if store.rank == 1:
                together.wait()
            handles = [store.pushpull_async(key, value, out) for key, out in zip(KEYS, outs, strict=True)]
            if store.rank == 0:
                together.wait()
            value[...] = 99
            other()
            for handle, out in zip(handles, outs, strict=True):
                assert handle.wait() is out
                assert (out == 1).all()
            fly(store, 5, rounds=3)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.begun >= taken.ended > 0


def test_a_value_of_another_form_is_refused_and_a_strided_one_is_taken() -> None:
    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)
        with pytest.raises(kvd.errors.ShapeMismatch):
            store.pushpull_async(KEYS[0], np.ones((5, 3), np.float32)).wait()
        wide, out = np.ones((3, 10), np.float32), np.empty((3, 5), np.float32)
        assert (store.pushpull_async(KEYS[0], wide[:, ::2], out).wait() == 2).all()
        in_place = np.ones((3, 5), np.float32)
        assert store.pushpull_async(KEYS[0], in_place).wait() is in_place
        assert (in_place == 2).all()

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)


def test_the_end_of_the_store_ends_the_calls_in_flight(taken: Taken) -> None:
    handles: list[kvd.Handle] = []
    has_left = threading.Event()

    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)
        if store.rank == 0:
            outs = np.empty((len(KEYS), 3, 5), np.float32)
            handles.extend(store.pushpull_async(key, outs[0], out) for key, out in zip(KEYS, outs, strict=True))
            backend_of(store).closing.abandon(failed=False)
            has_left.set()
        has_left.wait(60)  # the rounds wait for the other worker, which does not push

    with LocalCluster(2, 1) as cluster, pytest.raises(kvd.errors.StoreClosed):
        cluster.run(program)
    assert all(isinstance(handle.exception(), kvd.KvdError) for handle in handles)


def test_in_an_event_loop(taken: Taken) -> None:
    def program(store: kvd.KVStore) -> None:
        init(store)

        async def loop() -> None:
            others = kvd.aio.KVStore(backend_of(store, may_block=False))
            for step in range(ROUNDS):
                value = np.full((3, 5), step + store.rank, np.float32)
                outs = np.empty((len(KEYS), 3, 5), np.float32)
                calls = [others.pushpull(key, value, out) for key, out in zip(KEYS, outs, strict=True)]
                await asyncio.gather(*calls)
                assert (outs == 2 * step + 1).all()

        asyncio.run(loop())

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.ended > 0


def test_a_wait_that_gave_up_leaves_the_call(taken: Taken) -> None:
    has_given_up = threading.Event()

    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)
        store.barrier()
        value, outs = np.full((3, 5), 1, np.float32), list(np.empty((len(KEYS), 3, 5), np.float32))
        if store.rank == 1:
            assert has_given_up.wait(60)
        before = taken.begun
        handles = [store.pushpull_async(key, value, out) for key, out in zip(KEYS, outs, strict=True)]
        if store.rank == 0:
            assert taken.begun > before
            for handle in handles:
                with pytest.raises(kvd.errors.RequestTimeout, match="wait again"):
                    handle.wait(0.001)
            has_given_up.set()
        for handle, out in zip(handles, outs, strict=True):
            assert handle.wait() is out
            assert (out == 2).all()

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)


def test_an_array_that_changes_its_form_meanwhile_gets_the_sum(taken: Taken) -> None:
    """The memory of `out` is what counts, as with messages."""

    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)
        outs = list(np.empty((len(KEYS), 3, 5), np.float32))
        handles = [
            store.pushpull_async(key, np.ones((3, 5), np.float32), out) for key, out in zip(KEYS, outs, strict=True)
        ]
        for out in outs:
            out.shape = (5, 3)
            out.flags.writeable = False
        for handle, out in zip(handles, outs, strict=True):
            assert handle.wait(60) is out
            assert (out == 2).all()

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)


def test_a_callback_that_raises_takes_nothing_from_others(taken: Taken, caplog: pytest.LogCaptureFixture) -> None:
    """The end of the last push ends the flush, too."""

    def program(store: kvd.KVStore) -> None:
        init(store)
        fly(store, 8)

        def told(_: Any) -> None:
            raise ZeroDivisionError

        for _ in range(5):
            handles = [store.pushpull_async(key, np.ones((3, 5), np.float32)) for key in KEYS]
            for handle in handles:
                with suppress(ZeroDivisionError):  # it has ended already
                    handle.on_end(told)
            store.flush(60)
            assert all(handle.done() for handle in handles)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.ended > 0
    assert "a Complete could not be carried out" in caplog.text


def test_a_push_that_finds_no_room_is_made_later_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small call that cannot begin with a frame needs room for a copy. Until there is some, its step has not pushed
    the key."""
    is_asked = threading.Event()

    def refusing(way: SmallCalls, *arguments: Any) -> None:
        is_asked.set()

    def program(store: kvd.KVStore) -> None:
        large, value, out = np.ones(MEGABYTE // 4, np.float32), np.ones(4, np.float32), np.empty(4, np.float32)
        store.init(["s", "large"], [np.zeros_like(value), np.zeros_like(large)])
        for _ in range(6):
            store.pushpull_async("s", value, out).wait()
        store.barrier()
        for _ in store.steps(1, keys=["s", "large"]):
            if store.rank == 1:
                assert is_asked.wait(60)
                store.push("large", large).wait()
                store.pushpull("s", value, out)
                continue
            monkeypatch.setattr(SmallCalls, "begin", refusing)
            store.push("large", large)
            others = kvd.aio.KVStore(backend_of(store, may_block=False))
            asyncio.run(others.pushpull("s", value, out))
            assert (out == 2).all()

    with LocalCluster(2, 1, slice_bytes="1MiB") as cluster:
        cluster.run(program, **ONE_PUSH)
