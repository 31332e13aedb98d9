"""Optimizers that need all elements of a slice at once, against the formulas of their papers in float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from kvd.compute.noise import Noise, quantiles
from kvd.compute.norms import folded_sum, norm
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import DTYPES
from kvd.errors import NotAllowed
from kvd.optimizer import LAMB, LARS, SGLD, Optimizer, schedule
from tests.compute.optimizer_harness import STEPS, Array, gradients_of, start

RULES: list[Optimizer] = [
    LARS(20.0),
    LARS(schedule.Step(30.0, 7, 0.5), momentum=0.9, wd=0.05, rescale_grad=0.25, clip_gradient=0.3, epsilon=1e-3),
    LARS(1.0, eta=0.01, lr_mult={"w": 2.0}, wd=0.1, wd_mult={"*": 0.5}),
    LAMB(0.01),
    LAMB(0.02, beta1=0.5, beta2=0.9, epsilon=1e-3, wd=0.1, rescale_grad=2.0, clip_gradient=1.0, upper_bound=2.0),
    LAMB(0.01, lower_bound=50.0, bias_correction=False),
]


def trained(rule: Optimizer, weight: Array, gradients: Sequence[Array], key: str = "w", tile: int = 65536) -> Array:
    state = SliceState()
    for gradient in gradients:
        out = np.full_like(weight, 99)
        apply_update(rule, state, weight, [gradient], out, "sum", tile=tile, slice_id=(key, 0))
        weight = out
    assert state.step == len(gradients)
    return weight


def prepared(rule: Any, gradient: Array) -> Array:
    limit = math.inf if rule.clip_gradient is None else rule.clip_gradient
    clipped: Array = np.clip(gradient.astype(np.float64) * rule.rescale_grad, -limit, limit)
    return clipped


def by_lars(rule: LARS, weight: Array, gradients: Sequence[Array]) -> Array:
    velocity = np.zeros(weight.size)
    for step, raw in enumerate(gradients, 1):
        g, size = prepared(rule, raw), np.linalg.norm(weight)
        trust = rule.eta * size / (np.linalg.norm(g) + rule.wd * size + rule.epsilon)
        velocity = rule.momentum * velocity + trust * (g + rule.wd * weight)
        weight = weight - rule.rate(step) * velocity
    return weight


def by_lamb(rule: LAMB, weight: Array, gradients: Sequence[Array]) -> Array:
    mean, variance = np.zeros(weight.size), np.zeros(weight.size)
    for step, raw in enumerate(gradients, 1):
        g = prepared(rule, raw)
        mean = rule.beta1 * mean + (1 - rule.beta1) * g
        variance = rule.beta2 * variance + (1 - rule.beta2) * g**2
        correct = rule.bias_correction
        first = mean / (1 - rule.beta1**step) if correct else mean
        second = variance / (1 - rule.beta2**step) if correct else variance
        direction = first / (np.sqrt(second) + rule.epsilon) + rule.wd * weight
        size = float(np.linalg.norm(weight))
        size = max(size, rule.lower_bound or 0.0)
        size = min(size, rule.upper_bound or math.inf)
        weight = weight - rule.rate(step) * size / np.linalg.norm(direction) * direction
    return weight


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    ("dtype", "error"), [("float64", 1e-11), ("float32", 2e-5), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)]
)
def test_they_follow_their_papers(rule: Any, dtype: str, error: float) -> None:
    weight, gradients = start(DTYPES[dtype]), gradients_of(DTYPES[dtype])
    assert len(gradients) == STEPS == 50
    result = trained(rule, weight, gradients).astype(np.float64)
    own = replace(rule, learning_rate=2.0, wd=0.05, lr_mult={}, wd_mult={}) if rule.lr_mult else rule
    formula: Any = by_lars if isinstance(rule, LARS) else by_lamb
    np.testing.assert_allclose(result, formula(own, weight.astype(np.float64), gradients), rtol=error, atol=error)
    assert np.median(np.abs(result - weight.astype(np.float64))) > 0.02


def test_golden_steps_of_lars_and_lamb_by_hand() -> None:
    # ‖w‖ = 5, ‖g‖ = 10: λ = 0.5·5/10 = 0.25, so w − 2·0.25·g = (3, 4) − (3, 4).
    weight, gradient = np.array([3, 4], np.float32), np.array([6, 8], np.float32)
    assert trained(LARS(2.0, eta=0.5), weight, [gradient]).tolist() == [0, 0]
    # r = sign(g), for the first step of Adam without ε is of size 1: ‖r‖ = √2, w − √2·5/√2·(1, 1).
    result = trained(LAMB(math.sqrt(2), epsilon=0.0), weight.astype(np.float64), [gradient.astype(np.float64)])
    assert result == pytest.approx([-2, -1])


@pytest.mark.parametrize("rule", [*RULES[:2], *RULES[3:5]], ids=repr)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_an_element_without_a_finite_gradient_poisons_no_other(rule: Any, poison: float) -> None:
    plain = replace(rule, clip_gradient=None)
    weight, gradients = start(np.float32), gradients_of(np.float32, 4)
    gradients[2][5] = poison
    others = np.arange(weight.size) != 5
    result = trained(plain, weight, gradients)
    assert np.isfinite(result[others]).all()
    assert np.abs(result[others] - weight[others]).max() < 3


@pytest.mark.parametrize("rule", RULES[:1] + RULES[3:4], ids=repr)
def test_a_value_or_a_gradient_of_zeros_takes_an_ordinary_step(rule: Optimizer) -> None:
    zeros, gradients = np.zeros(57, np.float32), gradients_of(np.float32, 2)
    assert np.abs(trained(rule, zeros, gradients[:1])).max() > 0.005
    assert trained(rule, start(np.float32), [zeros]).tobytes() == start(np.float32).tobytes()


@pytest.mark.parametrize("rule", [*RULES, SGLD(0.01, wd=0.1)], ids=repr)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_bits_do_not_depend_on_tiles_and_a_replica_has_the_same(rule: Optimizer, dtype: str) -> None:
    random = np.random.default_rng(3)
    current = random.normal(size=40_000).astype(DTYPES[dtype])
    states = [SliceState() for _ in range(3)]
    for _ in range(2):
        given = [random.normal(size=current.size).astype(current.dtype) for _ in range(2)]
        outs = [np.empty_like(current) for _ in states]
        merged = np.empty(current.size, np.float32 if dtype == "float16" else current.dtype)
        apply_update(rule, states[0], current, given, outs[0], "mean", merged=merged, slice_id=("w", 3))
        apply_update(rule, states[1], current, given, outs[1], "mean", tile=777, slice_id=("w", 3))
        apply_update(rule, states[2], current, [merged], outs[2], is_merged=True, slice_id=("w", 3))
        assert outs[0].tobytes() == outs[1].tobytes() == outs[2].tobytes()
        assert states[0].checksum() == states[1].checksum() == states[2].checksum()
        current = outs[0]


def test_the_key_has_to_be_known() -> None:
    value = np.ones(2, np.float32)
    with pytest.raises(NotAllowed, match="LARS has to know the key"):
        apply_update(LARS(0.1), SliceState(), value, [value], value.copy())


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 2**15, 2**15 + 1, 100_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_norms_are_right_and_their_order_is_fixed(size: int, dtype: Any) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(dtype)
    assert norm(values) == pytest.approx(math.sqrt(math.fsum((values.astype(np.float64) ** 2).tolist())), rel=1e-14)
    doubled = np.repeat(values, 2)[::2]  # with gaps in memory
    assert norm(doubled) == norm(values)


def test_the_order_of_a_sum_is_the_documented_one() -> None:
    # 1 + x = 1, but 1 + 2x is more. Of three, the last is added to the first, then the middle one; of four, the latter
    # two are added to the former two first.
    x = 0.75 * 2.0**-53
    assert folded_sum(np.array([1, x, x])) == 1
    assert folded_sum(np.array([1, x, x, x])) == 1 + 2.0**-52


# ── noise ──


def test_sgld_adds_noise_to_half_a_step() -> None:
    rule, weight, gradients = SGLD(0.04, seed=7, wd=0.5), start(np.float64), gradients_of(np.float64)
    expected = weight
    for step, gradient in enumerate(gradients, 1):
        noise = Noise(7, "w", 0, step).normal(0, weight.size)
        expected = expected - 0.02 * (gradient + 0.5 * expected) + 0.2 * noise
    np.testing.assert_allclose(trained(rule, weight, gradients), expected, rtol=1e-12)
    still = trained(SGLD(0.0), weight, gradients[:2])
    assert still.tobytes() == weight.tobytes()


def test_the_noise_is_normal_to_seven_digits() -> None:
    """Against the inverse of the normal distribution in the standard library."""
    powers = 10.0 ** -np.arange(1, 16)
    uniform = np.concatenate([np.linspace(1e-9, 1 - 1e-9, 999), powers, 1 - powers, [2.0**-53, 1 - 2.0**-53]])
    expected = [NormalDist().inv_cdf(value) for value in uniform.tolist()]
    np.testing.assert_allclose(quantiles(uniform), expected, rtol=2e-7, atol=1e-15)


def test_the_noise_has_the_moments_of_independent_normal_numbers() -> None:
    count = 200_000
    drawn = [Noise(seed, key, index, step).normal(0, count) for seed, key, index, step in _NAMES]
    for values in drawn:
        assert abs(values.mean()) < 5 / math.sqrt(count)
        assert abs((values**2).mean() - 1) < 5 * math.sqrt(2 / count)
        assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / count)
        assert abs((values[1:] * values[:-1]).mean()) < 5 / math.sqrt(count)
    for number, values in enumerate(drawn):
        for other in drawn[:number]:
            assert abs((values * other).mean()) < 5 / math.sqrt(count)


_NAMES = [(0, "w", 0, 1), (1, "w", 0, 1), (0, "v", 0, 1), (0, "w", 1, 1), (0, "w", 0, 2)]


def test_the_noise_is_the_same_however_it_is_asked_for() -> None:
    noise = Noise(2**60, "a key", 5, 9)
    whole = noise.normal(0, 1000)
    assert (
        np.concatenate([noise.normal(0, 1), noise.normal(1, 600), noise.normal(601, 399)]).tobytes() == whole.tobytes()
    )


def test_the_noise_is_splitmix64_of_a_hash_of_the_place() -> None:
    """The hash in whole numbers of Python, the quantiles from the standard library."""
    base = int.from_bytes(hashlib.blake2b(b"-7 3 12 a key", digest_size=8).digest(), "little")
    expected = []
    for element in range(2000):
        bits = (base + (element + 1) * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        bits ^= bits >> 31
        expected.append(NormalDist().inv_cdf(((bits >> 12) + 0.5) / 2**52))
    np.testing.assert_allclose(Noise(-7, "a key", 3, 12).normal(0, 2000), expected, rtol=2e-7)


def test_the_noise_has_the_same_bits_on_every_machine() -> None:
    assert Noise(0, "w", 0, 1).normal(0, 3).tolist() == [0.07094428079923884, -0.8953166451483986, -1.608761068425559]
