"""Tests of the simulator: broken builds of `kv.steps`, each of which a campaign must catch within some seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.core.server.progress import WorkerProgress
from kvd.core.server.rounds import SliceLog
from kvd.core.server.shared_steps import SharedLoop
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.predecessor import Predecessor
from tests.simulator.campaign import CAMPAIGNS
from tests.simulator.simulator import World

SEEDS = 40


def no_redo(patch: pytest.MonkeyPatch) -> None:
    """A successor does not go back to the clocks of the step that it makes again."""
    patch.setattr(Predecessor, "is_redone", False)


def forgets_where_steps_begin(patch: pytest.MonkeyPatch) -> None:
    """A server keeps the place of a rank, and not the clock at which it began."""
    patch.setattr(WorkerProgress, "begun_at", lambda progress, place, counted: counted)


def no_gate(patch: pytest.MonkeyPatch) -> None:
    """The pushes of a step do not wait for those of the step before."""
    patch.setattr(OpenPushes, "holds_back", lambda pushes, push: False)


def counts_shared_steps_twice(patch: pytest.MonkeyPatch) -> None:
    """A shared step counts for each worker that makes it."""
    patch.setattr(SliceLog, "_is_counted_step", lambda log, contribution: False)


def loses_steps_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """The step of a worker that died is done for everyone else."""
    patch.setattr(SharedLoop, "give_back", lambda loop, gone: [loop.held.pop(rank, None) for rank in gone])


@pytest.mark.parametrize(
    ("mutate", "campaign"),
    [
        (no_redo, "stepped"),
        (no_redo, "stepped ledger"),
        (forgets_where_steps_begin, "stepped"),
        (no_gate, "stepped ledger, stale by 1"),
        (counts_shared_steps_twice, "shared"),
        (loses_steps_of_the_dead, "shared, long pauses"),
    ],
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], campaign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CAMPAIGNS["training"].run(0)  # the weights of an undisturbed run are those of a whole build
    mutate(monkeypatch)
    for seed in range(SEEDS):
        try:
            CAMPAIGNS[campaign].run(seed)
        except AssertionError as violation:
            assert f"seed {seed}" in str(violation)  # noqa: PT017  the first of many seeds
            return
    pytest.fail(f"{SEEDS} seeds of {campaign!r} notice nothing")


def test_steps_are_given_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns in which nobody takes over the step of another would prove little."""
    given_back, counted_twice = [], []
    give_back, is_counted = SharedLoop.give_back, SliceLog._is_counted_step

    def noting(loop: SharedLoop, gone: list[int]) -> None:
        give_back(loop, gone)
        given_back.extend(gone)

    def asking(log: SliceLog, contribution: object) -> bool:
        answer = is_counted(log, contribution)  # type: ignore[arg-type]
        counted_twice.extend([contribution] * answer)
        return answer

    monkeypatch.setattr(SharedLoop, "give_back", noting)
    monkeypatch.setattr(SliceLog, "_is_counted_step", asking)
    worlds: list[World] = [CAMPAIGNS["shared, long pauses"].run(seed) for seed in range(20)]
    assert worlds
    assert given_back
    assert counted_twice
