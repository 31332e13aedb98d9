"""Tests of the simulator: builds that are broken where keys are deleted, each of which a checker must catch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.server.deletions import Deletions
from kvd.core.server.key_creation import KeyCreation
from kvd.core.server.targets import TargetResolver
from kvd.core.worker.deletions import Deletions as WorkerDeletions
from kvd.core.worker.key_making import KeyMaking
from kvd.core.worker.push_window import PushWindow
from tests.simulator.campaign import Campaign
from tests.simulator.mishaps import Mishaps
from tests.simulator.network import LATE_COPIES

SEEDS = 40
COPIES = Campaign("deletions", mishaps=Mishaps(within_s=25.0), faults=LATE_COPIES)
CRASHES = Campaign("deletions", mishaps=Mishaps(within_s=12.0, crashes=10, pauses=2))


def caught(campaign: Campaign, seeds: int = SEEDS) -> str:
    """What the checkers say of the first seed that fails; "" if none does."""
    for seed in range(seeds):
        try:
            campaign.run(seed)
        except AssertionError as violation:
            return str(violation)
    return ""


def creations_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """What was sent to a deleted key is taken for its successor."""
    slices = TargetResolver._slices

    def careless(resolver: TargetResolver, event: Any, request: int, slice_ids: Any) -> Any:
        known = resolver._table.slices
        named = [
            slice_id._replace(creation=known[slice_id[:2]].creation) if slice_id[:2] in known else slice_id
            for slice_id in slice_ids
        ]
        return slices(resolver, event, request, named)

    patch.setattr(TargetResolver, "_slices", careless)


def late_inits_make_keys(patch: pytest.MonkeyPatch) -> None:
    """A copy of an Init that comes after the key was deleted makes it again."""
    init = KeyCreation.init

    def careless(creation: KeyCreation, event: Any, message: Any) -> None:
        before, creation._table.creation = creation._table.creation, 0
        init(creation, event, message)
        creation._table.creation = before

    patch.setattr(KeyCreation, "init", careless)
    patch.setattr(KeyCreation, "_created", _created_whatever_was_deleted(KeyCreation._created))


def _created_whatever_was_deleted(created: Callable[..., None]) -> Callable[..., None]:
    def careless(creation: KeyCreation, *rest: Any) -> None:
        before, creation._table.creation = creation._table.creation, 0
        created(creation, *rest)
        creation._table.creation = before

    return careless


def one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A key goes when the first worker deletes it."""

    def close(deletions: Deletions, key: str) -> None:
        deletions.going.add(key)
        deletions.advance()

    patch.setattr(Deletions, "_close", close)


def the_other_slices_stay(patch: pytest.MonkeyPatch) -> None:
    """The servers of the other slices of a key are not told that it is gone."""
    answered = WorkerDeletions._answered

    def careless(deletions: WorkerDeletions, keys: Any, home: int, event: Any) -> None:
        for key in keys:
            key.partitions = (home,)
        answered(deletions, keys, home, event)

    patch.setattr(WorkerDeletions, "_answered", careless)


def pushes_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A worker deletes a key while its pushes are under way."""
    patch.setattr(PushWindow, "is_in_use", False)


def all_keys_look_new(patch: pytest.MonkeyPatch) -> None:
    """Worker 0 does not tell the keys of a name apart, and neither do the servers."""
    patch.setattr(KeyMaking, "deleted", _deleted_without_a_trace)
    late_inits_make_keys(patch)
    creations_are_not_compared(patch)


def _deleted_without_a_trace(making: KeyMaking, key: Any) -> None:
    key.forget()
    making._plans.clear()


def states_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The optimizer states of a deleted key stay in memory."""
    patch.setattr("kvd.node.jobs.runner.JobRunner.forget", lambda *rest: None)


@pytest.mark.parametrize(
    ("mutate", "campaign", "complaint"),
    [
        (creations_are_not_compared, COPIES, "finds|KeyNotFound|ended with"),
        pytest.param(
            late_inits_make_keys,
            COPIES,
            "still has|finds|does not begin|publishes",
            marks=pytest.mark.soak,  # the next one has it, and more
        ),
        (all_keys_look_new, COPIES, "still has|finds|ended with|does not begin"),
        (one_rank_is_enough, CRASHES, "."),
        (the_other_slices_stay, CRASHES, "still has|ended with|finds"),
        (pushes_are_not_waited_for, CRASHES, "."),
        (states_are_kept, CRASHES, "still has states"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: Campaign, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    said = caught(campaign)
    assert said, f"{mutate.__doc__} Nobody noticed in {SEEDS} runs."
    assert re.search(complaint, said), said


@pytest.mark.parametrize("campaign", [COPIES, CRASHES], ids=["late copies", "crashes"])
def test_whole_build_is_not_caught(campaign: Campaign) -> None:
    assert caught(campaign, 4) == ""


@pytest.mark.soak
@pytest.mark.parametrize("campaign", [COPIES, CRASHES], ids=["late copies", "crashes"])
def test_whole_build_is_not_caught_soak(campaign: Campaign) -> None:
    assert caught(campaign) == ""
