"""Every role is killed while README's program trains: under `kvd launch --restart`, and under supervisors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvd.testing.cluster import wait_until
from tests.cli.restart_harness import DEADLINE_S, Hold, readme_program
from tests.environments import without_settings

pytestmark = pytest.mark.timeout(300)  # longer than the deadline of a program

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    (tmp_path / "hold").mkdir()
    return Hold(tmp_path / "hold")


class Output:
    """The lines of a process as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = process
        self._threads = [threading.Thread(target=self._read, args=(pipe,)) for pipe in (process.stdout, process.stderr)]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Iterator[str]) -> None:
        for line in pipe:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._changed:
            match = self._changed.wait_for(found, DEADLINE_S)
        assert match, self.lines
        return match

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return code

    def results(self) -> list[str]:
        """What the workers' programs printed, in the order of their ranks. kvd may say besides that it waits."""
        return [line.partition(" | ")[2] for line in sorted(self.lines) if re.match(r"worker-\d+ +\| worker ", line)]


def launched(spawn: Spawn, hold: Hold, program: str, folder: Path, *flags: str) -> Output:
    (folder / "train.py").write_text(program)
    command = ["-n", "2", "-s", "1", "--restart", "1", *flags, "--", sys.executable, "train.py"]
    return Output(spawn("launch", *command, environment=hold.environment, cwd=folder))


