"""A restore reads one batch while the one before is on its way, and begins when all of the snapshot is checked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.optimizer_state_file import OptimizerStateFile
from kvd.client.cluster import restoring, snapshots
from kvd.errors import SnapshotError
from kvd.optimizer import SGD
from kvd.snapshots.part_memory import PartMemory
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.series import SnapshotSeries
from kvd.testing.cluster import LocalCluster
from tests.client.harness import ones

SMALL_PART = 64 << 10


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and batches of 64 KiB."""
    monkeypatch.setattr(snapshots, "SnapshotSeries", lambda: SnapshotSeries(SMALL_PART))
    monkeypatch.setattr(restoring, "PART_BYTES", SMALL_PART)


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_last_part_changes_nothing(tmp_path: Path) -> None:
    """No key, no optimizer: the job can begin with anything."""
    names = [f"key {number}" for number in range(6)]
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        kv.init(names, [np.full(SMALL_PART // 4, number, np.float32) for number in range(6)])
        kv.set_optimizer(SGD(0.1, momentum=0.9))
        kv.snapshot(tmp_path / "taken")
    parts = sorted((tmp_path / "taken").glob("part-*"))
    assert len(parts) == 6
    with parts[-1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        with pytest.raises(SnapshotError, match="its checksum is another one") as caught:
            kv.restore(tmp_path / "taken")
        assert caught.value.path == str(parts[-1])
        with cluster.observer() as observer:
            assert observer.keys() == []
        kv.init("key 0", ones())
        assert kv.pushpull("key 0", ones()).tolist() == [1] * 4  # the sum: no optimizer is there


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shared_memory", ["off", "auto"])
def test_values_and_states_of_several_batches_come_back(tmp_path: Path, shared_memory: str) -> None:
    """Over TCP, too."""
    sizes = {"large": SMALL_PART, "small": 5, "middle": SMALL_PART // 8, "last": 3}

    def states_of(kv: kvd.KVStore, name: str) -> dict[str, Any]:
        kv.save_optimizer_states(tmp_path / name)
        file = OptimizerStateFile.read(tmp_path / name)
        return {key: {slot: array.tobytes() for slot, array in slots.items()} for key, slots in file.arrays.items()}

    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        kv.set_optimizer(SGD(0.1, momentum=0.9))
        kv.init(list(sizes), [np.arange(size, dtype=np.float32) for size in sizes.values()])
        for key in ("large", "last"):
            kv.push(key, np.arange(sizes[key], dtype=np.float32))
        kv.snapshot(tmp_path / "taken")
        values, states = [value.tobytes() for value in kv.pull(list(sizes))], states_of(kv, "before")
    assert len(list((tmp_path / "taken").glob("part-*"))) > 8
    with LocalCluster(1, 2, shared_memory=shared_memory) as cluster:
        kv = cluster.store()
        kv.restore(tmp_path / "taken")
        assert [value.tobytes() for value in kv.pull(list(sizes))] == values
        assert states_of(kv, "after") == states


@pytest.mark.usefixtures("small_parts")
def test_what_is_damaged_between_the_check_and_its_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        kv.init(["a", "b"], [ones(SMALL_PART // 4)] * 2)
        kv.snapshot(tmp_path / "taken")
    last = max((tmp_path / "taken").glob("part-*"))
    verify = StoredSnapshot.verify

    def and_damage(snapshot: StoredSnapshot) -> None:
        verify(snapshot)
        last.write_bytes(last.read_bytes()[:-1] + b"\1")

    monkeypatch.setattr(StoredSnapshot, "verify", and_damage)
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        with pytest.raises(SnapshotError, match="its checksum is another one"):
            kv.restore(tmp_path / "taken")


@pytest.mark.usefixtures("small_parts")
def test_the_memory_does_not_grow_with_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is on its way, and one is read: few parts have memory at a time. What is given back is not in use."""
    names = [f"key {number}" for number in range(24)]
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        kv.init(names, [np.full(SMALL_PART // 4, number, np.float32) for number in range(24)])
        kv.snapshot(tmp_path / "taken")
    lent: dict[int, Any] = {}
    most = []
    take, give_back = PartMemory.take, PartMemory.give_back

    def taken(memory: PartMemory, part: int, nbytes: int) -> Any:
        lent[part] = take(memory, part, nbytes)
        most.append(len(lent))
        return lent[part]

    def given_back(memory: PartMemory, parts: Iterable[int]) -> None:
        for part in parts:
            lent[part].base[:] = 0xFF
            del lent[part]
        give_back(memory, parts)

    monkeypatch.setattr(PartMemory, "take", taken)
    monkeypatch.setattr(PartMemory, "give_back", given_back)
    with LocalCluster(1, 2) as cluster:
        kv = cluster.store()
        kv.restore(tmp_path / "taken")
        for number, value in enumerate(kv.pull(names)):
            assert value.tolist() == [number] * (SMALL_PART // 4)
    assert len(most) == 24
    assert max(most) <= 2
    assert not lent
