"""A job whose snapshots, record and logs lie on one small disk, which fills up: `test_full_disk.py` runs it, with the
folder where that disk is mounted."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import kvd
from kvd.errors import SnapshotError
from kvd.snapshots.reader import StoredSnapshot
from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

SIZE = 300_000  # elements: a snapshot has 1.2 MB, and two do not fit on the disk
DEADLINE_S = 60.0
BARRIERS = 80


def fill(disk: Path) -> Path:
    """A file that leaves no room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return filler


def train(store: kvd.KVStore, steps: int) -> float:
    """What each element is then: the number of all steps."""
    for _ in range(steps):
        store.pushpull("w", np.full(SIZE, -1.0, np.float32))
    return float(store.pull("w").min())


def barriers(store: kvd.KVStore) -> None:
    """The record has their names, so it grows out of the room that its file has."""
    for number in range(BARRIERS):
        store.barrier(f"while it is full: {number:03} {'x' * 100}")


def snapshots(store: kvd.KVStore, disk: Path) -> dict[str, object]:
    """One fits, and the next ones do not."""
    store.snapshot(disk / "first")
    found: dict[str, object] = {}
    for name in ("second", "third"):
        train(store, 1)
        try:
            if name == "second":
                store.snapshot(disk / name)
            else:
                store.snapshot_async(disk / name).wait()
        except SnapshotError as error:
            found[name] = [str(error), error.path]
    return {**found, "left": sorted(path.name for path in disk.iterdir())}


def record(cluster: LocalCluster, store: kvd.KVStore, disk: Path) -> dict[str, object]:
    """The record cannot be saved, nothing can be logged, and then they can."""
    scheduler = cluster.scheduler
    assert isinstance(scheduler, ProcessNode)
    with cluster.observer() as observer, ThreadPoolExecutor(1) as pool:

        def problem() -> str:
            return str(observer.status()["cannot_save"])

        filler = fill(disk)
        free, logged = os.statvfs(disk).f_bavail, scheduler.log.read_bytes()
        met = pool.submit(barriers, store)
        wait_until(lambda: problem() != "", "the record cannot be saved", DEADLINE_S)
        said, trained, waits = problem(), train(store, 2), not met.done()
        filler.unlink()
        met.result(DEADLINE_S)
        wait_until(lambda: problem() == "", "the record is saved", DEADLINE_S)
    later = scheduler.log.read_bytes()
    assert later.startswith(logged)
    return {"free": free, "problem": said, "trained": trained, "waits": waits, "log": later[len(logged) :].decode()}


def main(disk: Path) -> dict[str, object]:
    """What happened, and how it was said."""
    with LocalCluster(1, 1, processes=True, state_dir=str(disk / "state")) as cluster:
        store = cluster.store()
        store.init("w", np.zeros(SIZE, np.float32))
        store.set_optimizer(kvd.optimizer.SGD(1.0))
        train(store, 3)
        found = {**snapshots(store, disk), **record(cluster, store, disk)}
        cluster.kill_scheduler()
        cluster.restart_scheduler()
        store.barrier("with the record")
        first = StoredSnapshot.open(disk / "first")
        first.verify()
        in_first = float(first.value(first.manifest.keys[0]).min())
        return {**found, "at the end": train(store, 1), "in the first": in_first}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
