"""`kvd snapshot save` against a cluster whose workers train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import kvd as library
from kvd.optimizer import SGD
from kvd.snapshots.reader import StoredSnapshot
from kvd.testing.cluster import LocalCluster
from tests.cli.conftest import Kvd


def flags(cluster: LocalCluster) -> list[str]:
    keyless = ["--insecure"] if cluster.settings.get("insecure") else []
    return ["--scheduler", cluster.address, *keyless]


def test_a_snapshot_is_written_and_described(kvd: Kvd, tmp_path: Path) -> None:
    def program(store: library.KVStore) -> Any:
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer(SGD(1.0, momentum=0.5))
        for _ in store.steps(3):
            store.push("w", np.ones(4, np.float32))
        store.flush()
        shown = kvd("snapshot", "save", "one", *flags(cluster))
        as_json = kvd("snapshot", "save", "two", "-o", "json", *flags(cluster))
        return shown, as_json, kvd("snapshot", "save", "two", *flags(cluster))

    with LocalCluster(1, 2) as cluster:
        ((shown, as_json, again),) = cluster.run(program)
    assert (shown.exit_code, as_json.exit_code, again.exit_code) == (0, 0, 1), shown.output
    assert shown.stdout.split()[:6] == ["PATH", "KEYS", "BYTES", "STEPS", "VERSION", "SECONDS"]
    facts = json.loads(as_json.stdout)
    assert facts.pop("seconds") > 0
    assert facts == {
        "path": "two", "keys": 1, "bytes": 16, "steps": 3, "is_one_step": True, "oldest": 3, "newest": 3
    }  # fmt: skip
    assert "two is there already" in again.stderr
    found = StoredSnapshot.open(tmp_path / "one")
    (key,) = found.manifest.keys
    assert found.value(key).tolist() == [-4.25] * 4  # 1 + 1.5 + 1.75
    assert key.updates == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_job_without_keys(kvd: Kvd, tmp_path: Path) -> None:
    with LocalCluster(1, 1) as cluster:
        result = cluster.run(lambda store: kvd("snapshot", "save", "new", *flags(cluster)))[0]
    assert result.exit_code == 1
    assert "job 'default' has no keys" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_snapshot_is_restored_for_the_next_program(kvd: Kvd, tmp_path: Path) -> None:
    def trains(store: library.KVStore) -> None:
        store.init("w", np.zeros(4, np.float32))
        store.set_optimizer(SGD(1.0, momentum=0.5))
        for _ in store.steps(3):
            store.push("w", np.ones(4, np.float32))
        store.flush()
        assert kvd("snapshot", "save", "taken", *flags(cluster)).exit_code == 0

    def goes_on(store: library.KVStore) -> Any:
        steps = store.restore("nothing", missing_ok=True)
        for _ in store.steps(4):
            store.push("w", np.ones(4, np.float32))
        return steps, store.pull("w").tolist()

    with LocalCluster(1, 2) as cluster:
        cluster.run(trains)
    with LocalCluster(1, 1) as cluster:
        damaged = kvd("snapshot", "restore", ".", *flags(cluster))
        made = kvd("snapshot", "restore", "taken", "-o", "json", *flags(cluster))
        again = kvd("snapshot", "restore", "taken", *flags(cluster))
        shown = kvd("jobs", *flags(cluster))
        values = cluster.run(goes_on)
    assert (damaged.exit_code, made.exit_code, again.exit_code) == (1, 0, 1), made.output
    assert "is no snapshot" in damaged.stderr
    facts = json.loads(made.stdout)
    assert (facts["keys"], facts["steps"], facts["num_workers"], facts["num_servers"]) == (1, 3, 1, 1)
    assert "this job has keys already" in again.stderr
    assert "prepared" in shown.stdout
    assert values == [(3, [-4.25 - 1.875] * 4)]
