"""A key may have a merge of its own: `init(key, value, merge=…)`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.facades.blocking import backend_of
from kvd.errors import MergeMismatch
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

MERGES = ["sum", "mean", "weighted"]
SAMPLES = [1, 5]
SHAPE = (3, 700)
STEPS = 4
RATE, MOMENTUM = 0.1, 0.9


def gradient(name: str, rank: int, step: int) -> Any:
    return np.random.default_rng([MERGES.index(name), rank, step]).standard_normal(SHAPE)


def merged(name: str, step: int) -> Any:
    """What the servers are to make of the pushes of both workers, in float64."""
    first, second = (gradient(name, rank, step) for rank in (0, 1))
    if name == "weighted":
        return (SAMPLES[0] * first + SAMPLES[1] * second) / sum(SAMPLES)
    return (first + second) / (2 if name == "mean" else 1)


def trained(name: str, steps: int = STEPS) -> Any:
    """A key after SGD with momentum."""
    weight, velocity = np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(steps):
        velocity = MOMENTUM * velocity + merged(name, step)
        weight = weight - RATE * velocity
    return weight


def train(kv: kvd.KVStore, steps: range) -> Any:
    """Pushes all keys in one call, each step."""
    weights = [np.empty(SHAPE) for _ in MERGES]
    for step in steps:
        kv.pushpull(MERGES, [gradient(name, kv.rank, step) for name in MERGES], weights, samples=SAMPLES[kv.rank])
    return weights


@pytest.mark.parametrize(("cluster_merge", "slice_bytes"), [("sum", 4 << 10), ("mean", 1 << 20)])
def test_each_key_is_merged_in_its_own_way(cluster_merge: str, slice_bytes: int) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init(MERGES, [np.zeros(SHAPE)] * 3, merge=MERGES)
        kv.init("seen", np.zeros(2, np.int64), merge="sum")
        kv.init("plain", np.zeros(2))
        kv.set_optimizer(SGD(RATE, momentum=MOMENTUM))
        weights = train(kv, range(STEPS))
        seen = kv.pushpull("seen", np.full(2, SAMPLES[kv.rank], np.int64))
        plain = kv.pushpull("plain", np.ones(2))
        return weights, seen.tolist(), plain.tolist()

    with LocalCluster(2, 2, merge=cluster_merge, slice_bytes=slice_bytes) as cluster:
        results = cluster.run(program)
        with cluster.observer() as observer:
            rows = observer.keys()
    for weights, seen, plain in results:
        for name, weight in zip(MERGES, weights, strict=True):
            np.testing.assert_allclose(weight, trained(name), rtol=1e-12)
        assert seen == [6, 6]  # the optimizer does not touch what was counted
        assert plain == pytest.approx([-RATE * (2 if cluster_merge == "sum" else 1)] * 2)
    assert {row["key"]: row["merge"] for row in rows} == {
        **{name: name for name in MERGES},
        "seen": "sum",
        "plain": cluster_merge,
    }


def test_one_merge_for_a_list_of_keys() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init(["a", "b"], [np.zeros(2)] * 2, merge="mean")
        kv.init(["c", "d"], [np.zeros(2)] * 2, merge=[None, "mean"])
        names = ["a", "b", "c", "d"]
        pulled = kv.pushpull(names, [np.full(2, kv.rank + 1.0)] * 4, [np.empty(2) for _ in names])
        return [value.tolist()[0] for value in pulled]

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [[1.5, 1.5, 3.0, 1.5]] * 2


def test_a_broadcast_keeps_the_merge_of_a_key_and_a_deleted_key_may_get_another() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init(["a", "b"], [np.zeros(2)] * 2, merge="mean")
        kv.broadcast(["a", "new"], [np.full(2, 9.0), np.full(2, 9.0)])
        kv.delete("b")
        kv.init("b", np.zeros(3), merge="sum")
        return [kv.pushpull(key, np.full(size, kv.rank + 1.0))[0] for key, size in (("a", 2), ("new", 2), ("b", 3))]

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [[1.5, 3.0, 3.0]] * 2


def test_a_restarted_worker_finds_its_key_if_it_names_the_same_merge() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.lone_store(node_id="worker-0")
        kv.init("w", np.zeros(2), merge="mean")
        backend_of(kv).closing.abandon(failed=True)
        again = cluster.lone_store(node_id="worker-0")
        assert again.restarted
        with pytest.raises(MergeMismatch, match="merged by 'mean'"):
            again.init("w", np.zeros(2), merge="weighted")
        again.init("w", np.zeros(2), merge="mean")


def test_another_merge_is_refused_as_another_shape_is() -> None:
    def program(kv: kvd.KVStore) -> Any:
        if kv.rank == 0:
            kv.init("w", np.zeros(2), merge="mean")
            text = "key 'w' is merged by 'mean', and this init wants 'sum'"
            with pytest.raises(MergeMismatch, match=text):
                kv.init("w", np.zeros(2))
            with pytest.raises(kvd.KeyExists):
                kv.init("w", np.zeros(2), merge="mean")
        else:
            with pytest.raises(MergeMismatch, match="is merged by 'mean', and this init wants 'weighted'") as caught:
                kv.init("w", np.zeros(2), merge="weighted")
            assert caught.value.key == "w"
            kv.init("w", np.zeros(2), merge="mean")
        if kv.rank == 0:
            kv.init(7, np.zeros(2), merge="sum")
        kv.barrier()
        if kv.rank == 1:
            with pytest.raises(MergeMismatch, match=r"^key 7 is"):
                kv.init(7, np.zeros(2), merge="mean")
        return kv.pushpull("w", np.full(2, kv.rank + 1.0)).tolist()

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program) == [[1.5, 1.5]] * 2


def run_alone(kind: str, program: Callable[[kvd.KVStore], Any]) -> Any:
    if not kind.startswith("dist"):
        with kvd.create(kind) as kv:
            return program(kv)
    with LocalCluster(1, 1) as cluster:
        return cluster.run(program, kind)[0]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_no_key_can_have_is_refused_and_makes_no_key(kind: str) -> None:
    def program(kv: kvd.KVStore) -> None:
        for merge in ("avg", "", 3, ["mean"], b"mean"):
            with pytest.raises(
                kvd.NotAllowed, match="key 'w': merge is one of 'sum', 'mean', 'weighted', or None, not"
            ):
                kv.init("w", np.zeros(2), merge=merge)  # type: ignore[arg-type]
        with pytest.raises(kvd.NotAllowed, match="a list of keys needs as many merges in a list: 2"):
            kv.init(["w", "v"], [np.zeros(2)] * 2, merge=["mean"])
        with pytest.raises(kvd.NotAllowed, match="key 'n' is int32: a weighted merge takes float keys only") as caught:
            kv.init(["w", "n"], [np.zeros(2), np.zeros(2, np.int32)], merge="weighted")
        assert caught.value.key == "n"
        for name in ("w", "v", "n"):
            with pytest.raises(kvd.KeyNotFound):
                kv.pull(name)

    run_alone(kind, program)


@pytest.mark.parametrize("kind", ["local", "device", "dist_async"])
def test_with_one_worker_every_merge_gives_its_value(kind: str) -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init(MERGES, [np.zeros(2)] * 3, merge=MERGES)
        kv.init("n", np.zeros(2, np.int32), merge="mean")
        with pytest.raises(MergeMismatch):
            kv.init("mean", np.zeros(2), merge="sum")
        kv.set_optimizer(SGD(1.0))
        for _ in range(2):
            kv.push(MERGES, [np.full(2, 3.0)] * 3, samples=4)
            kv.push("n", np.full(2, 5, np.int32))
        kv.flush()
        assert [value.tolist() for value in kv.pull(MERGES)] == [[-6.0, -6.0]] * 3
        assert kv.pull("n").tolist() == [5, 5]
        kv.init("other", np.zeros(1, np.int32))
        with pytest.raises(kvd.NotAllowed, match="with a merge of its own, such as merge='sum'"):
            kv.push("other", np.ones(1, np.int32)).wait()

    run_alone(kind, program)


def test_a_coroutine_takes_it_too() -> None:
    async def main() -> Any:
        async with await kvd.aio.create("local") as kv:
            await kv.init("w", np.zeros(2), merge="mean")
            with pytest.raises(MergeMismatch):
                await kv.init_async("w", np.zeros(2), merge="sum")

    asyncio.run(main())


# ── what outlives the process that made the key ──


def test_a_snapshot_keeps_the_merge_of_each_key(tmp_path: Path) -> None:
    def first(kv: kvd.KVStore) -> None:
        kv.init(MERGES, [np.zeros(SHAPE)] * 3, merge=MERGES)
        kv.init("plain", np.zeros(2))
        kv.set_optimizer(SGD(RATE, momentum=MOMENTUM))
        train(kv, range(2))
        kv.snapshot(tmp_path / "taken")

    def second(kv: kvd.KVStore) -> Any:
        kv.restore(tmp_path / "taken")
        with pytest.raises(MergeMismatch, match="'mean' is merged by 'mean', and this init wants 'sum'"):
            kv.init("mean", np.zeros(SHAPE), merge="sum")
        kv.init(MERGES, [np.zeros(SHAPE)] * 3, merge=MERGES)
        weights = train(kv, range(2, STEPS))
        plain = kv.pushpull("plain", np.ones(2))
        return weights, plain.tolist()

    with LocalCluster(2, 2) as cluster:
        cluster.run(first)
    with LocalCluster(2, 1, merge="mean") as cluster:
        for weights, plain in cluster.run(second):
            for name, weight in zip(MERGES, weights, strict=True):
                np.testing.assert_allclose(weight, trained(name), rtol=1e-12)
            assert plain == pytest.approx([-RATE] * 2)  # as this cluster merges
    with kvd.create("local") as kv:
        kv.restore(tmp_path / "taken")
        with pytest.raises(MergeMismatch):
            kv.init("weighted", np.zeros(SHAPE))
        kv.snapshot(tmp_path / "again")
    with kvd.create("local") as kv:
        kv.restore(tmp_path / "again")
        with pytest.raises(MergeMismatch):
            kv.init("weighted", np.zeros(SHAPE))
        kv.init("weighted", np.zeros(SHAPE), merge="weighted")


TRAINS = """
import sys
from pathlib import Path
import numpy as np
import kvd
from kvd.testing.cluster import wait_until
from tests.client.test_merge_per_key import MERGES, MOMENTUM, RATE, SHAPE, STEPS, train
with kvd.create("dist_sync") as kv:
    kv.init(MERGES, [np.zeros(SHAPE)] * 3, merge=MERGES)
    kv.set_optimizer(kvd.optimizer.SGD(RATE, momentum=MOMENTUM))
    train(kv, range(2))
    print("half", flush=True)
    wait_until(Path(sys.argv[1]).exists, "the other half")
    np.save(sys.argv[2], np.stack(train(kv, range(2, STEPS))))
"""


@pytest.mark.soak  # the same in virtual time is tests/scenarios/merge_per_key.txt
def test_the_server_that_takes_over_knows_it(tmp_path: Path) -> None:
    with LocalCluster(2, 2, processes=True, replicas=2, server_timeout_s=2.0, slice_bytes=4 << 10) as cluster:
        files = [tmp_path / f"{rank}.npy" for rank in range(2)]
        go = tmp_path / "go"
        workers = [cluster.script(TRAINS, rank, str(go), str(files[rank]), preferred_rank=rank) for rank in range(2)]
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == b"half\n"
            cluster.kill_server(0)
            go.touch()
            for worker in workers:
                worker.communicate(timeout=60)
            assert [worker.returncode for worker in workers] == [0, 0]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for file in files:
            for name, weight in zip(MERGES, np.load(file), strict=True):
                np.testing.assert_allclose(weight, trained(name), rtol=1e-12)
