"""The guard and what it is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvd.node.parent import Guard, ParentWatch


def test_a_watch_without_pidfd_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError

    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    watch = ParentWatch(child.pid)
    assert watch.descriptor is None
    assert not watch.is_gone()
    child.kill()
    child.communicate()
    assert watch.is_gone()
    assert watch.is_gone()
    watch.close()


def test_a_watch_for_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert ParentWatch(child.pid).is_gone()


def test_a_guard_ends_a_command_whose_parent_is_already_gone(mark: dict[str, str]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    before = signal.getsignal(signal.SIGTERM)
    guard = Guard(["sleep", "1000"], environment={**os.environ, **mark}, parent_pid=gone.pid, grace_s=5)
    assert guard.run() == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
