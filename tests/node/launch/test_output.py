"""The output of a job: lines and what has no end yet, tracebacks as a whole, broken and blocked readers."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from kvd.node.launch import Job, Launch, run
from kvd.node.launch.job_output import JobOutput
from kvd.node.launch.output import MAX_LINE, PASS_ON_S, Lines, OutputRelay, Sink, Stream
from tests.node.launch.harness import DEADLINE_S, in_thread, python, shell
from tests.node.launch.harness import Lines as Harvest


def test_lines_come_whole_and_long_ones_in_pieces(daemon: Any, lines: Harvest, mark: dict[str, str]) -> None:
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


@pytest.mark.parametrize(
    ("data", "pieces", "rest"),
    [
        (b"one\ntwo\n", [b"one\n", b"two\n"], b""),
        (b"one\r\n\n", [b"one\r\n", b"\n"], b""),
        (b"\r 10%\r 20%", [b"\r 10%\r"], b" 20%"),
        (b"\r 10%", [], b"\r 10%"),
        (b"50%\r", [], b"50%"),
        (b"\r\r", [], b""),
        ("Zoë".encode()[:-1], [], b"Zo"),
        ("€uro 😀".encode()[:-1], [], "€uro ".encode()),
        (b"\xff\xfe binary \x80\x80\x80\x80\x80", [], b"\xff\xfe binary \x80\x80\x80\x80\x80"),
        (b"red \x1b[3", [], b"red "),
        (b"red \x1b[31m", [], b"red \x1b[31m"),
        (b"", [], b""),
    ],
)
def test_lines_are_cut_where_it_does_no_harm(data: bytes, pieces: list[bytes], rest: bytes) -> None:
    lines = Lines()
    assert lines.feed(data) == pieces
    assert lines.has_beginning == bool(rest)
    assert lines.take_beginning() == rest
    assert not lines.has_beginning
    end = lines.end()
    assert b"".join([*pieces, rest, end]).removesuffix(b"\n") == data.removesuffix(b"\n")
    assert not end or end.endswith(b"\n")


def test_lines_that_come_byte_by_byte_are_the_same() -> None:
    data = "a\r\nb\r c\n\nZoë 😀\n\x1b[1mx\x1b[0m\rend".encode()
    lines, pieces = Lines(), []
    for index in range(len(data)):
        pieces += lines.feed(data[index : index + 1])
    assert pieces == Lines().feed(data)
    assert b"".join([*pieces, lines.end()]) == data + b"\n"


TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ValueError: bad
"""
CHAIN = TRACEBACK + b"\nDuring handling of the above exception, another exception occurred:\n\n" + TRACEBACK


@pytest.mark.parametrize("data", [TRACEBACK, CHAIN, CHAIN.replace(b"\n", b"\r\n")])
def test_a_traceback_lasts_until_its_exception(data: bytes) -> None:
    lines = Lines()
    for line in data.splitlines(keepends=True):
        lines.feed(line)
        text = line.strip()
        assert lines.in_traceback == (not text.startswith(b"ValueError")) or not text, line
    lines.feed(b"the next line\n")
    assert not lines.in_traceback


class Writer:
    """A process with a relay, and when each piece of its output came."""

    def __init__(self, name: str, sink: Sink, turn: threading.Lock, **options: Any) -> None:
        read, self._write = os.pipe()
        pipes: dict[Stream, Any] = {"stderr": os.fdopen(read, "rb")}
        self.relay = OutputRelay(name, pipes, sink, lambda *_: None, turn, **options)

    def write(self, data: bytes) -> None:
        os.write(self._write, data)

    def end(self) -> None:
        os.close(self._write)
        assert self.relay.join(DEADLINE_S)


@pytest.mark.parametrize("begun", [b"\r 50%|####", b"name? ", "Zoë".encode()])
def test_a_line_without_an_end_is_handed_on(begun: bytes, lines: Harvest) -> None:
    writer = Writer("x", lines.take, threading.Lock(), shows_unfinished=True)
    writer.write(begun)
    lines.wait_for("x", begun.decode())
    writer.write(b" and more\n")
    lines.wait_for("x", " and more")
    writer.end()


def test_a_stream_that_ends_in_a_line_ends_it_though_the_other_goes_on(lines: Harvest) -> None:
    (out, write_out), (err, write_err) = os.pipe(), os.pipe()
    pipes: dict[Stream, Any] = {"stdout": os.fdopen(out, "rb"), "stderr": os.fdopen(err, "rb")}
    relay = OutputRelay("x", pipes, lines.take, lambda *_: None, threading.Lock(), shows_unfinished=True)
    os.write(write_out, b"50%")
    lines.wait_for("x", "50%")
    os.close(write_out)
    lines.wait_for("x", "")
    os.close(write_err)
    assert relay.join(DEADLINE_S)


def test_whole_lines_only_where_lines_are_read(lines: Harvest) -> None:
    writer = Writer("x", lines.take, threading.Lock())
    writer.write(b"first\n{")
    lines.wait_for("x", "first")
    writer.write(b"}\n")
    writer.end()
    assert lines.of("x") == ["first", "{}"]


def test_tracebacks_of_two_processes_do_not_mix(lines: Harvest) -> None:
    """Each is written line by line, in turns. The others wait, even if one line takes its time."""
    turn = threading.Lock()
    writers = [Writer(name, lines.take, turn, shows_unfinished=True) for name in ("a", "b")]
    first, *rest = CHAIN.splitlines(keepends=True)[:4]
    for line in (first, *rest[:-1]):
        for writer in writers:
            writer.write(line)
        threading.Event().wait(2 * PASS_ON_S)  # time itself
    for writer in writers:
        writer.write(rest[-1])
        writer.end()
    names = [node for node, _, _ in lines.all]
    assert names in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4)


def test_a_traceback_without_an_end_is_shown(lines: Harvest) -> None:
    writer = Writer("x", lines.take, threading.Lock(), shows_unfinished=True)
    writer.write(TRACEBACK[: TRACEBACK.index(b"ValueError")])
    lines.wait_for("x", "    step()")
    writer.end()


def test_a_line_of_the_launcher_does_not_wait_for_a_blocked_reader(mark: dict[str, str]) -> None:
    said: list[bytes] = []
    job = Job(command=["true"], workers=1, servers=1)
    output = JobOutput(job, lambda node, stream, piece: said.append(piece))
    with output.turn:
        output.say("ending the job")
    assert said == [b"ending the job\n"]


def test_the_job_ends_when_nobody_reads_its_output(daemon: Any, mark: dict[str, str]) -> None:
    def broken(node: str, stream: str, line: bytes) -> None:
        raise BrokenPipeError

    job = Job(command=shell("echo x; sleep 1000"), workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, broken, handle_signals=False) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(("stops", "grace_s"), [(1, 1.0), (2, 1000.0)])
def test_a_blocked_reader_does_not_stop_the_end(
    stops: int, grace_s: float, daemon: Any, lines: Harvest, mark: dict[str, str]
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
