"""Custom optimizers that other distributions install."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvd.errors import ConfigError, ProtocolError
from kvd.optimizer import (
    SGD,
    Optimizer,
    from_wire,
    known_optimizers,
    registry,
    schedule,
    to_wire,
)

BUILT_IN = {
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSProp",
    "AdaDelta",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Signum",
    "FTML",
    "LARS",
    "LAMB",
    "SGLD",
    "DelayedNesterov",
    "DCASGD",
    "RowWiseAdagrad",
}


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
    assert known.keys() == BUILT_IN | {"sign"}
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
