"""Workers with an optimizer of their own get their state from each other: campaigns, and broken builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvd.core.server.healing import Healing
from kvd.core.worker.step_loops import StepLoops
from tests.simulation.mutants_harness import check_caught
from tests.simulator.absences import HEALED, HEALS
from tests.simulator.campaign import WORKERS
from tests.simulator.mishaps import live_through
from tests.simulator.settings import ClusterSettings
from tests.simulator.simulator import World
from tests.simulator.workloads.healed import HealedTraining

SEEDS = 3  # of these campaigns in `make test`
SOAK_SEEDS = 1000


@pytest.mark.parametrize("name", HEALED)
def test_healed(name: str) -> None:
    run_healed(name, range(SEEDS))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("healed", 111),  # all died in their first step: slices counted what was pushed for values that were lost
        ("healed", 126),  # an answer to a process that had been replaced came late
    ],
)
def test_found(name: str, seed: int) -> None:
    HEALED[name].run(seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", HEALED)
def test_healed_soak(name: str, first: int) -> None:
    run_healed(name, range(first, first + 100))


def run_healed(name: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        HEALED[name].run(seed)


def test_states_are_taken_before_and_after_steps_that_count() -> None:
    """Campaigns in which nobody takes a state would prove little."""
    healed = passed_over = 0
    for seed in range(8):
        training = HealedTraining(WORKERS, 20)
        world = World(seed, ClusterSettings(workers=WORKERS, on_worker_loss="wait"))
        live_through(world, training.program, HEALS.mishaps)
        healed += training.healed
        passed_over += training.passed_over
    assert healed > passed_over > 0


# ── broken builds ──


def gives_any_state(patch: pytest.MonkeyPatch) -> None:
    """Whoever has a state gives it, whatever step it is of."""
    patch.setattr(Healing, "_may_give", lambda healing, rank, offer, made: healing._lives(rank, offer.sender))


def counts_what_may_count(patch: pytest.MonkeyPatch) -> None:
    """A successor takes the step in which its predecessor stopped for one that counts."""
    patch.setattr(StepLoops, "counts_whole", property(lambda loops: loops._is_redoing))


def makes_every_step_again(patch: pytest.MonkeyPatch) -> None:
    """A successor takes no step for one that counts as a whole."""
    patch.setattr(StepLoops, "counts_whole", False)


def gives_up_those_who_say_nothing(patch: pytest.MonkeyPatch) -> None:
    """A worker that has not offered its state has none."""
    patch.setattr(Healing, "_may_have_one", lambda healing, others: False)


@pytest.mark.parametrize(
    ("mutate", "complaint"),
    [
        (gives_any_state, "a state that is not that"),
        (counts_what_may_count, ""),
        (makes_every_step_again, ""),
        (gives_up_those_who_say_nothing, "hears"),
    ],
)
def test_broken_build_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(mutate, HEALS, complaint, monkeypatch)
