"""Copies of gradients from GPUs to the host, while backward computes the next ones.

Each device has a copy stream besides the stream that it computes on. When a gradient is complete, the copy stream waits
for the kernels that make it (an event, so no thread waits) and copies into pinned memory. For the ``…device…`` types of
the store the devices' gradients are first summed on device 0, in the order of the devices, so that only one copy
crosses the bus. A thread waits for the copies, in order, and hands them to the store.
"""

from __future__ import annotations

import importlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvd.parallel.device import Array, HostArray
from kvd.parallel.device_threads import DeviceThread

Send = Callable[[str, Sequence[HostArray]], None]
_Job = tuple[str, list[Any], list[HostArray]]


class Downloads:
    """The copies of one gradient pipeline.

    Arguments:
        threads: of the group's devices; those of CPUs need no copy.
        sum_on_device: sum on the first device before the copy; only where all devices are GPUs.
        send: called with the name and the host arrays, one per device or one sum, when they are complete.
    """

    def __init__(self, threads: Sequence[DeviceThread], sum_on_device: bool, send: Send) -> None:
        self._threads = list(threads)
        self._sums = sum_on_device and len(threads) > 1 and all(thread.device.is_cuda for thread in threads)
        self._send = send
        self._streams = [_new_stream(thread) for thread in threads]
        self._pinned: dict[tuple[str, int], HostArray] = {}
        self._totals: dict[str, tuple[Array, Array]] = {}
        self._under_way: dict[str, dict[int, tuple[Any, HostArray | None]]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open_jobs = 0
        self._error: BaseException | None = None
        reference = weakref.ref(self)
        threading.Thread(target=_send_all, args=(reference, self._jobs), name="kvd-downloads", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def begin(self) -> None:
        """A backward starts: what devices had completed in one that failed is not sent."""
        self._under_way.clear()

    def completed(self, index: int, name: str, gradients: Sequence[Array]) -> None:
        """The gradient of device ``index`` is complete once the kernels on that device's current stream have run.

        Arguments:
            gradients: of all devices; only that of ``index`` need be there yet.

        Raises:
            What sending an earlier gradient raised.
        """
        self._raise_error()
        part = self._start(index, name, gradients[index])
        with self._idle:
            parts = self._under_way.setdefault(name, {})
            parts[index] = part
            if len(parts) < len(self._threads):
                return
            del self._under_way[name]
            self._open_jobs += 1
        ordered = [parts[place] for place in range(len(self._threads))]
        if self._sums:
            done, host = self._sum(name, gradients, [event for event, _ in ordered])
            self._jobs.put((name, [done], [host]))
        else:
            hosts = [gradients[place] if host is None else host for place, (_, host) in enumerate(ordered)]
            self._jobs.put((name, [event for event, _ in ordered if event is not None], hosts))

    def drain(self) -> None:
        """Return when the store has all completed gradients. Raises what handing them over raised."""
        with self._idle:
            self._idle.wait_for(lambda: self._open_jobs == 0)
        self._raise_error()

    def run(self, job: _Job) -> None:
        """Wait for the copies of one gradient and hand it to the store; runs in the thread of the downloads."""
        name, events, hosts = job
        try:
            for event in events:
                event.synchronize()
            if self._error is None:
                self._send(name, hosts)
        except BaseException as error:  # noqa: BLE001  raised in the thread that calls drain
            self._error = error
        finally:
            with self._idle:
                self._open_jobs -= 1
                self._idle.notify_all()

    def _start(self, index: int, name: str, gradient: Array) -> tuple[Any, HostArray | None]:
        """An event after which the gradient is there, and where: on the host, or (None) where it was made."""
        thread, stream = self._threads[index], self._streams[index]
        if stream is None:
            return None, None
        cupy = thread.device.xp
        with thread.device.current():
            made = cupy.cuda.Event(disable_timing=True)
            made.record()  # on the stream of the device's thread, which is current
            if self._sums:
                return made, None
            stream.wait_event(made)
            return self._copy(name, index, gradient)

    def _copy(self, name: str, index: int, array: Array) -> tuple[Any, HostArray]:
        """Queue the copy of a device array on the copy stream of its device."""
        cupy, stream = self._threads[index].device.xp, self._streams[index]
        host = self._pinned.get((name, index))
        if host is None:
            host = self._pinned[name, index] = _pinned(array)
        array.get(stream=stream, out=host, blocking=False)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(stream)
        return done, host

    def _sum(self, name: str, gradients: Sequence[Array], made: Sequence[Any]) -> tuple[Any, HostArray]:
        """The sum over the devices on the first, as ``((g0 + g1) + g2) + …``; halves are summed in float32."""
        device, stream = self._threads[0].device, self._streams[0]
        cupy = device.xp
        with device.current(), stream:
            for event in made:
                stream.wait_event(event)
            first = gradients[0]
            if name not in self._totals:
                wide = np.float32 if first.dtype.itemsize == 2 else first.dtype
                self._totals[name] = cupy.empty(first.shape, wide), cupy.empty_like(first)
            total, other = self._totals[name]
            total[...] = first
            for gradient in gradients[1:]:
                other.data.copy_from_device_async(gradient.data, gradient.nbytes, stream)
                total += other
            other[...] = total
            return self._copy(name, 0, other)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _send_all(downloads: weakref.ref[Downloads], jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        owner = downloads()
        if owner is None:
            return
        owner.run(job)
        del owner


def _new_stream(thread: DeviceThread) -> Any:
    if not thread.device.is_cuda:
        return None
    with thread.device.current():
        return thread.device.xp.cuda.Stream(non_blocking=True)


def _pinned(array: Array) -> HostArray:
    cupyx = importlib.import_module("cupyx")  # a host without GPUs need not have it
    host: HostArray = cupyx.empty_pinned(array.shape, array.dtype)
    return host
