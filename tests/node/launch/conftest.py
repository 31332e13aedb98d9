"""What the tests of the launcher share: stand-ins for daemons and ssh, collected lines, and launchers to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.launch.harness import DAEMON, FAKE_SSH, Launcher, Lines


@pytest.fixture
def daemon(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "daemon.py"
    path.write_text(DAEMON)
    return (sys.executable, "-S", str(path))


@pytest.fixture
def ssh(tmp_path: Path) -> tuple[str, ...]:
    """Runs the command of a host on this machine, in another folder."""
    path = tmp_path / "ssh.py"
    path.write_text(FAKE_SSH)
    return (sys.executable, "-I", "-S", str(path))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def launcher(mark: dict[str, str], daemon: Any, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(**job: Any) -> Launcher:
        started.append(Launcher(mark, tmp_path, daemon=daemon, **job))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        one.out.close()
