"""How a job ends: exit codes, restarts, daemons that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError, RequestTimeout
from kvd.node.launch import Job, RestartRule, run
from tests.node.launch.harness import WAIT_FOR_SERVERS, Lines, python, shell


def test_workers_find_the_cluster_and_success_is_0(
    tmp_path: Path, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    code = """
        import os
        names = ("ROLE", "SCHEDULER", "NODE_ID", "NUM_WORKERS", "NUM_SERVERS", "PREFERRED_RANK", "LOCAL_RANK")
        print(*(os.environ["KVD_" + name] for name in names), "NOTIFY_SOCKET" in os.environ)
    """
    environment = {
        **mark, "KVD_NODE_ID": "mine", "KVD_BIND": "tcp://0.0.0.0:1", "SERVER_IS_UP": str(tmp_path / "up"),
    }  # fmt: skip
    job = Job(command=python(WAIT_FOR_SERVERS, code), workers=2, servers=1, environment=environment, daemon=daemon)

    assert run(job, lines.take, handle_signals=False) == 0

    assert lines.of("worker-0") == ["worker tcp://127.0.0.1:12345 worker-0 2 1 0 0 False"]
    assert lines.of("worker-1") == ["worker tcp://127.0.0.1:12345 worker-1 2 1 1 1 False"]
    assert lines.of("scheduler") == [f"up scheduler {os.getpid()} tcp://127.0.0.1:0", "down scheduler"]
    assert lines.of("server-0") == [f"up server-0 {os.getpid()} ", "down server-0"]
    assert lines.all.index(("server-0", "stdout", b"down server-0")) < lines.all.index(
        ("scheduler", "stdout", b"down scheduler")
    )


def test_a_failing_worker_ends_the_rest_with_its_code(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = """
        import os, signal, sys
        if os.environ["KVD_LOCAL_RANK"] == "1":
            sys.exit(7)
        signal.pause()
    """
    job = Job(command=python(code), workers=3, servers=2, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 7
    assert "worker-1 failed (exit code 7): ending the job" in lines.of("launch")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (shell("kill -SEGV $$"), 128 + signal.SIGSEGV),
        (["/no/such/program"], 127),
        (["/dev/null"], 126),
    ],
)
def test_ends_of_a_worker_without_an_exit_code(
    command: list[str], code: int, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    job = Job(command=command, workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == code


def test_a_worker_is_restarted_under_its_name(tmp_path: Path, daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = f"""
        import os, pathlib, signal
        mine = pathlib.Path({str(tmp_path)!r}, os.environ["KVD_NODE_ID"])
        starts = int(mine.read_text()) if mine.exists() else 0
        mine.write_text(str(starts + 1))
        print("start", starts)
        if starts < 2 and mine.name == "worker-1":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    job = Job(command=python(code), workers=2, servers=1, environment=mark, restarts=RestartRule(2), daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 0
    assert lines.of("worker-1") == ["start 0", "start 1", "start 2"]
    assert lines.of("worker-0") == ["start 0"]
    assert "worker-1 failed (SIGKILL): restart 2 of 2 in 1 s" in lines.of("launch")


def test_restarts_are_counted(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    job = Job(
        command=shell("exit 5"),
        workers=1,
        servers=1,
        environment=mark,
        restarts=RestartRule(3, first_s=0.01),
        daemon=daemon,
    )
    assert run(job, lines.take, handle_signals=False) == 5
    assert len(lines.of("launch")) == 4


@pytest.mark.parametrize(("role", "code", "wanted"), [("server", 3, 1), ("server", 2, 2), ("scheduler", 2, 2)])
def test_a_daemon_that_ends_ends_the_job(
    role: str, code: int, wanted: int, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    environment = {**mark, "FAILS": role, "FAILS_WITH": str(code)}
    job = Job(command=shell("sleep 1000"), workers=1, servers=1, environment=environment, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == wanted
    assert any(f"ended (exit code {code})" in line for line in lines.of("launch"))


def test_a_scheduler_that_is_never_ready(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    environment = {**mark, "NEVER_READY": "1"}
    job = Job(command=["true"], workers=1, servers=1, environment=environment, daemon=daemon, startup_s=0.5)
    with pytest.raises(RequestTimeout, match=r"not ready within 0\.5 s"):
        run(job, lines.take, handle_signals=False)


@pytest.mark.parametrize("field", ["workers", "servers"])
def test_a_job_needs_workers_and_servers(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Job(**{"command": ["true"], "workers": 1, "servers": 1, field: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="command"):
        Job(command=[], workers=1, servers=1)


def test_each_daemon_has_its_own_state_directory(
    tmp_path: Path, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    show = tmp_path / "show.py"
    show.write_text(Path(daemon[-1]).read_text().replace('os.environ["KVD_BIND"]', 'os.environ["KVD_STATE_DIR"]'))
    environment = {**mark, "KVD_STATE_DIR": "/state", "SERVER_IS_UP": str(tmp_path / "up")}
    command = python(WAIT_FOR_SERVERS)
    job = Job(command=command, workers=1, servers=1, environment=environment, daemon=(*daemon[:-1], str(show)))
    assert run(job, lines.take, handle_signals=False) == 0
    assert lines.of("scheduler")[0].endswith(" /state/scheduler")
    assert lines.of("server-0")[0].endswith(" /state/server-0")
