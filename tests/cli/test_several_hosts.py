"""README's program and its commands for several machines, word by word, on hosts that are network namespaces."""

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

import pytest

from kvd.testing.cluster import wait_until
from kvd_cli.demo import ENOUGH
from tests.cli.restart_harness import ROOT, readme, readme_program, readme_results
from tests.node.launch.lan_harness import Lan, lan_or_skip

pytestmark = pytest.mark.timeout(300)  # of pytest: longer than the deadline of a program
DEADLINE_S = 200.0  # three hosts on one machine, which may be busy
SCHEDULER, SERVER, WORKER = 1, 2, 3  # README gives the scheduler 10.0.0.1


def commands() -> dict[str, str]:
    """By role, the command that README gives for it on several machines."""
    lines = re.findall(r"^kvd (\w+) +(--scheduler tcp://10\.0\.0\.1:9191.*?)(?: +#.*)?$", readme(), re.MULTILINE)
    found = {role: f"kvd {role} {rest}" for role, rest in lines}
    assert found.keys() == {"scheduler", "server", "worker"}, "README has a command for each role"
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the program lies, with the `kvd` and the `python` that are tested in ``bin``."""
    (tmp_path / "train.py").write_text(readme_program())
    (tmp_path / "bin").mkdir()
    for name, arguments in (("kvd", "-m kvd_cli.main"), ("python", "")):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        path.chmod(0o755)
    return tmp_path


@pytest.fixture
def lan() -> Iterator[Lan]:
    with lan_or_skip(3) as net:
        yield net


class Users:
    """On each host a user with an own home folder, who runs commands there."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self._lan = lan
        self._folder = folder
        names = ("KVD_", "DMLC_", "XDG_")
        self._kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}

    def home(self, host: int) -> Path:
        return self._folder / f"home-{host}"

    def start(self, host: int, command: str, **options: Any) -> subprocess.Popen[str]:
        environment = {
            **self._kept,
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),  # as in `kvd demo`
            "HOME": str(self.home(host)),
            "PATH": f"{self._folder}/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
        }
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        return subprocess.Popen(self._lan.on(host, *shlex.split(command)), env=environment, text=True, **given)

    def run(self, host: int, command: str, code: int = 0, **options: Any) -> str:
        process = self.start(host, command, **options)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == code, said
        return said

    def import_key(self, source: int, target: int) -> None:
        """README's ``kvd key export | ssh HOST kvd key import``, with a pipe for the ssh."""
        pipe = re.search(r"^(kvd key export) \| ssh HOST (kvd key import)$", readme(), re.MULTILINE)
        assert pipe is not None
        exported = self.start(source, pipe[1], stderr=None)
        said = self.run(target, pipe[2], stdin=exported.stdout)
        exported.communicate(timeout=DEADLINE_S)
        assert exported.returncode == 0, said


@pytest.fixture
def users(lan: Lan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    monkeypatch.chdir(folder)
    return Users(lan, folder)


def test_the_commands_of_the_readme_train_on_three_hosts(users: Users) -> None:
    typed = commands()
    daemons = [users.start(SCHEDULER, typed["scheduler"])]
    key = users.home(SCHEDULER) / ".config" / "kvd" / "cluster.key"
    wait_until(key.exists, "the scheduler makes the user's key")
    daemons.append(users.start(SERVER, typed["server"]))  # it waits for its key
    missing = f"there is no key at {users.home(SERVER)}/.config/kvd/cluster.key"
    assert daemons[1].stdout is not None
    next(line for line in daemons[1].stdout if missing in line.replace("\\/", "/"))
    for host in (SERVER, WORKER):
        users.import_key(SCHEDULER, host)
    sizes = re.search(r"--num-workers (\d+) --num-servers 1$", typed["scheduler"])
    assert sizes is not None, typed["scheduler"]
    workers = [users.start(WORKER, typed["worker"]) for _ in range(int(sizes[1]))]
    output = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), output
    status = users.run(WORKER, "kvd status --scheduler tcp://10.0.0.1:9191", stderr=subprocess.PIPE)
    for daemon in daemons:
        daemon.send_signal(signal.SIGTERM)
    logs = [daemon.communicate(timeout=DEADLINE_S)[0] for daemon in daemons]

    results = sorted(line for text in output for line in text.splitlines() if line.startswith("worker "))
    assert results == readme_results(len(workers)), output
    assert "no --bind is given: listening on 10.0.0.2, from where this host reaches the scheduler" in logs[1]
    assert "tcp://10.0.0.2:" in status, status
    assert [daemon.returncode for daemon in daemons] == [0, 0], logs


@pytest.mark.soak
def test_the_demo_trains_over_two_hosts_with_imported_keys(users: Users) -> None:
    """The demo's own workers, and the accuracy that `kvd demo` asks for."""
    users.run(SCHEDULER, "kvd key new", stderr=None)
    users.import_key(SCHEDULER, SERVER)
    at = "--scheduler tcp://10.0.0.1:9191"
    daemons = [
        users.start(SCHEDULER, f"kvd scheduler {at} --num-workers 2 --num-servers 2 --merge weighted"),
        users.start(SCHEDULER, f"kvd server {at} --merge weighted"),
        users.start(SERVER, f"kvd server {at} --merge weighted"),
    ]
    demo = "python -m kvd_cli.demo_worker --seed 0 --epochs 20 --batch 64"
    results = [users.home(host) / "demo" for host in (SCHEDULER, SERVER)]  # a pipe that nobody reads would fill
    workers = []
    for rank, host in enumerate((SCHEDULER, SERVER)):
        with results[rank].open("w") as out:
            command = f"kvd worker {at} --merge weighted --preferred-rank {rank} --num-workers 2 -- {demo}"
            workers.append(users.start(host, command, stdout=out))
    codes = [worker.wait(DEADLINE_S) for worker in workers]
    output = [result.read_text() for result in results]
    assert codes == [0, 0], output
    for daemon in daemons:
        daemon.send_signal(signal.SIGTERM)
    logs = [daemon.communicate(timeout=DEADLINE_S)[0] for daemon in daemons]
    assert [daemon.returncode for daemon in daemons] == [0, 0, 0], logs
    ends = [json.loads(line) for text in output for line in text.splitlines() if '"event": "end"' in line]
    assert len(ends) == 2, output
    assert min(end["accuracy"] for end in ends) >= ENOUGH
    assert len({end["digest"] for end in ends}) == 1
