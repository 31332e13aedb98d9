"""README's program and its commands for several machines, word by word, on hosts that are network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.restart_harness import DEADLINE_S, ROOT, readme, readme_program, readme_results
from tests.node.launch.lan_harness import Lan, missing_for_lan

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
    missing = missing_for_lan()
    if missing:
        pytest.skip(missing)
    with Lan(3) as net:
        yield net


def test_the_commands_of_the_readme_train_on_three_hosts(
    lan: Lan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVD_", "DMLC_"))}
    environment = {
        **kept,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
    }

    def start(host: int, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            lan.on(host, *shlex.split(command)), env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    typed = commands()
    daemons = [start(SCHEDULER, typed["scheduler"]), start(SERVER, typed["server"])]
    sizes = re.search(r"--num-workers (\d+) --num-servers 1 ", typed["scheduler"])
    assert sizes is not None, typed["scheduler"]
    workers = [start(WORKER, typed["worker"]) for _ in range(int(sizes[1]))]
    said = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), said
    status = subprocess.run(
        lan.on(WORKER, "kvd", "status", "--scheduler", "tcp://10.0.0.1:9191"),
        env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    for daemon in daemons:
        daemon.send_signal(signal.SIGTERM)
    logs = [daemon.communicate(timeout=DEADLINE_S)[0] for daemon in daemons]

    results = sorted(line for text in said for line in text.splitlines() if line.startswith("worker "))
    assert results == readme_results(len(workers)), said
    assert "no --bind is given: listening on 10.0.0.2, from where this host reaches the scheduler" in logs[1]
    assert "tcp://10.0.0.2:" in status.stdout, status
    assert [daemon.returncode for daemon in daemons] == [0, 0], logs
