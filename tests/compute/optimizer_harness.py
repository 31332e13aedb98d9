"""Sample gradients, the optimizers to try, and their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvd.compute.optimizers import SliceState, apply_update
from kvd.optimizer import (
    FTML,
    SGD,
    AdaDelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Nadam,
    Optimizer,
    RMSProp,
    Signum,
    schedule,
)

Array = np.ndarray[Any, Any]
STEPS = 50
SIZE = 57


def gradients_of(dtype: Any, count: int = STEPS) -> list[Array]:
    random = np.random.default_rng(7)
    return [random.normal(size=SIZE).astype(dtype) for _ in range(count)]


def start(dtype: Any) -> Array:
    return np.random.default_rng(1).normal(size=SIZE).astype(dtype)


def trained(optimizer: Optimizer, weight: Array, gradients: Sequence[Array], tile: int = 65536) -> Array:
    """The weight after one update per gradient. Each update writes to new memory."""
    state = SliceState()
    current, following = weight.copy(), np.full_like(weight, 99)
    for gradient in gradients:
        served = current.copy()
        apply_update(optimizer, state, current, [gradient], following, "sum", tile=tile)
        assert current.tobytes() == served.tobytes()
        current, following = following, current
    assert state.step == len(gradients)
    return current


def prepared(rule: Any, weight: float, gradient: float, wd: float) -> float:
    gradient *= rule.rescale_grad
    if rule.clip_gradient is not None:
        gradient = max(-rule.clip_gradient, min(rule.clip_gradient, gradient))
    return gradient + wd * weight


def by_sgd(rule: SGD, weight: float, gradients: Sequence[float]) -> float:
    velocity = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        velocity = rule.momentum * velocity + gradient
        weight -= rule.rate(step) * (gradient + rule.momentum * velocity if rule.nesterov else velocity)
    return weight


def by_adam(rule: Adam | AdamW, weight: float, gradients: Sequence[float]) -> float:
    first = second = 0.0
    for step, raw in enumerate(gradients, 1):
        if isinstance(rule, AdamW):
            gradient = prepared(rule, weight, raw, 0.0)
            weight -= rule.rate(step) * rule.wd * weight
        else:
            gradient = prepared(rule, weight, raw, rule.wd)
        first = rule.beta1 * first + (1 - rule.beta1) * gradient
        second = rule.beta2 * second + (1 - rule.beta2) * gradient * gradient
        corrected = first / (1 - rule.beta1**step)
        weight -= rule.rate(step) * corrected / (math.sqrt(second / (1 - rule.beta2**step)) + rule.epsilon)
    return weight


def by_adagrad(rule: Adagrad, weight: float, gradients: Sequence[float]) -> float:
    total = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        total += gradient * gradient
        rate = rule.rate(step) / (1 + (step - 1) * rule.lr_decay)
        weight -= rate * gradient / (math.sqrt(total) + rule.epsilon)
    return weight


def by_rmsprop(rule: RMSProp, weight: float, gradients: Sequence[float]) -> float:
    square = mean = velocity = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        square = rule.alpha * square + (1 - rule.alpha) * gradient * gradient
        mean = rule.alpha * mean + (1 - rule.alpha) * gradient
        spread = max(square - mean * mean, 0) if rule.centered else square
        velocity = rule.momentum * velocity + gradient / (math.sqrt(spread) + rule.epsilon)
        weight -= rule.rate(step) * velocity
    return weight


def by_adadelta(rule: AdaDelta, weight: float, gradients: Sequence[float]) -> float:
    square = delta = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        square = rule.rho * square + (1 - rule.rho) * gradient**2
        change = math.sqrt((delta + rule.epsilon) / (square + rule.epsilon)) * gradient
        delta = rule.rho * delta + (1 - rule.rho) * change**2
        weight -= rule.rate(step) * change
    return weight


def by_adamax(rule: Adamax, weight: float, gradients: Sequence[float]) -> float:
    mean = greatest = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        mean = rule.beta1 * mean + (1 - rule.beta1) * gradient
        greatest = max(rule.beta2 * greatest, abs(gradient) + rule.epsilon)
        weight -= rule.rate(step) / (1 - rule.beta1**step) * mean / greatest
    return weight


def by_nadam(rule: Nadam, weight: float, gradients: Sequence[float]) -> float:
    mean = variance = 0.0
    momenta = [rule.beta1 * (1 - 0.96 ** (n * rule.momentum_decay) / 2) for n in range(len(gradients) + 2)]
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        mean = rule.beta1 * mean + (1 - rule.beta1) * gradient
        variance = rule.beta2 * variance + (1 - rule.beta2) * gradient**2
        ahead = momenta[step + 1] * mean / (1 - math.prod(momenta[1 : step + 2]))
        ahead += (1 - momenta[step]) * gradient / (1 - math.prod(momenta[1 : step + 1]))
        weight -= rule.rate(step) * ahead / (math.sqrt(variance / (1 - rule.beta2**step)) + rule.epsilon)
    return weight


def by_ftrl(rule: Ftrl, weight: float, gradients: Sequence[float]) -> float:
    linear = square = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient, rate = prepared(rule, weight, raw, 0.0), rule.rate(step)
        linear += gradient - (math.sqrt(square + gradient**2) - math.sqrt(square)) / rate * weight
        square += gradient**2
        shrunk = math.copysign(max(abs(linear) - rule.l1, 0.0), linear)
        weight = -shrunk / ((rule.beta + math.sqrt(square)) / rate + rule.wd)
    return weight


def by_signum(rule: Signum, weight: float, gradients: Sequence[float]) -> float:
    velocity = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        velocity = rule.momentum * velocity + (1 - rule.momentum) * gradient
        weight -= rule.rate(step) * (rule.wd_lh * weight + (velocity > 0) - (velocity < 0))
    return weight


def by_ftml(rule: FTML, weight: float, gradients: Sequence[float]) -> float:
    variance = before = linear = 0.0
    for step, raw in enumerate(gradients, 1):
        gradient = prepared(rule, weight, raw, rule.wd)
        variance = rule.beta2 * variance + (1 - rule.beta2) * gradient**2
        root = math.sqrt(variance / (1 - rule.beta2**step))
        denominator = (1 - rule.beta1**step) / rule.rate(step) * (root + rule.epsilon)
        linear = rule.beta1 * linear + (1 - rule.beta1) * gradient - (denominator - rule.beta1 * before) * weight
        before = denominator
        weight = -linear / denominator
    return weight


def by_formula(rule: Optimizer, weight: Array, gradients: Sequence[Array]) -> Array:
    formulas: dict[type[Optimizer], Callable[..., float]] = {
        SGD: by_sgd,
        Adam: by_adam,
        AdamW: by_adam,
        Adagrad: by_adagrad,
        RMSProp: by_rmsprop,
        AdaDelta: by_adadelta,
        Adamax: by_adamax,
        Nadam: by_nadam,
        Ftrl: by_ftrl,
        Signum: by_signum,
        FTML: by_ftml,
    }
    columns = np.stack([gradient.astype(np.float64) for gradient in gradients]).T.tolist()
    starts = weight.astype(np.float64).tolist()
    return np.array([formulas[type(rule)](rule, w, column) for w, column in zip(starts, columns, strict=True)])


OF_TORCH: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, wd=0.05),
    SGD(0.1, momentum=0.9),
    SGD(0.05, momentum=0.9, wd=0.05, rescale_grad=0.25, clip_gradient=0.3),
    SGD(0.05, momentum=0.8, nesterov=True, wd=0.01),
    SGD(schedule.Warmup(schedule.Cosine(0.2, 20), 5), momentum=0.9),
    Adam(0.01),
    Adam(0.01, beta1=0.5, beta2=0.9, epsilon=1e-3, wd=0.1, rescale_grad=2.0, clip_gradient=1.0),
    Adam(schedule.Step(0.05, 7, 0.5)),
    AdamW(0.01),
    AdamW(0.05, wd=0.3, clip_gradient=0.5),
    Adagrad(0.1),
    Adagrad(0.1, lr_decay=0.05, wd=0.02, epsilon=1e-4),
    RMSProp(0.01),
    RMSProp(0.01, alpha=0.9, momentum=0.9, wd=0.01),
    RMSProp(0.01, alpha=0.9, centered=True, epsilon=1e-3),
    RMSProp(0.01, alpha=0.8, centered=True, momentum=0.5, epsilon=1e-2, rescale_grad=0.5, clip_gradient=0.4),
    AdaDelta(),
    AdaDelta(0.5, rho=0.8, epsilon=1e-3, wd=0.02, rescale_grad=0.5, clip_gradient=0.4),
    Adamax(0.01),
    Adamax(0.01, beta1=0.5, beta2=0.9, epsilon=1e-3, wd=0.1, rescale_grad=2.0, clip_gradient=1.0),
    Nadam(0.01),
    Nadam(schedule.Step(0.05, 7, 0.5), beta1=0.5, beta2=0.9, epsilon=1e-3, wd=0.1, clip_gradient=1.0),
    Nadam(0.01, momentum_decay=0.5),
]
"""Optimizers that torch has, too."""

RULES: list[Optimizer] = [
    *OF_TORCH,
    Ftrl(0.5),
    Ftrl(schedule.Polynomial(0.5, 100), l1=0.3, beta=0.5, wd=0.2, rescale_grad=0.5, clip_gradient=0.4),
    Signum(0.01),
    Signum(0.02, momentum=0.0),
    Signum(schedule.Step(0.05, 7, 0.5), momentum=0.5, wd=0.05, wd_lh=0.1, rescale_grad=0.5, clip_gradient=0.4),
    FTML(0.01),
    FTML(schedule.Step(0.05, 7, 0.5), beta1=0.5, beta2=0.9, epsilon=1e-3, wd=0.1, rescale_grad=2.0, clip_gradient=1.0),
]
