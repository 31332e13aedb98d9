"""How far apart the two cores of a machine are: how quickly one reads what the other has just written.

A host may run the virtual processors of a machine on cores that share a cache, or on cores that do not, and moves them
while the machine runs. Values that fit into caches then travel several times faster or slower, and large ones have the
memory bandwidth of one cache or of two. So a figure means little without this one, taken at the same time.

This file is also the program of the other core: ``python distance.py DESCRIPTOR CORE``.
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import subprocess
import sys
import time
from typing import Final

NBYTES: Final = 256 << 10
"""Of a block: less than a core's own cache has."""

BLOCKS: Final = 100
PATIENCE_S: Final = 2.0
SPINS: Final = 10_000
"""Looks at the turn between two looks at the clock."""

# The first page has whose turn it is, and the time of the last reading; the block comes behind.
_TURN: Final = 0
_TIME: Final = struct.Struct("=q")
_TIME_AT: Final = 8
_BLOCK_AT: Final = mmap.PAGESIZE
_TOTAL: Final = _BLOCK_AT + NBYTES
_OURS, _THEIRS, _OVER = range(3)


def gb_s() -> float | None:
    """GB/s at which one core copies 256 KiB that the other one has just written; the median of many. None: the usable
    cores are not just two, so that nobody knows which ones will talk to each other, or one of them was kept busy."""
    cores = sorted(os.sched_getaffinity(0))
    return between(*cores) if len(cores) == 2 else None


def between(one: int, other: int) -> float | None:
    """The same for two cores. The calling thread is on the first one meanwhile."""
    before = os.sched_getaffinity(0)
    descriptor = os.memfd_create("distance")
    try:
        os.ftruncate(descriptor, _TOTAL)
        with mmap.mmap(descriptor, _TOTAL) as memory:
            command = [sys.executable, "-I", __file__, str(descriptor), str(other)]
            with subprocess.Popen(command, pass_fds=[descriptor], stderr=subprocess.DEVNULL) as reader:
                try:
                    os.sched_setaffinity(0, {one})
                    return _median_gb_s(memory)
                finally:
                    os.sched_setaffinity(0, before)
                    memory[_TURN] = _OVER
                    reader.wait()
    finally:
        os.close(descriptor)


def _median_gb_s(memory: mmap.mmap) -> float | None:
    until = time.monotonic() + PATIENCE_S
    taken_ns: list[int] = []
    blocks = [bytes([number]) * NBYTES for number in range(2)]
    for number in range(BLOCKS):
        memory[_BLOCK_AT:] = blocks[number % 2]
        memory[_TURN] = _THEIRS
        if not _awaits(memory, _OURS, until):
            return None
        taken_ns += _TIME.unpack_from(memory, _TIME_AT)
    return float(NBYTES / statistics.median(taken_ns))


def _awaits(memory: mmap.mmap, turn: int, until: float) -> bool:
    """Waits for this turn. False: the time is up, or all is over."""
    while True:
        for _ in range(SPINS):
            if memory[_TURN] == turn:
                return True
        if time.monotonic() > until or memory[_TURN] == _OVER:
            return False


def read(descriptor: int, core: int) -> None:
    """The program of the other core: copies each block, and tells how long that took, until all is over."""
    os.sched_setaffinity(0, {core})
    until, own = time.monotonic() + 2 * PATIENCE_S, bytearray(NBYTES)
    with mmap.mmap(descriptor, _TOTAL) as memory, memoryview(memory) as pages, memoryview(own) as room:
        while _awaits(memory, _THEIRS, until):
            start_ns = time.perf_counter_ns()
            room[:] = pages[_BLOCK_AT:]
            _TIME.pack_into(memory, _TIME_AT, time.perf_counter_ns() - start_ns)
            memory[_TURN] = _OURS


if __name__ == "__main__":
    read(int(sys.argv[1]), int(sys.argv[2]))
