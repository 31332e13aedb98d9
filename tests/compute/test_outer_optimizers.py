"""The optimizers for pushes of weight differences, against their formulas in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvd.compute.optimizers import SliceState, apply_update
from kvd.errors import ConfigError
from kvd.optimizer import SGD, DelayedNesterov, schedule
from tests.compute.optimizer_harness import STEPS, Array, gradients_of, prepared, start, trained

RULES = [
    DelayedNesterov(0.1, 4),
    DelayedNesterov(0.1, 1, momentum=0.5),
    DelayedNesterov(0.1, 3, momentum=0.8, activation=1 / 3),
    DelayedNesterov(0.1, 7, activation=0.05, wd=0.02, rescale_grad=0.5, clip_gradient=0.4),
    DelayedNesterov(schedule.Step(0.2, 7, 0.5), 5, momentum=0.0),
    DelayedNesterov(0.1, 2 * STEPS),
]


def by_formula(rule: DelayedNesterov, weight: float, gradients: Sequence[float]) -> float:
    """Algorithm 3 of the paper, which counts t from 0."""
    momentum = total = 0.0
    size, c = rule.buffer_size, rule.activation
    for t, raw in enumerate(gradients):
        gradient = prepared(rule, weight, raw, rule.wd)
        total += gradient
        if (t + 1) % size == 0:
            momentum = rule.momentum * momentum + total / size
            change = (1 - c * size + c) * rule.momentum * momentum + gradient / size
            total = 0.0
        else:
            change = c * rule.momentum * momentum + gradient / size
        weight -= rule.rate(t + 1) * change
    return weight


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_delayed_nesterov_follows_its_formula(rule: DelayedNesterov, dtype: Any, error: float) -> None:
    weight, gradients = start(dtype), gradients_of(dtype)
    columns = np.stack([gradient.astype(np.float64) for gradient in gradients]).T.tolist()
    expected = [by_formula(rule, w, column) for w, column in zip(weight.tolist(), columns, strict=True)]
    result = trained(rule, weight, gradients, tile=8)
    np.testing.assert_allclose(result, expected, rtol=error, atol=error)
    assert np.median(np.abs(result - weight)) > 100 * error


def test_golden_steps_of_delayed_nesterov_by_hand() -> None:
    # N = 2, η = 0.5, momentum = 0.5, c = 0. w₁ = 8 − 0.5·4/2 = 7; then s = 4 + 8, m₂ = 6,
    # w₂ = 7 − 0.5·(0.5·6 + 8/2) = 3.5; w₃ = 3.5 − 0.5·(−2)/2 = 4; m₄ = 3 + (−2 + 2)/2 = 3, w₄ = 4 − 0.5·(1.5 + 1).
    rule = DelayedNesterov(0.5, 2, momentum=0.5)
    gradients = [np.array([value], np.float32) for value in (4, 8, -2, 2)]
    weights = [trained(rule, np.array([8], np.float32), gradients[:count]).tolist()[0] for count in (1, 2, 3, 4)]
    assert weights == [7, 3.5, 4, 2.75]


def torch_nesterov(weight: Array, gradients: Sequence[Array]) -> Array:
    parameter = torch.tensor(weight)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=True)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameter.numpy()


def test_a_buffer_of_one_is_nesterovs_momentum_as_torch_has_it() -> None:
    weight, gradients = start(np.float64), gradients_of(np.float64)
    result = trained(DelayedNesterov(0.1, 1), weight, gradients)
    np.testing.assert_allclose(result, torch_nesterov(weight, gradients), rtol=1e-11)


def test_the_mean_of_the_differences_of_all_workers_is_the_gradient_of_an_outer_step() -> None:
    """DiLoCo: two workers, ``merge="mean"``, SGD with Nesterov's momentum."""
    weight = start(np.float64)
    ours, state, theirs = weight.copy(), SliceState(), []
    for first, second in zip(gradients_of(np.float64)[::2], gradients_of(np.float64)[1::2], strict=True):
        after = [ours - 0.3 * first, ours - 0.3 * second]  # what the workers have trained to
        out = np.empty_like(ours)
        differences = [ours - local for local in after]
        apply_update(SGD(0.1, momentum=0.9, nesterov=True), state, ours, differences, out, "mean")
        theirs.append(0.3 * (first + second) / 2)
        ours = out
    np.testing.assert_allclose(ours, torch_nesterov(weight, theirs), rtol=1e-9)


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"buffer_size": 0}, "buffer_size"),
        ({"buffer_size": -3}, "buffer_size"),
        ({"buffer_size": 2.5}, "buffer_size"),
        ({"buffer_size": 2, "momentum": -0.1}, "momentum"),
        ({"buffer_size": 2, "activation": 0.51}, "activation"),
        ({"buffer_size": 2, "activation": -0.1}, "activation"),
        ({"buffer_size": 2, "activation": float("nan")}, "activation"),
    ],
)
def test_fields_out_of_their_range_are_refused(fields: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DelayedNesterov(0.1, **fields)
    assert caught.value.setting == setting
