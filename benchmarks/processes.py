"""Runs a command to its end, or ends it: no process of it is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. `code` is None if it took too long and was ended."""

    code: int | None
    output: str
    complaints: str


def run(command: list[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Finished:
    """Run a command in a session of its own, and keep its output; `environment` replaces ours."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, complaints = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Finished(None, "", "")
    finally:
        _end(process)
    return Finished(process.returncode, output, complaints)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt it, so that it can clean up; kill its whole session if that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
