"""Two schedulers on one ``state_dir``: the second ends at once, and says who uses it."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from pathlib import Path

import pytest

from kvd.errors import ConfigError
from kvd.node.storage.state_file import SchedulerStateFile
from kvd.node.storage.state_lock import InUse, StateLock
from kvd.testing.cluster import LocalCluster, ProcessNode


def test_the_second_of_two_schedulers_ends_and_names_the_first(tmp_path: Path) -> None:
    """Also while the first one is stopped; once that is dead, its successor takes the directory over."""
    with LocalCluster(1, 1, processes=True, state_dir=str(tmp_path)) as cluster:
        first = cluster.scheduler
        assert isinstance(first, ProcessNode)
        record = (tmp_path / "scheduler.json").read_bytes()
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(AssertionError, match="exited with 2") as refused:
                cluster.start("scheduler", num_workers=1, num_servers=1)
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert f"is in use by the scheduler at {first.address} (host " in str(refused.value)
        assert f"pid {first.process.pid}): end that one first" in str(refused.value)
        assert (tmp_path / "scheduler.json").read_bytes() == record
        cluster.kill_scheduler()
        cluster.restart_scheduler()


def test_a_lock_is_free_again_when_its_holder_closes(tmp_path: Path) -> None:
    first, second = SchedulerStateFile(tmp_path, "the first"), SchedulerStateFile(tmp_path, "the second")
    first.prepare()
    with pytest.raises(ConfigError, match="is in use by the first: end that one first"):
        second.prepare()
    first.save({"generation": 1})
    first.close()
    assert os.listdir(tmp_path) == ["scheduler.json"]
    second.prepare()
    with pytest.raises(ConfigError, match="is in use by the second"):
        first.prepare()
    second.close()


def test_one_whose_lock_was_removed_changes_nothing_once_another_has_it(tmp_path: Path) -> None:
    first, second = SchedulerStateFile(tmp_path, "the first"), SchedulerStateFile(tmp_path, "the second")
    first.prepare()
    (tmp_path / "scheduler.lock").unlink()
    first.save({"generation": 1})  # and locks it again
    with pytest.raises(ConfigError, match="in use by the first"):
        second.prepare()
    (tmp_path / "scheduler.lock").unlink()
    second.prepare()
    second.save({"generation": 2})
    with pytest.raises(InUse, match="the second"):
        first.save({"generation": 3})
    assert (tmp_path / "scheduler.json").read_text() == '{"generation": 2}'
    first.close()
    assert (tmp_path / "scheduler.lock").read_text() == "the second", "it is not the first one's to remove"
    second.close()


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = StateLock(tmp_path, "somebody")
    with caplog.at_level(logging.WARNING):
        lock.take()
        lock.keep()
    assert caplog.text.count("cannot be locked (Operation not supported): see that no other scheduler uses it") == 1
    lock.release()
