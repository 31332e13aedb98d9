"""Processes that are started again: how often, how soon, and what becomes of a job that loses a server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError
from kvd.node.launch import Host, Job, Launch, RestartRule, run
from kvd.node.launch.restart_policy import Restart, RestartCount, Restarts
from kvd.testing.cluster import wait_until
from tests.node.launch.harness import (
    DEADLINE_S,
    WAIT_FOR_SERVERS,
    Launcher,
    Lines,
    in_thread,
    marked,
    python,
    shell,
    wait_for_line,
)

NEVER = RestartRule(9, first_s=1000.0, longest_s=1000.0)
SOON = RestartRule(2, first_s=0.01)


# --- how often and how soon ------------------------------------------------------------------------------------------


def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long() -> None:
    count = RestartCount(RestartRule(9))
    restarts = [count.next(0.5) for _ in range(10)]
    assert [restart and restart.delay_s for restart in restarts] == [
        0.0,
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        30.0,
        30.0,
        30.0,
        None,
    ]
    assert [str(restart) for restart in restarts[:3]] == [
        "restart 1 of 9",
        "restart 2 of 9 in 1 s",
        "restart 3 of 9 in 2 s",
    ]
    assert count.used == 9


def test_a_process_that_was_well_starts_again_at_once_and_its_restarts_are_counted_on() -> None:
    count = RestartCount(RestartRule(6))
    delays = [restart and restart.delay_s for restart in map(count.next, (0.0, 0.0, 59.9, 60.0, 0.0, 3600.0, 3600.0))]
    assert delays == [0.0, 1.0, 2.0, 0.0, 1.0, 0.0, None]


def test_a_row_may_be_long() -> None:
    count = RestartCount(RestartRule(100_000))
    for _ in range(99_999):
        count.next(0.0)
    assert count.next(0.0) == Restart(100_000, 100_000, 30.0)


def test_a_process_is_started_when_its_restart_is_due() -> None:
    async def main() -> None:
        started: list[str] = []
        restarts = Restarts(SOON)
        assert restarts.plan("a", 0.0, lambda: started.append("a")) == Restart(1, 2, 0.0)
        restarts.start_due()
        assert restarts.plan("a", 0.0, lambda: started.append("a again")) == Restart(2, 2, 0.01)
        restarts.start_due()
        assert started == ["a"], "the second one waits"
        (due,) = restarts.due
        await asyncio.wait_for(due, DEADLINE_S)
        restarts.start_due()
        restarts.start_due()
        assert started == ["a", "a again"]
        assert not restarts.due
        assert restarts.plan("a", 0.0, lambda: started.append("never")) is None
        assert (restarts.used("a"), restarts.used("b")) == (2, 0)

    asyncio.run(main())


def test_workers_that_fail_are_restarted_more_and_more_slowly(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    job = Job(
        command=shell("exit 5"),
        workers=1,
        servers=1,
        environment=mark,
        restarts=RestartRule(3, first_s=0.01),
        daemon=daemon,
    )
    assert run(job, lines.take, handle_signals=False) == 5
    assert lines.of("launch") == [
        "worker-0 failed (exit code 5): restart 1 of 3",
        "worker-0 failed (exit code 5): restart 2 of 3 in 0.01 s",
        "worker-0 failed (exit code 5): restart 3 of 3 in 0.02 s",
        "worker-0 failed (exit code 5): ending the job",
    ]


@pytest.mark.parametrize(
    ("setting", "failing", "code"),
    [("ON_WORKER_LOSS=shrink", "*-0", 0), ("ON_WORKER_LOSS=shrink", "*", 5), ("QUORUM=1", "*", 5)],
)
def test_the_others_go_on_without_a_worker(
    setting: str, failing: str, code: int, daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    name, value = setting.split("=")
    job = Job(
        command=shell(f'case "$KVD_NODE_ID" in {failing}) exit 5 ;; esac'),
        workers=2,
        servers=1,
        environment={**mark, f"KVD_{name}": value},
        daemon=daemon,
    )
    assert run(job, lines.take, handle_signals=False) == code
    first, *others = lines.of("launch")
    assert first.endswith("failed (exit code 5): the job goes on without it, once the scheduler has missed it")
    assert [other.split(": ")[1] for other in others] == ["ending the job"] * (code == 5)


def test_workers_that_were_well_are_restarted_at_once(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    job = Job(
        command=shell("exit 5"), workers=1, servers=1, environment=mark, daemon=daemon,
        restarts=RestartRule(2, first_s=1000.0, longest_s=1000.0, well_after_s=1e-6),
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 5
    assert "worker-0 failed (exit code 5): restart 2 of 2" in lines.of("launch")


def test_workers_do_not_wait_for_the_restart_of_another(daemon: Any, lines: Lines, mark: dict[str, str]) -> None:
    """Only the stop ends this job, and it ends it at once."""
    code = "import os, sys; print('ran', flush=True); sys.exit(5 if os.environ['KVD_LOCAL_RANK'] == '1' else 0)"
    job = Job(command=python(code), workers=2, servers=1, environment=mark, restarts=NEVER, daemon=daemon)
    launch = Launch(job, lines.take)
    result = in_thread(launch)
    lines.wait_for("launch", "worker-1 failed (exit code 5): restart 2 of 9 in 1000 s")
    lines.wait_for("worker-0", "ran")
    assert launch.pid_of("worker-1") is None
    launch.stop(7)
    assert result() == 7
    assert lines.of("worker-1") == ["ran", "ran"]


def test_ctrl_c_while_a_process_waits_for_its_restart(launcher: Callable[..., Launcher]) -> None:
    job = launcher(command=shell("exit 5"), workers=1, restarts={"limit": 9, "first_s": 1000.0, "longest_s": 1000.0})
    job.wait_for("launch stderr worker-0 failed (exit code 5): restart 2 of 9 in 1000 s")
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 128 + signal.SIGINT
    assert "scheduler stdout down scheduler" in said
    assert not marked(job.mark)


# --- servers and the scheduler ---------------------------------------------------------------------------------------


class Running:
    """A job of two servers and a worker that waits for both and then for the end of the test."""

    def __init__(self, daemon: Any, lines: Lines, folder: Path, environment: dict[str, str], **job: Any) -> None:
        code = f"""
            print("here", flush=True)
            while not os.path.exists({str(folder / "go")!r}):
                time.sleep(0.01)  # this program has no kvd
        """
        self._folder = folder
        self._lines = lines
        self._launch = Launch(
            Job(
                command=python(WAIT_FOR_SERVERS, code),
                workers=1,
                servers=2,
                environment={**environment, "SERVER_IS_UP": str(folder / "up")},
                daemon=daemon,
                **job,
            ),
            lines.take,
        )
        self.result = in_thread(self._launch)
        lines.wait_for("worker-0", "here")

    def signal(self, name: str, number: int) -> None:
        pid = self._launch.pid_of(name)
        assert pid is not None
        os.kill(pid, number)

    def wait_until_up(self, count: int) -> None:
        """Wait until servers have begun so many times in all."""
        wait_until(lambda: (self._folder / "up").stat().st_size >= count, "the servers are up")

    def end(self) -> int:
        """Let the worker end; the exit code of the job."""
        (self._folder / "go").touch()
        return self.result()


@pytest.fixture
def start(daemon: Any, lines: Lines, mark: dict[str, str], tmp_path: Path) -> Callable[..., Running]:
    def start(environment: dict[str, str] | None = None, **job: Any) -> Running:
        return Running(daemon, lines, tmp_path, {**mark, **(environment or {})}, **job)

    return start


def test_a_server_with_a_copy_is_restarted_under_its_name(start: Callable[..., Running], lines: Lines) -> None:
    job = start(replicas=2, restarts=SOON)
    job.signal("server-0", signal.SIGKILL)
    job.wait_until_up(3)
    job.signal("server-0", signal.SIGKILL)
    job.wait_until_up(4)
    assert job.end() == 0
    up = f"up server-0 {os.getpid()} "
    assert lines.of("server-0") == [up, up, up, "down server-0"]
    assert lines.of("server-1") == [f"up server-1 {os.getpid()} ", "down server-1"]
    assert lines.of("launch") == [
        "server-0 ended (SIGKILL): restart 1 of 2",
        "server-0 ended (SIGKILL): restart 2 of 2 in 0.01 s",
    ]


def test_a_server_on_another_host_is_restarted_through_a_new_connection(
    start: Callable[..., Running], lines: Lines, ssh: Any
) -> None:
    job = start(replicas=2, restarts=RestartRule(1), hosts=[Host("a"), Host("b")], ssh=ssh)
    job.signal("server-1", signal.SIGKILL)  # its ssh
    job.wait_until_up(3)
    assert job.end() == 0
    assert lines.of("launch") == ["server-1 on b ended (SIGKILL): restart 1 of 1"]
    assert [line for line in lines.of("server-1") if line.startswith("up")] == ["up server-1  "] * 2
    assert lines.of("server-1")[-1] == "down server-1"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_with_copies_goes_on_without_a_server(restarts: int, start: Callable[..., Running], lines: Lines) -> None:
    job = start(replicas=2, restarts=RestartRule(restarts))
    for number in range(restarts):
        job.signal("server-1", signal.SIGKILL)
        job.wait_until_up(3 + number)
    job.signal("server-1", signal.SIGKILL)
    lines.wait_for("launch", "server-1 ended (SIGKILL): the job goes on without it, with the other copy of its keys")
    assert job.end() == 0
    assert lines.of("server-0")[-1] == "down server-0"
    assert len(lines.of("launch")) == restarts + 1


def test_a_job_without_any_server_ends(start: Callable[..., Running], lines: Lines) -> None:
    job = start(replicas=2)
    job.signal("server-1", signal.SIGKILL)
    wait_for_line(lines, "launch", "server-1 ended (SIGKILL): the job goes on")
    job.signal("server-0", signal.SIGKILL)
    assert job.result() == 1
    assert lines.of("launch")[-1] == (
        "server-0 ended (SIGKILL): no server is left, and no copy of the keys: start the job again from a checkpoint; "
        "ending the job"
    )


def test_a_job_with_one_copy_ends_with_a_server_whatever_is_restarted(
    start: Callable[..., Running], lines: Lines
) -> None:
    job = start(restarts=RestartRule(3))
    job.signal("server-1", signal.SIGKILL)
    assert job.result() == 1
    assert lines.of("launch") == [
        "server-1 ended (SIGKILL): its part of the keys is gone, since each value has one copy: start the job again "
        "from a checkpoint; ending the job"
    ]


def test_a_server_that_is_told_to_end_is_not_restarted(start: Callable[..., Running], lines: Lines) -> None:
    job = start(replicas=2, restarts=RestartRule(3))
    job.signal("server-0", signal.SIGTERM)
    wait_for_line(lines, "launch", "server-0 ended (exit code 0): the job goes on without it")
    assert job.end() == 0
    assert lines.of("server-0") == [f"up server-0 {os.getpid()} ", "down server-0"]


def test_a_scheduler_that_is_told_to_end_ends_the_job(start: Callable[..., Running], lines: Lines) -> None:
    job = start(restarts=RestartRule(3))
    job.signal("scheduler", signal.SIGTERM)
    assert job.result() == 1
    assert lines.of("launch") == ["scheduler ended (exit code 0): ending the job"]


def test_the_scheduler_is_restarted(start: Callable[..., Running], lines: Lines) -> None:
    job = start(restarts=SOON)
    up = f"up scheduler {os.getpid()} tcp://127.0.0.1:0"
    again = f"up scheduler {os.getpid()} tcp://127.0.0.1:12345"
    job.signal("scheduler", signal.SIGKILL)
    wait_until(lambda: lines.of("scheduler") == [up, again], "it is up again")
    job.signal("scheduler", signal.SIGKILL)
    wait_until(lambda: lines.of("scheduler") == [up, again, again], "it is up once more")
    assert job.end() == 0
    assert lines.of("scheduler") == [up, again, again, "down scheduler"]
    assert lines.of("launch") == [
        "scheduler ended (SIGKILL): restart 1 of 2",
        "scheduler ended (SIGKILL): restart 2 of 2 in 0.01 s",
    ]


def test_a_server_whose_settings_are_wrong_ends_the_job_when_it_starts(
    daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    job = Job(
        command=shell("sleep 1000"), workers=1, servers=2, replicas=2, restarts=RestartRule(3), daemon=daemon,
        environment={**mark, "FAILS": "server-1", "FAILS_WITH": "2"},
    )  # fmt: skip
    assert run(job, lines.take, handle_signals=False) == 2
    assert lines.of("launch") == ["server-1 ended (exit code 2): ending the job"]


def test_a_server_that_may_not_come_back_does_not_end_the_job(
    start: Callable[..., Running], lines: Lines, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    job = start({"FAILS": "server-1", "FAILS_WITH": "2", "FAILS_IF": str(broken)}, replicas=2, restarts=RestartRule(3))
    broken.touch()
    job.signal("server-1", signal.SIGKILL)
    lines.wait_for(
        "launch", "server-1 ended (exit code 2): the job goes on without it, with the other copy of its keys"
    )
    assert job.end() == 0


def test_each_copy_needs_a_server_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"replicas = 2, but num_servers = 1: .* give the job -s 2") as caught:
        Job(command=["true"], workers=1, servers=1, replicas=2)
    assert caught.value.setting == "replicas"
