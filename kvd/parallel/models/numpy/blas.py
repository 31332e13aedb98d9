"""How many threads the matrix products of NumPy have while the CPU devices of a group compute side by side.

OpenBLAS, with which NumPy comes, has one pool of threads for the process. Where several threads of the program multiply
matrices at once, each product waits for the pool, and its threads, which spin while they wait, take the cores from
those that compute. So as soon as a group has a device for every thread of the pool, each product gets one thread.

The number is a setting of the process: it is changed while such devices compute, and put back when the last of them is
done. A NumPy with another BLAS (MKL, BLIS, Accelerate) is left as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvd.parallel.device import Device
from kvd.parallel.device_threads import cpu_devices_in_group, turn_of_cpu_device

#: Of the functions that set and get the number: of NumPy's own wheels, and of OpenBLAS as distributions build it.
_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
_MODULES = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")  # from NumPy 2 on, and before


class BlasThreads:
    """The threads of one BLAS.

    Arguments:
        get: tells how many there are.
        put: sets how many there are.
    """

    def __init__(self, get: Callable[[], int], put: Callable[[int], None]) -> None:
        self._get = get
        self._put = put
        self._lock = threading.Lock()
        self._limiting = 0
        self._before = 0

    @contextlib.contextmanager
    def limited(self, devices: int) -> Iterator[None]:
        """Inside, products have one thread, if the process has a device for each thread of the BLAS.

        Arguments:
            devices: how many compute at once. 1: nothing changes.
        """
        if devices < 2 or not self._enter(devices):
            yield
            return
        try:
            yield
        finally:
            self._leave()

    def _enter(self, devices: int) -> bool:
        with self._lock:
            if self._limiting == 0:
                self._before = self._get()
                if not 1 < self._before <= devices:
                    return False
                self._put(1)
            self._limiting += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._limiting -= 1
            if self._limiting == 0:
                self._put(self._before)


@contextlib.contextmanager
def share_of_cpu(device: Device) -> Iterator[None]:
    """Inside, this thread computes on its device; if that is one of several CPUs of a group, with its share of cores.

    It may wait for its turn, and products of matrices may have fewer threads.
    """
    if device.is_cuda:
        yield
        return
    blas = blas_of_numpy()
    with turn_of_cpu_device(), contextlib.nullcontext() if blas is None else blas.limited(cpu_devices_in_group()):
        yield


@functools.cache
def blas_of_numpy() -> BlasThreads | None:
    """The BLAS that NumPy is linked to; None: it is no OpenBLAS, or this platform does not let one look it up."""
    for name in _MODULES:
        try:
            library: Any = ctypes.CDLL(importlib.import_module(name).__file__)  # finds what it is linked to, too
        except (ImportError, OSError):
            continue
        for spelling in _NAMES:
            get = getattr(library, spelling.format("get_num_threads"), None)
            put = getattr(library, spelling.format("set_num_threads"), None)
            if get is not None and put is not None:
                get.argtypes, get.restype = (), ctypes.c_int
                put.argtypes, put.restype = (ctypes.c_int,), None
                return BlasThreads(get, put)
    return None
