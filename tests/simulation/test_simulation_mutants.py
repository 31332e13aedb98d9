"""The tests are tested: broken builds of the machines, each of which a checker has to catch within some seeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import Contribution, Received
from kvd.core.server import ServerMachine
from kvd.core.slicelog import SliceLog, Turn
from kvd.core.units import Unit
from kvd.core.worker import WorkerMachine
from kvd.core.workerkeys import WorkerKey
from kvd.testing.campaign import Campaign
from kvd.testing.mishaps import Mishaps
from kvd.testing.network import Faults
from kvd.testing.simulator import Violation

SEEDS = 25
CALM_BUT_OUT_OF_ORDER = Faults(delay_s=(0.0005, 0.2), duplicates=0.3, ordered=False)


def caught(campaign: Campaign) -> str:
    """What the checkers say of the first seed that they catch something in."""
    for seed in range(SEEDS):
        try:
            campaign.run(seed)
        except AssertionError as violation:
            return str(violation)
    return ""


def ack_before_applied(patch: pytest.MonkeyPatch) -> None:
    """A push is acknowledged when its round is closed, before its update is done."""
    patch.setattr(SliceLog, "committed_clock", SliceLog.counted_clock)
    advance = ServerMachine._advance

    def hasty(server: ServerMachine, unit: Unit) -> None:
        advance(server, unit)
        unit.waiting = [waiting for waiting in unit.waiting if not server._settle(unit, waiting)]

    patch.setattr(ServerMachine, "_advance", hasty)


def every_push_is_next(patch: pytest.MonkeyPatch) -> None:
    """The clock of a push is not looked at."""
    patch.setattr(SliceLog, "turn", lambda log, rank, clock: Turn.NEXT)


def replaced_may_go_on(patch: pytest.MonkeyPatch) -> None:
    """A server goes on taking the pushes of an incarnation whose rank another one has, which does not fall silent."""
    patch.setattr(WorkerMachine, "_fall_silent", lambda worker: None)
    rank_of = ServerMachine._rank_of
    known: dict[tuple[int, int], int] = {}

    def forgiving(server: ServerMachine, event: Received, request: int) -> int | None:
        member = server._workers.get(event.sender)
        if member is not None:
            known[id(server), event.sender] = member
        rank = known.get((id(server), event.sender))
        return rank if rank is not None else rank_of(server, event, request)

    patch.setattr(ServerMachine, "_rank_of", forgiving)


def order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """A round is merged in the order in which its contributions came."""

    def take(log: SliceLog, required: Iterable[int]) -> tuple[Contribution, ...] | None:
        clock = log.closed + 1
        contributions = log._rounds.get(clock)
        if not contributions or log.missing(clock, required):
            return None
        del log._rounds[clock]
        return tuple(contributions.values())

    patch.setattr(SliceLog, "_take_round", take)


def no_window(patch: pytest.MonkeyPatch) -> None:
    """Workers run ahead as far as they like, and servers take it."""

    def turn(log: SliceLog, rank: int, clock: int) -> Turn:
        staged = log.staged_clock(rank)
        return Turn.KNOWN if clock <= staged else Turn.NEXT if clock == staged + 1 else Turn.WRONG

    patch.setattr(SliceLog, "turn", turn)
    patch.setattr(WorkerKey, "holds_back", lambda key, window: False)


def unclosed_stays(patch: pytest.MonkeyPatch) -> None:
    """What a predecessor had staged is not dropped when its successor comes."""
    patch.setattr(SliceLog, "drop_unclosed", lambda log, rank: None)


def incomplete_rounds(patch: pytest.MonkeyPatch) -> None:
    """A round is closed with whoever is there."""
    patch.setattr(SliceLog, "missing", lambda log, clock, required: [])


def no_staleness_bound(patch: pytest.MonkeyPatch) -> None:
    """The bound of the staleness is not looked at."""
    patch.setattr(SliceLog, "slowest", lambda log, required: 1 << 40)


def any_version_does(patch: pytest.MonkeyPatch) -> None:
    """A pull is answered with what is current, whatever it asked for."""
    patch.setattr(SliceLog, "at_version", lambda log, version: log.current)
    patch.setattr(SliceLog, "committed_clock", lambda log, rank: 1 << 40)


def copies_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """Values that come after a call was answered are written into the program's memory all the same."""
    copy = WorkerMachine._copy_values

    def careless(machine: WorkerMachine, call: Any, *rest: Any) -> None:
        completed, call.completed = call.completed, False
        copy(machine, call, *rest)
        call.completed = completed

    patch.setattr(WorkerMachine, "_copy_values", careless)


def clocks_start_anew(patch: pytest.MonkeyPatch) -> None:
    """A restarted worker does not ask where its predecessor stood."""

    def take_up(machine: WorkerMachine, key: WorkerKey, clocks: Collection[Any], then: Callable[[None], None]) -> None:
        key.state = 2
        then(None)

    patch.setattr(WorkerMachine, "_take_up", take_up)


QUIET = Mishaps(within_s=4.0)
HAUNTED = Campaign("lives", mishaps=Mishaps(ghosts=5))
PUSHY = Campaign("ledger", mishaps=Mishaps(pauses=3), faults=CALM_BUT_OUT_OF_ORDER)


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        (ack_before_applied, Campaign("ledger", mishaps=QUIET), "is not there"),
        (ack_before_applied, Campaign("lives", mode="async", mishaps=QUIET), "is not there"),
        (every_push_is_next, PUSHY, "counts|holds|staged bytes|not there"),
        (every_push_is_next, replace(PUSHY, mode="async"), "counts|holds|staged bytes|not there"),
        (replaced_may_go_on, HAUNTED, "not there|count"),
        (order_of_arrival, Campaign("rounds"), "other bits"),
        (order_of_arrival, Campaign("training"), "undisturbed"),
        (no_window, Campaign("ledger", mishaps=Mishaps(pauses=3)), "staged bytes"),
        (unclosed_stays, Campaign("lives"), "not there|count"),
        (incomplete_rounds, Campaign("rounds"), ""),
        (no_staleness_bound, Campaign("ledger", mode="async", staleness=1), "the slowest has made"),
        (any_version_does, Campaign("rounds", mishaps=QUIET), "other bits|brought"),
        (copies_after_the_end, Campaign("rounds", mishaps=Mishaps(pauses=6, longest_pause_s=18.0)), "Copy into"),
        (clocks_start_anew, Campaign("training"), ""),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Campaign, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if campaign.workload == "training":
        Campaign("training").run(0)  # the undisturbed bits are those of the unbroken build
    mutate(monkeypatch)
    violation = caught(campaign)
    assert violation
    assert not complaint or any(word in violation for word in complaint.split("|")), violation


def test_whole_build_is_not_caught() -> None:
    assert caught(PUSHY) == ""
    assert caught(HAUNTED) == ""
    with pytest.raises(Violation):
        Campaign("ledger").run(0).fail("checkers can complain")
