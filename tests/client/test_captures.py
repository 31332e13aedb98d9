"""Snapshots that an operator takes while the workers train: they are of one step, and go on with the same bits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.cluster.saving import Saved
from kvd.errors import NotAllowed, SnapshotError
from kvd.optimizer import SGD, Adam
from kvd.snapshots.reader import StoredSnapshot
from kvd.testing.cluster import LocalCluster, wait_until

KEYS: list[str | int] = ["a", "b|c", 7]
SHAPES: list[tuple[int, ...]] = [(300, 70), (5,), ()]
SLICE_BYTES = 16 << 10
TOTAL = 1_000_000  # steps: more than are made before the snapshot is there
AFTER = 5  # steps that are made after it


@contextmanager
def working(cluster: LocalCluster, program: Callable[[kvd.KVStore], Any], type: str = "dist_sync") -> Iterator[None]:  # noqa: A002
    """The workers run this program meanwhile."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            cluster.run(program, type)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failed


def row_ids(rank: int, step: int) -> Any:
    """The rows of the table that a worker names in a step."""
    return np.random.default_rng([step, rank, 1]).choice(50, 10, replace=False)


def rows_of(rank: int, step: int) -> kvd.RowSparseArray:
    rng = np.random.default_rng([step, rank, 2])
    return kvd.RowSparseArray(row_ids(rank, step), rng.standard_normal((10, 3)).astype(np.float32))


def table() -> kvd.RowSparse:
    return kvd.RowSparse((50, 3), initializer=kvd.initializer.Constant(0.5))


def gradients(rank: int, step: int) -> list[Any]:
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


class Training:
    """A program that trains until it is told to stop, and says how far it is."""

    def __init__(self, optimizer: Any, *, changes_rate: bool = False) -> None:
        self.optimizer = optimizer
        self.changes_rate = changes_rate
        self.step = -1
        self.is_over = threading.Event()

    def __call__(self, kv: kvd.KVStore) -> None:
        kv.init([*KEYS, "table"], [*[np.full(shape, 0.5, np.float32) for shape in SHAPES], table()])
        kv.set_optimizer(self.optimizer)
        self.make(kv, TOTAL)

    def make(self, kv: kvd.KVStore, total: int) -> list[bytes]:
        """Makes steps, and returns the values."""
        stops = np.zeros(1, np.float32)
        for step in kv.steps(total):
            kv.push([*KEYS, "table"], [*gradients(kv.rank, step), rows_of(kv.rank, step)])
            if kv.rank == 0:
                self.step = step
            if self.changes_rate:
                self._change_rate(kv, step)
            if total == TOTAL:  # all stop after the same step
                stops[0] = self.is_over.is_set()
                kv.broadcast("stops", stops, out=stops)
                if stops[0]:
                    break
        return [value.tobytes() for value in [*kv.pull(KEYS), kv.row_sparse_pull("table", np.arange(50))]]

    def _change_rate(self, kv: kvd.KVStore, step: int) -> None:
        """After the pushes of the step, and not made again by who goes on after it."""
        if kv.rank == 0:
            kv.update_optimizer(learning_rate=0.1 / (step + 2))


def save(cluster: LocalCluster, path: Path) -> Saved:
    with cluster.observer() as observer:
        return observer.save(path)


def begun(training: Training, steps: int = 3) -> None:
    wait_until(lambda: training.step >= steps, "some steps are made")


