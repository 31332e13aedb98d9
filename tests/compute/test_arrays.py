"""The sum of one array per device."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvd.compute import arrays
from kvd.compute.arrays import namespace, sum_devices
from kvd.compute.tensors import BFLOAT16
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch


def test_numpy_calculates_with_everything_on_the_host() -> None:
    assert namespace(np.zeros(1)) is np
    assert namespace(torch.zeros(1)) is np


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_the_sum_has_the_shape_of_its_parts(shape: tuple[int, ...]) -> None:
    parts = [np.full(shape, value, np.float32) for value in (1, 2, 4)]
    total = sum_devices(parts)
    assert total.shape == shape
    assert total.dtype == np.float32
    assert (total == 7).all()
    assert all((part == value).all() for part, value in zip(parts, (1, 2, 4), strict=True))


def test_devices_are_added_in_the_order_of_the_list() -> None:
    large = np.float32(2**24)
    one = np.float32(1)
    assert sum_devices([np.array([large]), np.array([-large]), np.array([one])]).tolist() == [1]
    assert sum_devices([np.array([large]), np.array([one]), np.array([-large])]).tolist() == [0]


@pytest.mark.parametrize(("dtype", "large"), [(np.dtype(np.float16), 2048), (BFLOAT16, 256)])
def test_halves_are_added_in_float32(dtype: Any, large: int) -> None:
    parts = [np.array([[value]]).astype(dtype) for value in (large, 1, 1, 1, 1)]
    total = sum_devices(parts)
    assert total.dtype == dtype
    assert total.astype(np.float64).tolist() == [[large + 4]]


def test_other_packages_and_layouts_are_read() -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    total = sum_devices([matrix.T, torch.ones(3, 2), np.asfortranarray(matrix.T)])
    assert total.tolist() == (2 * matrix.T + 1).tolist()


def test_a_single_array_is_not_copied() -> None:
    only = np.zeros(3)
    assert np.shares_memory(sum_devices([only]), only)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (0, 2), (7, 30_000)], ids=str)
def test_the_sum_can_be_written_to_a_given_array(shape: tuple[int, ...], count: int, dtype: Any) -> None:
    generator = np.random.default_rng(1)
    parts = [generator.normal(size=shape).astype(np.float32).astype(dtype) for _ in range(count)]
    out = np.full(shape, np.nan, dtype)
    assert sum_devices(parts, out=out) is out
    np.testing.assert_array_equal(out, sum_devices(parts))
    assert not any(np.shares_memory(out, part) for part in parts)
    first = parts[0].copy()
    assert sum_devices([first, *parts[1:]], out=first) is first
    np.testing.assert_array_equal(first, out)


def test_an_out_that_does_not_fit_is_refused() -> None:
    parts = [np.ones((2, 3), np.float32)] * 2
    for given in (parts, parts[:1]):
        with pytest.raises(ShapeMismatch, match=r"out has the shape \(6,\)"):
            sum_devices(given, out=np.empty(6, np.float32))
        with pytest.raises(DtypeMismatch, match="expected float64"):
            sum_devices(given, out=np.empty((2, 3)))
        with pytest.raises(NotAllowed, match="C-contiguous"):
            sum_devices(given, out=np.empty((3, 2), np.float32).T)


def test_arrays_that_disagree_are_refused() -> None:
    with pytest.raises(NotAllowed):
        sum_devices([])
    with pytest.raises(ShapeMismatch, match="device 1"):
        sum_devices([np.zeros(2), np.zeros(3)])
    with pytest.raises(DtypeMismatch, match="device 2"):
        sum_devices([np.zeros(2), np.zeros(2), np.zeros(2, np.float32)])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048), (torch.bfloat16, 256), (torch.int32, 7)])
def test_the_sum_on_torch_devices_follows_the_same_rules(dtype: torch.dtype, large: int) -> None:
    # The device is the CPU here; the arithmetic and the copies are those of a GPU.
    parts = [torch.tensor([value], dtype=dtype) for value in (large, 1, 1, 1, 1)]
    total = arrays._sum_torch(parts)
    assert total.dtype == dtype
    assert total.tolist() == [large + 4]
    assert parts[0].tolist() == [large]
    assert arrays._sum_torch([torch.ones(2, requires_grad=True)]).requires_grad is False


class DeviceArray:
    """As much of a CuPy array as a sum uses, on a device with a number."""

    def __init__(self, data: np.ndarray[Any, Any], device: int) -> None:
        self.data, self.number = data, device
        self.shape, self.dtype, self.device = data.shape, data.dtype, nullcontext()

    def astype(self, dtype: Any, copy: bool = True) -> DeviceArray:
        return DeviceArray(self.data.astype(dtype, copy=copy), self.number)

    def __iadd__(self, other: DeviceArray) -> DeviceArray:
        assert self.number == other.number, "CuPy adds arrays of one device only"
        self.data += other.data
        return self


def test_cupy_arrays_are_added_on_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.ndarray, cupy.float32 = DeviceArray, np.float32
    cupy.asarray = lambda value: DeviceArray(value.data, 3)
    cupy.asnumpy = lambda value: value.data
    waits: list[None] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(None))
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    parts = [DeviceArray(np.array([value], np.float16), 3 + index) for index, value in enumerate((2048, 1, 1, 1, 1))]
    assert namespace(parts[0]) is cupy
    total = sum_devices(parts)
    assert (total.number, total.dtype, total.data.tolist()) == (3, np.float16, [2052])
    assert parts[0].data.tolist() == [2048]
    assert len(waits) == 4
    assert sum_devices(parts[:1]) is parts[0]
    out = np.empty(1, np.float16)
    assert sum_devices(parts, out=out) is out
    assert out.tolist() == [2052]
