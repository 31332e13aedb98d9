"""The stdin of a launcher: each worker gets a copy, here and on other hosts, and after a restart."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.node.launch import Job, RestartRule, parse_hosts, run
from kvd.node.launch.stdin import MAX_BYTES, READ_BYTES, StdinCopies, copy_in_thread
from tests.node.launch.harness import DEADLINE_S, ROOT, Lines, python, shell

Feed = Callable[[bytes], int]

SUM = """
    import hashlib, os, sys
    print(os.environ["KVD_NODE_ID"], hashlib.sha1(sys.stdin.buffer.read()).hexdigest(), flush=True)
"""


@pytest.fixture
def feed() -> Iterator[Feed]:
    """Gives the reading end of a pipe into which this data goes, and then its end."""
    ends: list[int] = []

    def start(data: bytes) -> int:
        read, write = os.pipe()
        ends.append(read)

        def fill() -> None:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(data)

        threading.Thread(target=fill, daemon=True).start()
        return read

    yield start
    for end in ends:
        os.close(end)


def copied(stdin: StdinCopies) -> tuple[bytearray, threading.Event]:
    got, done = bytearray(), threading.Event()
    copy_in_thread(stdin, got.extend, done.set)
    return got, done


def never() -> None:
    raise AssertionError("there is not too much")


def test_each_reader_gets_everything_however_late(feed: Feed) -> None:
    data = os.urandom(3 * READ_BYTES + 1)
    stdin = StdinCopies(feed(data), never)
    for _ in range(2):
        got, done = copied(stdin)
        assert done.wait(DEADLINE_S)
        assert got == data
    stdin.close()


def test_a_file_is_read_from_its_position_which_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before after")
    with (tmp_path / "file").open("rb", buffering=0) as file:
        file.seek(7)
        stdin = StdinCopies(file.fileno(), never)
        got, done = copied(stdin)
        assert done.wait(DEADLINE_S)
        assert (bytes(got), file.tell()) == (b"after", 7)
        stdin.close()


def test_what_nobody_reads_is_not_read(feed: Feed) -> None:
    read = feed(b"for somebody else")
    StdinCopies(read, never).close()
    assert os.read(read, 100) == b"for somebody else"


def test_a_slow_reader_bounds_what_is_read_ahead() -> None:
    read, write = os.pipe()
    stdin = StdinCopies(read, never)
    os.write(write, b"x")
    assert stdin.read(0) == b"x"
    os.set_blocking(write, False)
    written = 0
    try:
        while True:
            written += os.write(write, b"x" * READ_BYTES)
            threading.Event().wait(0.01)  # time itself: it reads, or not
            assert written < 10 * READ_BYTES, "it reads although nobody asks for more"
    except BlockingIOError:
        pass
    stdin.close()
    os.close(write)
    os.close(read)


def test_the_end_of_the_job_ends_copies_that_wait() -> None:
    read, write = os.pipe()
    stdin = StdinCopies(read, never)
    _, done = copied(stdin)
    stdin.close()
    assert done.wait(DEADLINE_S)
    os.close(write)
    os.close(read)


def test_a_copy_that_begins_after_the_end_of_the_job_reads_nothing(feed: Feed) -> None:
    read = feed(b"for somebody else")
    stdin = StdinCopies(read, never)
    stdin.close()
    others = os.pipe()  # has the numbers that were given back
    before = set(threading.enumerate())
    assert stdin.read(0) == b""
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
    for descriptor in others:
        os.close(descriptor)
    assert os.read(read, 100) == b"for somebody else"


def test_too_much_is_reported() -> None:
    with open("/dev/zero", "rb", buffering=0) as endless:
        told = threading.Event()
        stdin = StdinCopies(endless.fileno(), told.set)
        got, done = copied(stdin)
        assert told.wait(DEADLINE_S)
        assert done.wait(DEADLINE_S)
        assert len(got) <= MAX_BYTES
        stdin.close()


@pytest.mark.parametrize("hosts", ["", "a,b:2"])
def test_a_program_from_stdin_runs_in_each_worker(
    hosts: str, ssh: Any, feed: Feed, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    program = b"import os\nprint('worker', os.environ['RANK'], flush=True)\nraise SystemExit(0)\n"
    job = Job(
        command=[sys.executable, "-S", "-"], workers=3, servers=1, environment=mark, daemon=daemon,
        stdin=feed(program), hosts=parse_hosts(hosts) if hosts else (), ssh=ssh,
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 0
    assert [lines.of(f"worker-{rank}") for rank in range(3)] == [[f"worker {rank}"] for rank in range(3)]


@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_large_and_binary_input_comes_whole(
    hosts: str, ssh: Any, feed: Feed, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    data = os.urandom(10 * READ_BYTES + 7)  # has all bytes that are commands on a connection
    job = Job(
        command=python(SUM), workers=2, servers=1, environment=mark, daemon=daemon,
        stdin=feed(data), hosts=parse_hosts(hosts) if hosts else (), ssh=ssh,
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 0
    digest = hashlib.sha1(data).hexdigest()
    assert [lines.of(f"worker-{rank}")[-1] for rank in range(2)] == [f"worker-{rank} {digest}" for rank in range(2)]


@pytest.mark.parametrize("hosts", ["", "a"])
def test_a_worker_that_is_restarted_gets_stdin_again(
    hosts: str, ssh: Any, feed: Feed, daemon: Any, lines: Lines, mark: dict[str, str], tmp_path: Path
) -> None:
    program = f"import os\nprint('ran', flush=True)\nif not os.path.exists({str(tmp_path / 'again')!r}):\n"
    program += f"    open({str(tmp_path / 'again')!r}, 'w')\n    os._exit(3)\n"
    job = Job(
        command=[sys.executable, "-S", "-"], workers=1, servers=1, environment=mark, daemon=daemon,
        stdin=feed(program.encode()), restarts=RestartRule(1), hosts=parse_hosts(hosts) if hosts else (), ssh=ssh,
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 0
    assert lines.of("worker-0") == ["ran", "ran"]


@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_a_worker_that_does_not_read_holds_nobody_up(
    hosts: str, ssh: Any, feed: Feed, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    command = shell("if [ $RANK = 0 ]; then wc -c; fi")
    job = Job(
        command=command, workers=2, servers=1, environment=mark, daemon=daemon,
        stdin=feed(b"x" * (20 * READ_BYTES)), hosts=parse_hosts(hosts) if hosts else (), ssh=ssh,
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 0
    assert lines.of("worker-0") == [str(20 * READ_BYTES)]


def test_too_much_stdin_ends_the_job_with_what_to_do(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    with open("/dev/zero", "rb", buffering=0) as endless:
        job = Job(
            command=shell("cat > /dev/null"), workers=1, servers=1, environment=mark, daemon=daemon,
            stdin=endless.fileno(),
        )  # fmt: skip
        assert run(job, lines.take, handle_signals=False) == 2
    assert any(line.startswith("stdin has more than 64 MiB") for line in lines.of("launch"))


TERMINAL = """
import os, sys
from kvd.node.launch.stdin import StdinCopies, copy_in_thread
import threading
done = threading.Event()
stdin = StdinCopies(0, lambda: None)
print("reading", flush=True)
copy_in_thread(stdin, lambda data: print("got", data, flush=True), done.set)
done.wait()
print("end", flush=True)
"""


def test_a_terminal_is_read_in_the_foreground_only_and_until_ctrl_d() -> None:
    """A shell's job: in the background it neither stops nor takes what is typed for the shell."""
    controller, terminal = pty.openpty()
    shell_program = f"""
import fcntl, os, signal, subprocess, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen([sys.executable, "-c", {TERMINAL!r}], preexec_fn=os.setpgrp)
print(job.pid, flush=True)
sys.stdin.readline()
os.tcsetpgrp(0, job.pid)
print("foreground", flush=True)
job.wait()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", shell_program], stdin=terminal, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        os.close(terminal)
        assert process.stdout is not None
        said = {process.stdout.readline().strip() for _ in range(2)}
        [pid] = [int(line) for line in said if line.isdigit()]
        try:
            os.write(controller, b"for the shell\n")
            assert process.stdout.readline() == "foreground\n", "the job has taken the line, or stopped"
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "SR"
            os.write(controller, b"for the job\n")
            assert process.stdout.readline() == "got b'for the job\\n'\n"
            os.write(controller, b"\x04")
            assert process.stdout.readline() == "end\n"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended well
                os.kill(pid, signal.SIGKILL)
    os.close(controller)
