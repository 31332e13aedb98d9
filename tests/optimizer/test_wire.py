"""Optimizers cross the wire as plain data."""

from __future__ import annotations

import json
import math

import msgpack
import pytest

from kvd.errors import ProtocolError
from kvd.optimizer import (
    DCASGD,
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
    DelayedNesterov,
    Ftrl,
    Nadam,
    Optimizer,
    RMSProp,
    RowWiseAdagrad,
    Signum,
    from_wire,
    known_optimizers,
    schedule,
    to_wire,
)

EVERY_OPTIMIZER: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, 0.9, 1e-4, 1 / 32, 1.5, True),
    SGD(schedule.Warmup(schedule.Cosine(0.1, 100, 0.001), 10), momentum=0.9),
    SGD(schedule.Warmup(0.5, 3)),
    Adam(),
    Adam(schedule.Step(0.1, 30, 0.5), clip_gradient=1.0),
    AdamW(schedule.Polynomial(0.1, 100, power=2.0), beta1=0.8),
    Adagrad(lr_decay=0.1),
    RMSProp(momentum=0.9, centered=True),
    RowWiseAdagrad(lr_decay=0.1),
    AdaDelta(0.5, rho=0.8),
    Adamax(beta1=0.8),
    Nadam(momentum_decay=0.1),
    Ftrl(schedule.Step(0.1, 30, 0.5), l1=0.5, beta=2.0),
    Signum(wd_lh=0.01),
    FTML(beta1=0.5),
    LARS(0.1, momentum=0.9, eta=0.01),
    LAMB(lower_bound=0.1, upper_bound=10.0),
    SGLD(0.1, seed=-5),
    DelayedNesterov(0.7, 3, activation=0.1),
    DCASGD(0.1, momentum=0.5, compensation=0.1),
]


def test_every_optimizer_is_tried() -> None:
    assert {type(optimizer) for optimizer in EVERY_OPTIMIZER} == set(known_optimizers().values())


@pytest.mark.parametrize("optimizer", EVERY_OPTIMIZER, ids=lambda value: type(value).__name__)
def test_the_wire_brings_back_what_went_in(optimizer: Optimizer) -> None:
    wire = to_wire(optimizer)
    assert from_wire(wire) == optimizer
    assert from_wire(msgpack.unpackb(msgpack.packb(wire))) == optimizer
    assert from_wire(json.loads(json.dumps(wire))) == optimizer
    assert to_wire(from_wire(wire)) == wire


def test_the_wire_form_is_fixed() -> None:
    assert to_wire(SGD(schedule.Warmup(0.5, 3), momentum=0.9)) == [
        "SGD",
        {
            "learning_rate": ["schedule", "Warmup", {"inner": 0.5, "steps": 3}],
            "momentum": 0.9,
            "wd": 0.0,
            "rescale_grad": 1.0,
            "clip_gradient": None,
            "nesterov": False,
        },
    ]


def fields_of_sgd(**changes: object) -> list[object]:
    name, fields = to_wire(SGD(0.1))
    assert isinstance(fields, dict)
    return [name, fields | changes]


def nested(depth: int) -> object:
    inner: object = 0.1
    for _ in range(depth):
        inner = ["schedule", "Warmup", {"inner": inner, "steps": 2}]
    return inner


@pytest.mark.parametrize(
    "wire",
    [
        None,
        b"SGD",
        "SGD",
        [],
        ["SGD"],
        ["SGD", None],
        ["SGD", {}],
        ["SGD", [["learning_rate", 0.1]]],
        ["SGD", {"learning_rate": 0.1}],
        [["SGD"], {}],
        [{}, {}],
        ["os.system", {}],
        ["Optimizer", {}],
        fields_of_sgd(unknown=1),
        fields_of_sgd(learning_rate=-1.0),
        fields_of_sgd(learning_rate=math.nan),
        fields_of_sgd(learning_rate=math.inf),
        fields_of_sgd(learning_rate=b"0.1"),
        fields_of_sgd(learning_rate=[]),
        fields_of_sgd(learning_rate={}),
        fields_of_sgd(learning_rate=10**5000),
        fields_of_sgd(learning_rate=["schedule", "Step", {}]),
        fields_of_sgd(learning_rate=["schedule", "Step", None]),
        fields_of_sgd(learning_rate=["schedule", ["Step"], {}]),
        fields_of_sgd(learning_rate=["schedule", "Nothing", {}]),
        fields_of_sgd(learning_rate=["SGD", {}]),
        fields_of_sgd(momentum=["schedule", "Step", {"base": 0.1, "step": 1, "factor": 0.5}]),
        fields_of_sgd(momentum="much"),
        fields_of_sgd(nesterov=1),
        fields_of_sgd(learning_rate=nested(2)),
        fields_of_sgd(learning_rate=nested(500)),
        ["SGD", {1: 2}],
    ],
)
def test_a_malformed_optimizer_is_a_protocol_error(wire: object) -> None:
    with pytest.raises(ProtocolError):
        from_wire(wire)
