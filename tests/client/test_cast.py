"""`cast=True`: values of another floating dtype than their key."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvd
from kvd.errors import DtypeMismatch, ShapeMismatch
from kvd.node.shell import payloads
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster
from tests.client.test_repeated_keys import run

FLOATS = ["float16", "bfloat16", "float32", "float64"]
STORES = ["local", "dist_sync", "dist_async"]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def gradient(rank: int, step: int, dtype: str, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, step, count]).normal(size=count).astype(dtype_of(dtype))


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("key_dtype", FLOATS)
@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_every_pair_of_dtypes(store_type: str, key_dtype: str, given: str) -> None:
    """Two workers, keys of one slice and of several (of four KiB), and an empty one, all in one call."""
    sizes = {"small": 3, "large": 5000, "empty": 0}
    names = list(sizes)

    def program(kv: kvd.KVStore) -> Any:
        kv.init(names, [np.zeros(size, dtype_of(key_dtype)) for size in sizes.values()])
        outs = [np.full(size, 9, dtype_of(given)) for size in sizes.values()]
        kv.push(names, [gradient(kv.rank, 0, given, size) for size in sizes.values()], cast=True)
        back = kv.pull(names, out=outs, cast=True)
        assert all(one is other for one, other in zip(back, outs, strict=True))
        pulled = kv.pull(names)
        again = [gradient(kv.rank, 1, given, size) for size in sizes.values()]
        assert kv.pushpull(names, again, cast=True)[1] is again[1]
        return outs, pulled, again, kv.pull(names), kv.num_workers

    if store_type == "local":
        results = run(store_type, program)
    else:
        with LocalCluster(2, 2, slice_bytes=4096) as cluster:
            results = cluster.run(program)
    for outs, pulled, again, last, workers in results:
        for index, size in enumerate(sizes.values()):
            for step, out, value in ((0, outs[index], pulled[index]), (1, again[index], last[index])):
                parts = [gradient(rank, step, given, size).astype(dtype_of(key_dtype)) for rank in range(workers)]
                wide = np.float64 if key_dtype == "float64" else np.float32
                total = sum(part.astype(wide) for part in parts)
                expected = np.asarray(total).astype(dtype_of(key_dtype))
                np.testing.assert_array_equal(value, expected)
                assert value.dtype == dtype_of(key_dtype)
                np.testing.assert_array_equal(out, expected.astype(dtype_of(given)))
                assert out.dtype == dtype_of(given)


@pytest.mark.parametrize("store_type", STORES)
def test_training_with_float16_gradients_of_float32_weights(store_type: str) -> None:
    """The keys are pushed together, so that the servers fuse them, and in between with casts."""
    names, count, rate = ["a", "b", "c"], 40, 0.5

    def value(name: str, rank: int, step: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([ord(name), rank, step]).integers(-8, 8, count).astype(np.float32)

    def program(kv: kvd.KVStore) -> Any:
        kv.init(names, [np.zeros(count, np.float32)] * 3)
        kv.set_optimizer(SGD(rate))
        for step in range(8):
            values = [value(name, kv.rank, step) for name in names]
            if step % 3 == 2:
                kv.push(names, [array.astype(np.float16) for array in values], cast=True)
            elif step % 3 == 1:
                kv.push(names, [values[0], values[1].astype(np.float64), values[2]], cast=True)
            else:
                kv.push(names, values)
        kv.flush()
        kv.barrier("pushed")
        return kv.pull(names), kv.num_workers

    for pulled, workers in run(store_type, program):
        for name, weight in zip(names, pulled, strict=True):
            total = sum(value(name, rank, step) for rank in range(workers) for step in range(8))
            np.testing.assert_array_equal(weight, np.float32(-rate) * total)


def test_a_value_travels_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, str, str]] = []
    cast = payloads._cast

    def seen(name: str, data: Any, coding: Any) -> Any:
        sizes.append((data.nbytes, name, coding.wanted))
        return cast(name, data, coding)

    monkeypatch.setattr(payloads, "_cast", seen)
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros(1000, np.float32))
        kv.push("w", np.ones(1000, np.float16), cast=True).wait()
        kv.push("w", np.ones(1000, np.float32), cast=True).wait()
        assert kv.pull("w").tolist() == [1] * 1000
        kv.close()
    assert sizes == [(2000, "float16", "float32")]


def test_devices_tensors_and_views() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros((2, 3), np.float32))
        kv.push("w", [torch.ones(2, 3, dtype=torch.bfloat16), torch.full((2, 3), 2, dtype=torch.bfloat16)], cast=True)
        outs = [torch.empty(2, 3, dtype=torch.float64), np.empty((3, 2), np.float16).T, np.empty((2, 3), ">f4")]
        assert kv.pull("w", out=outs, cast=True) is outs
        for out in outs:
            np.testing.assert_array_equal(np.asarray(out), np.full((2, 3), 3))
        kv.close()


def test_a_key_that_is_in_the_list_twice() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros(2, np.float32))
        outs: list[Any] = [np.empty(2, np.float16), np.empty(2, np.float64)]
        kv.pushpull(["w", "w"], [np.ones(2, np.float64)] * 2, out=outs, cast=True)
        assert [out.tolist() for out in outs] == [[2, 2], [2, 2]]
        kv.close()


def test_in_an_event_loop() -> None:
    async def program(cluster: LocalCluster) -> Any:
        async with await kvd.aio.create("dist_sync", **cluster.settings, scheduler=cluster.address) as kv:
            await kv.init("w", np.zeros(2, np.float32))
            half, wide = np.ones(2, np.float16), np.empty(2, np.float64)
            await kv.push("w", half, cast=True)
            await kv.push_async("w", half, cast=True)
            await kv.pull("w", out=wide, cast=True)
            await kv.pull_async("w", out=wide, cast=True)
            assert wide.tolist() == [1, 1]
            await kv.pushpull("w", half * 3, out=wide, cast=True)
            assert wide.tolist() == [3, 3]
            return await kv.pushpull_async("w", half * 4, cast=True)

    with LocalCluster(1, 1) as cluster:
        assert asyncio.run(program(cluster)).tolist() == [4, 4]


@pytest.mark.parametrize("store_type", ["local", "dist_sync"])
def test_what_is_refused(store_type: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init(["w", "n"], [np.zeros(2, np.float32), np.zeros(2, np.int32)])
        half = np.ones(2, np.float16)
        call: Any
        for call in (
            lambda: kv.push("w", half).wait(),
            lambda: kv.pull("w", out=half),
            lambda: kv.pushpull("w", half),
        ):
            with pytest.raises(DtypeMismatch, match="or pass cast=True to push, pull or pushpull"):
                call()
        for call in (
            lambda: kv.push("w", np.ones(2, np.int32), cast=True).wait(),
            lambda: kv.push("n", half, cast=True).wait(),
            lambda: kv.pull("n", out=half, cast=True),
            lambda: kv.pull("w", out=np.ones(2, np.int64), cast=True),
            lambda: kv.pushpull("w", half, out=np.ones(2, np.int32), cast=True),
        ):
            with pytest.raises(DtypeMismatch) as error:
                call()
            assert "cast=True" not in str(error.value)
        for call in (
            lambda: kv.push("w", np.ones(3, np.float16), cast=True).wait(),
            lambda: kv.pull("w", out=np.ones(3, np.float16), cast=True),
            lambda: kv.pushpull("w", half, out=np.ones(3, np.float32), cast=True),
            lambda: kv.pushpull("w", np.ones(3, np.float16), cast=True),
        ):
            with pytest.raises(ShapeMismatch):
                call()
        kv.flush()
        return kv.clock("w"), kv.clock("n")

    assert set(run(store_type, program)) == {(0, 0)}
