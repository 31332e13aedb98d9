"""Runs updates with NumPy alone or with compiled loops alone, and compares the bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kvd.compute.compiled import Loop
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import DTYPES
from kvd.optimizer import Optimizer

Array = np.ndarray[Any, Any]
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
FLOATS = ["float16", "bfloat16", "float32", "float64"]


@contextmanager
def only_numpy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "ready", lambda self, elements: None)
        yield


@contextmanager
def only_compiled() -> Iterator[list[str]]:
    """Lets only compiled loops compute, and gives the names of those that were used."""
    used: list[str] = []
    found = Loop.ready

    def ready(loop: Loop, elements: int) -> Callable[..., None]:
        function = found(loop, elements)
        assert function is not None, f"{loop.key} was not warmed up"
        used.append(loop.key[0])
        return function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "ready", ready)
        yield used


def numbers(random: np.random.Generator, size: int, dtype: str) -> Array:
    """Numbers of all magnitudes and all special values; two in three are ordinary."""
    kind = DTYPES[dtype]
    ordinary = random.normal(size=size)
    limits = np.array([65504.0, 2.0**-24, 2.0**-14, 3e38, 1e-45, 1.2e-38, 1e308, 5e-324])
    special = np.concatenate([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], limits, -limits])
    scaled = ordinary * 10.0 ** random.integers(-45, 39, size)
    choice = random.integers(0, 6, size)
    with np.errstate(all="ignore"):
        return np.select([choice == 0, choice == 1], [random.choice(special, size), scaled], ordinary).astype(kind)


def assert_same_bits(left: Array, right: Array, what: str) -> None:
    """Equal bits, except that every NaN equals every other: no promise is made about their payloads."""
    assert left.dtype == right.dtype, what
    with np.errstate(all="ignore"):
        both_nan = np.isnan(left.astype(np.float64)) & np.isnan(right.astype(np.float64))
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[left.dtype.itemsize]
    wrong = np.flatnonzero((left.view(bits) != right.view(bits)) & ~both_nan)
    assert wrong.size == 0, f"{what}: {wrong.size} differ, the first at {wrong[0]}: {left[wrong[0]]} {right[wrong[0]]}"


def updates(rule: Optimizer | None, dtype: str, size: int, count: int, mode: Any, steps: int) -> dict[str, Array]:
    """The weights and the state after some updates, and every version in between."""
    random = np.random.default_rng([size, count, steps])
    state, current = SliceState(), numbers(random, size, dtype)
    found = {"step 0": current}
    samples = [*random.integers(0, 4, count - 1).tolist(), 3]
    for step in range(1, steps + 1):
        contributions = [numbers(random, size, dtype) for _ in range(count)]
        for array in contributions:
            array.flags.writeable = False
        out = np.empty_like(current)
        apply_update(rule, state, current, contributions, out, mode, samples)
        found[f"step {step}"] = current = out
    exported = state.export()
    assert int(exported.pop("step")) == (0 if rule is None else steps)
    return found | exported


def assert_both_agree(rule: Optimizer | None, dtype: str, size: int, count: int, mode: Any, steps: int = 3) -> None:
    with only_numpy():
        expected = updates(rule, dtype, size, count, mode, steps)
    with only_compiled() as used:
        result = updates(rule, dtype, size, count, mode, steps)
    assert rule is None or len(used) == steps
    assert expected.keys() == result.keys()
    for name, array in expected.items():
        assert_same_bits(array, result[name], f"{rule} {dtype} {size} {count} {mode}, {name}")
