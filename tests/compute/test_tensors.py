"""Whatever users bring, as host arrays, and back."""

from __future__ import annotations

import array
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kvd.compute.tensors import (
    BFLOAT16,
    DTYPES,
    as_array,
    contiguous_bytes,
    dtype_name,
    named_dtype,
    writable_view,
    write_back,
)
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch

TORCH_DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def layouts(dtype: Any) -> list[np.ndarray[Any, Any]]:
    """The numbers 0 … in arrays of every shape and layout that is special."""
    base = np.arange(24).astype(dtype)
    return [
        base,
        base.reshape(2, 3, 4),
        base.reshape(4, 6).T,
        base[::-1],
        base[::-2],
        base.reshape(4, 6)[1:3, ::2],
        base[5:6].reshape(()),
        base[:0],
        base[:0].reshape(0, 3),
    ]


@pytest.mark.parametrize("name", DTYPES)
def test_names_and_dtypes_belong_together(name: str) -> None:
    assert dtype_name(named_dtype(name)) == name
    assert named_dtype(name).name == name


@pytest.mark.parametrize("dtype", [np.complex64, np.bool_, np.uint16, np.dtype(object), np.dtype(">f4"), "U3"])
def test_other_dtypes_are_answered_with_the_supported_ones(dtype: Any) -> None:
    with pytest.raises(DtypeMismatch, match=r"float16, float32, float64, bfloat16, int8, int32, int64, uint8"):
        dtype_name(dtype)


def test_an_unknown_name_is_answered_with_the_supported_ones() -> None:
    with pytest.raises(DtypeMismatch, match="bfloat16"):
        named_dtype("float8")


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_arrays_of_every_layout_are_shared(name: str) -> None:
    for value in layouts(DTYPES[name]):
        seen = as_array(value)
        assert (seen.dtype, seen.shape) == (value.dtype, value.shape)
        assert seen.strides == value.strides
        assert seen.size == 0 or np.shares_memory(seen, value)
        view = writable_view(value)
        assert view is not None
        assert view.size == 0 or np.shares_memory(view, value)


@pytest.mark.parametrize(
    ("name", "requires_grad"),
    [(name, False) for name in DTYPES] + [(name, True) for name in DTYPES if TORCH_DTYPES[name].is_floating_point],
)
def test_torch_tensors_are_shared(name: str, requires_grad: bool) -> None:
    dtype = TORCH_DTYPES[name]
    base = torch.arange(24).to(dtype)
    for source in (base, base.reshape(4, 6).T, base[5], base[:0], base[::3]):
        value = source.clone().requires_grad_(requires_grad) if source.dim() else source.detach().clone()
        seen = as_array(value)
        assert dtype_name(seen.dtype) == name
        assert seen.shape == tuple(value.shape)
        assert seen.astype(np.float64).tolist() == value.detach().to(torch.float64).tolist()
        view = writable_view(value)
        assert view is not None
        view[...] = 7
        assert (value.detach() == 7).all()


