"""Every message of a run is the same, in the same order, whether or not repeated calls go by the lanes, and repeated
pushes by verdicts that were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.machine import Gathered, LocalCall, ServerPeer
from kvd.core.requests import ListTransfer
from kvd.core.server.groups import FusedGroup
from kvd.core.server.pending import Pending
from kvd.core.server.push import Pushes
from kvd.core.server.rounds import SliceLog
from kvd.core.server.verdicts import Regime, Verdicts
from kvd.core.server.waiting import Waiters
from kvd.core.worker.asking import Asker
from kvd.core.worker.express import Express
from kvd.core.worker.express_flights import ExpressFlights
from kvd.core.worker.flights import Flight, Flights, Trip
from kvd.core.worker.in_flight import Steps
from kvd.core.worker.keys import KeyGroup
from kvd.core.worker.lane import Lane
from kvd.core.worker.list_moves import Whole
from kvd.core.worker.loads import ListLoad
from kvd.core.worker.machine import WorkerMachine
from kvd.core.worker.steps import StepCounter
from tests.simulator.absences import LATENESS
from tests.simulator.campaign import CAMPAIGNS
from tests.simulator.trace import Trace

COMPARED = (
    "rounds, nasty",
    "singles",
    "singles, nasty",
    "mixed, long pauses",
    "casts",
    "list training",
    "refusals, timeouts",
    "tables, nasty",
    "in flight, nasty",
    "in flight, long pauses",
)
NOTICED = (
    "in flight",
    "rounds, nasty",
    "lists, stale by 1",
    "refusals, stale by 1",
    "ledger, async",
    "refusals, nasty",
    "stepped",
    "singles",
    "singles, nasty",
)
NOTICED_BY_ROWS = ("tables, nasty",)
NOTICED_BY_LISTS = ("mixed, long pauses", "list training")
NOTICED_BY_REFUSALS = ("refusals, nasty",)  # rarely: a copy of a refused push has to come after the next one
NOTICED_BY_FLIGHTS = ("in flight",)
NOTICED_BY_LATENESS = ("late, losses",)  # rarely: what comes late from a worker that the rounds go on without
ALL = CAMPAIGNS | LATENESS
SEEDS = 1  # of each in `make test`
SOAK_SEEDS = 100


class Seen:
    """How often calls went by the lane of a worker, joined others there, those on lists among them, were completed
    there, and left it; how often something else passed by those in flight; the same of the express ways; and how many
    pushes servers took by verdicts, those of batches and those of tables."""

    def __init__(self) -> None:
        self.begun = self.joined = self.listed = self.left = self.passed = self.express = self.handed_over = 0
        self.flights = self.landed = 0
        self.taken = self.rows_taken = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Ticks are left out of the digests: a machine may be woken for the deadline of a call that is over."""
    seen, begin, give_up, take, record = Seen(), Lane.begin, Lane.give_up, Pushes.take, Trace.record
    begin_express, hand_over = Express.begin, Express.give_up
    begin_flight, end_flight = ExpressFlights.begin, ExpressFlights.end
    leaves_alone = Lane.leaves_alone

    def counting(lane: Lane, event: LocalCall, request: Any, now: float) -> bool:
        begun = begin(lane, event, request, now)
        seen.begun += begun
        seen.joined += begun and len(lane) > 1
        seen.listed += begun and isinstance(request, ListTransfer)
        return begun

    def passing(lane: Lane, *arguments: Any) -> bool:
        passes = leaves_alone(lane, *arguments)
        seen.passed += passes
        return passes

    def leaving(lane: Lane) -> list[Flight]:
        flights = give_up(lane)
        seen.left += len(flights)
        return flights

    def taking(pushes: Pushes, group: FusedGroup, *arguments: Any) -> bool:
        taken = take(pushes, group, *arguments)
        seen.taken += taken and not group.is_of_table
        seen.rows_taken += taken and group.is_of_table
        return taken

    def counting_express(express: Express, *arguments: Any) -> bool:
        begun = begin_express(express, *arguments)
        seen.express += begun
        return begun

    def counting_flights(flights: ExpressFlights, *arguments: Any) -> bool:
        begun = begin_flight(flights, *arguments)
        seen.flights += begun
        return begun

    def ending(flights: ExpressFlights, *arguments: Any) -> Trip | None:
        trip = end_flight(flights, *arguments)
        seen.landed += trip is not None
        return trip

    def handing_over(express: Express) -> tuple[Flight, ServerPeer]:
        seen.handed_over += 1
        return hand_over(express)

    def recording(trace: Trace, text: str) -> None:
        if not text.endswith("Tick"):
            record(trace, text)

    monkeypatch.setattr(Lane, "begin", counting)
    monkeypatch.setattr(Lane, "give_up", leaving)
    monkeypatch.setattr(Lane, "leaves_alone", passing)
    monkeypatch.setattr(Pushes, "take", taking)
    monkeypatch.setattr(Express, "begin", counting_express)
    monkeypatch.setattr(Express, "give_up", handing_over)
    monkeypatch.setattr(ExpressFlights, "begin", counting_flights)
    monkeypatch.setattr(ExpressFlights, "end", ending)
    monkeypatch.setattr(Trace, "record", recording)
    return seen


def compare(name: str, seed: int) -> None:
    with_lanes = ALL[name].run(seed).digest()
    with pytest.MonkeyPatch.context() as patch:
        for way in (Lane, Express, ExpressFlights):
            patch.setattr(way, "begin", lambda *arguments: False)
        patch.setattr(Verdicts, "find", nothing)
        assert ALL[name].run(seed).digest() == with_lanes, f"seed {seed}"


