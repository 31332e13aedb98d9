"""The scoreboard of faults tells apart what becomes of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.faulted_job import Fault, Means, Outcome, Verdict, run
from benchmarks.faulted_systems import ENTRANTS, Entrant, Part, Size
from benchmarks.faults_scoreboard import cell, table

STEPS = 20
SIZE = Size(workers=2, servers=1, steps=STEPS, step_s=0.01)
WORKER_KILLED = Fault("worker", Means.KILLED)
SERVER_KILLED = Fault("server", Means.KILLED)
UNDISTURBED = Fault("worker", Means.NOTHING)

TRAINS = """
import os, sys, time
def train(steps, value):
    for step in range(steps):
        print("step", step, flush=True)
        time.sleep(0.05)
    print("values", value, value, flush=True)
"""
RIGHT = f"{TRAINS}\ntrain({STEPS}, {2 * STEPS})"
WRONG = f"{TRAINS}\ntrain({STEPS}, {2 * STEPS - 1})"
FAILS = f"{TRAINS}\ntrain(6, 0)\nsys.exit('the others are gone')"
STOPS = f"{TRAINS}\nfor step in range(6):\n    print('step', step, flush=True)\ntime.sleep(1000)"
NEVER_ENDS = f"{RIGHT}\ntime.sleep(1000)"
NEVER_BEGINS = "import sys; sys.exit('no such peer')"
SERVER = "import time; time.sleep(1000)"


def entrant(first: str, second: str) -> Entrant:
    """A system whose two workers run these programs."""

    def parts(size: Size, folder: Path) -> list[Part]:
        def part(role: str, rank: int, code: str) -> Part:
            return Part(role, rank, [sys.executable, "-S", "-c", code], dict(os.environ))

        return [part("server", 0, SERVER), part("worker", 0, first), part("worker", 1, second)]

    return Entrant("fake", parts)


@pytest.mark.parametrize(
    ("programs", "fault", "limit_s", "verdict"),
    [
        ((RIGHT, RIGHT), UNDISTURBED, 60.0, Verdict.GOES_ON),
        ((RIGHT, RIGHT), SERVER_KILLED, 60.0, Verdict.GOES_ON),
        ((RIGHT, RIGHT), WORKER_KILLED, 60.0, Verdict.RESTARTS),
        ((RIGHT, WRONG), SERVER_KILLED, 60.0, Verdict.LOSES_DATA),
        ((FAILS, RIGHT), SERVER_KILLED, 60.0, Verdict.FAILS),
        ((STOPS, STOPS), SERVER_KILLED, 3.0, Verdict.HANGS),
        ((RIGHT, NEVER_ENDS), SERVER_KILLED, 10.0, Verdict.HANGS_AT_ITS_END),
        ((NEVER_BEGINS, RIGHT), SERVER_KILLED, 60.0, Verdict.NO_START),
    ],
)
def test_what_becomes_of_a_job(programs: tuple[str, str], fault: Fault, limit_s: float, verdict: Verdict) -> None:
    outcome = run(entrant(*programs), fault, SIZE, at_step=3, limit_s=limit_s)
    assert outcome is not None
    assert outcome.verdict is verdict, outcome
    if verdict is Verdict.FAILS:
        assert outcome.note == "the others are gone"
    if verdict is Verdict.LOSES_DATA:
        assert outcome.note == "values from 39 to 39, not 40"


def test_a_system_without_such_a_process_has_nothing_to_lose() -> None:
    assert run(entrant(RIGHT, RIGHT), Fault("scheduler", Means.KILLED), SIZE, at_step=3, limit_s=60.0) is None


def test_kvd_restarts_a_worker() -> None:
    outcome = run(ENTRANTS["kvd"], WORKER_KILLED, Size(2, 2, 40, 0.02), at_step=5, limit_s=100.0)
    assert outcome is not None
    assert outcome.verdict is Verdict.RESTARTS, outcome


def test_the_table() -> None:
    outcomes = [Outcome(Verdict.GOES_ON, 0.84), Outcome(Verdict.HANGS, 1.0, "after step 3 of 9"), None]
    assert table(["kvd", "MXNet", "Gloo"], [(SERVER_KILLED, outcomes)]).splitlines() == [
        "| fault | kvd | MXNet | Gloo |",
        "|---|---|---|---|",
        "| server killed | goes on, pause 0.8 s | hangs | has none |",
    ]
    assert cell(Outcome(Verdict.FAILS, 1.23, "why")) == "fails after 1.2 s"
