"""Memory of this process: its size, the part that the C library keeps for later, and its limit."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Heap(NamedTuple):
    """What the C library has handed out, in bytes.

    Attributes:
        used_bytes: that were not freed.
        unused_bytes: that were freed, and are kept for later. Pages that were given back count, too, until they are
            used again.
    """

    used_bytes: int
    unused_bytes: int


class ProcessMemory:
    """The memory of this process, in bytes. All are 0 where the system does not say."""

    def __init__(self) -> None:
        self._statm = -1
        self._mallinfo2: Any = None
        self._malloc_trim: Any = None
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            self._malloc_trim = library.malloc_trim
            self._mallinfo2 = library.mallinfo2  # of glibc 2.33 and later
            self._mallinfo2.restype = _MallInfo2

    def open(self) -> None:
        """Nothing is known before."""
        with suppress(OSError):
            self._statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)

    def resident_bytes(self) -> int:
        """What it has, freed memory that the C library keeps included."""
        try:
            return int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def heap(self) -> Heap:
        """How much of that the C library knows of."""
        if self._mallinfo2 is None:
            return Heap(0, 0)
        info = self._mallinfo2()
        return Heap(int(info.uordblks) + int(info.hblkhd), int(info.fordblks))

    def give_back(self) -> None:
        """Gives freed memory back to the system."""
        if self._malloc_trim is not None:
            self._malloc_trim(0)

    def close(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1


LOOK_S: Final = 1.0
FEW_LOOKS: Final = 4  # that find the same memory unused, until it is given back
MOST_LOOKS: Final = 16  # twice as many after each time, up to so many
NOTABLE_BYTES: Final = 1 << 20
NOTABLE_SHARE: Final = 32  # or this part of all that the process has, if that is more


class UnusedMemory:
    """Memory that was freed and that nothing has used for a while: finds it, and gives it back to the system.

    A process keeps freed memory for its job, which takes and frees the same buffers in every step
    (`kvd.node.daemon.process_limits`). What peers once made libzmq take is freed in the same way, but nothing will need
    it again. The two differ in time: the least that was unused at any of several looks is what the job did without. A
    job that uses its memory only between two looks loses pages now and then, and less often each time. No other job
    loses any.

    It belongs to one thread.
    """

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory
        self._other = 0  # the least that the process has had beside memory in use since it gave back the rest
        self._look_at = 0.0
        self._looks = FEW_LOOKS
        self._looks_left = FEW_LOOKS
        self._least = math.inf
        self._is_due = False

    def start(self) -> None:
        self._other = self._memory.resident_bytes() - self._memory.heap().used_bytes

    def nbytes(self, resident: int) -> int:
        """How much of the memory that the process has is unused. What was given back is no part of it, though the C
        library counts that, too."""
        heap = self._memory.heap()
        beside = resident - heap.used_bytes
        self._other = min(self._other, beside)
        return min(heap.unused_bytes, beside - self._other)

    def look(self, now: float, resident: int) -> None:
        """Gives back what was unused at all of the last looks. May be called at any time."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._least = min(self._least, self.nbytes(resident))
        self._looks_left -= 1
        if self._looks_left > 0:
            return
        if self._is_due or self._least > max(NOTABLE_BYTES, resident // NOTABLE_SHARE):
            self._memory.give_back()
            self.start()
            self._looks = min(2 * self._looks, MOST_LOOKS)
        else:
            self._looks = FEW_LOOKS
        self._begin(self._looks)

    def expect(self, now: float) -> None:
        """A peer was cut off: what it took is unused soon. It takes libzmq a while to free that."""
        self._look_at = now + LOOK_S
        self._looks = 1
        self._begin(1)
        self._is_due = True

    def _begin(self, looks: int) -> None:
        self._looks_left, self._least, self._is_due = looks, math.inf, False


REACTION_BYTES: Final = 32 << 20  # it takes so much more until something is done
REACTION_SHARE: Final = 8  # or this part of what it may have, if that is less
GROWTH_BYTES: Final = 16 << 20  # until it matters whose it is
CALM_INTERVAL_S: Final = 0.1
INTERVAL_S: Final = 0.02  # while the memory grows


class Pressure(NamedTuple):
    """What a look at the memory found.

    Attributes:
        has_grown: much, since that was said last.
        excess_bytes: what the process has too much, or will have soon if it goes on like this; at most 0: nothing.
        again_s: when to look again.
    """

    has_grown: bool
    excess_bytes: int
    again_s: float


class MemoryWatch:
    """Watch over the limit of the process's memory. What nothing uses any more is given back.

    Args:
        limit_bytes: what it may have, above what it has at `start`; 0: no limit.
    """

    def __init__(self, limit_bytes: int, memory: ProcessMemory) -> None:
        self.limit_bytes = limit_bytes
        self._memory = memory
        self._unused = UnusedMemory(memory)
        self._resident_limit = 0
        self._level = 0  # when growth was said last, or the least since then
        self._resident = 0  # at the last look
        self._looked_at = 0.0

    def start(self) -> None:
        self._memory.open()
        self._unused.start()
        self._level = self._resident = self._memory.resident_bytes()
        self._resident_limit = self._level + self.limit_bytes - min(REACTION_BYTES, self.limit_bytes // REACTION_SHARE)

    def stop(self) -> None:
        self._memory.close()

    def look(self, now: float) -> Pressure:
        resident = self._memory.resident_bytes()
        growth = max(0, resident - self._resident)
        soon = resident + int(growth * INTERVAL_S / max(INTERVAL_S, now - self._looked_at))
        self._resident, self._looked_at = resident, now
        self._level = min(self._level, resident)
        has_grown = resident - self._level > GROWTH_BYTES
        if has_grown:
            self._level = resident
        excess = soon - self._resident_limit if self.limit_bytes else 0
        if excess > 0:
            excess -= self._unused.nbytes(resident)
        self._unused.look(now, resident)
        return Pressure(has_grown, excess, INTERVAL_S if growth or excess > 0 else CALM_INTERVAL_S)

    def peer_was_cut_off(self, now: float) -> None:
        """What it took is given back as soon as libzmq has freed it."""
        self._unused.expect(now)