def test_lanes_change_nothing(seen: Seen) -> None:
    for name in COMPARED:
        for seed in range(SEEDS):
            compare(name, seed)
    # Undisturbed trainings are run once for all tests of a process, so another test may have had theirs.
    assert seen.left > 20
    assert seen.begun - seen.left > 20
    assert seen.joined > 20
    assert seen.listed > 20
    assert seen.passed > 5
    assert seen.taken > 20
    assert seen.handed_over > 20
    assert seen.express - seen.handed_over > 20
    assert seen.flights > seen.landed > 20
    assert seen.rows_taken > 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_lanes_change_nothing_soak(name: str, seen: Seen) -> None:
    for seed in range(SOAK_SEEDS):
        compare(name, seed)


def never(*arguments: Any) -> bool:
    return True


def nothing(*arguments: Any) -> Any:
    return None


def take_none(asker: Asker, count: int) -> int:
    """The numbers are given again."""
    return asker.next_number


def steps_of_one(steps: StepCounter, clock: int, oldest: int) -> Steps:
    """As if no other push were in flight."""
    return Steps(clock, clock - 1)


def some_are_enough(log: SliceLog, clock: int, contributions: Any, required: Any) -> bool:
    """A round waits for nobody."""
    return bool(contributions)


def wait_for_nothing(waiters: Waiters, pending: Pending, *arguments: Any) -> bool:
    """The push is open, and nobody answers it."""
    return waiters.pending.open_new(pending)


def stay_together(group: KeyGroup) -> None:
    """The keys do not get their clocks back."""
    group.is_parted = True


def first_ones(whole: Whole, sources: Sequence[Any]) -> Gathered:
    """Whichever a message is to bring."""
    return Gathered(sources[: len(whole.nbytes)], whole.gaps)


# What the lanes must look at. Without it, a run differs or a checker complains.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "batches that the server does not know": lambda patch: patch.setattr(Lane, "_may_send", never),
    "request numbers": lambda patch: patch.setattr(Asker, "give_next", nothing),
    "request numbers of those that ended": lambda patch: patch.setattr(Asker, "take", take_none),
    "steps": lambda patch: patch.setattr(StepCounter, "begin_in_lane", steps_of_one),
    "steps that were said": lambda patch: patch.setattr(StepCounter, "repeat", nothing),
    "which keys are in flight": lambda patch: patch.setattr(Flights, "has_any_of", nothing),
    "what concerns those in flight": lambda patch: patch.setattr(Lane, "leaves_alone", never),
    "retries that are due": lambda patch: patch.setattr(Lane, "is_due", nothing),
    "server: what is held when something else comes": lambda patch: patch.setattr(
        Waiters, "wait_for_round", wait_for_nothing
    ),
    "server: who has yet to push": lambda patch: patch.setattr(SliceLog, "_is_complete", some_are_enough),
    "express: what comes before its end": lambda patch: patch.setattr(Lane, "adopt", lambda *arguments: None),
    "clocks": lambda patch: patch.setattr("kvd.core.worker.loads.count_rounds", lambda *arguments: None),
}

MUTANTS_OF_ROWS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: rows that nobody waits for": lambda patch: patch.setattr(Waiters, "joins_open", nothing),
}

MUTANTS_OF_REGIMES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what may have changed": lambda patch: patch.setattr(Regime, "change", nothing),
}

MUTANTS_OF_FLIGHTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "express flights: what may have changed": lambda patch: patch.setattr(ExpressFlights, "_is_still", never),
}

MUTANTS_OF_REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what was pushed before": lambda patch: patch.setattr(SliceLog, "is_next", never),
}

MUTANTS_OF_LISTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the clock of a list": lambda patch: patch.setattr(ListLoad, "pushed", lambda load: None),
    "a key that moves alone": lambda patch: patch.setattr(KeyGroup, "part", stay_together),
    "the clocks of keys that part": lambda patch: patch.setattr(
        "kvd.core.worker.keys.move_to", lambda *arguments: None
    ),
    "which values of a list": lambda patch: patch.setattr(Whole, "gathered", first_ones),
    "what is due": lambda patch: patch.setattr(WorkerMachine, "_do_what_is_due", nothing),
}


@pytest.mark.parametrize(
    ("name", "campaigns", "seeds"),
    [
        *((name, NOTICED, 2) for name in MUTANTS),
        *((name, NOTICED_BY_ROWS, 2) for name in MUTANTS_OF_ROWS),
        *((name, NOTICED_BY_LISTS, 2) for name in MUTANTS_OF_LISTS),
        *((name, NOTICED_BY_REFUSALS, 30) for name in MUTANTS_OF_REFUSALS),
        *((name, NOTICED_BY_FLIGHTS, 30) for name in MUTANTS_OF_FLIGHTS),
        *((name, NOTICED_BY_LATENESS, 3) for name in MUTANTS_OF_REGIMES),
    ],
)
def test_a_broken_lane_is_noticed(
    name: str, campaigns: Sequence[str], seeds: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants = MUTANTS | MUTANTS_OF_ROWS | MUTANTS_OF_LISTS | MUTANTS_OF_REFUSALS | MUTANTS_OF_FLIGHTS
    (mutants | MUTANTS_OF_REGIMES)[name](monkeypatch)

    def run_all() -> None:
        for seed in range(seeds):
            for campaign in campaigns:
                compare(campaign, seed)

    with pytest.raises(Exception):  # noqa: B017, PT011  a checker's, an assertion's, or the machine's own
        run_all()
