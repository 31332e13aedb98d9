"""A program, time and again, on daemons that stay: `kvd jobs`, `kvd jobs end` and `kvd shutdown`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.testing.cluster import wait_until
from tests.cli.restart_harness import DEADLINE_S, Hold

Process = subprocess.Popen[str]
Spawn = Callable[..., Process]
WORKERS = 2
STEPS = 100
PROGRAM = f"""
import numpy as np
import kvd

kv = kvd.create("dist_sync")
kv.init("w", np.zeros(4, np.float32))
kv.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0))
for step in kv.steps({STEPS}):
    weights = kv.pushpull("w", np.full(4, kv.rank + 1, np.float32))
print("worker", kv.rank, *weights)
kv.close()
"""
RESULTS = [f"worker {rank} -300.0 -300.0 -300.0 -300.0" for rank in range(WORKERS)]  # STEPS times 1 + 2


class Daemons:
    """A scheduler that keeps its state, and a server."""

    def __init__(self, spawn: Spawn, folder: Path, **settings: str) -> None:
        self._spawn, self._folder = spawn, folder
        (folder / "train.py").write_text(PROGRAM)
        self.address = "tcp://127.0.0.1:0"
        self.settings = {f"KVD_{name.upper()}": value for name, value in settings.items()}
        self._starts = 0
        self.scheduler = self.start_scheduler()
        self.server = self._start("server")

    def start_scheduler(self) -> Process:
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        flags = ["--num-workers", str(WORKERS), "--num-servers", "1", "--state-dir", "state", "--bind", self.address]
        process = self._start("scheduler", *flags, "--ready-file", str(ready))
        self.address = wait_until(lambda: ready.exists() and ready.read_text(), "the scheduler is ready").strip()
        return process

    def _start(self, *arguments: str, environment: dict[str, str] | None = None) -> Process:
        told = {**self.settings, "OMP_NUM_THREADS": "1", **(environment or {})}
        if not self.address.endswith(":0"):
            told["KVD_SCHEDULER"] = self.address
        return self._spawn(*arguments, environment=told, cwd=self._folder)

    def program(self, *flags: str, hold: Hold | None = None) -> list[Process]:
        """Starts the program. Each start has a token: its workers are not taken for those of the one before."""
        self._starts += 1
        environment = {"KVD_RUN": f"start {self._starts}", **({} if hold is None else hold.environment)}
        return [
            self._start(
                "worker", "--node-id", f"worker-{rank}", *flags, "--", sys.executable, "train.py",
                environment=environment,
            )
            for rank in range(WORKERS)
        ]  # fmt: skip

    def ask(self, *arguments: str) -> tuple[int, str, str]:
        """What a command of the operator ends with: its exit code, its output, its errors."""
        process = self._start(*arguments)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def jobs(self) -> list[tuple[str, str]]:
        """The job and the phase of each run, as `kvd jobs` says."""
        code, out, err = self.ask("jobs", "-o", "json")
        assert code == 0, err
        return [(run["job"], run["phase"]) for run in json.loads(out)]


@pytest.fixture
def daemons(spawn: Spawn, tmp_path: Path) -> Daemons:
    return Daemons(spawn, tmp_path)


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    (tmp_path / "hold").mkdir()
    return Hold(tmp_path / "hold")


def ended(workers: list[Process]) -> list[tuple[int, str, str]]:
    """The exit codes, outputs and errors of processes that end by themselves."""
    found = [(*worker.communicate(timeout=DEADLINE_S), worker.returncode) for worker in workers]
    return [(code, out, err) for out, err, code in found]


def assert_trained(workers: list[Process]) -> None:
    found = ended(workers)
    assert [code for code, _, _ in found] == [0] * WORKERS, found
    assert sorted(out.strip() for _, out, _ in found) == RESULTS


def test_programs_one_after_the_other(daemons: Daemons) -> None:
    for _ in range(3):
        assert_trained(daemons.program())
    assert daemons.jobs() == [("default", "ended")] * 3
    code, table, _ = daemons.ask("jobs")
    assert code == 0
    assert table.splitlines()[0].split() == ["JOB", "RUN", "PHASE", "WORKERS"]
    oldest = table.splitlines()[1].split()[1]
    for job in ("default", f"default@{oldest}"):
        code, shown, err = daemons.ask("keys", "--job", job, "-o", "json")
        assert (code, [key["version"] for key in json.loads(shown)]) == (0, [STEPS]), err


def test_programs_side_by_side(daemons: Daemons, hold: Hold) -> None:
    first = daemons.program("--job", "a", hold=hold)
    hold.wait_for("worker-0", "worker-1")
    assert_trained(daemons.program("--job", "b"))
    assert daemons.jobs() == [("a", "running"), ("b", "ended")]
    _, shown, err = daemons.ask("doctor", "-o", "json")
    assert [(other["job"], other["healthy"], len(other["members"])) for other in json.loads(shown)["other_jobs"]] == [
        ("a", True, 3)
    ], err
    (stranger,) = ended([daemons._start("worker", "--job", "a", "--", sys.executable, "train.py")])
    assert stranger[0] == 1
    assert stranger[2].splitlines()[-1].startswith("kvd.errors.JobBusy: "), stranger
    hold.let_go()
    assert_trained(first)


def test_the_scheduler_is_started_again_between_two_programs(daemons: Daemons) -> None:
    assert_trained(daemons.program())
    daemons.scheduler.kill()
    daemons.scheduler.wait(DEADLINE_S)
    daemons.scheduler = daemons.start_scheduler()
    assert_trained(daemons.program())
    assert daemons.jobs() == [("default", "ended")] * 2


def test_a_state_that_cannot_be_saved(daemons: Daemons, hold: Hold, tmp_path: Path) -> None:
    """Pushes go on; what would change the view waits, and goes on by itself."""
    running = daemons.program("--job", "a", hold=hold)
    hold.wait_for("worker-0", "worker-1")
    state = tmp_path / "state" / "scheduler.json"
    state.unlink()
    (state / "in the way").mkdir(parents=True)
    waiting = daemons.program("--job", "b")
    unhealthy = wait_until(lambda: _unhealthy(daemons), "the status says so")
    assert "the scheduler cannot save its state: " in unhealthy
    hold.let_go()
    wait_until(lambda: _pushed(daemons, "a") == STEPS, "the job goes on")
    (state / "in the way").rmdir()
    state.rmdir()
    for workers in (running, waiting):
        assert_trained(workers)
    assert "cannot save" not in daemons.ask("status")[1]
    daemons.scheduler.terminate()
    assert ended([daemons.scheduler])[0][0] == 0


def _unhealthy(daemons: Daemons) -> str:
    code, out, err = daemons.ask("status")
    return out + err if code == 1 and "cannot save" in out + err else ""


def _pushed(daemons: Daemons, job: str) -> int:
    code, shown, _ = daemons.ask("keys", "--job", job, "-o", "json")
    return int(json.loads(shown)[0]["version"]) if code == 0 else 0


def test_a_worker_of_an_ended_run_that_wakes_up(spawn: Spawn, tmp_path: Path, hold: Hold) -> None:
    """It disturbs nobody. It learns that its job has ended, or first what was said to it while it slept."""
    daemons = Daemons(spawn, tmp_path, worker_timeout_s="3s")
    broken = daemons.program(hold=hold)
    pids = hold.wait_for("worker-0", "worker-1")
    os.kill(pids[1], signal.SIGSTOP)
    hold.let_go()
    (left,) = ended(broken[:1])
    assert left[0] == 1
    assert ", which died" in left[2].splitlines()[-1], left
    assert_trained(daemons.program())
    os.kill(pids[1], signal.SIGCONT)
    (woken,) = ended(broken[1:])
    assert woken[0] == 1
    assert re.search(r"kvd\.errors\.(JobEnded|NodeLost): ", woken[2]), woken
    assert daemons.jobs() == [("default", "failed"), ("default", "ended")]
    assert_trained(daemons.program())


def test_a_job_is_ended_while_it_trains(daemons: Daemons, hold: Hold) -> None:
    workers = daemons.program("--job", "mine", hold=hold)
    hold.wait_for("worker-0", "worker-1")
    code, _, err = daemons.ask("jobs", "end", "another")
    assert (code, err) == (1, "error: no run of job 'another' is here: kvd jobs lists all\n")
    assert daemons.ask("jobs", "end", "mine")[0] == 0
    hold.let_go()
    found = ended(workers)
    assert [code for code, _, _ in found] == [1] * WORKERS
    assert all("kvd.errors.JobEnded: " in err for _, _, err in found), found
    assert daemons.jobs() == [("mine", "gone")]


def test_the_daemons_are_ended(daemons: Daemons, hold: Hold) -> None:
    workers = daemons.program(hold=hold)
    hold.wait_for("worker-0", "worker-1")
    code, _, err = daemons.ask("shutdown")
    assert code == 1
    assert "default" in err
    assert "--force" in err
    hold.let_go()
    assert_trained(workers)
    assert daemons.ask("shutdown")[0] == 0
    logs: list[Any] = ended([daemons.scheduler, daemons.server])
    assert [code for code, _, _ in logs] == [0, 0], logs
