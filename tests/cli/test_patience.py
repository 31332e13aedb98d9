"""A cluster that does not answer: commands say that they wait, and fail at once if waiting is in vain."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvd.config import Config
from kvd.errors import ConnectError
from kvd_cli import patience

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


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_known_hosts(host: str) -> None:
    patience.check_host(Config(scheduler=f"tcp://{host}:9"))
    patience.check_host(Config(scheduler="ipc:///tmp/x"))


def test_invalid_host_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_look_up", lambda host: OSError(-2, "Name or service not known"))
    with pytest.raises(ConnectError, match=r"the host 'elsewhere' of tcp://elsewhere:9 is not known here \(Name or"):
        patience.check_host(Config(scheduler="tcp://elsewhere:9"))


def test_a_slow_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SILENT_FOR_S", 0.05)
    monkeypatch.setattr(patience, "_look_up", lambda host: time.sleep(2))
    started = time.monotonic()
    patience.check_host(Config(scheduler="tcp://elsewhere:9"))
    assert time.monotonic() - started < 1.5
