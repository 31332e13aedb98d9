"""Learning rate schedules, against torch and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvd.optimizer import (
    SGD,
    schedule,
)


def torch_rates(make: Any, steps: int) -> list[float]:
    """The learning rates of a torch scheduler for the updates 1 … steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schedule.Step(0.5, 7, 0.3), lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.3)),
        (schedule.Cosine(0.5, 30, 0.02), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30, 0.02)),
        (schedule.Polynomial(0.5, 25, power=2.0), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 25, 2.0)),
    ],
)
def test_schedules_follow_torch(ours: schedule.Schedule, theirs: Any) -> None:
    assert [ours.at(step) for step in range(1, 31)] == pytest.approx(torch_rates(theirs, 30), rel=1e-9)


@pytest.mark.parametrize(
    ("ours", "of_mxnet"),
    [
        (schedule.Polynomial(0.5, 25, 0.1, 2.0), lambda n: 0.1 + 0.4 * (1 - n / 25) ** 2),
        (schedule.Cosine(0.5, 25, 0.1), lambda n: 0.1 + 0.4 * (1 + math.cos(math.pi * n / 25)) / 2),
    ],
)
def test_mxnets_schedulers_are_one_update_ahead(ours: schedule.Schedule, of_mxnet: Any) -> None:
    """Its formulas take num_update, which is 1 for the first update, where torch's count from 0."""
    assert ours.at(1) == pytest.approx(0.5)
    assert [ours.at(update + 1) for update in range(1, 26)] == pytest.approx([of_mxnet(n) for n in range(1, 26)])


def test_schedules_stay_at_their_final_rate() -> None:
    assert schedule.Cosine(1.0, 10, 0.25).at(1000) == 0.25
    assert schedule.Polynomial(1.0, 10, 0.25).at(1000) == 0.25
    assert schedule.Step(1.0, 1, 0.5).at(10**9) == 0.0


def test_warmup_rises_in_a_line_and_then_starts_the_inner_schedule() -> None:
    rates = schedule.Warmup(schedule.Step(8.0, 2, 0.5), 4)
    assert [rates.at(step) for step in range(1, 10)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 4.0, 4.0, 2.0]
    assert [schedule.Warmup(1.0, 2).at(step) for step in (1, 2, 3)] == [0.5, 1.0, 1.0]


def test_the_rate_of_an_optimizer_is_its_number_or_its_schedule() -> None:
    assert SGD(0.25).rate(7) == 0.25
    assert SGD(schedule.Step(0.5, 1, 0.5)).rate(3) == 0.125


def test_the_largest_rates_do_not_overflow() -> None:
    for inner in (1e308, schedule.Cosine(1e308, 10), schedule.Polynomial(1e308, 10)):
        rates = schedule.Warmup(inner, 10)
        assert all(math.isfinite(rates.at(step)) for step in range(1, 30))
