"""Factors per key: which key has which, what is refused, and how they cross the wire."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import pytest

from kvd.errors import ConfigError, ProtocolError
from kvd.optimizer import (
    SGD,
    AdamW,
    DelayedNesterov,
    Optimizer,
    changes_from_wire,
    changes_to_wire,
    from_wire,
    known_optimizers,
    schedule,
    to_wire,
    with_hyperparameters,
)
from kvd.optimizer.multipliers import Multipliers


@pytest.mark.parametrize(
    ("entries", "factors"),
    [
        ({}, {"w": 1}),
        ({"w": 2, "b": 0}, {"w": 2, "b": 0, "ww": 1, "": 1}),
        ({"*": 3}, {"": 3, "w": 3}),
        ({"*_bias": 2}, {"fc_bias": 2, "_bias": 2, "bias": 1, "fc_bias_": 1}),
        ({"fc*": 2}, {"fc": 2, "fc1_bias": 2, "conv": 1}),
        ({"a*b*c": 2}, {"abc": 2, "a-b-c": 2, "abb": 1, "ac": 1, "acbc": 2, "a-c": 1}),
        ({"a*a": 2}, {"aa": 2, "a": 1, "aba": 2}),
        ({"a*ab*b": 2}, {"aabb": 2, "aab": 1, "abb": 1}),
        ({"layer[0].*": 2}, {"layer[0].w": 2, "layer0.w": 1}),
        ({"*_gamma": 0, "bn_*": 5, "bn_gamma": 7}, {"bn_gamma": 7, "x_gamma": 0, "bn_beta": 5, "bn_x_gamma": 0}),
        ({"a*": 2, "a*": 3, "a*b": 4}, {"ab": 3}),  # noqa: F601
        ({"x*y": 2}, {"x*y": 2}),
    ],
)
def test_a_name_goes_before_the_first_pattern_that_fits(entries: dict[str, float], factors: dict[str, float]) -> None:
    multipliers = Multipliers(entries)
    assert {key: multipliers.of(key) for key in factors} == factors


def test_a_pattern_of_many_stars_takes_no_time() -> None:
    assert Multipliers({"*a" * 90 + "b*": 2.0}).of("a" * 200) == 1


def test_keys_have_their_own_rates_and_decays() -> None:
    rule = AdamW(0.1, wd=0.2, lr_mult={"w": 0.5, 7: 4}, wd_mult={"*b": 0})
    assert rule.for_key("w") == AdamW(0.05, wd=0.2)
    assert rule.for_key("7").learning_rate == 0.4
    assert rule.for_key("wb") == AdamW(0.1, wd=0.0)
    assert rule.for_key("other") == AdamW(0.1, wd=0.2)
    assert not rule.for_key("w").differs_by_key
    assert SGD(0.1).for_key("w") is not None
    rates = SGD(schedule.Step(1.0, 1, 0.5), lr_mult={"w": 3.0})
    assert [rates.for_key("w").rate(step) for step in (1, 2, 3)] == [3, 1.5, 0.75]
    assert [rates.for_key("v").rate(step) for step in (1, 2, 3)] == [1, 0.5, 0.25]
    largest = SGD(1e308, wd=1e308, lr_mult={"w": 1e308}, wd_mult={"w": 1e308}).for_key("w")
    assert math.isfinite(largest.rate(1))
    assert math.isfinite(SGD(schedule.Cosine(1e308, 9), lr_mult={"w": 1e308}).for_key("w").rate(1))


@pytest.mark.parametrize(
    ("multipliers", "text"),
    [
        (None, "must map keys to factors"),
        (2.0, "must map keys to factors"),
        ([("w", 2.0)], "must map keys to factors"),
        ({"w": "2"}, "number"),
        ({"w": True}, "number"),
        ({"w": -0.5}, "≥ 0"),
        ({"w": math.nan}, "finite"),
        ({"w": math.inf}, "finite"),
        ({"": 1.0}, "1 to 200 characters"),
        ({"w" * 201: 1.0}, "1 to 200 characters"),
        ({1.5: 1.0}, "names of keys"),
        ({True: 1.0}, "names of keys"),
        ({f"w{n}": 1.0 for n in range(65)}, "patterns"),
        ({f"w{n}" * 60: 1.0 for n in range(20)}, "patterns"),
    ],
)
@pytest.mark.parametrize("name", ["lr_mult", "wd_mult"])
def test_what_is_no_mapping_of_keys_to_factors_is_refused(name: str, multipliers: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        SGD(0.1, **{name: multipliers})
    assert str(raised.value).startswith(name) or name in str(raised.value)
    assert str(raised.value.setting).startswith(name)
    wire: Any = ["SGD", {**to_wire(SGD(0.1))[1], name: multipliers}]  # type: ignore[dict-item]
    with pytest.raises(ProtocolError):
        from_wire(wire)


@pytest.mark.parametrize("kind", known_optimizers().values(), ids=lambda kind: kind.__name__)
def test_every_optimizer_has_them_and_they_cross_the_wire(kind: Any) -> None:
    needed = {"buffer_size": 2} if kind is DelayedNesterov else {}
    optimizer = kind(learning_rate=0.5, **needed, lr_mult={"b": 2, "a*": np.float32(0.5), 3: 0}, wd_mult={"*": 0.0})
    wire = to_wire(optimizer)
    assert wire[1]["lr_mult"] == {"b": 2.0, "a*": 0.5, "3": 0.0}  # type: ignore[index]
    decoded = from_wire(msgpack.unpackb(msgpack.packb(wire)))
    assert decoded == optimizer
    assert hash(decoded) == hash(optimizer)
    assert decoded.for_key("3").learning_rate == 0
    assert "lr_mult" not in to_wire(kind(learning_rate=0.5, **needed))[1]  # type: ignore[operator]


def test_the_order_of_patterns_counts() -> None:
    assert SGD(0.1, lr_mult={"a*": 1, "*b": 2}) != SGD(0.1, lr_mult={"*b": 2, "a*": 1})
    assert SGD(0.1, lr_mult={}) == SGD(0.1)


def test_they_are_changed_as_other_hyperparameters() -> None:
    before: Optimizer = SGD(0.1, lr_mult={"a": 2}, wd_mult={"b": 3})
    changes = changes_from_wire(msgpack.unpackb(msgpack.packb(changes_to_wire({"lr_mult": Multipliers({"c": 4.0})}))))
    after = with_hyperparameters(before, changes)
    assert after == SGD(0.1, lr_mult={"c": 4}, wd_mult={"b": 3})
    assert with_hyperparameters(after, {"lr_mult": {}, "wd_mult": {}}) == SGD(0.1)
