"""kv.snapshot and kv.restore: a training goes on in a new job with the bits of one that was never disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
from kvd.client.calls.optimizer_state_file import OptimizerStateFile
from kvd.client.calls.snapshot_outcome import Outcome
from kvd.errors import NotAllowed, SnapshotError
from kvd.optimizer import SGD, Adam
from kvd.optimizer.schedule import Cosine
from kvd.protocol.messages import MAX_TEXT_CHARS
from kvd.testing.cluster import LocalCluster
from tests.client.harness import ones

KEYS: list[str | int] = ["a", "b|c", 7]
SHAPES: list[tuple[int, ...]] = [(300, 70), (5,), ()]
SLICE_BYTES = 16 << 10
OPTIMIZERS = [SGD(Cosine(0.1, steps=20), momentum=0.9), Adam(0.01), SGD(0.1)]


def begin(kv: kvd.KVStore, optimizer: Any, dtype: Any) -> None:
    kv.init(KEYS, [np.full(shape, 0.5, dtype) for shape in SHAPES])
    kv.set_optimizer(optimizer)


def push(kv: kvd.KVStore, step: int, dtype: Any) -> None:
    rng = np.random.default_rng([step, kv.rank])
    kv.push(KEYS, [rng.standard_normal(shape).astype(dtype) for shape in SHAPES])


def train(kv: kvd.KVStore, total: int, dtype: Any, stop: int = -1, path: Path | None = None) -> tuple[list[int], Any]:
    """The steps that were made, and the values. The training is left after the step `stop`, with a snapshot."""
    made = []
    for step in kv.steps(total):
        made.append(step)
        push(kv, step, dtype)
        if step == stop:
            kv.snapshot(path)
            break
    return made, [value.tobytes() for value in kv.pull(KEYS)]


def undisturbed(cluster: LocalCluster, optimizer: Any, dtype: Any) -> Any:
    def program(kv: kvd.KVStore) -> Any:
        begin(kv, optimizer, dtype)
        return train(kv, 10, dtype)[1]

    return cluster.run(program)[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["momentum", "Adam", "plain"])
def test_a_training_goes_on_with_the_same_bits(tmp_path: Path, optimizer: Any, dtype: Any) -> None:
    path = tmp_path / "taken"

    def before(kv: kvd.KVStore) -> Any:
        begin(kv, optimizer, dtype)
        return train(kv, 10, dtype, 4, path)

    def after(kv: kvd.KVStore) -> Any:
        assert kv.restore(path) == 5
        return train(kv, 10, dtype)

    with LocalCluster(2, 2, slice_bytes=SLICE_BYTES) as cluster:
        expected = undisturbed(cluster, optimizer, dtype)
    with LocalCluster(2, 3, slice_bytes=SLICE_BYTES) as cluster:
        assert [steps for steps, _ in cluster.run(before)] == [[0, 1, 2, 3, 4]] * 2
    with LocalCluster(2, 1, slice_bytes=SLICE_BYTES // 2) as cluster:
        assert cluster.run(after) == [([5, 6, 7, 8, 9], expected)] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


# ── types, sizes, façades ──


def test_asynchronous_workers_lose_and_double_nothing(tmp_path: Path) -> None:
    """Sums of powers of ten do not depend on the order."""
    path = tmp_path / "taken"

    def before(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(4, np.float64))
        kv.set_optimizer(SGD(1.0))
        for step in kv.steps(4):
            kv.push("w", np.full(4, -(1.0 + kv.rank) * 10**step))
            if step == 1:
                kv.snapshot(path)
        kv.flush()
        kv.barrier()
        return kv.pull("w").tolist()

    def after(kv: kvd.KVStore) -> Any:
        kv.restore(path)
        restored = kv.pull("w").tolist()
        kv.barrier()
        for step in kv.steps(4):
            kv.push("w", np.full(4, -(10.0**step)))
        kv.flush()
        kv.barrier()
        return restored, kv.pull("w").tolist()

    with LocalCluster(3, 2) as cluster:
        assert cluster.run(before, "dist_async") == [[6666.0] * 4] * 3
    with LocalCluster(2, 3) as cluster:
        assert cluster.run(after, "dist_async") == [([66.0] * 4, [2266.0] * 4)] * 2


def test_another_number_of_workers_and_a_store_without_a_cluster(tmp_path: Path) -> None:
    def before(kv: kvd.KVStore) -> Any:
        begin(kv, Adam(0.01), np.float16)
        return train(kv, 10, np.float16, 4, tmp_path / "taken")[1]

    def after(kv: kvd.KVStore) -> Any:
        kv.restore(tmp_path / "taken")
        kv.save_optimizer_states(tmp_path / f"states-{kv.num_workers}-{kv.rank}", dump_optimizer=True)
        kv.snapshot(tmp_path / f"again-{kv.num_workers}")
        return [value.tobytes() for value in kv.pull(KEYS)]

    with LocalCluster(2, 2, slice_bytes=SLICE_BYTES) as cluster:
        expected = cluster.run(before)[0]
    with LocalCluster(3, 1) as cluster:
        assert cluster.run(after) == [expected] * 3
    with kvd.create("local") as kv:
        assert after(kv) == expected
        kv.save_optimizer_states(tmp_path / "states-1-0", dump_optimizer=True)
    states = {OptimizerStateFile.read(path).optimizer for path in tmp_path.glob("states-*")}
    assert states == {Adam(0.01)}
    files = [OptimizerStateFile.read(path) for path in sorted(tmp_path.glob("states-*"))]
    assert all(file.steps == {"a": 5, "b|c": 5, "7": 5} for file in files)
    for file in files[1:]:
        for key, slots in files[0].arrays.items():
            assert {slot: array.tobytes() for slot, array in file.arrays[key].items()} == {
                slot: array.tobytes() for slot, array in slots.items()
            }
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        assert kv.restore(tmp_path / "again-1") == 5  # from the store without a cluster, and that from the cluster
        assert [value.tobytes() for value in kv.pull(KEYS)] == expected


def test_many_keys_and_those_without_state(tmp_path: Path) -> None:
    keys = [f"key {number}" for number in range(70)]
    numbers, empty = np.arange(7, dtype=np.int64), np.empty((0, 3), np.float32)
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        kv.init([*keys, "numbers", "empty"], [*(ones(size) for size in range(1, 71)), numbers, empty])
        kv.set_optimizer(Adam(0.1))
        kv.push([*keys[1:], "empty"], [*(ones(size) for size in range(2, 71)), empty])
        kv.snapshot(tmp_path / "taken")
        values = kv.pull(keys)
    with LocalCluster(1, 3) as cluster:
        kv = cluster.store()
        kv.restore(tmp_path / "taken")
        restored = kv.pull([*keys, "numbers", "empty"])
        assert [value.tobytes() for value in restored[:70]] == [value.tobytes() for value in values]
        assert restored[70].tolist() == list(range(7))
        assert restored[71].shape == (0, 3)
        kv.save_optimizer_states(tmp_path / "states")
    steps = OptimizerStateFile.read(tmp_path / "states").steps
    assert steps == {**dict.fromkeys(keys[1:], 1), keys[0]: 0, "numbers": 0, "empty": 1}


def test_the_optimizer_comes_as_it_was(tmp_path: Path) -> None:
    """With a changed learning rate, and None if there was none."""

    def before(kv: kvd.KVStore) -> None:
        kv.init("w", ones())
        kv.snapshot(tmp_path / "without")
        kv.set_optimizer(SGD(1.0))
        kv.push("w", ones())
        kv.update_optimizer(learning_rate=0.25)
        kv.snapshot(tmp_path / "changed")

    def after(kv: kvd.KVStore) -> Any:
        kv.restore(tmp_path / "changed")
        kv.set_optimizer(SGD(0.25))  # the one that is in use: nothing changes
        return kv.pushpull("w", ones()).tolist()

    def without(kv: kvd.KVStore) -> Any:
        kv.restore(tmp_path / "without")
        return kv.pushpull("w", ones() * 5).tolist()

    with LocalCluster(2, 2) as cluster:
        cluster.run(before)
    with LocalCluster(2, 1) as cluster:
        assert cluster.run(after) == [[-1.5] * 4] * 2
    with LocalCluster(2, 1) as cluster:
        assert cluster.run(without) == [[10.0] * 4] * 2


def test_the_manifest_says_what_was_saved(tmp_path: Path) -> None:
    def program(kv: kvd.KVStore) -> None:
        begin(kv, SGD(0.1, momentum=0.9), np.float16)
        train(kv, 3, np.float16)
        kv.snapshot(tmp_path / "taken")

    with LocalCluster(2, 2, job="mnist") as cluster:
        cluster.run(program)
    plain = json.loads((tmp_path / "taken" / "manifest.json").read_text())
    assert (plain["job"], plain["type"], plain["steps"], plain["num_workers"]) == ("mnist", "dist_sync", 3, 2)
    assert plain["optimizer"][0] == "SGD"
    keys = {key["key"]: (key["shape"], key["clock"], key["updates"], sorted(key["state"])) for key in plain["keys"]}
    assert keys["a"] == ([300, 70], 3, 3, ["master", "slot/momentum"])
    assert plain["num_keys"] == 3


@pytest.mark.asyncio
async def test_awaited_in_an_event_loop(tmp_path: Path) -> None:
    with LocalCluster(1, 2) as cluster:
        given = {**cluster.settings, "scheduler": cluster.address}
        async with await kvd.aio.create("dist_sync", **given) as kv:
            await kv.init("w", ones())
            async for step in kv.steps(3):
                await kv.push("w", ones() * step)
                if step == 1:
                    await kv.snapshot(tmp_path / "taken")
                    break
    async with await kvd.aio.create("local") as kv:
        assert await kv.restore(tmp_path / "taken") == 2
        assert [step async for step in kv.steps(2)] == []
        assert (await kv.pull("w")).tolist() == [1] * 4


# ── what is refused ──


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_what_cannot_be_taken_or_restored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "taken"

    def program(kv: kvd.KVStore) -> None:
        with pytest.raises(SnapshotError, match="is not there"):
            kv.restore(path)
        kv.barrier("looked")
        kv.init(["a", "b"], [ones(), ones()])
        with pytest.raises(SnapshotError, match="No such file or directory: the snapshot cannot be written"):
            kv.snapshot(tmp_path / "no" / "taken")
        for step in kv.steps(2):
            kv.push("a", ones())
            if step == 1:
                with pytest.raises(NotAllowed, match="has yet to push 'b'"):
                    kv.snapshot(path)
            kv.push("b", ones())
        with pytest.raises(NotAllowed, match="before the first loop"):
            kv.restore(path)
        kv.snapshot(path)
        kv.snapshot(path)  # the same one
        kv.push("a", ones())
        with pytest.raises(SnapshotError, match=r"is there already: a snapshot of job .* after 2 steps"):
            kv.snapshot(path)
        kv.barrier("refused")
        assert kv.pushpull("b", ones()).tolist() == [kv.num_workers if kind == "dist_sync" else 1] * 4

    def late(kv: kvd.KVStore) -> None:
        kv.init("mine", ones())
        with pytest.raises(NotAllowed if kv.rank == 0 else SnapshotError, match="has keys already, such as 'mine'"):
            kv.restore(path)
        for wrong in ("", None, 5, "a\0b"):
            for call in (kv.snapshot, kv.restore):
                with pytest.raises(NotAllowed, match="the path of a file is"):
                    call(wrong)

    if kind == "local":
        for each in (program, late):
            with kvd.create("local") as kv:
                each(kv)
    else:
        for each in (program, late):
            with LocalCluster(2, 2) as cluster:
                cluster.run(each, kind)


def test_a_damaged_snapshot_makes_nothing_and_an_earlier_one_can_be_taken(tmp_path: Path) -> None:
    def before(kv: kvd.KVStore) -> None:
        begin(kv, SGD(0.1, momentum=0.9), np.float32)
        for step in kv.steps(2):
            push(kv, step, np.float32)
            kv.snapshot(tmp_path / f"step-{step}")

    def after(kv: kvd.KVStore) -> Any:
        with pytest.raises(SnapshotError, match=r"is damaged: its checksum .* take an earlier snapshot") as caught:
            kv.restore(tmp_path / "step-1")
        assert caught.value.path == str(part)
        return kv.restore(tmp_path / "step-0")

    with LocalCluster(2, 2) as cluster:
        cluster.run(before)
    (part,) = (tmp_path / "step-1").glob("part-*")
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    with LocalCluster(2, 2) as cluster:
        assert cluster.run(after) == [1, 1]


def test_a_name_that_utf_8_cannot_write_and_a_long_one_reach_the_others() -> None:
    for path in ("\udce4" * 400, "x" * 5000, '"\\\n' * 900):
        note = Outcome.of_error(SnapshotError(f"{path} is not there", path=path)).to_note()
        assert len(note) <= MAX_TEXT_CHARS
        outcome = Outcome.from_note(note)
        assert outcome is not None
        with pytest.raises(SnapshotError, match="the restore failed in worker 0, and so in all: "):
            outcome.check("the restore")
    for fields in (
        '["1", "", "", "", false, "", false]',
        '[-1, "", "", "", false, "", false]',
        '[1, "", "", null, true, "", false]',
        '[1, "", "", "", 0, "", false]',
        '[1, "", "", "", false, 5, false]',
        '[1, "", "", "", false, ""]',
    ):
        assert Outcome.from_note(fields) is None
    for note in ("", "[", "[1]", "5"):
        assert Outcome.from_note(note) is None


def test_a_shared_step_is_made_by_one_worker(tmp_path: Path) -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init("w", ones())
        for step in kv.steps(4, shared=True):
            with pytest.raises(NotAllowed, match="takes all workers"):
                kv.snapshot(tmp_path / "taken")
            kv.push("w", ones() * step)
        kv.snapshot(tmp_path / "taken")

    def after(kv: kvd.KVStore) -> None:
        assert kv.restore(tmp_path / "taken") == 4
        assert list(kv.steps(4, shared=True)) == []

    with LocalCluster(2, 1) as cluster:
        cluster.run(program, "dist_async")
    with LocalCluster(2, 1) as cluster:
        cluster.run(after, "dist_async")
