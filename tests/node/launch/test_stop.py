"""Ending a job from outside, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
from typing import Any

from kvd.node.launch import Job, Launch, run
from tests.node.launch.harness import Lines, in_thread, marked, python, shell, wait_for_line, wait_until_gone


def test_stop_is_graceful_first_and_at_once_then(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("pid", os.getpid(), flush=True)
        while True:
            signal.sigwait({signal.SIGTERM})
            print("not yet", flush=True)
    """
    job = Job(command=python(code), workers=1, servers=1, environment=mark, daemon=daemon, grace_s=1000)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    wait_for_line(lines, "worker-0", "pid ")
    assert launch.scheduler == "tcp://127.0.0.1:12345"
    assert launch.pid_of("worker-0") is not None
    assert launch.pid_of("worker-7") is None
    launch.stop(9)
    lines.wait_for("worker-0", "not yet")
    launch.stop(9)
    assert result() == 9
    launch.stop(9)  # the job is over: nothing happens
    assert "down scheduler" not in lines.of("scheduler"), "at once is at once for the daemons too"


def test_a_worker_that_will_not_end_is_killed_after_the_grace(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
    job = Job(command=python(code), workers=1, servers=1, environment=mark, daemon=daemon, grace_s=0.3)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    lines.wait_for("worker-0", "here")
    launch.stop(4)
    assert result() == 4
    assert "killing worker-0: still running 0.3 s after SIGTERM" in lines.of("launch")
    assert "down scheduler" in lines.of("scheduler")


def test_what_a_worker_leaves_behind_is_ended(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    command = shell("sleep 1000 & setsid sleep 1000 & (setsid sh -c 'trap : TERM; sleep 1000; sleep 1000' &) ; exit 0")
    job = Job(command=command, workers=1, servers=1, environment=mark, daemon=daemon)
    assert run(job, lines.take, handle_signals=False) == 0
    assert not marked(mark["JOB_MARK"])


def test_a_guard_that_is_killed_takes_its_command_along(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    command = shell("echo pid $$; sleep 1000 & sleep 1000; exit 0")
    job = Job(command=command, workers=1, servers=1, environment=mark, daemon=daemon)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    wait_for_line(lines, "worker-0", "pid ")
    guard = launch.pid_of("worker-0")
    assert guard is not None
    os.kill(guard, signal.SIGKILL)
    assert result() == 128 + signal.SIGKILL
    wait_until_gone(mark["JOB_MARK"])
