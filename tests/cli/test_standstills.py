"""What ``kvd doctor`` finds in a report when training stands still, and what it takes for nothing wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from kvd.errors import JobEnded, NotAllowed
from kvd.protocol.messages import EXIT_BARRIER
from kvd_cli import doctor as doctor_module
from kvd_cli.health import Health, health_of
from kvd_cli.options import current
from tests.cli.reports import member, report, server

MEMBERS = [member("server", 0), *(member("worker", rank) for rank in range(3))]
PROGRESS = {
    "step": 5,
    "rounds": 5,
    "steps_per_s": 0.0,
    "usual_step_s": 0.2,
    "last_step_ago_s": 14.0,
    "open_rounds": [],
    "last_pushes": {},
    "memory_used_bytes": 1 << 20,
    "memory_of_other_runs_bytes": 0,
    "memory_limit_bytes": 1 << 30,
}


def open_round(*waits_for: str, age_s: float = 14.0, usual_s: float | None = 0.2, limit_s: float = 10.0) -> Any:
    times = {"age_s": age_s, "usual_s": usual_s, "standstill_s": limit_s}
    return {"key": "w", "round": 6, "waits_for": list(waits_for), **times}


def barrier(*waits_for: str, name: str = "user:x", age_s: float = 14.0, limit_s: float | None = 10.0) -> Any:
    times = {"age_s": age_s, "standstill_s": limit_s}
    return {"name": name, "entered": ["worker 0"], "waits_for": list(waits_for), **times}


def given(*open_rounds: Any, members: Any = MEMBERS, barriers: Any = (), **progress: Any) -> dict[str, Any]:
    figures = {**server(0), **PROGRESS, "open_rounds": list(open_rounds), **progress}
    return report(figures, members=members, barrier_waits=list(barriers))


def judged(*open_rounds: Any, **more: Any) -> Health:
    return health_of(given(*open_rounds, **more))


def changed(rank: int, **changes: Any) -> list[Any]:
    """The members, one worker of which is another."""
    return [{**entry, **changes} if (entry["role"], entry["rank"]) == ("worker", rank) else entry for entry in MEMBERS]


# ── rounds ──


def test_a_hung_program_is_named_with_its_process_and_what_to_do() -> None:
    health = judged(open_round("worker 1"), members=changed(1, host_name="gpu7", pid=4711))
    assert not health.is_healthy
    [line] = health.advice
    assert line == (
        "stalled: round 6 of key 'w' has waited for 14 s for worker 1 (node worker-1, process 4711 on host gpu7), "
        "where a step usually takes 200 ms. worker 1 is heard, so its process runs. Its program is elsewhere: in a "
        "data loader, at a lock, or in an evaluation that only it makes. See where with py-spy dump --pid 4711 on host "
        "gpu7."
    )


def test_a_stopped_process_gets_other_advice_and_is_named_once() -> None:
    health = judged(open_round("worker 1"), members=changed(1, is_silent=True, last_heard_s=15.2, pid=4711))
    [line] = health.advice
    assert "worker 1 was last heard 15 s ago, so its process is stopped or cut off" in line
    assert "kill -CONT 4711" in line


def test_a_silent_worker_is_a_finding_even_if_nobody_waits_for_it() -> None:
    health = judged(members=changed(1, is_silent=True, last_heard_s=11.0), last_step_ago_s=1.0)
    assert not health.is_healthy
    [line] = health.advice
    assert line.startswith("silent: worker 1 (node worker-1, process 1). worker 1 was last heard 11 s ago")


@pytest.mark.parametrize("state", ["done", "left", "dead", "lost"])
def test_a_worker_that_is_out_of_the_rounds_may_be_silent(state: str) -> None:
    health = judged(members=changed(1, is_silent=True, state=state), last_step_ago_s=1.0)
    assert not [line for line in health.advice if line.startswith(("silent", "stalled"))]


def test_many_workers_are_not_all_named() -> None:
    members = [member("server", 0), *(member("worker", rank) for rank in range(12))]
    health = judged(open_round(*(f"worker {rank}" for rank in range(1, 12))), members=members)
    [line] = health.advice
    assert "worker 4 (node worker-4, process 1) and 7 more" in line


@pytest.mark.parametrize(
    ("age_s", "usual_s", "limit_s", "is_healthy", "begins"),
    [
        (9.0, 0.2, 10.0, True, []),
        (10.5, 0.2, 10.0, False, ["stalled"]),
        (55.0, 60.0, 600.0, True, []),  # as long as each step takes
        (300.0, 60.0, 600.0, True, ["waiting"]),
        (601.0, 60.0, 600.0, False, ["stalled"]),
        (30.0, None, 120.0, True, ["waiting"]),  # the first step
        (121.0, None, 120.0, False, ["stalled"]),
    ],
)
def test_the_age_counts_by_the_usual_time(
    age_s: float, usual_s: float | None, limit_s: float, is_healthy: bool, begins: list[str]
) -> None:
    entry = open_round("worker 1", age_s=age_s, usual_s=usual_s, limit_s=limit_s)
    health = judged(entry, last_step_ago_s=1.0)
    assert health.is_healthy is is_healthy
    assert [line.partition(":")[0] for line in health.advice] == begins


def test_what_another_line_explains_is_not_said_again() -> None:
    health = judged(open_round("worker 1"), members=changed(1, process_ended=True), last_step_ago_s=1.0)
    [line] = health.advice
    assert line.startswith("process ended: worker 1.")
    health = judged(open_round("worker 2"), members=MEMBERS[:-1], last_step_ago_s=1.0)
    assert health.advice == ()  # it has not joined: that is said by `missing`


def test_servers_that_wait_for_the_same_worker_are_one_finding() -> None:
    servers = [{**server(rank), **PROGRESS, "open_rounds": [open_round("worker 1")]} for rank in range(2)]
    health = health_of(report(*servers, members=[*MEMBERS, member("server", 1)]))
    assert len(health.advice) == 1


def test_a_round_that_waits_for_a_backup() -> None:
    [line] = judged(open_round("server 1"), members=[*MEMBERS, member("server", 1)]).advice
    assert "for server 1 (node server-1, process 1)" in line
    assert "Look at its log" in line


def test_the_first_key_is_awaited() -> None:
    entry = {**open_round("worker 0", age_s=130.0, usual_s=None, limit_s=120.0), "round": 0}
    [line] = judged(entry).advice
    assert line.startswith("stalled: init of key 'w' has waited for 2 min for worker 0")


# ── barriers ──


def test_a_barrier_that_is_not_reached() -> None:
    health = judged(barriers=[barrier("worker 1", "worker 2")])
    assert not health.is_healthy
    [line] = health.advice
    assert line.startswith(
        "stalled: worker 0 at barrier 'x' has waited for 14 s for worker 1 (node worker-1, process 1), "
    )


def test_a_barrier_before_the_first_step_has_more_time() -> None:
    more: Any = {"usual_step_s": None, "last_step_ago_s": None}
    assert judged(barriers=[barrier("worker 1")], **more).is_healthy
    assert not judged(barriers=[barrier("worker 1", age_s=121.0)], **more).is_healthy


def test_the_end_of_the_programs_may_take_long() -> None:
    health = judged(barriers=[barrier("worker 1", name=EXIT_BARRIER, age_s=900.0, limit_s=None)])
    assert health.is_healthy
    [line] = health.advice
    assert line.startswith("waiting: worker 0 at close has waited for 15 min for worker 1")


def test_rounds_and_barriers_that_wait_for_each_other() -> None:
    health = judged(open_round("worker 0"), barriers=[barrier("worker 1")])
    assert (
        "worker 0 is at barrier 'x', where it waits for worker 1: all workers must make these calls" in health.advice[0]
    )


# ── asynchronous jobs ──


def pushed(ago_s: float) -> dict[str, Any]:
    return {"ago_s": ago_s, "usual_s": 0.1, "standstill_s": 10.0}


def test_a_worker_that_pushes_nothing_while_others_do() -> None:
    latest = {"worker 0": pushed(0.5), "worker 1": pushed(34.0), "worker 2": pushed(1.0)}
    health = judged(last_pushes=latest, last_step_ago_s=0.5)
    assert not health.is_healthy
    [line] = health.advice
    assert line.startswith(
        "stalled: worker 1 (node worker-1, process 1) has pushed nothing for 34 s, where it usually pushes every "
        "100 ms; the others continue. worker 1 is heard"
    )


@pytest.mark.parametrize("changes", [{"state": "done"}, {"state": "idle"}, {"state": "back"}])
def test_a_worker_that_has_nothing_to_push(changes: dict[str, Any]) -> None:
    latest = {"worker 0": pushed(0.5), "worker 1": pushed(34.0)}
    health = judged(last_pushes=latest, last_step_ago_s=0.5, members=changed(1, **changes))
    assert not [line for line in health.advice if line.startswith("stalled")]


def test_a_worker_at_a_barrier_pushes_nothing() -> None:
    latest = {"worker 0": pushed(34.0), "worker 1": pushed(0.5)}
    health = judged(last_pushes=latest, last_step_ago_s=0.5, barriers=[barrier("worker 1", age_s=5.0)])
    assert health.is_healthy


def test_a_worker_that_pushes_to_other_servers_now() -> None:
    servers = [
        {**server(rank), **PROGRESS, "last_step_ago_s": 0.5, "last_pushes": {"worker 0": pushed(0.5), "worker 1": late}}
        for rank, late in enumerate([pushed(34.0), pushed(1.0)])
    ]
    assert health_of(report(*servers, members=[*MEMBERS, member("server", 1)])).is_healthy


# ── nobody waits ──


def test_a_job_that_evaluates_between_two_steps_is_healthy_and_the_pause_is_said() -> None:
    health = judged(last_step_ago_s=60.0)
    assert health.is_healthy
    [line] = health.advice
    assert line.startswith("quiet: no worker has pushed for 60 s, where a step usually takes 200 ms. None waits for")
    assert judged(last_step_ago_s=9.0).advice == ()
    assert judged(last_step_ago_s=60.0, usual_step_s=60.0).advice == ()
    assert judged(last_step_ago_s=None, usual_step_s=None).advice == ()


def test_a_job_that_is_over_is_not_quiet() -> None:
    members = [member("server", 0), *(member("worker", rank, "left") for rank in range(3))]
    assert judged(last_step_ago_s=600.0, members=members).advice == ()


def test_pauses_of_all_workers_of_an_asynchronous_job_are_no_finding() -> None:
    latest = {f"worker {rank}": pushed(30.0) for rank in range(3)}
    assert judged(last_pushes=latest, last_step_ago_s=30.0).is_healthy


# ── servers that died ──


def test_after_a_server_is_gone_the_advice_is_one() -> None:
    members = [member("server", 0), member("server", 1, "dead"), member("worker", 0, process_ended=True)]
    members += [member("worker", 1, "dead"), member("worker", 2, "lost")]
    health = health_of(report({**server(0), **PROGRESS, "open_rounds": [open_round("worker 0")]}, members=members))
    assert not health.is_healthy
    assert health.advice == (
        "dead: server 1. With replicas=1 its part of the keys is gone: start the job again from a checkpoint.",
        "dead: worker 1. Starting it again does not help: values are gone with a server, see above.",
        "process ended: worker 0. Starting it again does not help: values are gone with a server, see above.",
    )


# ── what is shown ──


def test_the_table_of_progress(status: Callable[..., Result]) -> None:
    lines = [" ".join(line.split()) for line in status(given(open_round("worker 1"))).stdout.splitlines()]
    place = lines.index("SERVER STEP PER SECOND USUAL OPEN FOR WAITS FOR MEMORY")
    assert lines[place + 1] == "server 0 5 0.00 200 ms 14 s worker 1 1.0 MiB of 1.0 GiB"
    lines = [" ".join(line.split()) for line in status(given(usual_step_s=None)).stdout.splitlines()]
    assert lines[place + 1] == "server 0 5 0.00 - - - 1.0 MiB of 1.0 GiB"


def test_doctor_exits_with_1(status: Callable[..., Result]) -> None:
    result = status(given(open_round("worker 1")), command="doctor")
    assert result.exit_code == 1
    assert result.stdout.startswith("stalled: ")
    as_json = json.loads(status(given(open_round("worker 1")), "-o", "json", command="doctor").stdout)
    assert as_json["healthy"] is False
    assert as_json["advice"][0].startswith("stalled: ")
    assert as_json["servers"][0]["open_rounds"][0]["waits_for"] == ["worker 1"]


# ── several jobs ──

NO_JOB = report(server(0), members=MEMBERS[:1])
RUNS = [
    {"job": "a", "run": "1a", "phase": "running", "workers": 3, "num_workers": 3},
    {"job": "b", "run": "1b", "phase": "ended", "workers": 3, "num_workers": 3},
    {"job": "c", "run": "1c", "phase": "failing", "workers": 3, "num_workers": 3},
    {"job": "default", "run": "1d", "phase": "running", "workers": 3, "num_workers": 3},
]


ENDED: dict[str, Any] = {}
"""The report of a run that ends while the jobs are examined one after the other."""


@pytest.fixture
def doctor(kvd: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``kvd doctor`` against a cluster with these reports, by the name under which a job is asked for. A key that
    is not allowed to see a job has none."""

    def run(by_job: dict[str, Any], *flags: str) -> Result:
        @contextlib.contextmanager
        def observer(doing: str, job: str = "", within_s: float | None = None) -> Iterator[Any]:
            current().load_client()
            if job not in by_job:
                raise NotAllowed("this key is of other jobs")
            if by_job[job] is ENDED:
                raise JobEnded("the run has ended", job=job)
            yield SimpleNamespace(status=lambda _within_s: {**by_job[job], "jobs": RUNS})

        monkeypatch.setattr(doctor_module, "observer", observer)
        return kvd("doctor", *flags)

    return run


