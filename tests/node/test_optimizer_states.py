"""Optimizer states of slices that are fused, parted and fused again: the same bits as without fusing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from kvd.compute.tensors import named_dtype
from kvd.protocol.messages import ASSIGN
from tests.node.states_harness import ADAM, MOMENTUM, SIZES, gradients, started

# ── an independent calculation ────────────────────────────────────────────────────────────────────────────────────────


def momentum_by_hand(weight: Any, rounds: Sequence[Any]) -> tuple[Any, Any]:
    weight, velocity = weight.astype(np.float64), np.zeros(weight.size)
    for gradient in rounds:
        velocity = 0.9 * velocity + gradient + 0.01 * weight
        weight = weight - 0.1 * velocity
    return weight, velocity


def adam_by_hand(weight: Any, rounds: Sequence[Any]) -> tuple[Any, Any]:
    weight, mean, square = weight.astype(np.float64), np.zeros(weight.size), np.zeros(weight.size)
    for step, gradient in enumerate(rounds, 1):
        gradient = gradient + 0.001 * weight
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weight = weight - rate * mean / (np.sqrt(square) + 1e-8)
    return weight, mean


@pytest.mark.parametrize(("optimizer", "by_hand"), [(MOMENTUM, momentum_by_hand), (ADAM, adam_by_hand)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fused_parted_and_fused_again_agrees_with_a_calculation_by_hand(
    optimizer: Any, by_hand: Callable[..., Any], dtype: str
) -> None:
    server = started(dtype)
    first = {key: server.value(key).copy() for key in SIZES}
    rounds: dict[str, list[Any]] = {key: [] for key in SIZES}
    for step, groups in enumerate(("abcd", "abcd", "a bc d", "abcd", "b cd", "dcba", "ab", "abcd", "abcd")):
        for group in groups.split():
            one, two = gradients(2 * step), gradients(2 * step + 1)
            server.push(list(group), one, two, optimizer=optimizer)
            for key in group:
                rounds[key].append(one[key].astype(np.float64) + two[key])
    for key in SIZES:
        weight, slot = by_hand(first[key], rounds[key])
        np.testing.assert_allclose(server.value(key), weight, rtol=2e-5, atol=1e-6)
        step, arrays = server.state(key)
        assert step == len(rounds[key])
        kept = [np.frombuffer(data, named_dtype(dtype)) for data in arrays.values()]
        assert any(np.allclose(array, slot, rtol=1e-4, atol=1e-6) for array in kept)


# ── the bits of keys that were never fused ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_grouping_gives_the_bits_of_keys_that_were_never_fused(seed: int, dtype: str) -> None:
    random = Random(seed)
    sizes = {key: random.choice([0, 1, 3, 8, 17]) for key in "abcdef"}
    mixed, alone = started(dtype, sizes), started(dtype, sizes)
    optimizer: Any = MOMENTUM
    groups = [list(sizes)]
    for step in range(40):
        whim = random.random()
        if whim < 0.2:
            keys = random.sample(list(sizes), len(sizes))
            cuts = sorted(random.sample(range(1, len(keys)), random.randrange(3)))
            groups = [keys[low:high] for low, high in zip([0, *cuts], [*cuts, len(keys)], strict=True)]
        elif whim < 0.3:
            source, target = random.choice(list(sizes)), random.choice(list(sizes))
            if sizes[source] == sizes[target]:  # a state that was exported is loaded elsewhere
                for server in (mixed, alone):
                    number, slots = server.state(source)
                    arrays = {name: np.frombuffer(data, np.float32) for name, data in slots.items()}
                    assert server.load(target, number, arrays) is None
        elif whim < 0.34:
            optimizer = ADAM if optimizer is MOMENTUM else MOMENTUM
            for server in (mixed, alone):
                server.runner.reset([(key, 0) for key in sizes])
        elif whim < 0.38:
            values = gradients(step, sizes)
            mixed.push(groups[0], values, how=ASSIGN)
            for key in groups[0]:
                alone.push([key], values, how=ASSIGN)
        elif whim < 0.42:
            key = random.choice(list(sizes))
            for server in (mixed, alone):
                server.create(key, np.ones(sizes[key]))
        given = gradients(100 + step, sizes), gradients(200 + step, sizes)
        for group in groups[: random.randrange(1, len(groups) + 1)]:
            mixed.push(group, *given, optimizer=optimizer)
            for key in group:
                alone.push([key], *given, optimizer=optimizer)
        assert {key: mixed.value(key).tobytes() for key in sizes} == {
            key: alone.value(key).tobytes() for key in sizes
        }, step
        for key in sizes:
            if sizes[key]:  # an empty slice has no state that could matter
                assert mixed.state(key) == alone.state(key), (step, key)


def test_steps_that_differ_stay_each_slice_s_own() -> None:
    """As a checkpoint of one key is loaded while it is in a group: Adam divides by a power of its own step."""
    mixed, alone = started(), started()
    for server, groups in ((mixed, ["abcd"]), (alone, list("abcd"))):
        for group in groups:
            server.push(list(group), gradients(1), optimizer=ADAM)
        slots = {name: np.frombuffer(data, np.float32) for name, data in server.state("b")[1].items()}
        assert server.load("b", 50, slots) is None
        for step in range(3):
            for group in groups:
                server.push(list(group), gradients(2 + step), optimizer=ADAM)
    assert mixed.everything() == alone.everything()
    assert [mixed.state(key)[0] for key in "abcd"] == [4, 53, 4, 4]


# ── failing updates ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_update_that_fails_in_one_slice_changes_no_other_slice_of_the_group() -> None:
    """A state of the wrong dtype for c: the update of the group is refused every time."""
    server = started()
    server.push(list("abcd"), gradients(1), optimizer=MOMENTUM)
    wrong = {"slot/momentum": np.zeros(SIZES["c"], np.float64)}
    assert server.load("c", 1, wrong) is None
    before = server.everything()
    for _ in range(3):
        assert server.try_push(list("abcd"), gradients(2), optimizer=MOMENTUM) is not None
    assert server.everything() == before
    after = started()
    after.push(list("abcd"), gradients(1), optimizer=MOMENTUM)
    right = {name: np.frombuffer(data, np.float32) for name, data in after.state("c")[1].items()}
    assert server.load("c", 1, right) is None
    for one in (server, after):
        one.push(list("abcd"), gradients(2), optimizer=MOMENTUM)
    assert server.everything() == after.everything()


def test_a_state_of_the_wrong_dtype_does_not_spread_to_the_slices_it_is_fused_with() -> None:
    server = started()
    wrong = {"slot/momentum": np.zeros(SIZES["a"], np.float64)}
    for key in "abc":
        server.push([key], gradients(1), optimizer=MOMENTUM)
    assert server.load("a", 1, wrong) is None
    expected = server.state("b")
    assert server.try_push(list("abc"), gradients(2), optimizer=MOMENTUM) is not None
    assert server.state("b") == expected
    assert server.try_push(list("bc"), gradients(2), optimizer=MOMENTUM) is None
    assert server.state("b")[0] == 2
