"""The fields of the optimizers: their order, their defaults and their ranges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from kvd.errors import ConfigError
from kvd.optimizer import (
    FTML,
    LAMB,
    LARS,
    SGD,
    SGLD,
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
    changes_from_wire,
    changes_to_wire,
    schedule,
    with_hyperparameters,
)


def test_the_arguments_of_sgd_come_in_the_documented_order() -> None:
    assert SGD(0.1, 0.9, 0.01, 0.5, 2.0, True) == SGD(
        learning_rate=0.1, momentum=0.9, wd=0.01, rescale_grad=0.5, clip_gradient=2.0, nesterov=True
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (Adam(), torch.optim.Adam, {"learning_rate": "lr", "epsilon": "eps", "wd": "weight_decay"}),
        (AdamW(), torch.optim.AdamW, {"learning_rate": "lr", "epsilon": "eps", "wd": "weight_decay"}),
        (Adagrad(), torch.optim.Adagrad, {"learning_rate": "lr", "epsilon": "eps", "lr_decay": "lr_decay"}),
        (RMSProp(), torch.optim.RMSprop, {"learning_rate": "lr", "epsilon": "eps", "alpha": "alpha"}),
        (AdaDelta(), torch.optim.Adadelta, {"learning_rate": "lr", "epsilon": "eps", "rho": "rho"}),
        (Adamax(), torch.optim.Adamax, {"learning_rate": "lr", "epsilon": "eps", "wd": "weight_decay"}),
        (Nadam(), torch.optim.NAdam, {"learning_rate": "lr", "epsilon": "eps", "momentum_decay": "momentum_decay"}),
    ],
)
def test_defaults_are_those_of_torch(ours: Optimizer, theirs: Any, names: dict[str, str]) -> None:
    defaults = theirs([torch.zeros(1)]).defaults
    assert {name: getattr(ours, name) for name in names} == {name: defaults[name_] for name, name_ in names.items()}


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: SGD(-0.1), "learning_rate"),
        (lambda: SGD(math.nan), "learning_rate"),
        (lambda: SGD(math.inf), "learning_rate"),
        (lambda: SGD("0.1"), "learning_rate"),  # type: ignore[arg-type]
        (lambda: SGD(None), "learning_rate"),  # type: ignore[arg-type]
        (lambda: SGD(True), "learning_rate"),
        (lambda: SGD(10**400), "learning_rate"),
        (lambda: SGD(0.1, momentum=-1), "momentum"),
        (lambda: SGD(0.1, wd=-1), "wd"),
        (lambda: SGD(0.1, rescale_grad=math.inf), "rescale_grad"),
        (lambda: SGD(0.1, clip_gradient=0), "clip_gradient"),
        (lambda: SGD(0.1, nesterov=True), "nesterov"),
        (lambda: SGD(0.1, nesterov=1), "nesterov"),  # type: ignore[arg-type]
        (lambda: SGD(0.1, nesterov=10**5000), "nesterov"),  # type: ignore[arg-type]
        (lambda: Adam(beta1=1), "beta1"),
        (lambda: Adam(beta2=-0.1), "beta2"),
        (lambda: AdamW(epsilon=-1), "epsilon"),
        (lambda: Adagrad(lr_decay=-1), "lr_decay"),
        (lambda: RMSProp(alpha=2), "alpha"),
        (lambda: AdaDelta(rho=1.1), "rho"),
        (lambda: AdaDelta(epsilon=0), "epsilon"),
        (lambda: Adamax(beta1=1), "beta1"),
        (lambda: Nadam(momentum_decay=-1), "momentum_decay"),
        (lambda: Ftrl(l1=-1), "l1"),
        (lambda: Ftrl(beta=0), "beta"),
        (lambda: Signum(momentum=1), "momentum"),
        (lambda: Signum(wd_lh=-1), "wd_lh"),
        (lambda: FTML(beta2=1), "beta2"),
        (lambda: FTML(epsilon=0), "epsilon"),
        (lambda: LARS(0.1, eta=0), "eta"),
        (lambda: LARS(0.1, momentum=-1), "momentum"),
        (lambda: LAMB(beta1=1), "beta1"),
        (lambda: LAMB(lower_bound=-1), "lower_bound"),
        (lambda: LAMB(lower_bound=2, upper_bound=1), "lower_bound"),
        (lambda: SGLD(0.1, seed=0.5), "seed"),  # type: ignore[arg-type]
        (lambda: SGLD(0.1, seed=2**60), "seed"),
        (lambda: schedule.Step(0.1, 0, 0.5), "step"),
        (lambda: schedule.Step(0.1, 1.5, 0.5), "step"),  # type: ignore[arg-type]
        (lambda: schedule.Step(0.1, 10, 1.5), "factor"),
        (lambda: schedule.Step(0.1, 2**60, 0.5), "step"),
        (lambda: schedule.Cosine(-1, 10), "base"),
        (lambda: schedule.Cosine(1, 10, -1), "final"),
        (lambda: schedule.Polynomial(1, 10, power=0), "power"),
        (lambda: schedule.Warmup(-1, 10), "inner"),
        (lambda: schedule.Warmup(schedule.Warmup(0.1, 2), 10), "inner"),
    ],
)
def test_a_field_out_of_its_range_is_named(make: Any, setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.setting == setting


def test_numbers_of_all_kinds_become_python_numbers() -> None:
    optimizer = SGD(1, momentum=np.float32(0.5), wd=np.int64(2))  # type: ignore[arg-type]
    assert [type(value) for value in (optimizer.learning_rate, optimizer.momentum, optimizer.wd)] == [float] * 3
    assert optimizer == SGD(1.0, 0.5, 2.0)


def test_hyperparameters_are_changed_in_a_copy() -> None:
    before = Adam(0.1, beta1=0.8)
    rate = schedule.Step(0.01, 10, 0.5)
    changes = changes_from_wire(msgpack.unpackb(msgpack.packb(changes_to_wire({"learning_rate": rate, "wd": 1}))))
    assert with_hyperparameters(before, changes) == Adam(rate, beta1=0.8, wd=1.0)
    assert before == Adam(0.1, beta1=0.8)


def test_an_unknown_hyperparameter_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate, momentum, wd") as raised:
        with_hyperparameters(SGD(0.1), {"lr": 0.2})
    assert raised.value.setting == "lr"
    with pytest.raises(ConfigError) as raised:
        with_hyperparameters(SGD(0.1), {"learning_rate": -1})
    assert raised.value.setting == "learning_rate"


def test_specifications_are_frozen_and_hashable() -> None:
    assert len({SGD(0.1), SGD(0.1), SGD(0.2)}) == 2
    with pytest.raises(AttributeError):
        SGD(0.1).momentum = 0.5  # type: ignore[misc]
    assert replace(SGD(0.1), momentum=0.5).momentum == 0.5