def test_a_torch_parameter_and_a_transposed_one_are_written_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    write_back(parameter, np.arange(6).reshape(3, 2).astype(BFLOAT16))
    assert parameter.tolist() == [[0, 1], [2, 3], [4, 5]]
    matrix = torch.zeros(3, 2)
    write_back(matrix.T, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert matrix.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_torch_tensors_with_lazy_signs_and_other_dtypes() -> None:
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj().imag  # its negation is only a flag
    assert lazy.is_neg()
    assert as_array(lazy).tolist() == [-2.0, 4.0]
    with pytest.raises(DtypeMismatch):
        as_array(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(DtypeMismatch):
        as_array(torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(NotAllowed, match="to_dense"):
        as_array(torch.eye(2).to_sparse())
    with pytest.raises(NotAllowed, match="meta"):
        as_array(torch.zeros(2, device="meta"))


def test_a_lazily_negated_tensor_is_written_through_torch() -> None:
    base = torch.tensor([1 + 2j])
    lazy = base.conj().imag
    assert writable_view(lazy) is None
    write_back(lazy, np.array([5], np.float32))
    assert lazy.tolist() == [5]
    assert base.tolist() == [1 - 5j]


def test_a_sparse_tensor_is_no_target() -> None:
    with pytest.raises(NotAllowed, match="to_dense"):
        write_back(torch.eye(2).to_sparse(), np.zeros((2, 2), np.float32))


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.5, "float32", 1.5),
        (3, "int64", 3),
        ([1.5, 2], "float32", [1.5, 2.0]),
        ([[1, 2], [3, 4]], "int64", [[1, 2], [3, 4]]),
        ((1.0, (2.0)), "float32", [1.0, 2.0]),
        ([], "float32", []),
        (np.float64(2.5), "float64", 2.5),
        (ml_dtypes.bfloat16(2.5), "bfloat16", 2.5),
        ([np.float64(1.5)], "float64", [1.5]),
        ([np.zeros(2), np.ones(2)], "float64", [[0, 0], [1, 1]]),
        (bytearray(b"\x01\x02"), "uint8", [1, 2]),
        (b"\x01\x02", "uint8", [1, 2]),
        (np.arange(3, dtype=np.float16).data, "float16", [0, 1, 2]),
        (np.arange(6, dtype=np.int32).data[::-2], "int32", [5, 3, 1]),
        (array.array("d", [1, 2]), "float64", [1, 2]),
        (np.arange(3, dtype=">f4"), "float32", [0, 1, 2]),
        (np.array([[1.0]]).view(np.recarray), "float64", [[1.0]]),
    ],
)
def test_other_values_become_arrays(value: object, dtype: str, expected: object) -> None:
    seen = as_array(value)
    assert type(seen) is np.ndarray
    assert dtype_name(seen.dtype) == dtype
    assert seen.tolist() == expected


def test_buffers_are_shared() -> None:
    buffer = bytearray(4)
    seen = as_array(buffer)
    buffer[2] = 9
    assert seen.tolist() == [0, 0, 9, 0]
    write_back(memoryview(buffer), np.array([1, 2, 3, 4], np.uint8))
    assert buffer == b"\x01\x02\x03\x04"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, NotAllowed),
        ("text", NotAllowed),
        (object(), NotAllowed),
        ({"a": 1}, NotAllowed),
        (True, DtypeMismatch),
        ([1j], DtypeMismatch),
        (["text"], DtypeMismatch),
        ([2**70], DtypeMismatch),
        ([object()], DtypeMismatch),
        (np.array(["a"]), DtypeMismatch),
        ([[1.0], [2.0, 3.0]], ShapeMismatch),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        as_array(value)


