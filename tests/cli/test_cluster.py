"""The commands that talk to a cluster, with a real one: daemons that the command line started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from kvd.testing.cluster import wait_until
from tests.environments import without_settings

Kvd = Callable[..., Result]
DEADLINE_S = 60.0


@dataclass
class Cluster:
    """A scheduler and two servers, for one worker.

    Attributes:
        address: of the scheduler.
        processes: the scheduler first.
    """

    address: str
    processes: list[subprocess.Popen[str]]


def daemon(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvd_cli", *arguments],
        env=without_settings(KVD_LOG_FORMAT="text"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def address_in(file: Path, process: subprocess.Popen[str]) -> str:
    """The address that a daemon writes once it is ready."""
    wait_until(lambda: file.exists() or process.poll() is not None, f"{file} is written", DEADLINE_S)
    assert file.exists(), process.communicate()[1]
    return file.read_text().strip()


def start_cluster(folder: Path, workers: int) -> Cluster:
    sizes = ["--num-workers", str(workers), "--num-servers", "2"]
    bind = ["--bind", "tcp://127.0.0.1:0", "--ready-file", str(folder / "scheduler")]
    scheduler = daemon("scheduler", *sizes, *bind)
    address = address_in(folder / "scheduler", scheduler)
    processes = [scheduler]
    for index in range(2):
        file = folder / f"server-{index}"
        own = ["--node-id", f"server-{index}", "--ready-file", str(file)]
        processes.append(daemon("server", "-S", address, *own))
    for index in range(2):
        assert address_in(folder / f"server-{index}", processes[1 + index]).startswith("tcp://127.0.0.1:")
    return Cluster(address, processes)


def stop_cluster(cluster: Cluster) -> list[int]:
    for process in reversed(cluster.processes):
        process.terminate()
    for process in cluster.processes:
        process.communicate(timeout=DEADLINE_S)
    return [process.returncode for process in cluster.processes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = start_cluster(tmp_path_factory.mktemp("cluster"), workers=1)
    yield started
    assert stop_cluster(started) == [0, 0, 0]


@pytest.fixture
def ask(kvd: Kvd, cluster: Cluster) -> Kvd:
    """Runs a command line against the cluster."""

    def call(*arguments: str | Path, **options: Any) -> Result:
        return kvd(*arguments, "-S", cluster.address, "--timeout", "20s", **options)

    return call


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], Path]:
    def save(values: Any) -> Path:
        np.save(tmp_path / "in.npy", np.asarray(values, dtype=np.float32))
        return tmp_path / "in.npy"

    return save


def test_a_value_is_pushed_and_pulled(ask: Kvd, saved: Callable[[Any], Path], tmp_path: Path) -> None:
    assert ask("init", "w", saved([[1, 2], [3, 4]])).exit_code == 0
    assert ask("push", "w", saved([[5, 6], [7, 8]])).exit_code == 0

    shown = ask("pull", "w")
    assert shown.exit_code == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[:2] == [
        ["KEY", "SHAPE", "DTYPE", "BYTES", "MIN", "MAX", "MEAN"],
        ["w", "2×2", "float32", "16", "B", "5.0", "8.0", "6.5"],
    ]
    as_json = json.loads(ask("pull", "w", "--format", "json").stdout)
    assert as_json["shape"] == [2, 2]

    written = ask("pull", "w", "-o", tmp_path / "out.npy")
    assert (written.exit_code, written.stdout) == (0, "")
    assert np.load(tmp_path / "out.npy").tolist() == [[5, 6], [7, 8]]

    assert ask("pull", "w", "-o", "./json").exit_code == 0
    assert np.load("json").tolist() == [[5, 6], [7, 8]]

    assert ask("pushpull", "w", saved([[0, 0], [0, 9]]), "-o", tmp_path / "new.npy").exit_code == 0
    assert np.load(tmp_path / "new.npy").tolist() == [[0, 0], [0, 9]]


def test_several_values_are_pulled_of_one_step(ask: Kvd, saved: Callable[[Any], Path], tmp_path: Path) -> None:
    for key, value in [("layers/0", [1, 2]), ("layers/1", [3])]:
        assert ask("init", key, saved(value)).exit_code == 0
    assert ask("push", "layers/1", saved([5])).exit_code == 0

    shown = ask("pull", "layers/0", "layers/1")
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["KEY", "VERSION", "SHAPE", "DTYPE", "BYTES", "MIN", "MAX", "MEAN"],
        ["layers/0", "0", "2", "float32", "8", "B", "1.0", "2.0", "1.5"],
        ["layers/1", "1", "1", "float32", "4", "B", "5.0", "5.0", "5.0"],
    ]
    as_json = json.loads(ask("pull", "layers/1", "layers/0", "--format", "json").stdout)
    assert as_json["version"] >= 1
    assert [(row["key"], row["version"]) for row in as_json["keys"]] == [("layers/1", 1), ("layers/0", 0)]

    written = ask("pull", "layers/1", "layers/0", "-o", tmp_path / "out.npz")
    assert (written.exit_code, written.stdout) == (0, "")
    with np.load(tmp_path / "out.npz") as arrays:
        assert {key: array.tolist() for key, array in arrays.items()} == {"layers/1": [5], "layers/0": [1, 2]}
    assert ask("pull", "layers/0", "unknown").exit_code == 1
    assert ask("pull").exit_code == 2


def test_keys(ask: Kvd, saved: Callable[[Any], Path]) -> None:
    assert ask("init", "listed", saved(np.zeros((3, 4, 5)))).exit_code == 0
    (key,) = [key for key in json.loads(ask("keys", "-o", "json").stdout) if key["key"] == "listed"]
    assert (key["shape"], key["dtype"], key["bytes"], key["version"]) == ([3, 4, 5], "float32", 240, 0)
    (row,) = [line.split() for line in ask("keys").stdout.splitlines() if line.startswith("listed ")]
    assert row[:5] == ["listed", "3×4×5", "float32", "-", "0"]  # no rounds, so no merge
    again = ask("init", "listed", saved(np.zeros((3, 4, 5))), "--merge", "mean")
    assert again.exit_code == 1
    assert "key 'listed' is merged by 'sum', and this init wants 'mean': pass merge='sum'" in again.stderr
    assert ask("init", "other", saved(np.zeros(1)), "--merge", "avg").exit_code == 2


def test_tables_are_listed_with_their_updated_rows(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {
        "dtype": "float32",
        "merge": "sum",
        "version": 4,
        "slices": 2,
        "bytes": 5000,
        "shard": 3,
        "servers": [0, 1],
    }
    found = [
        {"key": "t", "shape": [10, 5], "updated_rows": 7, **common},
        {"key": "u", "shape": [None, 5], "updated_rows": 0, **common},
    ]
    looks = nullcontext(SimpleNamespace(keys=lambda: found))
    monkeypatch.setattr("kvd_cli.cluster.observer", lambda what: looks)
    lines = kvd("keys").stdout.splitlines()
    assert lines[1].split()[:6] == ["t", "10×5", "(7", "rows", "updated)", "float32"]
    assert lines[2].split()[:6] == ["u", "∞×5", "(0", "rows", "updated)", "float32"]


def test_commands_that_are_refused(ask: Kvd, saved: Callable[[Any], Path], tmp_path: Path) -> None:
    assert ask("init", "small", saved([1])).exit_code == 0
    one, two = saved([1]), tmp_path / "two.npy"
    np.save(two, np.zeros(2, dtype=np.float32))
    for arguments, reason in [
        (["pull", "unknown"], "unknown"),
        (["push", "small", str(two)], "shape"),
        (["push", "small", str(one), "--dtype", "int8"], "dtype"),
        (["command", "no-such-head", ""], "no-such-head"),
    ]:
        result = ask(*arguments)
        assert (result.exit_code, result.stdout) == (1, ""), arguments
        assert result.stderr.startswith("error: ")
        assert reason in result.stderr


def test_a_command_for_all_servers(ask: Kvd) -> None:
    assert json.loads(ask("command", "ping", "hello", "-o", "json").stdout) == [
        {"server": 0, "answer": "hello"},
        {"server": 1, "answer": "hello"},
    ]
    assert ask("command", "ping", "hello").stdout.split() == ["SERVER", "ANSWER", "0", "hello", "1", "hello"]


def test_a_barrier_for_one(ask: Kvd) -> None:
    result = ask("barrier", "here")
    assert (result.exit_code, result.output) == (0, "")


def test_status_of_a_healthy_cluster(ask: Kvd, saved: Callable[[Any], Path]) -> None:
    assert ask("init", "any", saved([1])).exit_code == 0  # so that the worker has been there
    shown = ask("status")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["scheduler", "active"] in [line[:2] for line in lines]
    assert [line[2] for line in lines if line[:1] == ["server"] and len(line) > 7 and line[2] == "active"]
    assert any(line[:3] == ["worker", "0", "left"] for line in lines)
    report = json.loads(ask("status", "-o", "json").stdout)
    assert report["healthy"] is True
    assert [server["rank"] for server in report["servers"]] == [0, 1]
    assert ask("dead-nodes").stdout.split() == ["NODE", "NODE", "ID", "SILENT", "FOR", "REASON"]


@pytest.mark.keys  # without, each status says so
def test_status_of_an_unhealthy_cluster(kvd: Kvd, tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path, workers=2)
    try:
        idle = kvd("status", "-S", cluster.address, "--timeout", "20s")
        assert (idle.exit_code, idle.stderr) == (0, "")  # no job is running, and the daemons are well

        cluster.processes[2].kill()
        deadline = time.monotonic() + DEADLINE_S
        while not (nodes := json.loads(kvd("dead-nodes", "-S", cluster.address, "-o", "json").stdout)):
            assert time.monotonic() < deadline, "nobody notices"
        assert [(node["role"], node["node_id"]) for node in nodes] == [("server", "server-1")]
        assert nodes[0]["reason"]

        dead = kvd("status", "-S", cluster.address, "--timeout", "20s")
        assert dead.exit_code == 1
        assert "dead: server" in dead.stderr
        assert json.loads(kvd("status", "-S", cluster.address, "-o", "json").stdout)["healthy"] is False
    finally:
        assert sorted(stop_cluster(cluster)) == [-9, 0, 0]


def test_a_daemon_on_a_taken_port(cluster: Cluster) -> None:
    process = daemon("scheduler", "--bind", cluster.address, "--num-workers", "1", "--num-servers", "1")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3, err
    assert cluster.address in err


def test_a_daemon_with_a_wrong_setting() -> None:
    process = daemon("scheduler", "--num-servers", "1")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, err
    assert "--num-workers" in err
