"""`kv.bind`: arrays to keep for a key, whose gradient is pushed without a copy."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
from kvd.client.facades.blocking import backend_of
from kvd.errors import KeyNotFound, ShapeMismatch
from kvd.testing.cluster import LocalCluster, PathName, ProcessNode, engine_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGE = (600, 500)  # more than what goes through the socket in any case
SMALL = (3,)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One worker and two servers that share memory; the tests take keys of their own."""
    with LocalCluster(1, 2, path="shm") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kv(cluster: LocalCluster) -> kvd.KVStore:
    return cluster.store()


def arena_of(kv: kvd.KVStore) -> Any:
    return engine_of(kv).transport.arena


@contextmanager
def stores(kind: str) -> Iterator[kvd.KVStore]:
    """A store in this process, or the worker of a cluster with this path."""
    if kind in ("local", "device"):
        with kvd.create(kind) as kv:
            yield kv
    else:
        path: PathName = "shm" if kind == "shm" else "tcp"
        with LocalCluster(1, 2, path=path) as cluster:
            yield cluster.store()


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_the_arrays_are_the_same_at_each_call(kind: str) -> None:
    with stores(kind) as kv:
        kv.init(["w", "v"], [np.full(LARGE, 3, np.float32), np.arange(3, dtype=np.float16)])
        gradient, weight = kv.bind("w")
        assert (gradient.shape, gradient.dtype) == (weight.shape, weight.dtype) == (LARGE, np.dtype(np.float32))
        assert not gradient.any()
        assert (weight == 3).all()
        gradient[:], weight[:] = 5, 6
        again = kv.bind("w")
        assert again[0] is gradient
        assert again[1] is weight
        assert (gradient == 5).all()
        assert (weight == 6).all()
        gradients, weights = kv.bind(["v", "w"])
        assert gradients[1] is gradient
        assert weights[1] is weight
        assert gradients[0].tolist() == [0, 0, 0]
        assert weights[0].tolist() == [0, 1, 2]
        assert not any(np.shares_memory(one, other) for one in gradients for other in weights)
        assert kv.bind([]) == ([], [])


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_an_unknown_key_cannot_be_bound(kind: str) -> None:
    with stores(kind) as kv:
        kv.init("w", np.zeros(SMALL, np.float32))
        for wrong in ("nobody", ["w", "nobody"]):
            with pytest.raises(KeyNotFound, match="'nobody'") as caught:
                kv.bind(wrong)
            assert caught.value.key == "nobody"
        kv.init("nobody", np.ones(SMALL, np.float32))
        assert kv.bind("nobody")[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16, "float64", "int64", "uint8"], ids=str)
def test_every_shape_and_dtype(kind: str, dtype: Any) -> None:
    shapes = [(), (0,), (2, 0, 3), (1,), (7,), (33, 129), LARGE]
    keys = [f"{shape}" for shape in shapes]
    with stores(kind) as kv:
        kv.init(keys, [np.full(shape, 7, dtype) for shape in shapes])
        gradients, weights = kv.bind(keys)
        assert [(array.shape, array.dtype) for array in gradients] == [(shape, np.dtype(dtype)) for shape in shapes]
        assert [(array.shape, array.dtype) for array in weights] == [(shape, np.dtype(dtype)) for shape in shapes]
        for turn in range(1, 4):
            for number, gradient in enumerate(gradients):
                gradient[...] = turn + number
            kv.pushpull(keys, gradients, weights)
            for number, weight in enumerate(weights):
                assert (weight == turn + number).all()
        for number, key in enumerate(keys):
            gradients[number][...] = 9
            kv.push(key, gradients[number]).wait()
            kv.pull(key, weights[number])
            assert (weights[number] == 9).all()


