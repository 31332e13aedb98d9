"""DCASGD: gradients are compensated for what has happened to the weights since they were pulled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.compute.delays import compensated
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import DTYPES
from kvd.errors import ConfigError
from kvd.optimizer import DCASGD, SGD

RULE = DCASGD(0.1, compensation=0.5, rescale_grad=0.25)


def test_golden_values_by_hand() -> None:
    # g + 0.5·0.25·g²·(w − p): 4 + 0.125·16·(3 − 1) = 8; −2 + 0.125·4·(0 − 4) = −4; nothing has changed: 5.
    gradient = np.array([4, -2, 5], np.float32)
    current, pulled = np.array([3, 0, 7], np.float32), np.array([1, 4, 7], np.float32)
    assert compensated(RULE, current, pulled, [gradient]).tolist() == [8, -4, 5]
    assert gradient.tolist() == [4, -2, 5]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_it_follows_the_formula_in_float64(dtype: str) -> None:
    random, kind = np.random.default_rng(3), DTYPES[dtype]
    gradient, current, pulled = (random.normal(size=1000).astype(kind) for _ in range(3))
    wide = [array.astype(np.float64) for array in (gradient, current, pulled)]
    expected = wide[0] + 0.5 * 0.25 * wide[0] ** 2 * (wide[1] - wide[2])
    found = compensated(RULE, current, pulled, [gradient])
    assert found.dtype == (np.float64 if dtype == "float64" else np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_fifty_steps_of_workers_that_are_late_follow_the_formula_in_float64() -> None:
    """Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation": workers take turns, and each
    has the weights that were there when it pulled, 1 to 4 updates ago."""
    random = np.random.default_rng(8)
    rule = DCASGD(0.1, momentum=0.5, compensation=0.5, rescale_grad=0.25, wd=0.01, clip_gradient=0.4)
    current = random.normal(size=200).astype(np.float32)
    state, weights, velocity = SliceState(), [current.astype(np.float64)], np.zeros(200)
    served = [current]
    for step in range(50):
        gradient, late = random.normal(size=200).astype(np.float32), min(step, 1 + step % 4)
        given = compensated(rule, current, served[-1 - late], [gradient])
        made = np.empty_like(current)
        apply_update(rule, state, current, [given], made, is_merged=True)
        current = made
        served.append(current)
        wide = gradient.astype(np.float64)
        wide = wide + 0.5 * 0.25 * wide**2 * (weights[-1] - weights[-1 - late])
        velocity = 0.5 * velocity + np.clip(0.25 * wide, -0.4, 0.4) + 0.01 * weights[-1]
        weights.append(weights[-1] - 0.1 * velocity)
    np.testing.assert_allclose(current, weights[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("samples", "expected"), [(7, 8.0), (0, 0.0)])
def test_a_weighted_push_without_samples_is_no_gradient(samples: int, expected: float) -> None:
    one = np.array([4], np.float32), np.array([3], np.float32), np.array([1], np.float32)
    assert compensated(RULE, one[1], one[2], [one[0]], "weighted", [samples]).tolist() == [expected]


def test_a_weight_that_has_not_changed_gets_no_compensation_however_large_its_gradient_is() -> None:
    huge = np.array([1e30, np.inf, np.nan, -1e30], np.float32)
    same = np.ones(4, np.float32)
    found = compensated(RULE, same, same, [huge])
    assert found[[0, 3]].tolist() == huge[[0, 3]].tolist()
    assert not np.isfinite(found[[1, 2]]).any()


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"compensation": -0.1}, "compensation"),
        ({"compensation": float("nan")}, "compensation"),
        ({"momentum": -1.0}, "momentum"),
        ({"nesterov": True}, "nesterov"),
    ],
)
def test_fields_out_of_their_range_are_refused(fields: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DCASGD(0.1, **fields)
    assert caught.value.setting == setting


def test_it_is_another_optimizer_than_sgd() -> None:
    assert DCASGD(0.1) != SGD(0.1)
