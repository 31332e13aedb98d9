"""What mxnet.kvstore.byteps.BytePS documents, in our store: also where that one does otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import kvd
import kvd.aio
from kvd.errors import KeyNotFound, ShapeMismatch
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

SHAPE = (2, 3)
SIZES = [("local", 1), ("device", 1), ("dist_sync", 1), ("dist_sync", 3)]


def run(kind: str, workers: int, program: Any) -> list[Any]:
    """The results of all workers."""
    if kind in ("local", "device"):
        with kvd.create(kind) as kv:
            return [program(kv)]
    with LocalCluster(workers, 2) as cluster:
        return cluster.run(program, kind)


def full(value: float) -> np.ndarray[Any, Any]:
    return np.full(SHAPE, value, np.float32)


@pytest.mark.parametrize(("kind", "workers"), [*SIZES, ("dist_async", 3)])
def test_broadcast_gives_everyone_the_value_of_rank_0(kind: str, workers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        out = np.zeros(SHAPE, np.float32)
        value = full(2) if kv.rank == 0 else full(np.nan)  # multiplied by zero, as there, it would stay NaN
        assert kv.broadcast("3", value, out=out) is out
        return out.tolist()

    assert run(kind, workers, program) == [full(2).tolist()] * workers


@pytest.mark.parametrize(("kind", "workers"), SIZES)
def test_broadcast_without_out_writes_into_value(kind: str, workers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        value = full(kv.rank + 2)
        kv.broadcast(3, value, out=None)
        return value.tolist()

    assert run(kind, workers, program) == [full(2).tolist()] * workers


@pytest.mark.parametrize(("kind", "workers"), SIZES)
def test_broadcast_to_several_outs_and_keys_and_again(kind: str, workers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        outs = [np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)]
        kv.broadcast("a", full(kv.rank + 1), out=outs, priority=-1)
        pair = (np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32))  # a tuple, which fails there
        kv.broadcast("a", full(kv.rank + 5), out=pair)
        first, second = full(0), full(0)
        kv.broadcast(["b", "c"], [full(kv.rank + 7), full(kv.rank + 8)], out=[first, second])
        return [float(array[0, 0]) for array in (*outs, *pair, first, second)]

    assert run(kind, workers, program) == [[1.0, 1.0, 5.0, 5.0, 7.0, 8.0]] * workers


@pytest.mark.parametrize(("kind", "workers"), SIZES)
def test_pushpull_sums(kind: str, workers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        a = np.zeros(SHAPE, np.float32)
        kv.broadcast("3", full(1), out=a)
        kv.pushpull("3", full(8), out=a)
        return a.tolist()

    assert run(kind, workers, program) == [full(8 * workers).tolist()] * workers


@pytest.mark.parametrize(("kind", "workers"), SIZES)
def test_pushpull_without_out_writes_back(kind: str, workers: int) -> None:
    """There the copy that was summed is thrown away."""

    def program(kv: kvd.KVStore) -> Any:
        value = full(kv.rank + 1)
        kv.broadcast("3", full(0))
        assert kv.pushpull("3", value) is value
        return value.tolist()

    total = sum(range(1, workers + 1))
    assert run(kind, workers, program) == [full(total).tolist()] * workers


@pytest.mark.parametrize(("kind", "workers"), SIZES)
def test_pushpull_of_one_element_lists_and_of_devices(kind: str, workers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.broadcast("3", full(0))
        one, two = full(0), [full(0), full(0)]
        kv.pushpull("3", [full(2)], out=[one])
        kv.pushpull("3", [full(2), full(3)], out=two)
        return float(one[0, 0]), [float(array[0, 0]) for array in two]

    assert run(kind, workers, program) == [(2.0 * workers, [5.0 * workers] * 2)] * workers


@pytest.mark.parametrize(("kind", "workers"), SIZES)
def test_properties(kind: str, workers: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        return kv.type, kv.rank, kv.local_rank, kv.num_workers

    assert run(kind, workers, program) == [(kind, rank, 0, workers) for rank in range(workers)]


def test_local_rank_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with LocalCluster(1) as cluster:
        assert cluster.run(lambda kv: kv.local_rank) == [3]


def test_is_capable_names_the_capabilities() -> None:
    """A static method. There it is always False; an unknown name is an error here, as in MXNet's own store."""
    assert kvd.KVStore.is_capable("optimizer") is True
    for name in ("compression", "row_sparse", "bind"):
        assert kvd.KVStore.is_capable(name) in (True, False)
    with pytest.raises(ValueError, match="no capability is called 'teleport'"):
        kvd.KVStore.is_capable("teleport")


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_members_that_byteps_leaves_unimplemented(kind: str, tmp_path: Any) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.broadcast("w", full(0))
        kv.set_optimizer(SGD(1.0, momentum=0.5))
        kv.pushpull("w", full(-1), out=full(0))
        kv.save_optimizer_states(tmp_path / "states")
        kv.pushpull("w", full(-1), out=full(0))
        kv.load_optimizer_states(tmp_path / "states")
        return float(kv.pushpull("w", full(-1))[0, 0])

    # momentum 1, 1.5, and 1.5 once more from the state after the first step
    assert run(kind, 1, program) == [1 + 1.5 + 1.5]