def test_a_snapshot_of_a_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    optimizer = SGD(0.1, momentum=0.9)
    training = Training(optimizer)
    with LocalCluster(2, 3, slice_bytes=SLICE_BYTES) as cluster, working(cluster, training):
        begun(training)
        saved = save(cluster, path)
        training.is_over.set()
    assert saved.steps > 3
    assert saved.is_one_step
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    origin = StoredSnapshot.open(path).manifest.origin
    assert (origin.type, origin.num_workers, origin.optimizer, origin.steps) == ("dist_sync", 2, optimizer, saved.steps)

    def undisturbed(kv: kvd.KVStore) -> list[bytes]:
        kv.init([*KEYS, "table"], [*[np.full(shape, 0.5, np.float32) for shape in SHAPES], table()])
        kv.set_optimizer(optimizer)
        return Training(optimizer).make(kv, saved.steps + AFTER)

    def after(kv: kvd.KVStore) -> list[bytes]:
        assert kv.restore(path) == saved.steps
        return Training(optimizer).make(kv, saved.steps + AFTER)

    with LocalCluster(2, 1) as cluster:
        expected = cluster.run(undisturbed)
    for servers in (1, 3):
        with LocalCluster(2, servers, slice_bytes=SLICE_BYTES // 2) as cluster:
            assert cluster.run(after) == expected


def test_what_the_program_did_after_its_pushes_is_in_the_snapshot(tmp_path: Path) -> None:
    """The learning rate changes between the pushes of two steps; the values decide which rate belongs to a step."""
    path = tmp_path / "taken"
    training = Training(Adam(0.1), changes_rate=True)
    with LocalCluster(2, 2, slice_bytes=SLICE_BYTES) as cluster, working(cluster, training):
        begun(training)
        saved = save(cluster, path)
        training.is_over.set()
    assert StoredSnapshot.open(path).manifest.origin.optimizer == Adam(0.1 / (saved.steps + 1))


def test_keys_that_are_not_pushed_any_more(tmp_path: Path) -> None:
    path, training = tmp_path / "taken", Training(SGD(0.1))

    def program(kv: kvd.KVStore) -> None:
        kv.init([f"frozen {number}" for number in range(5)], [np.ones(3, np.float32)] * 5)
        kv.init("once", np.zeros(3, np.float32))
        kv.pushpull("once", np.ones(3, np.float32))
        training(kv)

    with LocalCluster(2, 3) as cluster, working(cluster, program):
        begun(training)
        saved = save(cluster, path)
        training.is_over.set()
    assert saved.is_one_step
    found = StoredSnapshot.open(path)
    clocks = {key.key: key.clock for key in found.manifest.keys}
    assert (clocks["once"], clocks["frozen 3"]) == (1, 0)
    assert clocks["a"] == clocks["7"] == saved.newest - (saved.newest > clocks["a"])


def test_a_job_that_stands_still_and_one_that_has_ended(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def program(kv: kvd.KVStore) -> None:
        kv.init([*KEYS, "table"], [*[np.full(shape, 0.5, np.float32) for shape in SHAPES], table()])
        kv.set_optimizer(Adam(0.01))
        for step in kv.steps(3):
            kv.push([*KEYS, "table"], [*gradients(kv.rank, step), rows_of(kv.rank, step)])
        kv.flush()
        if kv.rank == 0:
            stands.set()
        goes_on.wait(60)

    stands = threading.Event()
    with LocalCluster(2, 2, slice_bytes=SLICE_BYTES) as cluster:
        with working(cluster, program):
            stands.wait(60)
            standing = save(cluster, tmp_path / "standing")
            goes_on.set()
        ended = save(cluster, tmp_path / "ended")
    assert standing == ended
    assert (ended.steps, ended.is_one_step, ended.oldest, ended.newest) == (3, True, 3, 3)
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("standing", "ended")]
    assert manifests[0] == manifests[1]


def test_asynchronous_keys_have_one_version_each(tmp_path: Path) -> None:
    """The number of updates and the momentum tell which pushes are in a slice, for all have the same gradient."""
    path, is_over, made = tmp_path / "taken", threading.Event(), [0, 0]

    def program(kv: kvd.KVStore) -> None:
        kv.init(["w", "v"], [np.zeros(20_000, np.float64), np.zeros(3, np.float64)])
        kv.set_optimizer(SGD(1.0, momentum=0.5))
        for step in kv.steps(TOTAL):
            kv.pushpull(["w", "v"], [np.ones(20_000, np.float64), np.ones(3, np.float64)])
            made[kv.rank] = step
            if is_over.is_set():
                break

    with LocalCluster(2, 3, slice_bytes=SLICE_BYTES) as cluster, working(cluster, program, "dist_async"):
        wait_until(lambda: min(made) > 3, "some steps are made")
        saved = save(cluster, path)
        is_over.set()
    assert saved.newest > 4
    assert 0 < saved.steps <= saved.newest
    found = StoredSnapshot.open(path)
    assert found.manifest.origin.type == "dist_async"
    for key in found.manifest.keys:
        value, speed = 0.0, 0.0
        for _ in range(key.updates):
            speed = 0.5 * speed + 1.0
            value -= speed
        assert key.clock == key.updates
        assert set(found.value(key).tolist()) == {value}
        assert [set(array.tolist()) for array in found.state(key).values()] == [{speed}]


@pytest.mark.soak
def test_a_server_dies_and_the_snapshot_is_of_its_backup(tmp_path: Path) -> None:
    path, training = tmp_path / "taken", Training(SGD(0.1, momentum=0.9))
    cluster = LocalCluster(2, 2, slice_bytes=SLICE_BYTES, replicas=2, processes=True)
    with cluster, working(cluster, training), cluster.observer() as observer:
        begun(training)
        first = observer.save(tmp_path / "first")
        cluster.kill_server(1)
        saved = observer.save(path)
        training.is_over.set()
    assert first.steps < saved.steps
    found = StoredSnapshot.open(path)
    keys = {key.key: key for key in found.manifest.keys}

    def undisturbed(kv: kvd.KVStore) -> list[bytes]:
        kv.init([*KEYS, "table"], [*[np.full(shape, 0.5, np.float32) for shape in SHAPES], table()])
        kv.set_optimizer(training.optimizer)
        return training.make(kv, saved.steps)

    with LocalCluster(2, 1) as cluster:
        *values, rows = cluster.run(undisturbed)[0]
    assert values == [found.value(keys[str(key)]).tobytes() for key in KEYS]
    stored = found.rows(keys["table"])
    assert stored.ids.tolist() == list(range(50))
    assert stored.rows.tobytes() == rows


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()

    def program(kv: kvd.KVStore) -> None:
        with cluster.observer() as observer:
            with pytest.raises(NotAllowed, match="has no keys"):
                observer.save(tmp_path / "new")
            kv.init("w", np.zeros(3, np.float32))
            with pytest.raises(SnapshotError, match="is there already"):
                observer.save(tmp_path / "taken")
            with pytest.raises(SnapshotError, match="cannot be written"):
                observer.save(tmp_path / "missing" / "new")
            observer.save(tmp_path / "new")

    with LocalCluster(1, 1) as cluster:
        cluster.run(program)
        status = cluster.servers[0]
        assert status is not None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "taken"]
