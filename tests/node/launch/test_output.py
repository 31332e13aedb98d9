"""The output of a job: whole lines, broken and blocked readers."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from kvd.node.launch import Job, Launch, run
from kvd.node.launch.output import MAX_LINE
from tests.node.launch.harness import DEADLINE_S, Lines, in_thread, python, shell


def test_lines_come_whole_and_long_ones_in_pieces(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = f"""
        import os, sys
        os.write(1, b"one, ")
        os.write(1, b"\\xff two\\n\\n")
        os.write(2, b"x" * {MAX_LINE + 10} + b"\\n")
        os.write(1, b"the end without a line end")
    """
    job = Job(command=python(code), workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 0
    out = [line for node, stream, line in lines.all if (node, stream) == ("worker-0", "stdout")]
    assert out == [b"one, \xff two", b"", b"the end without a line end"]
    err = [line for node, stream, line in lines.all if (node, stream) == ("worker-0", "stderr")]
    assert [len(line) for line in err] == [MAX_LINE, 10]


def test_the_job_ends_when_nobody_reads_its_output(daemon: Any, mark: dict[str, str]) -> None:
    def broken(node: str, stream: str, line: bytes) -> None:
        raise BrokenPipeError

    job = Job(command=shell("echo x; sleep 1000"), workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, broken, handle_signals=False) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(("stops", "grace_s"), [(1, 1.0), (2, 1000.0)])
def test_a_blocked_reader_does_not_stop_the_end(
    stops: int, grace_s: float, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    """A slow reader slows the nodes down, but the job ends: after the grace, or at once when asked twice."""
    entered, release = threading.Event(), threading.Event()

    def blocked(node: str, stream: str, line: bytes) -> None:
        if node == "worker-0":
            entered.set()
            release.wait(DEADLINE_S)

    job = Job(
        command=shell("while :; do echo x; done"),
        workers=1,
        servers=1,
        environment=mark,
        daemon=daemon,
        grace_s=grace_s,
    )
    launch = Launch(job, blocked)
    result = in_thread(launch)
    assert entered.wait(DEADLINE_S)
    for _ in range(stops):
        launch.stop(3)
    assert result() == 3
    release.set()
