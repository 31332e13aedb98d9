"""A snapshot is restored before the workers come: the next program of the job finds its keys, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.cluster.joining import Arrival
from kvd.client.cluster.preparing import Preparation, Prepared
from kvd.config import load
from kvd.errors import JobBusy, NotAllowed, SnapshotError
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

STEPS, TAKEN_AFTER = 10, 5
OPTIMIZER = SGD(0.1, momentum=0.9)


def train(kv: kvd.KVStore, path: Path | None = None) -> Any:
    """The steps that were made, and the values."""
    made = []
    for step in kv.steps(STEPS):
        kv.push(["w", "v"], [np.full(5000, step + kv.rank, np.float32), np.full(3, step, np.float32)])
        made.append(step)
        if path is not None and step + 1 == TAKEN_AFTER:
            kv.snapshot(path)
    return made, [value.tobytes() for value in kv.pull(["w", "v"])]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A snapshot, and the values at the end of its training."""
    path = tmp_path_factory.mktemp("preparing") / "taken"

    def program(kv: kvd.KVStore) -> Any:
        kv.init(["w", "v"], [np.zeros(5000, np.float32), np.ones(3, np.float32)])
        kv.set_optimizer(OPTIMIZER)
        return train(kv, path)[1]

    with LocalCluster(2, 2, slice_bytes=8192) as cluster:
        return path, cluster.run(program)[0]


def prepare(cluster: LocalCluster, path: Path, **changes: Any) -> Prepared:
    preparation = Preparation(path)
    settings = {**cluster.settings, "scheduler": cluster.address, **changes}
    return preparation.make(
        load(settings, environ={}), preparation.type_name, Arrival(wait_for_workers=False, tell=print)
    )


def goes_on(kv: kvd.KVStore) -> Any:
    assert kv.restore("a folder that is not here", missing_ok=True) == TAKEN_AFTER
    return train(kv)


@pytest.mark.parametrize("servers", [1, 3])
def test_the_next_program_goes_on_with_the_same_bits(taken: tuple[Path, Any], servers: int) -> None:
    path, expected = taken
    with LocalCluster(2, servers, slice_bytes=4096, replicas=min(servers, 2)) as cluster:
        prepared = prepare(cluster, path)
        assert (prepared.keys, prepared.steps, prepared.num_workers) == (2, TAKEN_AFTER, 2)
        with cluster.observer() as observer:
            assert [(job["phase"], job["workers"]) for job in observer.jobs()] == [("prepared", 0)]
            listed = observer.keys()
            assert [row["key"] for row in listed] == ["v", "w"]
        with pytest.raises(NotAllowed, match="this job has keys already"):
            prepare(cluster, path)
        assert cluster.run(goes_on) == [([5, 6, 7, 8, 9], expected)] * 2
        with cluster.observer() as observer:
            assert [job["phase"] for job in observer.jobs()] == ["ended"]


def test_a_program_that_restores_by_itself_goes_on_there(taken: tuple[Path, Any], tmp_path: Path) -> None:
    """It has no snapshot of its own yet, and is written as if it began anew."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init(["w", "v"], [np.zeros(5000, np.float32), np.ones(3, np.float32)])
        kv.set_optimizer(OPTIMIZER)
        return train(kv)

    with LocalCluster(2, 1) as cluster:
        prepare(cluster, taken[0])
        results = cluster.run(program, restore="auto", snapshot_dir=str(tmp_path))
    assert results == [([5, 6, 7, 8, 9], taken[1])] * 2


def test_a_program_without_restore_takes_the_values_only(taken: tuple[Path, Any]) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("v", np.ones(3, np.float32))
        value = kv.pull("v").tolist()
        return value, [kv.push("v", np.zeros(3, np.float32)) and step for step in kv.steps(2)]

    with LocalCluster(1, 1) as cluster:
        prepare(cluster, taken[0])
        ((value, steps),) = cluster.run(program)
    assert value != [1.0] * 3
    assert steps == [0, 1]


def test_a_job_that_runs_and_a_snapshot_that_is_damaged(taken: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    for file in taken[0].iterdir():
        content = file.read_bytes()
        broken = content[:-1] + b"?" if file.suffix == ".safetensors" else content
        (tmp_path / "damaged" / file.name).write_bytes(broken)

    def program(kv: kvd.KVStore) -> None:
        with pytest.raises(JobBusy):
            prepare(cluster, taken[0])

    with LocalCluster(1, 1) as cluster:
        for name, text in (("damaged", "is damaged"), ("missing", "is not there")):
            with pytest.raises(SnapshotError, match=text):
                prepare(cluster, tmp_path / name)
        with cluster.observer() as observer:
            assert observer.jobs() == []  # nothing was begun
        cluster.run(program)


def test_a_restore_that_fails_prepares_nothing(taken: tuple[Path, Any]) -> None:
    def program(kv: kvd.KVStore) -> Any:
        assert kv.restore("a folder that is not here", missing_ok=True) is None
        kv.init("v", np.ones(3, np.float32))
        return kv.pull("v").tolist()

    with LocalCluster(1, 1, memory_limit_bytes=50_000, credit_bytes=20_000, slice_bytes=4096) as cluster:
        with pytest.raises(NotAllowed, match="its limit is"):
            prepare(cluster, taken[0])
        assert cluster.run(program) == [[1.0] * 3]
