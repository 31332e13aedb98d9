"""What is held back of a job's output, and the folder with the logs of its processes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError
from kvd.node.launch import Job, run
from kvd.node.launch.job_output import KEPT_BYTES, KEPT_LINES, HeldBack, LogFolder
from kvd.observe.log import JsonFormatter
from tests.node.launch.harness import Lines, shell


def logged(level: int, message: str) -> bytes:
    record = logging.LogRecord("kvd.node", level, __file__, 1, message, (), None)
    return JsonFormatter("server").format(record).encode() + b"\n"


def test_what_daemons_log_below_a_warning_is_held_back(lines: Lines) -> None:
    output = HeldBack(lines.take, ["server-0"])
    info, warning = logged(logging.INFO, "joined"), logged(logging.WARNING, "slow")
    for line in (info, warning, b"Traceback (most recent call last):\n", b"    its frames\n"):
        output.write("server-0", "stderr", line)
    output.write("worker-0", "stderr", info)
    assert lines.all == [
        ("server-0", "stderr", warning.rstrip()),
        ("server-0", "stderr", b"Traceback (most recent call last):"),
        ("server-0", "stderr", b"    its frames"),
        ("worker-0", "stderr", info.rstrip()),
    ]
    output.release("worker-0")
    output.release("server-0")
    output.release("server-0")
    assert lines.all[4:] == [("server-0", "stderr", info.rstrip())]


def test_when_the_job_ends_warnings_are_held_back_too(lines: Lines) -> None:
    output = HeldBack(lines.take, ["server-0"])
    warning, error = logged(logging.WARNING, "worker 0 ended"), logged(logging.ERROR, "broken")
    output.write("server-0", "stderr", warning)
    output.expect_ends()
    for line in (warning, error):
        output.write("server-0", "stderr", line)
    assert [line + b"\n" for _, _, line in lines.all] == [warning, error]


def test_the_traceback_of_a_line_that_is_held_back_is_too(lines: Lines) -> None:
    output = HeldBack(lines.take, ["server-0"])
    for line in (b"12:00:00 server  a message", b"    of two lines", b"12:00:01 server  error: bad", b"    and why"):
        output.write("server-0", "stderr", line + b"\n")
    assert lines.of("server-0") == ["12:00:01 server  error: bad", "    and why"]


def test_what_is_kept_is_bounded(lines: Lines) -> None:
    output = HeldBack(lines.take, ["server-0"])
    for number in range(KEPT_LINES + 5):
        output.write("server-0", "stderr", logged(logging.INFO, f"{number} " + "x" * 2 * KEPT_BYTES))
    output.release("server-0")
    assert len(lines.all) == KEPT_LINES
    assert {len(line) for _, _, line in lines.all} == {KEPT_BYTES}
    assert b'"message":"5 x' in lines.all[0][2]


def test_a_job_whose_daemon_fails_shows_what_it_logged(tmp_path: Path, lines: Lines, mark: dict[str, str]) -> None:
    daemon = tmp_path / "daemon"
    daemon.write_text('echo "12:00:00 scheduler  about to fail" >&2; exit 4')
    job = Job(command=["true"], workers=1, servers=1, environment=mark, daemon=["/bin/sh", str(daemon)], quiet=True)
    assert run(job, lines.take, handle_signals=False) == 1
    assert lines.of("scheduler") == ["12:00:00 scheduler  about to fail"]


def test_the_first_thing_a_launcher_says_is_where_the_scheduler_is(
    daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    environment = {**mark, "KVD_JOB": "digits", "KVD_CPU_AFFINITY": "auto"}
    command = shell("echo '12:00:00 worker  the log of the program' >&2")
    job = Job(command=command, workers=1, servers=1, environment=environment, daemon=daemon, quiet=True, announce=True)
    assert run(job, lines.take, handle_signals=False) == 0
    first, second = lines.of("launch")
    assert re.fullmatch(
        "scheduler at tcp://127.0.0.1:12345; look at the job with: KVD_SCHEDULER=tcp://127.0.0.1:12345 KVD_JOB=digits "
        r"(KVD_KEYFILE=/\S+/cluster\.key|KVD_INSECURE=1) kvd status",
        first,
    )
    assert "core" in second
    assert lines.of("worker-0") == ["12:00:00 worker  the log of the program"]


def test_logs_are_written_line_by_line_and_earlier_ones_are_kept_once(tmp_path: Path, lines: Lines) -> None:
    for text in (b"first", b"second", b"third"):
        folder = LogFolder(tmp_path, ["launch", "worker-0"], lines.take)
        folder.write("worker-0", "stdout", text + b"\n")
        assert (tmp_path / "worker-0.log").read_bytes() == text + b"\n"
        folder.close()
        folder.write("worker-0", "stdout", b"too late\n")
    assert (tmp_path / "worker-0.log.1").read_bytes() == b"second\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "launch.log", "launch.log.1", "worker-0.log", "worker-0.log.1",
    ]  # fmt: skip
    assert lines.of("worker-0") == ["first", "too late", "second", "too late", "third", "too late"]


def test_logs_have_a_limit(tmp_path: Path, lines: Lines) -> None:
    folder = LogFolder(tmp_path, ["launch", "worker-0"], lines.take, max_file_bytes=100)
    for number in range(20):
        folder.write("worker-0", "stdout", b"%029d\n" % number)
    folder.write("worker-0", "stdout", b"x" * 200 + b"\n")
    folder.close()
    assert (tmp_path / "worker-0.log").read_bytes() == b"x" * 200 + b"\n"
    assert [int(line) for line in (tmp_path / "worker-0.log.1").read_bytes().splitlines()] == [18, 19]


def test_the_job_goes_on_when_its_log_cannot_be_written_any_more(tmp_path: Path, lines: Lines) -> None:
    folder = LogFolder(tmp_path, ["launch", "worker-0"], lines.take)
    (tmp_path / "worker-1.log.1").mkdir()  # in the way of the file that is put aside
    (tmp_path / "worker-1.log").touch()
    for text in (b"one", b"two"):
        folder.write("worker-1", "stdout", text + b"\n")
    assert lines.of("worker-1") == ["one", "two"]
    assert lines.of("launch") == [f"cannot write logs to {tmp_path} (Is a directory): the job goes on without them"]
    folder.close()


def test_a_folder_for_logs_that_cannot_be_made(tmp_path: Path, lines: Lines) -> None:
    (tmp_path / "file").touch()
    job = Job(command=["true"], workers=1, servers=1, log_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot write logs to .*/file: File exists; give --log-dir"):
        run(job, lines.take, handle_signals=False)