class Exporter:
    """An array of some other package that speaks DLPack only."""

    def __init__(self, data: np.ndarray[Any, Any], device: int = 1) -> None:
        self.data = data
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class Converter:
    """An array of some other package that can only make NumPy arrays of itself."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.data.copy()


def test_dlpack_on_the_host_is_shared_and_written() -> None:
    data = np.zeros(3, np.float32)
    assert np.shares_memory(as_array(Exporter(data)), data)
    write_back(Exporter(data), np.ones(3, np.float32))
    assert data.tolist() == [1, 1, 1]


def test_dlpack_of_a_gpu_without_cupy_asks_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)  # another test may have imported it
    with pytest.raises(NotAllowed, match="copied to the host"):
        as_array(Exporter(np.zeros(3), device=2))


def test_an_array_protocol_is_read_but_never_written() -> None:
    value = Converter(np.ones(2, np.float32))
    assert as_array(value).tolist() == [1, 1]
    assert writable_view(value) is None
    with pytest.raises(NotAllowed):
        write_back(value, np.ones(2, np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_values_are_written_into_every_layout(name: str) -> None:
    for target in layouts(DTYPES[name]):
        source = (np.arange(target.size).reshape(target.shape) + 100).astype(DTYPES[name])
        write_back(target, source)
        assert target.tolist() == source.tolist()


def test_a_wrong_shape_or_dtype_is_never_cast_silently() -> None:
    out = np.zeros((2, 3), np.float32)
    with pytest.raises(ShapeMismatch, match=r"\(2, 3\)"):
        write_back(out, np.zeros((3, 2), np.float32))
    with pytest.raises(ShapeMismatch):
        write_back(out, np.zeros((), np.float32))
    with pytest.raises(DtypeMismatch, match=r"float32.*float64"):
        write_back(out, np.zeros((2, 3), np.float64))
    with pytest.raises(DtypeMismatch):
        write_back(torch.zeros(2, dtype=torch.float16), np.zeros(2, BFLOAT16))
    assert not out.any()


def read_only() -> np.ndarray[Any, Any]:
    value = np.zeros(3, np.float32)
    value.flags.writeable = False
    return value


@pytest.mark.parametrize("target", [read_only(), b"abc", [0.0, 0.0, 0.0], 1.0, np.float32(1), None, "out"])
def test_what_cannot_be_written_is_named(target: object) -> None:
    assert writable_view(target) is None
    with pytest.raises(NotAllowed, match="out is a"):
        write_back(target, np.zeros(3, np.float32))


def test_tensors_on_another_device_are_written_through_torch() -> None:
    # The device "meta" has no elements, but everything up to the copy itself happens as on a GPU.
    target = torch.zeros(2, 3, dtype=torch.bfloat16, device="meta")
    assert writable_view(target) is None
    frozen = np.zeros((2, 3), BFLOAT16)[::-1]
    frozen.flags.writeable = False
    write_back(target, frozen)
    with pytest.raises(DtypeMismatch):
        write_back(target, np.zeros((2, 3), np.float32))
    with pytest.raises(ShapeMismatch):
        write_back(target, np.zeros((3, 2), BFLOAT16))


class DeviceArray:
    """As much of a CuPy array as is used here."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype
        self.device = nullcontext()

    def __setitem__(self, key: Any, value: DeviceArray) -> None:
        self.data[key] = value.data


def test_cupy_arrays_are_copied_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = DeviceArray
    cupy.asnumpy = lambda value: value.data.copy()
    cupy.asarray = lambda value: DeviceArray(np.array(value))
    cupy.from_dlpack = lambda value: DeviceArray(value.data)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    value = DeviceArray(np.arange(3, dtype=np.float32))
    assert as_array(value).tolist() == [0, 1, 2]
    assert writable_view(value) is None
    write_back(value, np.array([5, 6, 7], np.float32))
    assert value.data.tolist() == [5, 6, 7]
    with pytest.raises(ShapeMismatch):
        write_back(value, np.zeros(2, np.float32))
    with pytest.raises(DtypeMismatch):
        write_back(value, np.zeros(3, np.float64))
    assert as_array(Exporter(np.ones(2), device=2)).tolist() == [1, 1]


def test_jax_arrays_are_read_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # A JAX array on the CPU exports memory that looks writable through DLPack; it must not be written all the same.
    jax: Any = ModuleType("jax")
    jax.Array = Exporter
    monkeypatch.setitem(sys.modules, "jax", jax)
    value = Exporter(np.ones(2, np.float32))
    assert as_array(value).tolist() == [1, 1]
    with pytest.raises(NotAllowed, match="JAX"):
        write_back(value, np.zeros(2, np.float32))
    assert value.data.tolist() == [1, 1]


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_a_view_exactly_if_they_lie_in_order(name: str) -> None:
    for value in layouts(DTYPES[name]):
        flat = contiguous_bytes(value)
        assert flat.dtype == np.uint8
        assert flat.shape == (value.nbytes,)
        assert flat.tobytes() == value.tobytes()
        if value.size:
            assert np.shares_memory(flat, value) == value.flags.c_contiguous