# ── a key is declared by its first pushpull ──


@pytest.mark.parametrize("kind", ["byteps", "Horovod"])
def test_pushpull_makes_a_key_that_is_new(kind: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.broadcast("begun", full(7))
        seen = [kv.pushpull("begun", full(kv.rank + 1)), kv.pushpull("a", full(kv.rank + 1))]
        kv.pushpull("a", full(kv.rank + 2), out=seen[0])
        more = [full(kv.rank), np.arange(3, dtype=np.int64)]
        seen += kv.pushpull(["b", 5], more)
        seen.append(kv.pushpull("devices", [full(1), full(2)], out=full(0)))
        handles = [kv.pushpull_async(name, full(kv.rank), out=full(0)) for name in ("c", "d", "c")]
        seen += [handle.wait() for handle in handles]
        seen.append(kv.pushpull("new", full(kv.rank), copy=False))
        return [value.tolist() for value in seen]

    first, *others = run(kind, 3, program)
    three = full(3).tolist()
    assert first == [full(9).tolist(), full(6).tolist(), three, [0, 3, 6], full(9).tolist(), *[three] * 4]
    assert others == [first, first]


@pytest.mark.parametrize("kind", ["byteps", "horovod"])
def test_pushpull_makes_a_deleted_key_again(kind: str) -> None:
    """Whatever way the calls before the deletion took, and with another shape."""

    def program(kv: kvd.KVStore) -> list[Any]:
        seen: list[Any] = []
        for size in (2, 3, 3):
            ones = np.ones(size, np.float32)
            seen += [kv.pushpull("one", ones.copy()).tolist() for _ in range(3)]
            seen += [kv.pushpull(7, ones.copy()).tolist() for _ in range(3)]
            seen += [kv.pushpull_async("handle", ones, out=ones.copy()).wait().tolist() for _ in range(3)]
            seen += [kv.pushpull(["b", "c"], [ones.copy(), ones.copy()])[1].tolist() for _ in range(3)]
            seen.append(kv.pushpull("large", np.ones(size << 16, np.float32))[:size].tolist())
            kv.delete(["one", 7, "b", "large", "handle"])
            kv.delete("c")
        kv.broadcast("d", full(1))
        deletion = kv.delete_async("d")
        again = kv.pushpull_async("d", full(2))  # before the deletion has ended
        seen.append(again.wait().ravel()[:2].tolist())
        deletion.wait()
        return seen

    first, second = run(kind, 2, program)
    assert first == second == [*[[2.0] * 2] * 13, *[[2.0] * 3] * 26, [4.0] * 2]


def test_pushpull_makes_a_key_in_an_event_loop() -> None:
    async def program(settings: dict[str, Any]) -> list[Any]:
        async with await kvd.aio.create("byteps", **settings) as kv:
            values = [await kv.pushpull("a", full(1)), *await kv.pushpull(["b", "c"], [full(2), full(3)])]
            await kv.delete("a")
            values.append(await kv.pushpull("a", full(5)))
            return [float(value[0, 0]) for value in values]

    async def both(settings: dict[str, Any]) -> list[list[Any]]:
        return list(await asyncio.gather(program(settings), program(settings)))

    with LocalCluster(2, 1) as cluster:
        settings = {"scheduler": cluster.address, "run": cluster.settings["run"]}
        assert asyncio.run(both(settings)) == [[2, 4, 6, 10]] * 2


def test_a_declared_key_has_the_shape_that_worker_0_gave_it() -> None:
    with LocalCluster(2, 1) as cluster:
        zero, one = cluster.open_stores("byteps")
        handle = zero.pushpull_async("a", np.ones(3, np.float32))
        with pytest.raises(ShapeMismatch) as raised:
            one.pushpull("a", np.ones(4, np.float32))
        assert raised.value.key == "a"
        one.pushpull("a", np.ones(3, np.float32))
        assert handle.wait().tolist() == [2, 2, 2]


def test_an_out_that_is_unlike_the_value_of_a_new_key_is_named() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store("byteps")
        with pytest.raises(ShapeMismatch, match=r"the given out has \(4,\)"):
            kv.pushpull("w", np.ones(3, np.float32), out=np.zeros(4, np.float32))
        assert kv.pushpull("w", np.ones(3, np.float32)).tolist() == [1, 1, 1]


def test_other_types_make_no_key() -> None:
    with LocalCluster(1, 1) as cluster, pytest.raises(KeyNotFound):
        cluster.store("dist_sync").pushpull("a", full(1))
