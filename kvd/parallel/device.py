"""Where an executor computes: a CPU through NumPy or a CUDA device through CuPy.

A device is written ``"cpu"``, ``"cpu:1"``, ``"cuda:0"``. Several CPU devices behave as separate devices that share
the cores of this host; their index only tells them apart, so any index exists.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from kvd.errors import ConfigError

#: A ``numpy.ndarray`` or a ``cupy.ndarray``, whichever the device at hand computes with. The two share no base class.
Array: TypeAlias = Any
HostArray: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, ...]

_SPELLING = re.compile(r"(cpu|cuda)(?::([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this host.

    Attributes:
        kind: ``"cpu"`` or ``"cuda"``.
        index: which one; ``"cpu"`` and ``"cuda"`` alone mean index 0.
    """

    kind: Literal["cpu", "cuda"]
    index: int = 0

    @classmethod
    def parse(cls, text: str | Device) -> Device:
        """The device that ``text`` names (a `Device` is returned as it is).

        Only the spelling is checked, so that a configuration can be read on a host without the device. `check`, which
        `xp`, `array` and `current` call, looks for the device itself.

        Raises:
            ConfigError: ``text`` does not name a device.
        """
        if isinstance(text, Device):
            return text
        match = _SPELLING.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ConfigError(f'{text!r} is not a device: write "cpu", "cpu:1" or "cuda:0"', setting="devices")
        return cls("cpu" if match[1] == "cpu" else "cuda", int(match[2] or 0))

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" and self.index == 0 else f"{self.kind}:{self.index}"

    @property
    def is_cuda(self) -> bool:
        """Whether arrays of this device live in the memory of a GPU."""
        return self.kind == "cuda"

    def check(self) -> None:
        """Return if the device can be used.

        Raises:
            ConfigError: CuPy is missing or finds no driver, or there is no device with this index; the message then
                lists the devices that there are.
        """
        if self.is_cuda:
            count = _cuda_device_count()
            if self.index >= count:
                there = ", ".join(["cpu"] + [f"cuda:{index}" for index in range(count)])
                raise ConfigError(f"there is no device {self}; this host has {there}", setting="devices")

    @property
    def xp(self) -> Any:
        """The array module: ``numpy`` or ``cupy``.

        Raises:
            ConfigError: as `check`.
        """
        if not self.is_cuda:
            return np
        self.check()
        return _cupy()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the device that new arrays and kernels of this thread go to. On a CPU nothing has to be done.

        Raises:
            ConfigError: as `check`.
        """
        if not self.is_cuda:
            yield
            return
        self.check()
        with _cupy().cuda.Device(self.index):
            yield

    def array(self, host: Any, dtype: Any = None) -> Array:
        """A new C-contiguous array on this device with the values of ``host``, converted to ``dtype`` if given.

        Raises:
            ConfigError: as `check`.
        """
        with self.current():
            return self.xp.array(host, dtype=dtype, order="C")

    def put(self, target: Array, source: Array) -> None:
        """Copy ``source``, which may lie on the host or on any device, into ``target``, an array of this device."""
        if not self.is_cuda:
            # what has the buffer protocol is read in place; an array of a GPU has to be fetched
            np.copyto(target, source.get() if hasattr(source, "get") else np.asarray(source), casting="same_kind")
            return
        with self.current():
            if isinstance(source, np.ndarray) and source.dtype == target.dtype and target.flags.c_contiguous:
                target.set(np.asarray(source, order="C"))  # ascontiguousarray would give a 0-d state one dimension
            else:
                target[...] = self.xp.asarray(source)

    def to_host(self, array: Array) -> HostArray:
        """``array`` in host memory: itself if it lies there already, else a copy, complete on return."""
        if isinstance(array, np.ndarray):
            return array
        with self.current():
            host: HostArray = self.xp.asnumpy(array)
        return host


def _cupy() -> Any:
    """CuPy, imported when a CUDA device is first used: a host without GPUs does not need it."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            f'a CUDA device needs CuPy, which cannot be imported ({error}): pip install cupy-cuda12x, or use "cpu"',
            setting="devices",
        ) from error


@functools.cache
def _cuda_device_count() -> int:
    """How many CUDA devices there are, at least 1. Raises ConfigError when CuPy is missing or finds no driver."""
    cupy = _cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f'CuPy finds no CUDA driver or device ({error}): see that nvidia-smi lists one, or use "cpu"',
            setting="devices",
        ) from error
    if count == 0:
        raise ConfigError('CuPy finds a CUDA driver but no device; this host has "cpu" only', setting="devices")
    return count
