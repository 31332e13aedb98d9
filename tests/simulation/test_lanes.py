"""Whether pushes go by the lanes of servers or not, every message of a run is the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.server.express import ExpressRounds, Round
from kvd.core.server.lane import PushLane
from kvd.core.server.rounds import SliceLog
from kvd.core.server.row_lane import RowLane
from kvd.testing.campaign import CAMPAIGNS
from kvd.testing.trace import Trace

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
NOTICED_BY_REFUSALS = ("refusals, nasty",)  # rarely: a copy of a refused push has to come after the next one
SEEDS = 1  # of each in `make test`
SOAK_SEEDS = 100


class Seen:
    """How many pushes the lanes of servers took: those of batches, those that were held for their rounds, and those of
    tables."""

    def __init__(self) -> None:
        self.taken = self.held = self.rows_taken = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Ticks are left out of the digests: a machine may be woken for the deadline of a call that is over."""
    seen, take, record = Seen(), PushLane._take, Trace.record
    hold, take_rows = PushLane.hold, RowLane._take_push

    def taking(lane: PushLane, *arguments: Any) -> bool:
        taken = take(lane, *arguments)
        seen.taken += taken
        return taken

    def holding(lane: PushLane, *arguments: Any) -> Round | None:
        held = hold(lane, *arguments)
        seen.held += held is not None
        return held

    def taking_rows(lane: RowLane, *arguments: Any) -> bool:
        taken = take_rows(lane, *arguments)
        seen.rows_taken += taken
        return taken

    def recording(trace: Trace, text: str) -> None:
        if not text.endswith("Tick"):
            record(trace, text)

    monkeypatch.setattr(PushLane, "_take", taking)
    monkeypatch.setattr(PushLane, "hold", holding)
    monkeypatch.setattr(RowLane, "_take_push", taking_rows)
    monkeypatch.setattr(Trace, "record", recording)
    return seen


def compare(name: str, seed: int) -> None:
    with_lanes = CAMPAIGNS[name].run(seed).digest()
    with pytest.MonkeyPatch.context() as patch:
        for way, method in (
            (PushLane, "_take"),
            (RowLane, "_take_push"),
            (RowLane, "_take_pull"),
        ):
            patch.setattr(way, method, lambda *arguments: False)
        patch.setattr(PushLane, "hold", lambda *arguments: None)
        assert CAMPAIGNS[name].run(seed).digest() == with_lanes, f"seed {seed}"


def test_lanes_change_nothing(seen: Seen) -> None:
    for name in COMPARED:
        for seed in range(SEEDS):
            compare(name, seed)
    # Undisturbed trainings are run once for all tests of a process, so another test may have had theirs.
    assert seen.taken > 20
    assert seen.held > 20
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


def stage_at_once(log: SliceLog, contribution: Any, push: Any) -> bool:
    """Whatever the worker has pushed before."""
    log.stage(contribution, push)
    return True


# What the lanes must look at. Without it, a run differs or a checker complains.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what may have changed": lambda patch: patch.setattr(PushLane, "forget", lambda lane: None),
    "server: what is held when something else comes": lambda patch: patch.setattr(
        ExpressRounds, "materialize", lambda *arguments: None
    ),
    "server: who has yet to push": lambda patch: patch.setattr(SliceLog, "due", lambda *arguments: set()),
}

MUTANTS_OF_ROWS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what may have changed for rows": lambda patch: patch.setattr(RowLane, "forget", lambda lane: None),
    "server: rows that nobody waits for": lambda patch: patch.setattr(
        "kvd.core.server.pending.PendingTable.may_open", never
    ),
}

MUTANTS_OF_REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what was pushed before": lambda patch: patch.setattr(SliceLog, "stage_next", stage_at_once),
}


@pytest.mark.parametrize(
    ("name", "campaigns", "seeds"),
    [
        *((name, NOTICED, 2) for name in MUTANTS),
        *((name, NOTICED_BY_ROWS, 2) for name in MUTANTS_OF_ROWS),
        *((name, NOTICED_BY_REFUSALS, 30) for name in MUTANTS_OF_REFUSALS),
    ],
)
def test_a_broken_lane_is_noticed(
    name: str, campaigns: Sequence[str], seeds: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    (MUTANTS | MUTANTS_OF_ROWS | MUTANTS_OF_REFUSALS)[name](monkeypatch)

    def run_all() -> None:
        for seed in range(seeds):
            for campaign in campaigns:
                compare(campaign, seed)

    with pytest.raises(Exception):  # noqa: B017, PT011  a checker's, an assertion's, or the machine's own
        run_all()