def test_all_jobs_under_way_are_examined(doctor: Callable[..., Result]) -> None:
    stalled = given(open_round("worker 1"))
    result = doctor({"": {**NO_JOB, "missing": ["server 1"]}, "a@1a": {**stalled, "missing": ["server 1"]}})
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first.startswith("missing: server 1.")  # once
    assert second.startswith("job 'a': stalled: round 6 of key 'w'")
    as_json = json.loads(doctor({"": NO_JOB, "a@1a": stalled, "c@1c": NO_JOB}, "-o", "json").stdout)
    assert [(other["job"], other["run"], other["healthy"]) for other in as_json["other_jobs"]] == [
        ("a", "1a", False),
        ("c", "1c", True),
    ]
    assert as_json["healthy"] is False


def test_a_run_that_ends_meanwhile_is_passed_over(doctor: Callable[..., Result]) -> None:
    result = doctor({"": NO_JOB, "a@1a": ENDED, "c@1c": NO_JOB}, "-o", "json")
    assert [other["job"] for other in json.loads(result.stdout)["other_jobs"]] == ["c"], result.output


def test_one_job_that_is_named_is_examined_alone(doctor: Callable[..., Result]) -> None:
    result = doctor({"": NO_JOB, "a@1a": given(open_round("worker 1"))}, "--job", "b")
    assert (result.exit_code, result.stdout) == (0, "all is well\n")
