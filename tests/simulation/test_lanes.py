"""Whether repeated calls and pushes go by the lanes or not, every message of a run is the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.server.lane import PushLane
from kvd.core.server.rounds import SliceLog
from kvd.core.server.row_lane import RowLane
from kvd.core.worker.lane import Flight, Lane
from kvd.testing.campaign import CAMPAIGNS
from kvd.testing.trace import Trace

COMPARED = ("rounds, nasty", "mixed, long pauses", "casts", "list training", "refusals, timeouts", "tables, nasty")
NOTICED = (
    "rounds, nasty",
    "lists, stale by 1",
    "refusals, stale by 1",
    "ledger, async",
    "refusals, nasty",
    "stepped",
    "tables, nasty",
)
SEEDS = 1  # of each in `make test`
SOAK_SEEDS = 100


class Seen:
    """How often calls went by the lane of a worker, were completed there, and left it; and how many pushes the lanes of
    servers took, those of batches and those of tables."""

    def __init__(self) -> None:
        self.begun = self.left = self.taken = self.rows_taken = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Ticks are left out of the digests: a machine may be woken for the deadline of a call that is over."""
    seen, begin, give_up, take, record = Seen(), Lane.begin, Lane.give_up, PushLane._take, Trace.record
    take_rows = RowLane._take_push

    def counting(lane: Lane, *arguments: Any) -> bool:
        begun = begin(lane, *arguments)
        seen.begun += begun
        return begun

    def leaving(lane: Lane) -> Flight:
        seen.left += 1
        return give_up(lane)

    def taking(lane: PushLane, *arguments: Any) -> bool:
        taken = take(lane, *arguments)
        seen.taken += taken
        return taken

    def taking_rows(lane: RowLane, *arguments: Any) -> bool:
        taken = take_rows(lane, *arguments)
        seen.rows_taken += taken
        return taken

    def recording(trace: Trace, text: str) -> None:
        if not text.endswith("Tick"):
            record(trace, text)

    monkeypatch.setattr(Lane, "begin", counting)
    monkeypatch.setattr(Lane, "give_up", leaving)
    monkeypatch.setattr(PushLane, "_take", taking)
    monkeypatch.setattr(RowLane, "_take_push", taking_rows)
    monkeypatch.setattr(Trace, "record", recording)
    return seen


def compare(name: str, seed: int) -> None:
    with_lanes = CAMPAIGNS[name].run(seed).digest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "begin", lambda *arguments: False)
        for lane, take in ((PushLane, "_take"), (RowLane, "_take_push"), (RowLane, "_take_pull")):
            patch.setattr(lane, take, lambda *arguments: False)
        assert CAMPAIGNS[name].run(seed).digest() == with_lanes, f"seed {seed}"


def test_lanes_change_nothing(seen: Seen) -> None:
    for name in COMPARED:
        for seed in range(SEEDS):
            compare(name, seed)
    # Undisturbed trainings are run once for all tests of a process, so another test may have had theirs.
    assert seen.left > 20
    assert seen.begun - seen.left > 20
    assert seen.taken > 20
    assert seen.rows_taken > 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_lanes_change_nothing_soak(name: str, seen: Seen) -> None:
    for seed in range(SOAK_SEEDS):
        compare(name, seed)


def never(*arguments: Any) -> bool:
    return True


def stage_at_once(log: SliceLog, contribution: Any, push: Any) -> bool:
    """Whatever the worker has pushed before."""
    log.stage(contribution, push)
    return True


# What the lanes must look at. Without it, a run differs or a checker complains.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "batches that the server does not know": lambda patch: patch.setattr(Lane, "_may_send", never),
    "request numbers": lambda patch: patch.setattr("kvd.core.worker.asking.Asker.skip", lambda *arguments: None),
    "server: what was pushed before": lambda patch: patch.setattr(SliceLog, "stage_next", stage_at_once),
    "server: what may have changed": lambda patch: patch.setattr(PushLane, "forget", lambda lane: None),
    "server: what may have changed for rows": lambda patch: patch.setattr(RowLane, "forget", lambda lane: None),
    "server: rows that nobody waits for": lambda patch: patch.setattr(
        "kvd.core.server.pending.PendingTable.may_open", never
    ),
    "clocks": lambda patch: patch.setattr("kvd.core.worker.lane.count_rounds", lambda *arguments: None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_lane_is_noticed(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)

    def run_all() -> None:
        for seed in range(2):
            for campaign in NOTICED:
                compare(campaign, seed)

    with pytest.raises(Exception):  # noqa: B017, PT011  a checker's, an assertion's, or the machine's own
        run_all()
