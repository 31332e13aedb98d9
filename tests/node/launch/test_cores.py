"""Which cores the processes of a job run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.node.affinity import CorePlan, auto_servers, plan_cores, running_on, usable_cores
from kvd.node.launch import Job, run
from tests.node.launch.harness import DAEMON, WAIT_FOR_SERVERS, Lines, python


@pytest.mark.parametrize(("workers", "cores", "servers"), [(2, 2, 1), (2, 1, 1), (2, 3, 1), (2, 6, 4), (4, 64, 8)])
def test_servers_take_the_cores_that_the_workers_leave(workers: int, cores: int, servers: int) -> None:
    assert auto_servers(workers, cores) == servers


def test_each_server_gets_the_last_cores_and_the_rest_is_for_the_others() -> None:
    found = plan_cores(2, 2, {7, 0, 3, 1, 2})
    assert found == CorePlan(servers=(3, 7), rest=frozenset({0, 1, 2}))
    assert found is not None
    assert [set(found.cores_of(server)) for server in (0, 1, None)] == [{3}, {7}, {0, 1, 2}]
    assert plan_cores(3, 2, {7, 0, 3, 1, 2}) is not None
    assert plan_cores(4, 2, {7, 0, 3, 1, 2}) is None


def test_a_process_inherits_its_cores_and_the_starter_keeps_its_own() -> None:
    own = usable_cores()
    one = min(own)
    show = [sys.executable, "-S", "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with running_on({one}):
        inside = subprocess.check_output(show, text=True)
    with running_on(None):
        anywhere = subprocess.check_output(show, text=True)
    assert inside == f"[{one}]\n"
    assert anywhere == f"{sorted(own)}\n"
    assert usable_cores() == own


SHOW_CORES = "import os; print('cores', sorted(os.sched_getaffinity(0)))"


def test_servers_are_pinned_if_there_are_enough_cores(tmp_path: Path, lines: Lines, mark: dict[str, str]) -> None:
    """With two cores of this machine a worker and a server each have one; the plan is the same for more."""
    cores = sorted(usable_cores())
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    path = tmp_path / "daemon.py"
    path.write_text(DAEMON.replace('print("up"', f'{SHOW_CORES}\nprint("up"', 1))
    environment = {**mark, "KVD_CPU_AFFINITY": "auto", "SERVER_IS_UP": str(tmp_path / "up")}
    daemon = (sys.executable, "-S", str(path))
    command = python(SHOW_CORES, WAIT_FOR_SERVERS)
    job = Job(command=command, workers=1, servers=1, environment=environment, daemon=daemon)

    assert run(job, lines.take, handle_signals=False) == 0

    assert lines.of("server-0")[0] == f"cores [{cores[-1]}]"
    assert lines.of("scheduler")[0] == lines.of("worker-0")[0] == f"cores {cores[:-1]}"
    assert lines.of("launch")[0].startswith(f"servers run on cores {cores[-1]}, all others on {cores[0]}")
    assert sorted(usable_cores()) == cores


def test_nothing_is_pinned_without_enough_cores_or_unless_asked(
    daemon: Any, lines: Lines, mark: dict[str, str]
) -> None:
    cores = sorted(usable_cores())
    for asked in ("auto", "off"):
        environment = {**mark, "KVD_CPU_AFFINITY": asked}
        workers = len(cores) if asked == "auto" else 1
        job = Job(command=python(SHOW_CORES), workers=workers, servers=1, environment=environment, daemon=daemon)
        assert run(job, lines.take, handle_signals=False) == 0
        assert lines.of("worker-0")[-1] == f"cores {cores}"
    assert lines.of("launch") == [
        f"no server gets a core of its own: {len(cores) + 1} workers and servers, {len(cores)} usable cores"
    ]
