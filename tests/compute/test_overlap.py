"""Arrays that share memory, compared with the sets of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvd.compute.overlap import are_apart, device_memory, first_overlap, overlaps_itself

Array = np.ndarray[Any, Any]


def elements(array: Array) -> list[set[int]]:
    """The addresses of the bytes of each element."""
    begin = array.__array_interface__["data"][0]
    places = product(*map(range, array.shape))
    starts = [begin + sum(i * step for i, step in zip(place, array.strides, strict=True)) for place in places]
    return [set(range(start, start + array.itemsize)) for start in starts]


def all_bytes(array: Array) -> set[int]:
    return set().union(*elements(array))


def views(generator: np.random.Generator, buffer: Array, count: int) -> list[Array]:
    """Views of the buffer of all kinds: slices, steps of both directions, columns, and overlapping windows."""
    made = []
    for _ in range(count):
        begin, end = sorted(generator.integers(0, buffer.size + 1, 2))
        step = int(generator.choice([1, 1, 1, 2, 3, -1, -2]))
        view = buffer[begin:end][::step]
        if view.size >= 6 and generator.random() < 0.3:
            rows = int(generator.integers(1, 4))
            view = np.lib.stride_tricks.as_strided(
                view, (rows, 3), (view.strides[0] * int(generator.integers(1, 3)), view.strides[0])
            )
            view = view if (generator.random() < 0.5) else view.T
        made.append(view)
    return made


def is_inside(view: Array, buffer: Array) -> bool:
    return all_bytes(view) <= all_bytes(buffer)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16], ids=str)
def test_views_of_one_buffer_are_compared_byte_by_byte(dtype: Any) -> None:
    generator = np.random.default_rng(7)
    found = {True: 0, False: 0}
    for _ in range(300):
        buffer = np.zeros(24, dtype)
        arrays = [view for view in views(generator, buffer, int(generator.integers(1, 5))) if is_inside(view, buffer)]
        shared = {
            (one, other)
            for other in range(len(arrays))
            for one in range(other)
            if all_bytes(arrays[one]) & all_bytes(arrays[other])
        }
        overlap = first_overlap(arrays)
        assert overlap in shared if shared else overlap is None
        found[bool(shared)] += 1
        for array in arrays:
            parts = elements(array)
            assert overlaps_itself(array) == (sum(map(len, parts)) > len(set().union(*parts)))
    assert min(found.values()) > 50


def slices(buffer: Array, places: Sequence[tuple[int, int]]) -> list[Array]:
    return [buffer[begin:end] for begin, end in places]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_contiguous_arrays_are_apart_unless_two_share_a_byte(dtype: Any) -> None:
    buffer = np.zeros(100, dtype)
    for places, wanted in (
        ([(0, 4), (4, 8), (8, 100)], True),
        ([(8, 100), (0, 4), (4, 8)], True),
        ([(0, 5), (4, 8)], False),
        ([(4, 8), (0, 5)], False),
        ([(0, 100), (40, 41)], False),
        ([(7, 9), (7, 9)], False),
        ([(3, 4)], True),
        ([], True),
    ):
        arrays = slices(buffer, places)
        sizes = np.array([array.nbytes for array in arrays], np.intp)
        assert are_apart(arrays, sizes) is wanted
        assert (first_overlap(arrays) is None) is wanted


def test_sources_are_kept_unless_a_target_of_another_place_or_a_part_of_the_own_covers_them() -> None:
    generator = np.random.default_rng(3)
    found = {True: 0, False: 0}
    buffer = np.zeros(40, np.int16)
    for _ in range(500):
        begins = np.sort(generator.choice(10, 3, replace=False)) * 4
        targets = [buffer[begin : begin + 4] for begin in generator.permutation(begins)]
        sources = [
            target if generator.random() < 0.5 else buffer[begin : begin + 4]
            for target, begin in zip(targets, generator.integers(0, 37, 3), strict=True)
        ]
        wanted = not any(
            all_bytes(source) & all_bytes(target)
            for one, source in enumerate(sources)
            for other, target in enumerate(targets)
            if one != other or all_bytes(source) != all_bytes(target)
        )
        assert are_apart(targets, np.full(3, 8, np.intp), sources) == wanted
        found[wanted] += 1
    assert min(found.values()) > 50


def test_arrays_without_elements_overlap_nothing() -> None:
    buffer = np.zeros(8, np.float32)
    assert first_overlap([buffer, buffer[3:3], buffer[3:3], buffer[:0]]) is None
    assert not overlaps_itself(np.broadcast_to(np.zeros((0, 1)), (0, 5)))


def test_columns_of_one_matrix_are_apart() -> None:
    matrix = np.zeros((5, 40), np.float32)
    columns = [matrix[:, place] for place in range(40)]
    assert first_overlap(columns) is None
    assert first_overlap([*columns, matrix[:, 7]]) == (7, 40)


def test_an_array_elsewhere_is_known_by_its_address_and_strides() -> None:
    for tensor in (
        torch.zeros(6, 8)[::2, 1::3],
        torch.zeros(3, 1, dtype=torch.bfloat16).expand(3, 4),
        torch.zeros(4, 3, dtype=torch.float64).T,
        torch.zeros(()),
    ):
        memory = device_memory(tensor)
        assert memory.__array_interface__["data"][0] == tensor.data_ptr()
        assert memory.shape == tuple(tensor.shape)
        assert memory.strides == tuple(step * tensor.element_size() for step in tensor.stride())
        assert overlaps_itself(memory) == (0 in tensor.stride() and tensor.numel() > 1)
