"""Keys that are updated together, each with a learning rate and a weight decay of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvd.optimizer import Adam, Optimizer
from tests.node.states_harness import MOMENTUM, SIZES, Server, gradients, started

FACTORS: dict[str, Any] = {"lr_mult": {"b": 0.0, "c": 3}, "wd_mult": {"a": 0.0}}
KEYS = list(SIZES)


def own(rule: Optimizer, key: str) -> Optimizer:
    """What the multipliers above make of a rule for one key, by hand."""
    rates, decays = {"b": 0.0, "c": 3.0}, {"a": 0.0}
    rate: Any = rule.learning_rate
    return replace(rule, learning_rate=rate * rates.get(key, 1), wd=rule.wd * decays.get(key, 1))  # type: ignore[type-var]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rule", [MOMENTUM, Adam(0.01, wd=0.5)], ids=repr)
def test_fused_keys_are_updated_as_if_each_were_alone(rule: Any, dtype: str) -> None:
    fused, alone = started(dtype), started(dtype)
    for step in range(6):
        given = gradients(step)
        fused.push(KEYS, given, given, optimizer=replace(rule, **FACTORS))
        for key in KEYS:
            alone.push([key], given, given, optimizer=own(rule, key))
    assert fused.everything() == alone.everything()


def test_the_state_is_kept_when_multipliers_come_change_and_go() -> None:
    fused, alone = started(), started()
    stages: list[dict[str, Any]] = [{}, FACTORS, {"lr_mult": {"*": 0.5}}, {}, FACTORS]
    for step in range(10):
        changes, given = stages[step // 2], gradients(step)
        fused.push(KEYS, given, optimizer=replace(MOMENTUM, **changes))
        for key in KEYS:
            alone.push([key], given, optimizer=replace(MOMENTUM, **changes))
        if step == 4:  # a state that comes from a file, in the midst of parted ones
            for server in (fused, alone):
                state, arrays = server.state("c")
                assert state == 5
                assert server.load("c", 5, {name: _floats(data) for name, data in arrays.items()}) is None
    assert fused.everything() == alone.everything()
    assert fused.state("a")[0] == 10


def test_a_replica_has_the_same_bits() -> None:
    leader, backup = started("float16"), started("float16")
    rule = replace(MOMENTUM, **FACTORS)
    for step in range(4):
        error = leader.try_push(KEYS, gradients(step), gradients(step + 9), optimizer=rule, keeps_merged=True)
        assert error is None
        assert backup.hold(KEYS, leader.merged, rule) is None
    assert leader.everything() == backup.everything()


def test_a_failed_update_changes_no_key() -> None:
    server = Server("int32")
    for key, size in SIZES.items():
        server.create(key, range(size))
    before = server.everything()
    assert server.try_push(KEYS, gradients(1), optimizer=replace(MOMENTUM, **FACTORS)) is not None
    assert server.everything() == before


def _floats(data: bytes) -> Any:
    return np.frombuffer(data, np.float32)
