"""What is sent and what is filled, of values of every kind: `source_of` and `target_of` by themselves."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvd.client.calls.values import Array, source_of, target_of
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.protocol.specs import KeySpec

SLICE_BYTES = 1 << 20
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(), (0,), (3, 0, 2), (7,), (4, 6)]
DTYPES: list[Any] = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16, np.dtype(np.int64), np.dtype(np.uint8)]


class Memory:
    """Gives memory, and remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[Array] = []

    def __call__(self, nbytes: int) -> Array:
        self.given.append(np.full(nbytes, 0xFF, np.uint8))
        return self.given[-1]


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_of_an_array_are_its_own_or_a_private_copy(shape: tuple[int, ...], dtype: Any) -> None:
    value, memory = numbers(shape, dtype), Memory()
    data, spec = source_of(value, SLICE_BYTES, copy=False, memory=memory)
    assert spec == KeySpec(dtype.name, shape, SLICE_BYTES)
    assert data.tobytes() == value.tobytes()
    assert data.shape == (value.nbytes,)
    assert memory.given == []
    assert value.size == 0 or np.shares_memory(data, value)
    copied = source_of(value, SLICE_BYTES, copy=True, memory=memory)
    assert copied.data is memory.given[0]  # what frees the memory when it is gone
    assert copied.data.tobytes() == value.tobytes()
    assert copied.spec is spec


def test_an_array_in_other_order_or_of_foreign_bytes_is_sent_as_it_reads() -> None:
    value = numbers((4, 6), np.float32)
    for given in (
        np.asfortranarray(value),
        value.astype(">f4"),
        np.repeat(value, 2, 1)[:, ::2],
    ):
        for copy in (False, True):
            source = source_of(given, SLICE_BYTES, copy=copy)
            assert source.spec == KeySpec("float32", (4, 6), SLICE_BYTES)
            assert source.data.tobytes() == value.tobytes()
            assert not (copy and np.shares_memory(source.data, np.asarray(given)))


def test_arrays_of_one_device_each_are_summed_into_the_memory_that_is_given() -> None:
    value = numbers((4, 6), np.float32)
    for copy in (False, True):
        memory = Memory()
        source = source_of([value, torch.ones(4, 6), value], SLICE_BYTES, copy=copy, memory=memory)
        assert source.data is memory.given[0]
        assert len(memory.given) == 1
        np.testing.assert_array_equal(source.data.view(np.float32).reshape(4, 6), value * 2 + 1)
    with pytest.raises(ShapeMismatch, match="device 1"):
        source_of([value, value[:1]], SLICE_BYTES, copy=True)


def test_a_list_of_one_device_is_what_it_holds() -> None:
    value, memory = numbers((3,), np.float32), Memory()
    assert np.shares_memory(source_of([value], SLICE_BYTES, copy=False, memory=memory).data, value)
    assert source_of((value,), SLICE_BYTES, copy=True, memory=memory).data is memory.given[0]


@pytest.mark.parametrize("wrong", [np.zeros(2, bool), np.zeros(2, np.complex64), np.array(["a"]), np.array([None])])
def test_arrays_that_no_key_can_hold(wrong: Any) -> None:
    for copy in (False, True):
        with pytest.raises(DtypeMismatch, match="is not supported"):
            source_of(wrong, SLICE_BYTES, copy=copy)
    with pytest.raises(DtypeMismatch, match="is not supported"):
        target_of(wrong, SLICE_BYTES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_array_in_one_piece_is_pulled_into_directly(shape: tuple[int, ...], dtype: Any) -> None:
    out = np.zeros(shape, dtype)
    target = target_of(out, SLICE_BYTES)
    assert target.spec is source_of(out, SLICE_BYTES, copy=False).spec
    target.data[:] = np.frombuffer(numbers(shape, dtype).tobytes(), np.uint8)
    np.testing.assert_array_equal(out, numbers(shape, dtype))
    assert target.finish() is out


def test_other_outs_get_the_value_at_the_end() -> None:
    value = numbers((4, 6), np.float32)
    unaligned = np.zeros(97, np.uint8)[1:].view(np.float32).reshape(4, 6)
    outs = [np.zeros((6, 4), np.float32).T, unaligned, torch.zeros(4, 6), np.zeros((4, 6), ">f4")]
    for out in (*outs, outs):
        target = target_of(out, SLICE_BYTES)
        target.data[:] = value.reshape(-1).view(np.uint8)
        assert target.finish() is out
    for out in outs:
        np.testing.assert_array_equal(np.asarray(out), value)


def test_an_out_that_is_read_only() -> None:
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(NotAllowed, match="read-only"):
        target_of(fixed, SLICE_BYTES)
