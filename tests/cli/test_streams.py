"""stdout and stderr that are closed, full or have a narrow encoding, and interrupts at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

Spawn = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
FULL = Path("/dev/full")

PRINTING = [["--help"], ["--version"], ["config", "show"], ["completion", "bash"], ["status", "--help"]]


@pytest.fixture
def full() -> Iterator[IO[str]]:
    """A stream to a disk without room."""
    if not FULL.is_char_device():
        pytest.skip("this system has no /dev/full")
    with FULL.open("r+") as stream:
        yield stream


def closing(descriptor: int) -> Callable[[], None]:
    return lambda: os.close(descriptor)


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_full_disk_is_reported(arguments: list[str], spawn: Spawn, full: IO[str]) -> None:
    process = spawn(*arguments, stdout=full)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, err
    assert err == ("error: cannot write to stdout: No space left on device; make room, or redirect it\n")


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_closed_pipe_is_quiet(arguments: list[str], spawn: Spawn) -> None:
    process = spawn(*arguments)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_without_stdout(arguments: list[str], spawn: Spawn) -> None:
    process = spawn(*arguments, preexec_fn=closing(1))
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("arguments", [["nonsense"], ["scheduler"], ["status", "-S", "nonsense"]], ids=" ".join)
def test_errors_keep_their_code_where_nobody_reads_them(arguments: list[str], spawn: Spawn, full: IO[str]) -> None:
    for options in ({"stderr": full}, {"preexec_fn": closing(2)}):
        process = spawn(*arguments, **options)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2


def test_every_character_can_be_written(spawn: Spawn) -> None:
    for encoding in ("ascii", "latin-1"):
        process = spawn("config", "show", environment={"PYTHONIOENCODING": encoding, "KVD_STATE_DIR": "/tmp/…☃"})
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        assert "/tmp/" in out
        assert err == ""


# --- whole jobs ------------------------------------------------------------------------------------------------------

JOB = ["launch", "-n", "1", "-s", "1", "--", sys.executable, "-c", "print('here')"]


def test_a_job_without_stderr(spawn: Spawn) -> None:
    process = spawn(*JOB, preexec_fn=closing(2))
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "worker-0  | here\n")


def test_a_job_without_stdout(spawn: Spawn) -> None:
    process = spawn(*JOB, preexec_fn=closing(1))
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err


def test_a_job_whose_output_cannot_be_written(spawn: Spawn, full: IO[str]) -> None:
    process = spawn(*JOB, stdout=full)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, err
    assert "launch    | cannot write stdout (No space left on device): ending the job\n" in err
    assert "Traceback" not in err


def test_a_demo_whose_output_cannot_be_written(spawn: Spawn, full: IO[str]) -> None:
    process = spawn("demo", "--epochs", "2", stdout=full)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, err
    assert "No space left on device" in err
    assert "Traceback" not in err


# --- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_it_imports(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "cli")])
    process = spawn("status", environment={"PYTHONPATH": path})
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (130, "", "")


INTERRUPTING = """
import os, signal, sys, weakref
class Lock:
    pass
def released(_):
    os.kill(os.getpid(), signal.SIGINT)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            lock = Lock()
            reference = weakref.ref(lock, released)  # as the import system has for its locks
            del lock
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize(
    "module", ["click", "rich.console", "kvd_cli.cluster", "kvd.client.cluster.observer", "numpy", "zmq", "asyncio"]
)
def test_an_interrupt_while_it_starts(module: str, spawn: Spawn, tmp_path: Path) -> None:
    """Wherever it comes: Python prints what is raised in the callbacks of its import system, and goes on."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "cli")])
    process = spawn("status", "-S", "tcp://127.0.0.1:9", environment={"PYTHONPATH": path, "INTERRUPT_AT": module})
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (130, "", "")


def test_an_interrupt_while_it_waits(spawn: Spawn) -> None:
    process = spawn("status", "-S", "tcp://127.0.0.1:9", "--timeout", "50s")
    assert process.stderr is not None
    assert "waiting for an answer" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("again_s", [0.02, 0.1])
def test_a_second_interrupt_of_a_job_at_any_time(again_s: float, spawn: Spawn) -> None:
    code = "import signal; print('here', flush=True); signal.pause()"
    process = spawn("launch", "-n", "1", "-s", "1", "--", sys.executable, "-S", "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "worker-0  | here\n"
    process.send_signal(signal.SIGINT)
    for _ in range(3):
        time.sleep(again_s)  # time itself: any moment of its end
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in err
    assert process.returncode == 130


def test_an_ignored_interrupt_stays_ignored(spawn: Spawn) -> None:
    process = spawn(
        "status", "-S", "tcp://127.0.0.1:9", "--timeout", "1s",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    time.sleep(0.3)  # time itself: it is at work
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
