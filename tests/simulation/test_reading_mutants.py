"""Broken builds that give readers keys of different steps, each of which a checker must catch within some seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from kvd.core.server import captures as captures_module
from kvd.core.server.rounds import NoVersion, SliceLog
from kvd.core.worker.in_flight import InFlight, Steps
from kvd.core.worker.steps import StepCounter
from tests.simulation.mutants_harness import caught
from tests.simulator.campaign import CAMPAIGNS, Campaign


def steps_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """Pushes do not say in which step they were made."""
    patch.setattr(StepCounter, "begin", lambda counter, call, clocks: (0, 0))


def readers_get_the_newest(patch: pytest.MonkeyPatch) -> None:
    """A reader is given the version that is there when its question arrives."""
    version_at = SliceLog.version_at

    def newest(log: SliceLog, step: int, over: int) -> int | NoVersion:
        found = version_at(log, step, over)
        return found if found is NoVersion.LATER else log.version

    patch.setattr(SliceLog, "version_at", newest)


def every_step_is_complete(patch: pytest.MonkeyPatch) -> None:
    """A reader does not wait for what may still be pushed in its step."""
    version_at = SliceLog.version_at
    patch.setattr(SliceLog, "version_at", lambda log, step, over: version_at(log, step, step))


def open_pushes_are_settled(patch: pytest.MonkeyPatch) -> None:
    """A worker says that its steps are over when it begins the next one, whatever of them is under way."""
    begin = StepCounter.begin

    def hasty(counter: StepCounter, call: InFlight, clocks: Sequence[int]) -> Steps:
        step, _ = begin(counter, call, clocks)
        return step, step - 1

    patch.setattr(StepCounter, "begin", hasty)


def snapshots_are_between_two_keys(patch: pytest.MonkeyPatch) -> None:
    """Each slice is kept as it is when an operator asks for it, whatever step it names."""
    patch.setattr(captures_module, "version_for", lambda message, log, over: log.version)


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        (steps_are_not_told, CAMPAIGNS["watched, uneven"], "brought|RequestTimeout|has not finished"),
        (readers_get_the_newest, CAMPAIGNS["watched"], "brought"),
        (every_step_is_complete, CAMPAIGNS["watched"], "brought"),
        (snapshots_are_between_two_keys, CAMPAIGNS["captured, nasty"], "a snapshot of step"),
        (open_pushes_are_settled, CAMPAIGNS["watched, uneven, nasty"], "brought"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Campaign, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert re.search(complaint, caught(campaign) or "nothing")
