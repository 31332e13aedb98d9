"""Every optimizer against its formula and against torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from kvd.compute.catalogue import scalars
from kvd.compute.tensors import DTYPES
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
from tests.compute.optimizer_harness import OF_TORCH, RULES, SIZE, Array, by_formula, gradients_of, start, trained

_TORCH_NAMES = {"wd": "weight_decay", "epsilon": "eps"}
_TORCH_CLASSES: dict[type[Optimizer], Any] = {
    SGD: torch.optim.SGD,
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
    Adagrad: torch.optim.Adagrad,
    RMSProp: torch.optim.RMSprop,
    AdaDelta: torch.optim.Adadelta,
    Adamax: torch.optim.Adamax,
    Nadam: torch.optim.NAdam,
}
_COMMON = {"learning_rate", "rescale_grad", "clip_gradient", "beta1", "beta2", "lr_mult", "wd_mult"}


def by_torch(rule: Any, weight: Array, gradients: Sequence[Array]) -> Array:
    """torch.optim in the dtype of ``weight``, clipped and rescaled by hand, with the learning rate set at each step."""
    own = {field.name for field in fields(rule)} - _COMMON
    options = {_TORCH_NAMES.get(name, name): getattr(rule, name) for name in own}
    if hasattr(rule, "beta1"):
        options["betas"] = (rule.beta1, rule.beta2)
    parameter = torch.tensor(weight)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(parameter.dtype)  # in which NAdam keeps its product
    try:
        optimizer = _TORCH_CLASSES[type(rule)]([parameter], lr=rule.rate(1), **options)
        for step, gradient in enumerate(gradients, 1):
            optimizer.param_groups[0]["lr"] = rule.rate(step)
            parameter.grad = torch.tensor(gradient) * rule.rescale_grad
            if rule.clip_gradient is not None:
                parameter.grad = parameter.grad.clamp(-rule.clip_gradient, rule.clip_gradient)
            optimizer.step()
    finally:
        torch.set_default_dtype(usual)
    return parameter.numpy()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_every_optimizer_follows_its_formula(rule: Optimizer, dtype: Any, error: float) -> None:
    weight, gradients = start(dtype), gradients_of(dtype)
    result = trained(rule, weight, gradients)
    np.testing.assert_allclose(result, by_formula(rule, weight, gradients), rtol=error, atol=error)
    assert np.median(np.abs(result - weight)) > 100 * error, "nothing would be shown by weights that do not move"


@pytest.mark.parametrize("rule", OF_TORCH, ids=repr)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_every_optimizer_follows_torch(rule: Optimizer, dtype: Any, error: float) -> None:
    weight, gradients = start(dtype), gradients_of(dtype)
    result = trained(rule, weight, gradients)
    np.testing.assert_allclose(result, by_torch(rule, weight, gradients), rtol=error, atol=error)


def test_golden_steps_of_sgd_by_hand() -> None:
    # b₁ = 2, w₁ = 1 − 0.5·2 = 0; b₂ = 0.5·2 + 2 = 3, w₂ = 0 − 0.5·3 = −1.5: all exact in binary.
    rule = SGD(0.5, momentum=0.5)
    two = np.array([2], np.float32)
    assert trained(rule, np.array([1], np.float32), [two]).tolist() == [0]
    assert trained(rule, np.array([1], np.float32), [two, two]).tolist() == [-1.5]
    # The order: 8 is rescaled to 4, clipped to 3, and only then decayed: g = 3 + 0.5·1, w = 1 − 0.5·3.5.
    rule = SGD(0.5, wd=0.5, rescale_grad=0.5, clip_gradient=3)
    assert trained(rule, np.array([1], np.float32), [np.array([8], np.float32)]).tolist() == [-0.75]


def test_a_gradient_without_spread_does_not_make_centered_rmsprop_nan() -> None:
    # With a constant gradient v − a² tends to 0, and for many of these magnitudes rounding takes it below.
    constant = np.linspace(0.01, 3, SIZE).astype(np.float32)
    rule = RMSProp(1e-3, alpha=0.9, centered=True, epsilon=1e-3)
    assert np.isfinite(trained(rule, start(np.float32), [constant] * 400)).all()


def test_a_nan_in_the_gradient_shows_in_the_weight_also_when_clipped() -> None:
    poison = np.array([np.nan, 1], np.float32)
    result = trained(SGD(0.5, clip_gradient=1), np.zeros(2, np.float32), [poison])
    assert np.isnan(result[0])
    assert result[1] == -0.5


def test_each_step_of_adam_is_one_rounded_float32_operation() -> None:
    rule = Adam(0.003, beta1=0.9, beta2=0.99, epsilon=1e-6, wd=0.01, rescale_grad=0.3, clip_gradient=0.2)
    single = np.float32
    weight, gradients = start(np.float32), gradients_of(np.float32, 5)
    expected = []
    for index in range(SIZE):
        w, m, v = weight[index], single(0), single(0)
        for step, values in enumerate(gradients, 1):
            root = math.sqrt(1 - 0.99**step)
            g = min(max(values[index] * single(0.3), single(-0.2)), single(0.2))
            g = g + w * single(0.01)
            m = m * single(0.9) + g * single(1 - 0.9)
            v = v * single(0.99) + g * g * single(1 - 0.99)
            w = w - m / (np.sqrt(v) + single(1e-6 * root)) * single(0.003 * root / (1 - 0.9**step))
        expected.append(w)
    assert trained(rule, weight, gradients, tile=8).tobytes() == np.array(expected, single).tobytes()


def test_golden_steps_of_signum_by_hand() -> None:
    # b₁ = 0.5·3 = 1.5, w₁ = (1 − 0.25·0.5)·8 − 0.25 = 6.75; b₂ = 0.75 − 0.5·4 < 0, w₂ = 0.875·6.75 + 0.25.
    rule = Signum(0.25, momentum=0.5, wd_lh=0.5)
    gradients = [np.array([value], np.float32) for value in (3, -4)]
    assert trained(rule, np.array([8], np.float32), gradients).tolist() == [0.875 * 6.75 + 0.25]


def test_ftrl_makes_weights_exactly_zero_until_the_gradients_exceed_l1() -> None:
    # From 0, z is the sum of the gradients: 0.75, then 1.5 > 1, √n = √1.125. Without a gradient it stays 0.
    rule, gradient = Ftrl(0.5, l1=1.0), np.array([0.75, 0, -0.75])
    assert trained(rule, np.zeros(3), [gradient]).tolist() == [0, 0, 0]
    expected = 0.5 / ((1 + math.sqrt(1.125)) / 0.5)
    assert trained(rule, np.zeros(3), [gradient] * 2) == pytest.approx([-expected, 0, expected])


@pytest.mark.parametrize("rate", [0.0, 1e-300, 5e-324, schedule.Cosine(0.1, 50)])
@pytest.mark.parametrize("kind", [Ftrl, FTML])
def test_a_learning_rate_of_nothing_changes_nothing(kind: type[Ftrl | FTML], rate: Any) -> None:
    """Their formulas divide by it; a schedule may well end at 0."""
    weight, gradients = start(np.float32), gradients_of(np.float32, 51)
    rule = kind(rate)
    if not isinstance(rate, float):  # all updates but the last
        weight = trained(rule, weight, gradients[:50])
        assert rule.rate(51) == 0
        assert trained(rule, start(np.float32), gradients).tobytes() == weight.tobytes()
    else:
        assert trained(rule, weight, gradients).tobytes() == weight.tobytes()


@pytest.mark.parametrize("rule", [AdaDelta(), Adamax(), Nadam(), FTML(), Signum(), Signum(momentum=0.0)], ids=repr)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_elements_without_gradients_stay_as_they_are(rule: Optimizer, dtype: str) -> None:
    weight, gradients = start(DTYPES[dtype]), [np.zeros(SIZE, DTYPES[dtype])] * 20
    np.testing.assert_allclose(trained(rule, weight, gradients), weight, rtol=1e-6)


@pytest.mark.parametrize("momentum_decay", [0.0, 4e-3, 0.3, 5.0, 1e300])
@pytest.mark.parametrize("beta1", [0.0, 0.9, 1 - 2.0**-53])
def test_nadams_product_of_momenta_takes_no_longer_at_any_step(beta1: float, momentum_decay: float) -> None:
    rule = Nadam(beta1=beta1, momentum_decay=momentum_decay)
    momenta = [beta1 * (1 - 0.96 ** (n * momentum_decay) / 2) for n in range(5002)]
    expected = 2e-3 * math.sqrt(1 - 0.999**5000) * (1 - momenta[5000]) / (1 - math.prod(momenta[1:5001]))
    assert scalars(rule, 5000)[-3] == pytest.approx(expected, rel=1e-9)
    assert all(math.isfinite(number) for number in scalars(Nadam(beta1=0.9, momentum_decay=momentum_decay), 2**62)[3:])
