"""Each daemon as systemd sees it: READY when it is, WATCHDOG from its loop, STOPPING at the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.config import child_environment
from kvd.testing.cluster import ROOT, LocalCluster

WATCHDOG_USEC = "200000"
DEADLINE_S = 20.0


@pytest.fixture
def notify(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        server.settimeout(DEADLINE_S)
        yield server, path


def start(path: str, *arguments: str, **settings: str) -> subprocess.Popen[bytes]:
    changes = {
        "NOTIFY_SOCKET": path,
        "WATCHDOG_USEC": WATCHDOG_USEC,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}",
        **settings,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "kvd_cli.main", *arguments],
        env={**child_environment({"KVD_PARENT_PID": str(os.getpid())}), **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def until(server: socket.socket, word: str) -> list[str]:
    """The messages up to the one with this word."""
    seen: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        seen.append(server.recv(4096).decode())
        if word in seen[-1]:
            return seen
    raise AssertionError(f"no {word} in {seen}")


def check_life(server: socket.socket, process: subprocess.Popen[bytes]) -> None:
    until(server, "READY=1")
    for _ in range(3):
        until(server, "WATCHDOG=1")
    process.terminate()
    until(server, "STOPPING=1")
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (0, 143), output.decode()


def test_a_scheduler_is_ready_when_it_listens(notify: tuple[socket.socket, str]) -> None:
    server, path = notify
    check_life(
        server,
        start(path, "scheduler", "--bind", "tcp://127.0.0.1:0", "--num-workers", "1", "--num-servers", "1"),
    )


def test_a_server_is_ready_when_it_has_joined(notify: tuple[socket.socket, str]) -> None:
    server, path = notify
    with LocalCluster(1, 1) as cluster:
        for node in cluster.servers:
            node.stop()
        arguments = ("server", "--scheduler", cluster.address, "--bind", "tcp://127.0.0.1:0", "--node-id", "server-0")
        check_life(server, start(path, *arguments))


def test_a_worker_is_ready_when_its_command_runs(notify: tuple[socket.socket, str]) -> None:
    server, path = notify
    with LocalCluster(1, 1) as cluster:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        check_life(server, start(path, "worker", "--scheduler", cluster.address, "--", *command))