def pid_named(output: Output, name: str) -> int:
    """The process of a daemon: a child of the launcher whose environment has its node id."""
    launcher = output.process.pid
    for entry in os.listdir("/proc"):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text() if entry.isdigit() else ""
            mine = stat.rpartition(")")[2].split()[1:2] == [str(launcher)]
            if mine and f"KVD_NODE_ID={name}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                return int(entry)
        except OSError:
            continue  # it has ended
    raise AssertionError(f"{name} does not run: {output.lines}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the workers of README's program print if nothing happens to them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(readme_program())
    command = [sys.executable, "-m", "kvd_cli.main", "launch", "-n", "2", "-s", "1", "--", sys.executable, "train.py"]
    environment = without_settings(OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    lines = [line.partition(" | ")[2] for line in sorted(done.stdout.splitlines())]
    assert len(lines) == 2
    return lines


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_worker_is_killed_under_launch(
    spawn: Spawn, hold: Hold, tmp_path: Path, undisturbed: list[str], rank: int
) -> None:
    output = launched(spawn, hold, readme_program(), tmp_path)
    pids = hold.wait_for("worker-0", "worker-1")
    os.kill(pids[rank], signal.SIGKILL)
    output.wait_for(rf"worker-{rank} failed \(SIGKILL\): restart 1 of 1")
    hold.let_go()
    assert output.end() == 0, output.lines
    assert output.results() == undisturbed


def test_the_scheduler_is_killed_under_launch(spawn: Spawn, hold: Hold, tmp_path: Path, undisturbed: list[str]) -> None:
    output = launched(spawn, hold, readme_program(), tmp_path)
    hold.wait_for("worker-0", "worker-1")
    os.kill(pid_named(output, "scheduler"), signal.SIGKILL)
    output.wait_for(r"scheduler ended \(SIGKILL\): restart 1 of 1")
    hold.let_go()
    assert output.end() == 0, output.lines
    assert output.results() == undisturbed


def test_the_scheduler_is_killed_once_more_than_it_is_restarted(spawn: Spawn, hold: Hold, tmp_path: Path) -> None:
    output = launched(spawn, hold, readme_program(), tmp_path, "--restart", "0")
    hold.wait_for("worker-0", "worker-1")
    os.kill(pid_named(output, "scheduler"), signal.SIGKILL)
    assert output.end() == 1
    assert "launch    | scheduler ended (SIGKILL): ending the job" in output.lines


def test_a_server_is_killed_under_launch(spawn: Spawn, hold: Hold, tmp_path: Path) -> None:
    output = launched(spawn, hold, readme_program(), tmp_path)
    hold.wait_for("worker-0", "worker-1")
    os.kill(pid_named(output, "server-0"), signal.SIGKILL)
    assert output.end() == 1
    assert output.results() == []
    assert (
        "launch    | server-0 ended (SIGKILL): its part of the keys is gone, since each value has one copy: "
        "start the job again from a checkpoint; ending the job"
    ) in output.lines


def test_a_server_with_copies_is_killed_under_launch(
    spawn: Spawn, hold: Hold, tmp_path: Path, undisturbed: list[str]
) -> None:
    output = launched(spawn, hold, readme_program(), tmp_path, "-s", "2", "--replicas", "2", "--restart", "5")
    hold.wait_for("worker-0", "worker-1")
    os.kill(pid_named(output, "server-0"), signal.SIGKILL)
    output.wait_for(r"server-0 ended \(SIGKILL\): restart 1 of 5")
    hold.let_go()
    assert output.end() == 0, output.lines
    assert output.results() == undisturbed


class Supervised:
    """A daemon that is started again when it fails, as systemd does with ``Restart=on-failure``."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]], *, restarts: bool = True) -> None:
        self._start = start
        self._restarts = restarts
        self._stopped = False
        self.processes = [start()]
        self.printed: list[str] = []
        self.logged: list[str] = []
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            process = self.processes[-1]
            out, err = process.communicate()
            self.printed += out.splitlines()
            self.logged += err.splitlines()
            if process.returncode == 0 or self._stopped or not self._restarts:
                return
            self.processes.append(self._start())

    def end(self) -> int:
        """Wait for its good end, or the end of what is not restarted; the exit code."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "it does not end"
        return self.processes[-1].returncode

    def stop(self) -> None:
        self._stopped = True
        self.processes[-1].kill()
        self._thread.join(DEADLINE_S)


class Cluster:
    """Daemons under supervisors: a scheduler that keeps its state, a server, two workers with a program."""

    def __init__(self, spawn: Spawn, hold: Hold, folder: Path, program: str, *, restart_workers: bool = True) -> None:
        (folder / "train.py").write_text(program)
        self._spawn, self._hold, self._folder = spawn, hold, folder
        self._address = ""
        self.scheduler = Supervised(self._start_scheduler)
        self.server = Supervised(lambda: self._daemon("server", "server-0"))
        self.workers = [
            Supervised(partial(self._worker, f"worker-{rank}"), restarts=restart_workers) for rank in range(2)
        ]

    def _daemon(self, role: str, node_id: str, *flags: str) -> subprocess.Popen[str]:
        cluster = ["--scheduler", self._address] if self._address else []
        return self._spawn(
            role, *cluster, "--node-id", node_id, *flags, environment=self._hold.environment, cwd=self._folder
        )

    def _start_scheduler(self) -> subprocess.Popen[str]:
        ready = self._folder / "ready"
        bind = self._address or "tcp://127.0.0.1:0"
        flags = ["--num-workers", "2", "--num-servers", "1", "--state-dir", "state", "--bind", bind]
        process = self._daemon("scheduler", "scheduler", *flags, "--ready-file", str(ready))
        if not self._address:
            self._address = wait_until(lambda: ready.exists() and ready.read_text(), "the scheduler is ready").strip()
        return process

    def _worker(self, node_id: str) -> subprocess.Popen[str]:
        return self._daemon("worker", node_id, "--", sys.executable, "train.py")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.workers, self.server, self.scheduler):
            one.stop()

    def results(self) -> list[str]:
        """What the workers printed, in the order of their ranks."""
        return sorted(line for worker in self.workers for line in worker.printed)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_worker_is_killed_under_a_supervisor(
    spawn: Spawn, hold: Hold, tmp_path: Path, undisturbed: list[str], rank: int
) -> None:
    with Cluster(spawn, hold, tmp_path, readme_program()) as cluster:
        pids = hold.wait_for("worker-0", "worker-1")
        os.kill(pids[rank], signal.SIGKILL)
        hold.let_go()
        assert [worker.end() for worker in cluster.workers] == [0, 0], [worker.logged for worker in cluster.workers]
        assert [len(worker.processes) for worker in cluster.workers] == [2 - rank, 1 + rank]
        assert cluster.results() == undisturbed


def test_the_scheduler_is_killed_under_a_supervisor(
    spawn: Spawn, hold: Hold, tmp_path: Path, undisturbed: list[str]
) -> None:
    with Cluster(spawn, hold, tmp_path, readme_program()) as cluster:
        hold.wait_for("worker-0", "worker-1")
        cluster.scheduler.processes[0].kill()
        wait_until(lambda: len(cluster.scheduler.processes) == 2, "the scheduler is started again")
        hold.let_go()
        assert [worker.end() for worker in cluster.workers] == [0, 0], [worker.logged for worker in cluster.workers]
        assert [len(worker.processes) for worker in cluster.workers] == [1, 1]
        assert cluster.results() == undisturbed


@pytest.mark.soak
def test_a_server_is_killed_under_a_supervisor(spawn: Spawn, hold: Hold, tmp_path: Path) -> None:
    with Cluster(spawn, hold, tmp_path, readme_program(), restart_workers=False) as cluster:
        hold.wait_for("worker-0", "worker-1")
        cluster.server.processes[0].kill()
        wait_until(lambda: len(cluster.server.processes) == 2, "the server is started again")
        hold.let_go()
        assert [worker.end() for worker in cluster.workers] == [1, 1]
        assert cluster.results() == []
        assert [worker.logged[-1] for worker in cluster.workers] == 2 * [
            "kvd.errors.NodeLost: server 0 died, and with replicas=1 its part of the keys is gone: "
            "start the job again from its last checkpoint"
        ]
