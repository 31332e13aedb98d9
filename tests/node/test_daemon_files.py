"""Files that a daemon cannot write: it says so and ends before anyone relies on it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.errors import KvdError
from kvd.node.daemon.ready_file import ReadyFile
from kvd.node.storage.state_file import SchedulerStateFile
from tests.environments import without_settings

DEADLINE_S = 30.0

Scheduler = Callable[..., tuple[int, str]]

PROGRAM = """
import sys
from pathlib import Path
from kvd.config import load
from kvd.node.daemon.roles import run_daemon
ready = Path(sys.argv[1]) if sys.argv[1] else None
sys.exit(run_daemon(load({}), "scheduler", ready_file=ready))
"""


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    """Run a scheduler that is expected to end by itself; returns its exit code and its stderr."""

    def run(ready: Path | str = "", state: Path | str = "", no_room: bool = False) -> tuple[int, str]:
        def limit() -> None:  # every write to a file fails, as on a full disk
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

        settings = {"NUM_WORKERS": "1", "NUM_SERVERS": "1", "BIND": "tcp://127.0.0.1:0", "LOG_FORMAT": "text"}
        settings["STATE_DIR"] = str(state)
        done = subprocess.run(
            [sys.executable, "-B", "-c", PROGRAM, str(ready)],
            env=without_settings(**{f"KVD_{name}": value for name, value in settings.items()}),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            preexec_fn=limit if no_room else None,
            cwd=tmp_path,
        )
        return done.returncode, done.stderr

    return run


# --- the ready file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nowhere/ready", "file/ready", "folder"])  # the last one fails at the end only
def test_a_ready_file_that_cannot_be_written_ends_the_daemon(name: str, scheduler: Scheduler, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    code, err = scheduler(ready=tmp_path / name)
    assert code == 1, err
    assert f"cannot write the ready file {tmp_path / name}: " in err
    assert "--ready-file" in err
    assert "Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"], "no .part is left"


def test_a_ready_file_on_a_full_disk_ends_the_daemon(scheduler: Scheduler, tmp_path: Path) -> None:
    code, err = scheduler(ready=tmp_path / "ready", no_room=True)
    assert code == 1, err
    assert f"cannot write the ready file {tmp_path / 'ready'}: File too large" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == [], "no .part is left"


def test_a_ready_file_appears_whole_and_goes(tmp_path: Path) -> None:
    ready = ReadyFile(tmp_path / "ready")
    ready.check()
    assert os.listdir(tmp_path) == []
    ready.write("tcp://127.0.0.1:1")
    assert os.listdir(tmp_path) == ["ready"]
    assert (tmp_path / "ready").read_text() == "tcp://127.0.0.1:1\n"
    ready.remove()
    ready.remove()
    assert os.listdir(tmp_path) == []


def test_a_ready_file_that_cannot_be_replaced_or_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ready" / "inside").mkdir(parents=True)
    ready = ReadyFile(tmp_path / "ready")
    with pytest.raises(KvdError, match="cannot write the ready file"):
        ready.write("x")
    ready.remove()
    assert "cannot remove" in caplog.text
    assert os.listdir(tmp_path) == ["ready"]


# --- the state -------------------------------------------------------------------------------------------------------


def make_file(folder: Path) -> None:
    (folder / "state").write_text("something")


def make_folder_in_its_place(folder: Path) -> None:
    (folder / "state" / "scheduler.json").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "state", "reason"),
    [
        (make_file, "state", "is a file, or lies below one"),
        (make_file, "state/below", "is a file, or lies below one"),
        (make_folder_in_its_place, "state", "is a directory, but the state is kept in a file with this name"),
    ],
)
def test_a_state_dir_that_is_not_a_directory_is_refused(
    make: Callable[[Path], None], state: str, reason: str, scheduler: Scheduler, tmp_path: Path
) -> None:
    make(tmp_path)
    code, err = scheduler(state=tmp_path / state)
    assert code == 2, err
    assert reason in err
    assert str(tmp_path / state) in err
    assert "--state-dir" in err
    assert "Traceback" not in err


def test_a_state_dir_without_room(scheduler: Scheduler, tmp_path: Path) -> None:
    code, err = scheduler(state=tmp_path / "state", no_room=True)
    assert code == 2, err
    assert f"state_dir = '{tmp_path / 'state'}' cannot be written (File too large)" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path / "state") == []


def test_an_invalid_state_is_refused(scheduler: Scheduler, tmp_path: Path) -> None:
    (tmp_path / "scheduler.json").write_text("{}")
    code, err = scheduler(state=tmp_path)
    assert code == 2, err
    assert "is not the state of a scheduler" in err
    assert (tmp_path / "scheduler.json").read_text() == "{}", "it is not overwritten"


def test_a_state_dir_is_made_again_when_it_was_removed(tmp_path: Path) -> None:
    state = SchedulerStateFile(tmp_path / "a" / "b")
    state.prepare()
    assert state.load() is None
    (tmp_path / "a" / "b").rmdir()
    for generation in (1, 2):
        state.save({"generation": generation})
    shutil.rmtree(tmp_path / "a")
    state.save({"generation": 3})
    state.close()
    assert os.listdir(tmp_path / "a" / "b") == ["scheduler.json"]
    assert json.loads((tmp_path / "a" / "b" / "scheduler.json").read_text()) == {"generation": 3}
