"""A disk without room: what cannot be written is said, what was written stays, and the job goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.environments import ROOT, without_settings

DEADLINE_S = 240.0
RUN = 'mount -t tmpfs -o size=2m none "$1" && TMPDIR="$1" exec "$2" -m tests.faults.full_disk_program "$1"'
"""The folder of the cluster, with its logs, is on that disk, too."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the job says that has a disk of 2 MB, in a mount namespace of its own."""
    disk = tmp_path_factory.mktemp("disk")
    unshare = shutil.which("unshare")
    trial = [str(unshare), "-rm", "mount", "-t", "tmpfs", "none", str(disk)]
    if unshare is None or subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("this needs unshare (util-linux), and a kernel that lets this user mount in a namespace")
    command = [unshare, "-rm", "bash", "-c", RUN, "bash", str(disk), sys.executable]
    done = subprocess.run(
        command, env=without_settings(), cwd=ROOT, timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), disk


def test_a_snapshot_that_does_not_fit_is_refused_and_leaves_nothing(found: Any) -> None:
    said, disk = found
    for name in ("second", "third"):
        text, path = said[name]
        assert path == str(disk / name)
        assert text.startswith(f"{path}: No space left on device: the snapshot cannot be written there")
        assert "nothing of it stays; make room" in text
    assert [name for name in said["left"] if not name.startswith("kvd-test-")] == ["first", "state"]
    assert said["in the first"] == 3


def test_training_goes_on_while_the_record_cannot_be_saved(found: Any) -> None:
    said, _ = found
    assert said["free"] == 0
    assert "No space left on device" in said["problem"]
    assert said["waits"]  # a barrier, until the record is saved
    assert said["trained"] == 7
    assert said["at the end"] == 8  # after the scheduler has come back with its record


def test_what_is_logged_once_there_is_room_is_in_the_log(found: Any) -> None:
    said, _ = found
    assert "the state can be saved again" in said["log"]
    assert "Traceback" not in said["log"]
