"""The optimizer specifications: their checks, their schedules, and their way over the wire."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ConfigError, ProtocolError
from kvd.optimizer import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    RMSProp,
    changes_from_wire,
    changes_to_wire,
    from_wire,
    known_optimizers,
    registry,
    schedule,
    to_wire,
    with_hyperparameters,
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
]


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


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
_NAMES = st.sampled_from(["SGD", "Adam", "AdamW", "RMSProp", "Step", "Cosine", "Warmup", "schedule", "Optimizer"])
_FIELD_NAMES = st.sampled_from(
    ["learning_rate", "momentum", "wd", "rescale_grad", "clip_gradient", "nesterov", "inner", "steps", "base", "final"]
)
_ANYTHING = st.recursive(
    _SCALARS | _NAMES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(_NAMES, inner)
        | st.tuples(st.just("schedule"), _NAMES, inner)
        | st.dictionaries(_FIELD_NAMES | st.text(max_size=4) | st.integers(), inner, max_size=6)
    ),
    max_leaves=25,
)


def understood(wire: object) -> Optimizer | None:
    try:
        optimizer = from_wire(wire)
    except ProtocolError as error:
        message = str(error)
    else:
        return check_understood(optimizer)
    assert len(message) < 600  # an answer to garbage must not be as long as the garbage
    return None


def check_understood(optimizer: object) -> Optimizer:
    assert isinstance(optimizer, Optimizer)
    assert from_wire(to_wire(optimizer)) == optimizer
    rate = optimizer.rate(1)
    assert math.isfinite(rate)
    assert rate >= 0
    return optimizer


def test_the_largest_rates_do_not_overflow() -> None:
    for inner in (1e308, schedule.Cosine(1e308, 10), schedule.Polynomial(1e308, 10)):
        rates = schedule.Warmup(inner, 10)
        assert all(math.isfinite(rates.at(step)) for step in range(1, 30))


@given(_ANYTHING)
def test_any_bytes_are_an_optimizer_or_a_protocol_error(wire: object) -> None:
    understood(wire)


_NUMBERS = st.floats(-1, 2) | st.integers(-1, 3) | st.sampled_from([math.nan, math.inf, None, True, "x", 10**30])
_RATES = _NUMBERS | st.builds(lambda i, n: ["schedule", "Warmup", {"inner": i, "steps": n}], _NUMBERS, _NUMBERS)


@given(
    st.fixed_dictionaries(
        {
            "learning_rate": _RATES,
            "momentum": _NUMBERS,
            "wd": _NUMBERS,
            "rescale_grad": _NUMBERS,
            "clip_gradient": _NUMBERS,
            "nesterov": st.booleans() | _NUMBERS,
        }
    )
)
def test_nearly_right_fields_are_an_optimizer_or_a_protocol_error(fields: dict[str, object]) -> None:
    understood(["SGD", fields])


@given(_ANYTHING)
def test_any_changes_are_a_map_or_a_protocol_error(wire: object) -> None:
    try:
        changes = changes_from_wire(wire)
    except ProtocolError:
        return
    try:
        changed = with_hyperparameters(SGD(0.1, 0.9), changes)
    except ConfigError:
        return
    assert isinstance(changed, SGD)


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


@dataclass(frozen=True, slots=True)
class Sign(Optimizer):
    """A custom optimizer, as another distribution would define it."""

    learning_rate: float | schedule.Schedule
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    label: str = "sign"

    def check(self) -> None:
        if self.label == "explode":
            raise RuntimeError("a custom class may raise anything")

    def kernel(self) -> object:
        return object()


@dataclass(frozen=True, slots=True)
class Incomplete(Optimizer):
    learning_rate: float | schedule.Schedule

    def kernel(self) -> object:
        return object()


@dataclass(frozen=True, slots=True)
class WithoutKernel(Optimizer):
    learning_rate: float
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None


@dataclass(frozen=True, slots=True)
class WithoutTypes(WithoutKernel):
    mystery: NoSuchType = None  # type: ignore[name-defined]  # noqa: F821

    def kernel(self) -> object:
        return object()


class FakeEntryPoint:
    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.value = value

    def load(self) -> object:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entry points as if some distributions, good and bad ones, were installed."""
    points = [
        FakeEntryPoint("sign", Sign),
        FakeEntryPoint("SGD", Sign),
        FakeEntryPoint("broken", ImportError("no such library")),
        FakeEntryPoint("function", print),
        FakeEntryPoint("incomplete", Incomplete),
        FakeEntryPoint("base", Optimizer),
        FakeEntryPoint("without-kernel", WithoutKernel),
        FakeEntryPoint("without-types", WithoutTypes),
    ]
    asked: list[str] = []

    def entry_points(*, group: str) -> list[FakeEntryPoint]:
        asked.append(group)
        return points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()
    assert asked == ["kvd.optimizers"]


@pytest.mark.usefixtures("installed")
def test_installed_optimizers_are_known_and_bad_ones_left_out(caplog: pytest.LogCaptureFixture) -> None:
    known = known_optimizers()
    assert known["sign"] is Sign
    assert known["SGD"] is SGD
    assert known.keys() == {"SGD", "Adam", "AdamW", "Adagrad", "RMSProp", "sign"}
    for name in ("broken", "function", "incomplete", "base", "without-kernel", "without-types"):
        assert name in caplog.text


@pytest.mark.usefixtures("installed")
def test_an_installed_optimizer_crosses_the_wire_under_its_name() -> None:
    optimizer = Sign(schedule.Step(0.5, 2, 0.5), label="mine")
    name, fields = wire = to_wire(optimizer)
    assert name == "sign"
    assert from_wire(wire) == optimizer
    assert isinstance(fields, dict)
    for bad in ({"label": 3}, {"label": "explode"}, {"label": None}):
        with pytest.raises(ProtocolError):
            from_wire(["sign", fields | bad])


def test_an_optimizer_that_is_not_installed_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match=r"kvd\.optimizers"):
        to_wire(Sign(0.1))


def test_specifications_are_frozen_and_hashable() -> None:
    assert len({SGD(0.1), SGD(0.1), SGD(0.2)}) == 2
    with pytest.raises(AttributeError):
        SGD(0.1).momentum = 0.5  # type: ignore[misc]
    assert replace(SGD(0.1), momentum=0.5).momentum == 0.5
