"""The devices of one group side by side: a thread each and, on CUDA, a stream each; and their input buffers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from kvd.parallel.batch import DataDesc
from kvd.parallel.device import Array, Device

T = TypeVar("T")

_of_thread = threading.local()


def cpu_devices_in_group() -> int:
    """How many lanes of the group on whose lane this thread runs are on a CPU, and so share its cores; else 1."""
    lanes: int = getattr(_of_thread, "cpu_devices_in_group", 1)
    return lanes


class Lane:
    """What runs on one device of a group, one task at a time.

    Attributes:
        device: where.
        index: its place in the group, which tells apart two lanes on one device.

    Arguments:
        on_cpu: how many lanes of the group are on a CPU.
    """

    def __init__(self, device: Device, index: int, on_cpu: int = 1) -> None:
        device.check()
        self.device = device
        self.index = index
        self._threads = ThreadPoolExecutor(
            1, thread_name_prefix=f"kvd-{device}-{index}", initializer=_set_cpu_devices_in_group, initargs=(on_cpu,)
        )
        self._stream: Any = None
        self._storage: dict[str, Array] = {}
        if device.is_cuda:
            with device.current():
                self._stream = device.xp.cuda.Stream()

    def run(self, task: Callable[[int], T]) -> T:
        """``task(index)`` in this thread, with the device and its stream current; its kernels are done on return."""
        with self._current():
            return task(self.index)

    def submit(self, task: Callable[[int], T]) -> Future[T]:
        """`run` in the thread of the lane."""
        return self._threads.submit(self.run, task)

    def buffer(self, desc: DataDesc) -> Array:
        """An array for the input that ``desc`` describes; its memory is that of the last buffer of the name if it
        was large enough, so that going back and forth between shapes allocates nothing.
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


def _set_cpu_devices_in_group(count: int) -> None:
    _of_thread.cpu_devices_in_group = count


def run_on_all(lanes: Sequence[Lane], task: Callable[[int], T]) -> list[T]:
    """``task(index)`` on every lane at once; the results in the order of the lanes.

    Returns when all are done, also when some failed: the error of the first such lane is raised, with a note that
    names its device, and those of others are notes on it. A single lane runs in the caller's thread.
    """
    if len(lanes) == 1:
        return [lanes[0].run(task)]
    futures = [lane.submit(task) for lane in lanes]
    wait(futures)
    failed = [(lane, error) for lane, future in zip(lanes, futures, strict=True) if (error := future.exception())]
    if failed:
        lane, first = failed[0]
        first.add_note(f"on {lane.device} (device {lane.index} of the group)")
        for other, error in failed[1:]:
            first.add_note(f"also on {other.device} (device {other.index}): {type(error).__name__}: {error}")
        raise first
    return [future.result() for future in futures]
