"""Commands that take long say so on stderr, and fail at once if waiting is in vain."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.testing.cluster import LocalCluster
from tests.faults.stopping import stopped

Spawn = Callable[..., "subprocess.Popen[str]"]
NOBODY = "tcp://127.0.0.1:9"
UNKNOWN = "tcp://no-such-host.invalid:9191"


@pytest.mark.parametrize("flags", [[], ["-o", "json"]])
def test_a_command_that_waits_says_so(flags: list[str], spawn: Spawn) -> None:
    process = spawn("status", "-S", NOBODY, "--timeout", "3s", *flags)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    told, error = err.splitlines()
    assert told.startswith(f"waiting for an answer from the cluster at {NOBODY}, for up to 3 s")
    assert error.startswith(f"error: no scheduler answers at {NOBODY}")


def test_a_command_that_joins_says_so(spawn: Spawn, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.zeros(1, np.float32))
    process = spawn("init", "w", tmp_path / "w.npy", "-S", NOBODY, "--timeout", "3s")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert f"waiting for an answer from the cluster at {NOBODY}" in err


def test_a_short_wait_is_silent(spawn: Spawn) -> None:
    process = spawn("status", "-S", NOBODY, "--timeout", "1s")
    assert "waiting" not in process.communicate(timeout=60)[1]


def test_an_unknown_host_is_named(spawn: Spawn) -> None:
    process = spawn("status", "-S", UNKNOWN)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert "the host 'no-such-host.invalid'" in err or "no scheduler answers" in err  # a slow name server


def test_a_command_does_not_try_for_long_where_nothing_listens(spawn: Spawn) -> None:
    begun = time.monotonic()
    process = spawn("status", "-S", NOBODY)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, time.monotonic() - begun < 50) == (3, True)
    assert f"error: no scheduler answers at {NOBODY} (Connection refused): start one there" in err


def test_a_server_names_an_unknown_host(spawn: Spawn) -> None:
    process = spawn("server", "-S", UNKNOWN, "--insecure", "--join-timeout-s", "1s")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "no-such-host.invalid" in err


# ── a cluster that answers ──

PATIENT: dict[str, Any] = {"server_timeout_s": 40.0, "worker_timeout_s": 40.0}  # nobody is declared dead


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One worker and one server that can be stopped, with a key."""
    with LocalCluster(1, 1, processes=True, **PATIENT) as cluster:
        cluster.store().init("w", np.ones(4, np.float32))
        yield cluster


@pytest.mark.parametrize("flags", [[], ["-o", "json"]])
def test_a_fast_command_is_silent(flags: list[str], cluster: LocalCluster, spawn: Spawn) -> None:
    process = spawn("keys", "-S", cluster.address, *flags)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("keys", "-o", "json"), "listing the keys of all servers, for up to 60 s (--timeout); Ctrl-C ends it"),
        (("pull", "w", "--format", "json"), "pulling 'w', for up to 60 s (--timeout); Ctrl-C ends it"),
        (("command", "ping", "x", "-o", "json"), "running 'ping' on all servers, for up to 60 s (--timeout)"),
    ],
)
def test_a_slow_server_is_said_and_stdout_is_the_answer_alone(
    command: tuple[str, ...], says: str, cluster: LocalCluster, spawn: Spawn
) -> None:
    with stopped(cluster.servers[0]):
        process = spawn(*command, "-S", cluster.address)
        assert process.stderr is not None
        told = process.stderr.readline()
    out, err = process.communicate(timeout=60)
    assert says in told
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)


def test_a_terminal_shows_a_status_that_vanishes(cluster: LocalCluster, spawn: Spawn) -> None:
    terminal, theirs = os.openpty()
    try:
        seen = b""
        with stopped(cluster.servers[0]):
            process = spawn(
                "keys",
                "-o",
                "json",
                "-S",
                cluster.address,
                stderr=theirs,
                environment={"TERM": "xterm", "COLUMNS": "200"},
            )
            os.close(theirs)
            while b"listing the keys" not in seen:
                seen += os.read(terminal, 4096)
        out, _ = process.communicate(timeout=60)
        assert json.loads(out)[0]["key"] == "w"
        while b"\x1b[?25h" not in seen:  # the cursor is back
            seen += os.read(terminal, 4096)
        assert b"\x1b[2K" in seen.rpartition(b"listing the keys")[2]  # its line is erased
    finally:
        os.close(terminal)


def test_a_barrier_that_takes_long_says_so(spawn: Spawn) -> None:
    with ThreadPoolExecutor(1) as pool, LocalCluster(2, 1, run="") as cluster:
        process = spawn("barrier", "epoch", "-S", cluster.address)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting at barrier 'epoch' for all other workers, for up to 60 s")
        other = cluster.store()
        pool.submit(other.barrier, "epoch").result()
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_a_command_that_joins_names_the_servers_that_are_missing(spawn: Spawn, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.zeros(1, np.float32))
    with LocalCluster(1, 2) as cluster:
        cluster.lone_store().close()  # both servers have joined
        cluster.servers.pop().stop()
        process = spawn("init", "w", tmp_path / "w.npy", "-S", cluster.address)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting for an answer from the cluster at ")
        line = process.stderr.readline()
        assert line.startswith(
            f"waiting for server 1 (which has left) at {cluster.address}: 1 of 2 servers have joined;"
        )
        cluster.start("server", node_id="server-1")
        assert process.communicate(timeout=60)[0] == ""
        assert process.returncode == 0


def test_a_server_that_waits_for_its_scheduler_says_so(spawn: Spawn) -> None:
    process = spawn("server", "-S", NOBODY, "--timeout", "30s")
    assert process.stderr is not None
    assert NOBODY in next(line for line in process.stderr if "still waiting for the scheduler" in line)