def test_the_weight_changes_in_pulls_of_it_only(kv: kvd.KVStore) -> None:
    kv.init("kept", np.zeros(LARGE, np.float32))
    gradient, weight = kv.bind("kept")
    gradient[:] = 1
    out = np.empty_like(weight)
    kv.pushpull("kept", gradient, out)
    assert (out == 1).all()
    assert not weight.any()
    kv.pull("kept", weight)
    assert (weight == 1).all()


# ── copies ──


class Blocks:
    """Counts what is taken from the arena of a store meanwhile."""

    def __init__(self, kv: kvd.KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arena = arena_of(kv)
        self.sizes: list[int] = []
        allocate = self._arena.allocate

        def counted(nbytes: int) -> Any:
            self.sizes.append(nbytes)
            return allocate(nbytes)

        monkeypatch.setattr(self._arena, "allocate", counted)


def test_a_push_of_the_bound_gradient_copies_nothing(kv: kvd.KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kv.init(["large", "other"], [np.zeros(LARGE, np.float32)] * 2)
    (gradient, other), (weight, _) = kv.bind(["large", "other"])
    assert arena_of(kv).locate(gradient) is not None
    blocks = Blocks(kv, monkeypatch)
    for turn in range(1, 5):
        gradient[:] = turn
        kv.push("large", gradient).wait()
        gradient[:] = -turn
        kv.pushpull("large", gradient, weight)
        assert (weight == -turn).all()
        kv.pushpull(["large", "other"], [gradient, other], [weight, other])
    assert blocks.sizes == []


def test_a_push_of_another_array_is_copied(kv: kvd.KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kv.init("copied", np.zeros(LARGE, np.float32))
    gradient, weight = kv.bind("copied")
    gradient[:] = 4
    blocks = Blocks(kv, monkeypatch)
    value = np.full(LARGE, 2, np.float32)
    push = kv.push("copied", value)
    value[:] = np.nan
    push.wait()
    kv.pull("copied", weight)
    assert (weight == 2).all()
    assert blocks.sizes == [value.nbytes]
    for part in (gradient[::-1], gradient.T.reshape(LARGE), gradient.copy()):
        assert (kv.pushpull("copied", part, weight) == 4).all()
    with pytest.raises(ShapeMismatch):
        kv.push("copied", gradient[:300]).wait()
    assert len(blocks.sizes) > 1
    assert (gradient == 4).all()


def test_the_gradient_of_one_key_is_pushed_to_another_as_any_array(kv: kvd.KVStore) -> None:
    kv.init(["one", "two"], [np.zeros(LARGE, np.float32)] * 2)
    (one, two), (weight, _) = kv.bind(["one", "two"])
    one[:], two[:] = 1, 2
    push = kv.push("one", two)
    two[:] = 3  # it was copied
    push.wait()
    kv.pull("one", weight)
    assert (weight == 2).all()
    kv.pushpull("two", two, weight)
    assert (weight == 3).all()


def test_a_pushpull_into_the_gradient_itself(kv: kvd.KVStore) -> None:
    kv.init("in place", np.zeros(LARGE, np.float32))
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    try:
        gradient, _ = kv.bind("in place")
        gradient[:] = -1
        assert kv.pushpull("in place", gradient) is gradient
        assert (gradient == 1).all()
        kv.pushpull("in place", gradient)
        assert (gradient == 0).all()
    finally:
        kv.set_optimizer(None)


def test_bound_arrays_outlive_the_store() -> None:
    with LocalCluster(1, 1, path="shm") as cluster:
        with cluster.store() as kv:
            kv.init("w", np.full(LARGE, 2, np.float32))
            gradient, weight = kv.bind("w")
        gradient[:] = 8
        assert (gradient == 8).all()
        assert (weight == 2).all()


# ── two workers, the other façade, a restart ──


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_workers_add_up(kind: str) -> None:
    def program(kv: kvd.KVStore) -> list[float]:
        kv.init(["large", "small"], [np.zeros(LARGE, np.float32), np.zeros(SMALL, np.float32)])
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        kv.barrier("set")
        gradients, weights = kv.bind(["large", "small"])
        for step in range(4):
            for gradient in gradients:
                gradient[:] = -(step + 1) * (kv.rank + 1)
            kv.pushpull(["large", "small"], gradients, weights)
        kv.barrier("pushed")
        kv.pull(["large", "small"], weights)
        assert all((weight == weight.flat[0]).all() for weight in weights)
        return [float(weight.flat[0]) for weight in weights]

    with LocalCluster(2, 2) as cluster:
        assert cluster.run(program, kind) == [[30, 30]] * 2


@pytest.mark.asyncio
async def test_the_async_facade() -> None:
    with LocalCluster(1, 1) as cluster:
        async with await kvd.aio.create("dist_sync", scheduler=cluster.address, run=cluster.settings["run"]) as kv:
            await kv.init(["a", "b"], [np.ones(LARGE, np.float32), np.ones(SMALL, np.float32)])
            gradients, weights = await kv.bind(["a", "b"])
            (gradient, _), (_, weight) = await asyncio.gather(kv.bind("a"), kv.bind("b"))
            assert gradient is gradients[0]
            assert weight is weights[1]
            gradients[0][:] = 5
            await kv.pushpull("a", gradients[0], weights[0])
            assert (weights[0] == 5).all()
            with pytest.raises(KeyNotFound):
                await kv.bind("nobody")


def test_threads_that_bind_at_once_get_the_same(kv: kvd.KVStore) -> None:
    kv.init("raced", np.full(LARGE, 2, np.float32))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(kv.bind("raced"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {(id(gradient), id(weight)) for gradient, weight in found} == {tuple(map(id, kv.bind("raced")))}
    assert (found[0][1] == 2).all()


def test_a_restarted_worker_binds_the_value_of_its_step() -> None:
    with LocalCluster(1, 2, worker_timeout_s=20.0) as cluster:
        first = cluster.store(node_id="worker-0")
        first.init("w", np.zeros(LARGE, np.float32))
        first.set_optimizer(kvd.optimizer.SGD(1.0, momentum=0.5))
        gradient, weight = first.bind("w")
        seen = []
        for _ in range(3):
            gradient[:] = -1
            seen.append(float(first.pushpull("w", gradient, weight)[0, 0]))
        first.__exit__(RuntimeError, None, None)

        second = cluster.store(node_id="worker-0")
        assert second.restarted
        assert second.clock("w") == 3
        second.rewind(2)
        again, value = second.bind("w")
        assert again is not gradient
        assert not again.any()
        assert (value == seen[1]).all()
        again[:] = -1
        second.pushpull("w", again, value)  # the step that its predecessor made counts once
        assert (value == seen[2]).all()
        assert second.clock("w") == 3


# ── calls that failed ──


@pytest.mark.parametrize("path", ["shm", "ipc", "tcp"])
def test_a_bound_gradient_whose_pushpull_was_given_up_is_sent_as_it_was(path: Any) -> None:
    """As with other arrays: see tests/faults/test_faults_given_up.py."""
    count = (48 << 20) // 4  # more than the credit, and than what sockets hold
    with LocalCluster(processes=True, path=path) as cluster:
        kv = cluster.store()
        values = np.arange(count, dtype=np.float32)
        kv.init("w", np.zeros_like(values))
        gradient, weight = kv.bind("w")
        gradient[:] = values
        server = cluster.servers[0]
        assert isinstance(server, ProcessNode)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            # As the blocking call does.
            handle = backend_of(kv).values.pushpull("w", gradient, weight, 0, 1, False, None)
            with pytest.raises(kvd.RequestTimeout):
                handle.wait(0.5)
            weight[:] = -2
            if path != "shm":  # there the server reads it where it lies: leave it until flush has returned
                gradient[:] = -1
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        kv.flush()
        gradient[:] = -1
        assert (weight == -2).all()
        assert np.array_equal(kv.pull("w"), values)
