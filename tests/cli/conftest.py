"""What the tests of the command line share: the program in this process, and in one of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvd_cli import cluster, doctor
from kvd_cli.program import cli
from tests.environments import WITHOUT_KEYS, is_setting

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "NOTIFY_SOCKET")

Kvd = Callable[..., Result]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the environment or from a file of this folder."""
    for name in list(os.environ):
        if (is_setting(name) and name != WITHOUT_KEYS) or name in RANK_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kvd(clean_environment: None) -> Kvd:
    """Runs a command line in this process."""

    def call(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(cli, [*map(str, arguments)], prog_name="kvd", **options)

    return call


@pytest.fixture
def spawn(clean_environment: None) -> Iterator[Spawn]:
    """Starts a command line in a process of its own. It is killed if it still runs at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, environment: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "kvd_cli.main", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}", **(environment or {})},
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def status(kvd: Kvd, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``kvd status``, or another command, against a cluster that gives this report."""

    def run(given: dict[str, Any], *flags: str, command: str = "status") -> Result:
        class Stub:
            def status(self, servers_within_s: float | None = None) -> dict[str, Any]:
                return given

            def handshakes_with(self, ranks: Any) -> dict[int, Any]:
                return {}

        @contextlib.contextmanager
        def observer(doing: str, job: str = "", within_s: float | None = None) -> Iterator[Stub]:
            yield Stub()

        for module in (cluster, doctor):
            monkeypatch.setattr(module, "observer", observer)
        return kvd(command, *flags)

    return run
