"""The devices of one group side by side: each has a thread, input buffers and, on CUDA, a stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kvd.compute.halves import processors
from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device

P = ParamSpec("P")
T = TypeVar("T")

_of_thread = threading.local()


class CpuDevices:
    """The CPU devices of a group, which share the cores of this host.

    Attributes:
        count: how many there are.
        turns: as many as there are cores.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.turns = threading.BoundedSemaphore(processors())


def cpu_devices_in_group() -> int:
    """In a device's thread: how many devices of its group are CPUs, and so share the cores. In other threads: 1."""
    devices: CpuDevices | None = getattr(_of_thread, "cpu_devices", None)
    return 1 if devices is None else devices.count


@contextlib.contextmanager
def turn_of_cpu_device() -> Iterator[None]:
    """Inside, no more CPU devices of this thread's group compute than there are cores.

    Devices that the system switches between push each other's arrays out of the caches, and wait for each other's
    interpreter lock. In a thread that is not of a device there is nothing to wait for.
    """
    devices: CpuDevices | None = getattr(_of_thread, "cpu_devices", None)
    if devices is None:
        yield
        return
    with devices.turns:
        _of_thread.has_turn = True
        try:
            yield
        finally:
            _of_thread.has_turn = False


def outside_of_turn(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, during which another device may compute: it may wait for a store, or for the other devices."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not getattr(_of_thread, "has_turn", False):
            return function(*args, **kwargs)
        turns = _of_thread.cpu_devices.turns
        _of_thread.has_turn = False
        turns.release()
        try:
            return function(*args, **kwargs)
        finally:
            turns.acquire()
            _of_thread.has_turn = True

    return call


class DeviceThread:
    """Runs tasks on one device of a group, one at a time.

    Attributes:
        device: where.
        index: its place in the group, which tells two entries of one device apart.

    Arguments:
        cpu_devices: of its group; None: it is alone.
    """

    def __init__(self, device: Device, index: int, cpu_devices: CpuDevices | None = None) -> None:
        device.check()
        self.device = device
        self.index = index
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix=f"kvd-{device}-{index}", initializer=_set_cpu_devices, initargs=(cpu_devices,)
        )
        self._stream: Any = None
        self._storage: dict[str, Array] = {}
        if device.is_cuda:
            with device.current():
                self._stream = device.xp.cuda.Stream()

    def run(self, task: Callable[[int], T]) -> T:
        """``task(index)`` in the calling thread, with the device and its stream current; on return its kernels ran."""
        with self._current():
            return task(self.index)

    def submit(self, task: Callable[[int], T]) -> Future[T]:
        """`run` in the thread of the device."""
        return self._pool.submit(self.run, task)

    def buffer(self, desc: DataDesc) -> Array:
        """An array for the input that ``desc`` describes, in the memory of the last buffer of that name if it fits.

        So switching between shapes allocates nothing.
        """
        dtype = np.dtype(desc.dtype)
        size = int(np.prod(desc.shape, dtype=np.int64)) * dtype.itemsize
        storage = self._storage.get(desc.name)
        if storage is None or storage.nbytes < size:
            storage = self._storage[desc.name] = self.device.xp.empty(size, dtype=np.uint8)
        return storage[:size].view(dtype).reshape(desc.shape)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        with self.device.current():
            if self._stream is None:
                yield
                return
            with self._stream:
                yield
                self._stream.synchronize()


def _set_cpu_devices(devices: CpuDevices | None) -> None:
    _of_thread.cpu_devices = devices


def run_on_all(threads: Sequence[DeviceThread], task: Callable[[int], T]) -> list[T]:
    """``task(index)`` on every device at once; the results in the order of the devices.

    Returns when all are done, even if some failed: then the error of the first device that failed is raised, with a
    note that names the device, and notes about the others' errors. A single device runs in the caller's thread.
    """
    if len(threads) == 1:
        return [threads[0].run(task)]
    futures = [thread.submit(task) for thread in threads]
    wait(futures)
    failed = [(thread, error) for thread, future in zip(threads, futures, strict=True) if (error := future.exception())]
    if failed:
        thread, first = failed[0]
        first.add_note(f"on {thread.device} (device {thread.index} of the group)")
        for other, error in failed[1:]:
            first.add_note(f"also on {other.device} (device {other.index}): {type(error).__name__}: {error}")
        raise first
    return [future.result() for future in futures]
