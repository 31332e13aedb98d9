"""A job that loses values begins again from its newest snapshot, with new processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.config import child_environment
from kvd.node.launch import Job, RestartRule
from kvd.node.launch.restart_policy import JobRestarts
from kvd.testing.cluster import wait_until

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 100

PROGRAM = """
import hashlib, os, sys
import numpy as np
import kvd
from kvd.testing.cluster import wait_until
folder, dies = sys.argv[1:]
with kvd.create("dist_sync") as kv:
    value = np.zeros((50, 40), np.float32)
    kv.init(["a", "b"], [value, value])
    kv.set_optimizer(kvd.optimizer.SGD(0.1, momentum=0.9))
    for step in kv.steps(12):
        if kv.rank == 0:
            with open(os.path.join(folder, "made"), "a") as file:
                file.write(f"{step} ")
        if dies == "dies" and step == 8:
            wait_until(lambda: os.path.exists(os.path.join(folder, "died")), "the servers are killed")
        rng = np.random.default_rng([step, kv.rank])
        kv.push(["a", "b"], [rng.standard_normal((50, 40)).astype(np.float32) for _ in range(2)])
    values = kv.pull(["a", "b"])
    print("digest", hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()[:16], flush=True)
"""


def launch(folder: Path, dies: str, *options: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", "2", *options]
    command += ["--snapshot-dir", str(folder / "snapshots"), "--snapshot-every", "3", "--restore", "auto"]
    command += ["--", sys.executable, str(folder / "program.py"), str(folder), dies]
    environment = child_environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "OMP_NUM_THREADS": "1"})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def children(pid: int, name: str) -> list[int]:
    """The processes below the launcher that have this node id."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                environment = Path(f"/proc/{entry}/environ").read_bytes()
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                if f"KVD_NODE_ID={name}".encode() in environment.split(b"\0") and parent == pid:
                    found.append(int(entry))
        except OSError:
            continue
    return found


def digests(text: str) -> set[str]:
    found = re.findall(r"digest (\w+)", text)
    assert len(found) == 2, text
    return set(found)


def undisturbed(folder: Path, *options: str) -> set[str]:
    folder.mkdir()
    process = launch(folder, "lives", *options)
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text
    return digests(text)


@pytest.mark.parametrize(("servers", "replicas"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_the_only_copies_die_and_the_job_ends_with_the_same_bits(tmp_path: Path, servers: int, replicas: int) -> None:
    options = ["-s", str(servers), "--replicas", str(replicas), "--restart", "3", "--heartbeat-interval-s", "0.2"]
    expected = undisturbed(tmp_path / "undisturbed", *options)
    folder = tmp_path / "disturbed"
    folder.mkdir()
    process = launch(folder, "dies", *options)
    try:
        wait_until(lambda: (folder / "snapshots" / "step-000006").exists(), "two snapshots are there", TIMEOUT_S)
        wait_until(lambda: "8 " in (folder / "made").read_text(), "step 8 has begun", TIMEOUT_S)
        killed = [pid for index in range(servers) for pid in children(process.pid, f"server-{index}")]
        assert len(killed) == servers
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        (folder / "died").touch()
        text, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, text
    assert digests(text) == expected, text
    assert "the job begins again from its newest snapshot, restart 1 of 3" in text
    made = [int(step) for step in (folder / "made").read_text().split()]
    begun = made.index(8) + 1
    assert made[:begun] == list(range(9))
    assert made[begun:] == [6, 7, *range(8, 12)]


# ── how often ──


def job(**given: Any) -> Job:
    return Job(command=["true"], workers=1, servers=2, **given)


def restarts_of(of: Job) -> JobRestarts:
    return JobRestarts(of.restarts, of.replicas, restores=of.restores)


def test_only_a_job_that_restores_begins_anew_and_not_more_often_than_told() -> None:
    assert restarts_of(job(restarts=RestartRule(3))).plan(1.0) is None
    assert restarts_of(job(restarts=RestartRule(3), environment={"KVD_RESTORE": "off"})).plan(1.0) is None
    assert restarts_of(job(environment={"KVD_RESTORE": "auto"})).plan(1.0) is None
    anew = restarts_of(job(restarts=RestartRule(2), environment={"KVD_RESTORE": "older"}))
    for delay_s in (0.0, 1.0):
        restart = anew.plan(5.0)
        assert restart is not None
        assert restart.delay_s == delay_s
        assert anew.is_due
        assert anew.begin() == delay_s
        assert not anew.is_due
    assert anew.plan(5.0) is None


def test_with_two_copies_a_worker_that_fails_after_two_servers_ended_tells_that_values_are_lost() -> None:
    anew = restarts_of(job(restarts=RestartRule(2), replicas=2, environment={"KVD_RESTORE": "auto"}))
    assert not anew.may_have_lost_copies
    anew.server_ended()
    assert not anew.may_have_lost_copies
    anew.server_ended()
    assert anew.may_have_lost_copies
    anew.begin()
    assert not anew.may_have_lost_copies
