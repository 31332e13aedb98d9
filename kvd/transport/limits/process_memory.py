"""How much memory this process has, and how much of that its C library keeps for later."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
