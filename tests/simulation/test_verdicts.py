"""Every message of a run is the same, in the same order, whether or not servers keep verdicts for repeated pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvd.core.server.groups import FusedGroup
from kvd.core.server.pending import Pending
from kvd.core.server.push import Pushes
from kvd.core.server.rounds import SliceLog
from kvd.core.server.verdicts import Regime, Verdicts
from kvd.core.server.waiting import Waiters
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
NOTICED_BY_REFUSALS = ("refusals, nasty",)  # rarely: a copy of a refused push has to come after the next one
NOTICED_BY_LATENESS = ("late, losses",)  # rarely: what comes late from a worker that the rounds go on without
ALL = CAMPAIGNS | LATENESS
SEEDS = 1  # of each in `make test`
SOAK_SEEDS = 100


class Seen:
    """How many pushes servers took by verdicts, those of batches and those of tables."""

    def __init__(self) -> None:
        self.taken = self.rows_taken = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Ticks are left out of the digests: a machine may be woken for the deadline of a call that is over."""
    seen, take, record = Seen(), Pushes.take, Trace.record

    def taking(pushes: Pushes, group: FusedGroup, *arguments: Any) -> bool:
        taken = take(pushes, group, *arguments)
        seen.taken += taken and not group.is_of_table
        seen.rows_taken += taken and group.is_of_table
        return taken

    def recording(trace: Trace, text: str) -> None:
        if not text.endswith("Tick"):
            record(trace, text)

    monkeypatch.setattr(Pushes, "take", taking)
    monkeypatch.setattr(Trace, "record", recording)
    return seen


def compare(name: str, seed: int) -> None:
    by_verdicts = ALL[name].run(seed).digest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verdicts, "find", nothing)
        assert ALL[name].run(seed).digest() == by_verdicts, f"seed {seed}"


def test_verdicts_change_nothing(seen: Seen) -> None:
    for name in COMPARED:
        for seed in range(SEEDS):
            compare(name, seed)
    # Undisturbed trainings are run once for all tests of a process, so another test may have had theirs.
    assert seen.taken > 20
    assert seen.rows_taken > 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_verdicts_change_nothing_soak(name: str, seen: Seen) -> None:
    for seed in range(SOAK_SEEDS):
        compare(name, seed)


def never(*arguments: Any) -> bool:
    return True


def nothing(*arguments: Any) -> Any:
    return None


def some_are_enough(log: SliceLog, clock: int, contributions: Any, required: Any) -> bool:
    """A round waits for nobody."""
    return bool(contributions)


def wait_for_nothing(waiters: Waiters, pending: Pending, *arguments: Any) -> bool:
    """The push is open, and nobody answers it."""
    return waiters.pending.open_new(pending)


# What a verdict does not spare. Without it, a run differs or a checker complains.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what is held when something else comes": lambda patch: patch.setattr(
        Waiters, "wait_for_round", wait_for_nothing
    ),
    "server: who has yet to push": lambda patch: patch.setattr(SliceLog, "_is_complete", some_are_enough),
}

MUTANTS_OF_ROWS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: rows that nobody waits for": lambda patch: patch.setattr(Waiters, "joins_open", nothing),
}

MUTANTS_OF_REGIMES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what may have changed": lambda patch: patch.setattr(Regime, "change", nothing),
}

MUTANTS_OF_REFUSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "server: what was pushed before": lambda patch: patch.setattr(SliceLog, "is_next", never),
}


@pytest.mark.parametrize(
    ("name", "campaigns", "seeds"),
    [
        *((name, NOTICED, 2) for name in MUTANTS),
        *((name, NOTICED_BY_ROWS, 2) for name in MUTANTS_OF_ROWS),
        *((name, NOTICED_BY_REFUSALS, 30) for name in MUTANTS_OF_REFUSALS),
        *((name, NOTICED_BY_LATENESS, 3) for name in MUTANTS_OF_REGIMES),
    ],
)
def test_a_broken_verdict_is_noticed(
    name: str, campaigns: Sequence[str], seeds: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    (MUTANTS | MUTANTS_OF_ROWS | MUTANTS_OF_REFUSALS | MUTANTS_OF_REGIMES)[name](monkeypatch)

    def run_all() -> None:
        for seed in range(seeds):
            for campaign in campaigns:
                compare(campaign, seed)

    with pytest.raises(Exception):  # noqa: B017, PT011  a checker's, an assertion's, or the machine's own
        run_all()
