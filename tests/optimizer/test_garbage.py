"""Whatever arrives as an optimizer is one, or is a protocol error."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ConfigError, ProtocolError
from kvd.optimizer import (
    SGD,
    Optimizer,
    changes_from_wire,
    from_wire,
    to_wire,
    with_hyperparameters,
)

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
    assert len(message) < 600  # the answer to garbage stays short
    return None


def check_understood(optimizer: object) -> Optimizer:
    assert isinstance(optimizer, Optimizer)
    assert from_wire(to_wire(optimizer)) == optimizer
    rate = optimizer.rate(1)
    assert math.isfinite(rate)
    assert rate >= 0
    return optimizer


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
