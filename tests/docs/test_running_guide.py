"""The commands of the guide for those who run a shared cluster, run in its order, and its figures of capacity."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.config import child_environment
from kvd.node.remote import free_port
from kvd.testing.cluster import LocalCluster, wait_until
from tests.docs.sources_harness import ROOT
from tests.environments import is_setting

GUIDE = (ROOT / "docs" / "running-for-others.md").read_text(encoding="utf-8")
ADDRESS = "10.0.0.1:9191"
TIMEOUT_S = 115.0
HELD_AT = 50
PROGRAM = f"""
import hashlib, pathlib
import numpy as np
import kvd
from kvd.testing.cluster import wait_until

kv = kvd.create("dist_sync", merge="mean")
weights = np.ones(1000, np.float32)
kv.init("w", weights)
kv.set_optimizer(kvd.optimizer.Adam(0.1))
kv.pull("w", out=weights)
for step in kv.steps(100):
    with open(f"steps-{{kv.rank}}", "a") as steps:
        steps.write(f"{{step}}\\n")
    wait_until(lambda: step != {HELD_AT} or pathlib.Path("go").exists(), "the test goes on", 300)
    kv.pushpull("w", np.sin(weights * (step + kv.rank)), out=weights)
print(f"worker {{kv.rank}}: {{hashlib.sha256(weights.tobytes()).hexdigest()}}")
kv.close()
"""


def commands(heading: str) -> list[list[str]]:
    """Return the commands of each block below a heading."""
    [section] = [part for part in re.split(r"^## ", GUIDE, flags=re.MULTILINE) if part.startswith(heading + "\n")]
    return [block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]


class Hosts:
    """The guide's hosts, all of them this one: one folder, and a free port of loopback for the scheduler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []
        self._address = f"127.0.0.1:{free_port()}"
        self._started: list[subprocess.Popen[bytes]] = []
        shims = folder / "bin"
        shims.mkdir()
        for name, command in (("python", [sys.executable]), ("kvd", [sys.executable, "-m", "kvd_cli.main"])):
            (shims / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (shims / name).chmod(0o755)
        kept = {name: value for name, value in child_environment({}).items() if not is_setting(name)}
        self._environment = kept | {
            "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "KVD_SCHEDULER": f"tcp://{self._address}",
            "KVD_KEYFILE": "admin.key",
        }

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start a command that runs until it is told to end; its output goes to a log in the folder."""
        self.ran.append(command)
        typed = command.replace(ADDRESS, self._address)
        with (self.folder / f"{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {typed}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def run(self, command: str, code: int = 0) -> str:
        """Run a command, and return its standard output."""
        self.ran.append(command)
        done = subprocess.run(
            ["sh", "-c", command.replace(ADDRESS, self._address)],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def succeeds(self, command: str) -> bool:
        typed = ["sh", "-c", command]
        return subprocess.run(typed, cwd=self.folder, env=self._environment, capture_output=True).returncode == 0

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "train.py").write_text(PROGRAM)
    made = Hosts(tmp_path)
    yield made
    made.end()


def results(hosts: Hosts, workers: list[subprocess.Popen[bytes]]) -> set[str]:
    """Return what the workers of all jobs so far have printed of their final weights."""
    for worker in workers:
        assert worker.wait(TIMEOUT_S) == 0, hosts.logs()
    return set(re.findall(r"^worker \d: (\w+)$", hosts.logs(), re.MULTILINE))


@pytest.mark.keys
@pytest.mark.timeout(300)
def test_a_shared_cluster_from_its_keys_to_its_upgrade(hosts: Hosts) -> None:
    [keys] = commands("Keys")
    for command in keys:
        hosts.run(command)
    for name in ("scheduler", "server-0", "server-1", "admin", "alice"):
        assert (hosts.folder / f"{name}.key").stat().st_mode & 0o777 == 0o600

    starts, job = commands("Start the daemons")
    daemons = [hosts.start(command) for command in starts]
    workers = [hosts.start(command) for command in job]

    def steps(rank: int) -> list[int]:
        file = hosts.folder / f"steps-{rank}"
        return [int(step) for step in file.read_text().split()] if file.exists() else []

    def are_held() -> bool:
        assert all(worker.poll() is None for worker in workers), hosts.logs()
        return all(steps(rank)[-1:] == [HELD_AT] for rank in range(2))

    wait_until(are_held, "both workers are held", TIMEOUT_S)

    [watching] = commands("Watch")
    shown = {command: hosts.run(command) for command in watching}
    assert "all is well" in shown["kvd doctor"] or "quiet" in shown["kvd doctor"]
    assert re.search(r"alice-digits +\w+ +running +2 of 2", shown["kvd jobs"])
    document = json.loads(shown["kvd doctor -o json"])
    assert document["healthy"], document["advice"]
    assert "alice-digits" in json.dumps(document["other_jobs"])
    hosts.run("kvd shutdown", code=1)  # a job is running

    [[new_user]] = commands("A new user, and one who leaves")
    list_before = (hosts.folder / "allowed.toml").read_text()
    hosts.run(new_user)
    as_bob = "kvd status --keyfile bob.key --job bob-first"
    assert not hosts.succeeds(as_bob)
    for daemon in daemons:
        daemon.send_signal(signal.SIGHUP)
    wait_until(lambda: hosts.succeeds(as_bob), "Bob's key is accepted", TIMEOUT_S)
    (hosts.folder / "allowed.toml").write_text(list_before)
    for daemon in daemons:
        daemon.send_signal(signal.SIGHUP)
    wait_until(lambda: not hosts.succeeds(as_bob), "Bob's key is refused", TIMEOUT_S)

    ending, restoring = commands("Upgrade")
    for command in ending:
        hosts.run(command)
    for daemon in daemons:
        assert daemon.wait(TIMEOUT_S) == 0, hosts.logs()
    (hosts.folder / "go").touch()
    for worker in workers:
        assert worker.wait(TIMEOUT_S) != 0

    daemons = [hosts.start(command) for command in starts]
    wait_until(lambda: hosts.succeeds("kvd doctor"), "the cluster has started again", TIMEOUT_S)
    for command in restoring:
        hosts.run(command)
    for rank in range(2):
        (hosts.folder / f"steps-{rank}").unlink()
    restored = results(hosts, [hosts.start(command) for command in job])
    assert [steps(rank)[0] for rank in range(2)] == [HELD_AT, HELD_AT]
    whole = results(hosts, [hosts.start(command.replace("alice-digits", "alice-whole")) for command in job])
    assert restored == whole
    assert len(whole) == 1

    [[end]] = commands("End")
    hosts.run(end)
    for daemon in daemons:
        assert daemon.wait(TIMEOUT_S) == 0, hosts.logs()
    printed = [line for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S) for line in block.splitlines()]
    assert set(printed) <= set(hosts.ran)


# ── Capacity ──


def row(first_cell: str) -> list[str]:
    """Return the other cells of a row of the guide."""
    [found] = re.findall(rf"^\| {re.escape(first_cell)} \| (.*) \|$", GUIDE, re.MULTILINE)
    return str(found).split(" | ")


def copies(cell: str, num_workers: int) -> int:
    """Return what a cell such as ``B/S × (3 + 2 W)`` multiplies the bytes of a server with."""
    found = re.search(r"B/S × \((\d+) \+ (\d+) W\)$", cell)
    assert found is not None, cell
    return int(found[1]) + int(found[2]) * num_workers


COUNTED = row("memory that counts against `memory_limit_bytes`")
NUM_WORKERS, NUM_SERVERS = 2, 3
SLICE_BYTES = 64 << 10
SLICES_EACH = 4


def servers(cluster: LocalCluster) -> list[dict[str, int]]:
    with cluster.observer() as observer:
        return [server for server in observer.status()["servers"] if "memory_used_bytes" in server]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_formula_is_what_servers_count(replicas: int) -> None:
    nbytes = NUM_SERVERS * SLICES_EACH * SLICE_BYTES  # the same number of slices on each server

    def program(store: kvd.KVStore) -> list[int]:
        store.init("w", np.zeros(nbytes // 4, np.float32))
        store.set_optimizer(kvd.optimizer.Adam())
        store.pushpull("w", np.ones(nbytes // 4, np.float32), out=np.empty(nbytes // 4, np.float32))
        used = [server["memory_used_bytes"] for server in servers(cluster)]
        store.barrier()
        return used

    with LocalCluster(NUM_WORKERS, NUM_SERVERS, replicas=replicas, slice_bytes=SLICE_BYTES) as cluster:
        expected = nbytes // NUM_SERVERS * copies(COUNTED[replicas - 1], NUM_WORKERS)
        assert cluster.run(program) == [[expected] * NUM_SERVERS] * NUM_WORKERS


def test_the_formula_bounds_the_servers_that_are_left_after_a_death() -> None:
    nbytes = NUM_SERVERS * SLICES_EACH * SLICE_BYTES
    settings: dict[str, Any] = {"replicas": 2, "slice_bytes": SLICE_BYTES, "server_timeout_s": 2.0}
    with LocalCluster(NUM_WORKERS, NUM_SERVERS, processes=True, **settings) as cluster:
        stores = cluster.open_stores()
        handles = [store.init_async("w", np.zeros(nbytes // 4, np.float32)) for store in stores]
        for handle in handles:
            handle.wait()
        cluster.kill_server(0)

        def led() -> int:
            return sum(server["bytes_led"] for server in servers(cluster))

        wait_until(lambda: len(servers(cluster)) == NUM_SERVERS - 1 and led() == nbytes, "others lead its partition")
        used = [server["memory_used_bytes"] for server in servers(cluster)]
    assert max(used) <= nbytes // NUM_SERVERS * copies(COUNTED[2], NUM_WORKERS)
    assert max(used) > nbytes // NUM_SERVERS * copies(COUNTED[1], NUM_WORKERS)


@pytest.mark.parametrize(
    ("model", "slots"),
    [("ResNet-50, momentum", 1), ("335 M parameters, Adam", 2), ("1 G parameters, Adam", 2)],
)
def test_the_examples_follow_the_formulas(model: str, slots: int) -> None:
    total, num_workers, num_servers, counted, state, network, step = (
        float(cell.removesuffix(" GB").removesuffix(" s")) for cell in row(model)
    )
    part = total / num_servers
    assert counted == pytest.approx(part * copies(COUNTED[0], int(num_workers)), abs=0.006)
    assert state == pytest.approx(part * slots, abs=0.006)
    assert network == pytest.approx(part * num_workers, abs=0.006)
    assert step == pytest.approx(max(total, part * num_workers) / 1.25, abs=0.006)
