"""Devices: spellings, arrays, and what is said when one does not exist."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.errors import ConfigError
from kvd.parallel import device as device_module
from kvd.parallel.device import Device


@pytest.mark.parametrize(
    ("text", "kind", "index", "shown"),
    [
        ("cpu", "cpu", 0, "cpu"),
        ("cpu:0", "cpu", 0, "cpu"),
        ("cpu:3", "cpu", 3, "cpu:3"),
        ("cuda", "cuda", 0, "cuda:0"),
        ("cuda:2", "cuda", 2, "cuda:2"),
    ],
)
def test_spellings(text: str, kind: str, index: int, shown: str) -> None:
    device = Device.parse(text)
    assert (device.kind, device.index, str(device)) == (kind, index, shown)
    assert Device.parse(str(device)) == device
    assert Device.parse(device) is device
    assert device.is_cuda == (kind == "cuda")


@pytest.mark.parametrize("text", ["", "gpu", "gpu:0", "cpu:", "cpu:-1", "cpu:x", "CPU", "cuda:0 ", "cuda:1.0", None, 0])
def test_other_spellings_are_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        Device.parse(text)


def test_cpu_arrays() -> None:
    device = Device.parse("cpu:7")
    device.check()
    assert device.xp is np
    with device.current():
        array = device.array([[1, 2], [3, 4]], dtype="float32")
    assert array.dtype == np.float32
    assert device.to_host(array) is array
    source = np.arange(6).reshape(2, 3).T
    copy = device.array(source)
    assert copy.flags.c_contiguous
    assert not np.shares_memory(copy, source)


class FakeRuntimeError(Exception):
    pass


class FakeDevice:
    entered: list[int]

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        FakeDevice.entered.append(self.index)

    def __exit__(self, *error: object) -> None:
        FakeDevice.entered.append(-self.index)


def fake_cupy(count: int | Exception) -> Any:
    """What `Device` uses of CuPy, on a host with ``count`` devices."""

    def get_device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(getDeviceCount=get_device_count, CUDARuntimeError=FakeRuntimeError)
    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=FakeDevice),
        array=np.array,
        asnumpy=lambda array: np.asarray(array.values),
    )


@pytest.fixture(autouse=True)
def _forget_count() -> Iterator[None]:
    device_module._cuda_device_count.cache_clear()
    FakeDevice.entered = []
    yield
    device_module._cuda_device_count.cache_clear()


@pytest.mark.parametrize("use", [lambda d: d.check(), lambda d: d.xp, lambda d: d.array([1])])
def test_missing_cupy(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="pip install cupy-cuda12x") as raised:
        use(Device.parse("cuda:0"))
    assert raised.value.setting == "devices"


def test_cupy_without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(FakeRuntimeError("cudaErrorInsufficientDriver")))
    with pytest.raises(ConfigError, match=r"finds no CUDA driver.*cudaErrorInsufficientDriver"):
        Device.parse("cuda:0").check()


def test_driver_without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(0))
    with pytest.raises(ConfigError, match="no device"):
        Device.parse("cuda:0").check()


def test_missing_device_lists_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    Device.parse("cuda:1").check()
    with (
        pytest.raises(ConfigError, match="no device cuda:2; this host has cpu, cuda:0, cuda:1"),
        Device("cuda", 2).current(),
    ):
        pass


def test_cuda_device_is_current_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(2))
    device = Device.parse("cuda:1")
    assert device.array([1, 2]).tolist() == [1, 2]
    assert FakeDevice.entered == [1, -1]
    assert device.to_host(SimpleNamespace(values=[3])).tolist() == [3]
    assert FakeDevice.entered == [1, -1, 1, -1]


class FakeArray:
    """An array of CuPy as `Device.put` uses one: `set` takes a contiguous host array of its shape and dtype."""

    def __init__(self, host: Any) -> None:
        self.host = np.array(host)
        self.dtype, self.flags = self.host.dtype, self.host.flags

    def set(self, source: Any) -> None:
        assert isinstance(source, np.ndarray)
        assert source.flags.c_contiguous
        if source.shape != self.host.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.host.shape}, new shape: {source.shape}")
        assert source.dtype == self.dtype
        self.host[...] = source


@pytest.mark.parametrize(
    "source",
    [
        np.array(7),
        np.arange(6)[4:5].reshape(()),
        np.arange(3),
        np.arange(6).reshape(2, 3).T,
        np.arange(8)[::2],
        np.arange(0),
    ],
    ids=["0-d", "0-d view", "1-d", "transposed", "strided", "empty"],
)
def test_cuda_arrays_of_every_shape_are_written(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm of torch has a 0-d state, `num_batches_tracked`."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(1))
    target = FakeArray(np.full(source.shape, -1, source.dtype))
    Device.parse("cuda:0").put(target, source)
    np.testing.assert_array_equal(target.host, source)
