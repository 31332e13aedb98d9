"""Buffers that are joined, and filled, all at once: the same bytes as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Gathered, Scatter, Span
from kvd.node.shell.payloads import joined, scatter

SHAPES: list[tuple[int, ...]] = [(4,), (2, 2), (), (0,), (3,), (1, 3, 5)]


def arrays(dtype: Any) -> list[Any]:
    random = np.random.default_rng(7)
    return [random.integers(1, 100, shape).astype(dtype) for shape in SHAPES]


def as_sent(values: list[Any]) -> tuple[bytes, list[bytes]]:
    """The bytes of a message with these values, each of which starts at a multiple of 8, and the gaps after them."""
    whole = bytearray()
    starts = []
    for value in values:
        whole.extend(bytes(-len(whole) % 8))
        starts.append(len(whole))
        whole.extend(value.tobytes())
    ends = [start + value.nbytes for start, value in zip(starts, values, strict=True)]
    return bytes(whole), [bytes(start - end) for start, end in zip([*starts[1:], len(whole)], ends, strict=True)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "uint8"])
def test_joined(dtype: str) -> None:
    values = arrays(dtype)
    whole, gaps = as_sent(values)
    assert joined(Span(Gathered(values, gaps), 0, len(whole))) == Span(whole, 0, len(whole))


def test_joined_without_gaps() -> None:
    values = arrays("float64")
    whole, gaps = as_sent(values)
    assert not any(gaps)
    assert joined(Span(Gathered(values), 0, len(whole))).buffer == whole


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "uint8"])
def test_scatter(dtype: str) -> None:
    values = arrays(dtype)
    whole, gaps = as_sent(values)
    targets = [np.full_like(value, 0) for value in values]
    scatter(Scatter(memoryview(whole), targets, [value.nbytes for value in values], gaps))
    for value, target in zip(values, targets, strict=True):
        np.testing.assert_array_equal(target, value)


def test_scatter_without_gaps() -> None:
    values = arrays("int64")
    targets = [np.zeros_like(value) for value in values]
    scatter(Scatter(as_sent(values)[0], targets, [value.nbytes for value in values]))
    for value, target in zip(values, targets, strict=True):
        np.testing.assert_array_equal(target, value)


def test_values_of_no_bytes_at_all() -> None:
    scatter(Scatter(None, [np.zeros(0), np.zeros((0, 3))], [0, 0]))
    assert joined(Span(Gathered([np.zeros(0)]), 0, 0)).buffer == b""


def test_arrays_that_were_changed_on_the_way_are_noticed() -> None:
    values = arrays("float64")
    nbytes = [value.nbytes for value in values]
    larger = [*values[:-1], np.zeros(99)]
    with pytest.raises(ValueError, match="changed"):
        joined(Span(Gathered(larger), 0, sum(nbytes)))
    with pytest.raises(ValueError, match="changed"):
        scatter(Scatter(bytes(sum(nbytes) + 800), larger, nbytes))
    with pytest.raises(ValueError, match="changed"):
        scatter(Scatter(bytes(sum(nbytes) - 8), values, nbytes))
    values[0].flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        scatter(Scatter(bytes(sum(nbytes)), values, nbytes))
