"""Shared memory that this process owns and writes, and that other processes of this host may map to read.

A segment is a memfd whose pages are allocated at once, and which is sealed: its size stays, and nobody can punch holes
into it. So a process that maps it never gets a SIGBUS and allocates nothing by reading it, and a machine without memory
fails here instead of killing a process later. Segments are cut into blocks. A block is an ordinary array; it returns to
the arena when nothing refers to it or to a view of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

ALIGNMENT = 64
SMALLEST_SEGMENT_BYTES = 4 << 20  # the first one: a process that sends little takes little
LARGEST_SEGMENT_BYTES = 64 << 20  # a new segment doubles the arena up to this; a larger block gets its own segment
STEPS_PER_DOUBLING = 8  # of the size classes: at most an eighth is wasted
MOST_JOINED = 16  # a block is made of free ones of at least one part in so many: there are few to look through
RETRY_AFTER_S = 1.0  # after the system refused memory

F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1: no new map can be written to, and no hole can be punched
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | F_SEAL_FUTURE_WRITE


class Segment:
    """One memfd with its map."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = _allocated_memory(nbytes)
        try:
            self.map = mmap.mmap(self.descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            os.close(self.descriptor)
            raise
        self.address = address_of(np.frombuffer(self.map, np.uint8))
        self.carved = 0  # bytes from the start that have been cut into blocks
        self.blocks = 0  # in use

    def close(self) -> None:
        """Closes the descriptor. The map goes with its last block."""
        os.close(self.descriptor)


class _Block(weakref.ref[Bytes]):
    """Notices when a block's array is gone. Its callback only appends it to a deque: finalizers run on any thread, at
    any time."""

    __slots__ = ("nbytes", "offset", "segment")
    segment: Segment
    offset: int
    nbytes: int


class Arena:
    """The segments of one process, at most `limit_bytes` in total. Any thread may call its methods.

    Args:
        copies_parts: what is sent of a much larger buffer is copied first. Otherwise a program that keeps the value of
            one key would keep those of all keys that lie beside it, of every version.
    """

    def __init__(self, limit_bytes: int, *, copies_parts: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.copies_parts = copies_parts
        self.problem = ""  # why the last attempt to get memory failed
        self._total_bytes = 0
        self._segments: list[Segment] = []
        self._by_address: tuple[list[int], list[Segment]] = ([], [])  # always replaced as a whole
        self._free: dict[int, list[tuple[Segment, int]]] = {}  # by size class
        self._used: dict[int, _Block] = {}  # by id: keeps the weak references alive
        self._returned: deque[_Block] = deque()
        self._retry_at = 0.0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def usable(self) -> bool:
        """Whether there is shared memory. Allocates the first segment if there is none."""
        if not self._segments and not self._closed:
            with self._lock:
                self._grow(1)
        return bool(self._segments) and not self._closed

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def allocate(self, nbytes: int) -> Bytes | None:
        """A free block as a uint8 array, not cleared. None: no memory, see `problem`."""
        size = _size_class(nbytes)
        with self._lock:
            self._collect()
            found = None if self._closed else self._find_free(size)
            if found is None:
                return None
            segment, offset, size = found
            array: Bytes = np.frombuffer(segment.map, np.uint8, nbytes, offset)
            block = _Block(array, self._returned.append)
            block.segment, block.offset, block.nbytes = segment, offset, size
            self._used[id(block)] = block
            segment.blocks += 1
        return array

    def locate(self, array: NDArray[Any]) -> tuple[int, int] | None:
        """(segment number, offset) of the first byte of an array or view in this arena; None if it lies elsewhere."""
        starts, segments = self._by_address
        if not starts:
            return None
        address = address_of(array)
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        segment = segments[index]
        offset = address - segment.address
        return (segment.number, offset) if offset < segment.nbytes else None

    def segment(self, number: int) -> Segment:
        return self._segments[number]

    def close(self) -> None:
        """Hands out no more memory. Blocks in use stay valid."""
        with self._lock:
            if not self._closed:
                self._closed, self.problem = True, "closed"
                self._by_address = ([], [])
                for segment in self._segments:
                    segment.close()
                self._segments, self._free, self._used = [], {}, {}
                self._returned.clear()

    # ── with the lock held ──

    def _collect(self) -> None:
        """Takes back the blocks that nothing refers to."""
        while self._returned:
            block = self._returned.popleft()
            del self._used[id(block)]
            block.segment.blocks -= 1
            self._free.setdefault(block.nbytes, []).append((block.segment, block.offset))

    def _find_free(self, size: int) -> tuple[Segment, int, int] | None:
        free = self._free.get(size)
        if free:
            return (*free.pop(), size)
        self._recut()
        carved = self._carve(size) or self._join(size)
        if carved is None and self._grow(size):
            carved = self._carve(size)
        return self._larger(size) if carved is None else (*carved, size)

    def _carve(self, size: int) -> tuple[Segment, int] | None:
        """Cuts a new block from the rest of a segment."""
        for segment in reversed(self._segments):
            if segment.nbytes - segment.carved >= size:
                segment.carved += size
                return segment, segment.carved - size
        return None

    def _join(self, size: int) -> tuple[Segment, int] | None:
        """Makes a block of smaller ones that lie side by side, and of the rest of their segment behind the last one."""
        by_segment: dict[int, list[tuple[int, int]]] = {}  # offset and size of its free blocks
        for each, free in self._free.items():
            if each * MOST_JOINED >= size:
                for segment, offset in free:
                    by_segment.setdefault(segment.number, []).append((offset, each))
        for number, blocks in by_segment.items():
            segment = self._segments[number]
            run: list[tuple[int, int]] = []
            for offset, each in [*sorted(blocks), (segment.carved, segment.nbytes - segment.carved)]:
                if run and offset != sum(run[-1]):
                    run.clear()
                run.append((offset, each))
                start = run[0][0]
                if offset + each - start >= size and start < segment.carved:
                    self._use_run(segment, run, start + size)
                    return segment, start
        return None

    def _use_run(self, segment: Segment, run: list[tuple[int, int]], end: int) -> None:
        """Blocks that lie side by side become one, to its `end`. What is left of the last one stays free."""
        for offset, each in run:
            if offset < segment.carved:
                self._free[each].remove((segment, offset))
        last = sum(run[-1])
        if run[-1][0] == segment.carved:
            segment.carved = end
        elif end < last:
            self._free.setdefault(last - end, []).append((segment, end))

    def _recut(self) -> None:
        """Forgets the blocks of segments that are entirely free, so that they can be cut into other sizes."""
        empty = {segment.number for segment in self._segments if segment.carved and not segment.blocks}
        if not empty:
            return
        for size, free in list(self._free.items()):
            self._free[size] = [block for block in free if block[0].number not in empty]
        for number in empty:
            self._segments[number].carved = 0

    def _grow(self, size: int) -> bool:
        wanted = max(size, min(max(self._total_bytes, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES))
        wanted = min(wanted, self.limit_bytes - self._total_bytes) & -mmap.PAGESIZE
        if wanted < size:
            self.problem = f"the limit of {self.limit_bytes} bytes is reached"
            return False
        if time.monotonic() < self._retry_at:
            return False
        try:
            segment = Segment(len(self._segments), wanted)
        except (OSError, MemoryError) as error:
            self.problem = f"no shared memory: {getattr(error, 'strerror', None) or error}"
            self._retry_at = time.monotonic() + RETRY_AFTER_S
            return False
        self._segments.append(segment)
        self._total_bytes += wanted
        ordered = sorted(self._segments, key=lambda each: each.address)
        self._by_address = ([each.address for each in ordered], ordered)
        return True

    def _larger(self, size: int) -> tuple[Segment, int, int] | None:
        """The smallest free block that is large enough. Wasteful, so the last resort."""
        larger = min((other for other, free in self._free.items() if free and other >= size), default=None)
        return None if larger is None else (*self._free[larger].pop(), larger)


def address_of(array: NDArray[Any]) -> int:
    """The address of the first element."""
    if array.flags.carray and array.nbytes:  # faster, but only for writable memory
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return int(array.__array_interface__["data"][0])


def _size_class(nbytes: int) -> int:
    below = 1 << max(0, (nbytes - 1).bit_length() - 1)  # a power of two
    step = max(ALIGNMENT, below // STEPS_PER_DOUBLING)
    return max(step, (nbytes + step - 1) // step * step)


def _allocated_memory(nbytes: int) -> int:
    """A descriptor of memory whose pages are allocated."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        raise OSError(0, "this system has no memfd_create")
    descriptor: int = create("kvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
