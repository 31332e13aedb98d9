"""A cluster that does not answer: commands say that they wait, and fail at once if waiting is in vain."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

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


def test_a_server_names_an_unknown_host(spawn: Spawn) -> None:
    process = spawn("server", "-S", UNKNOWN, "--insecure", "--timeout", "30s")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 or "cannot find the address" in err  # a slow name server
    assert "no-such-host.invalid" in err
