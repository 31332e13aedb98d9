"""Memory that was freed and that nothing has used for a while: finding it, and giving it back to the system.

A process keeps freed memory for its job, which takes and frees the same buffers in every step (`kvd.node.memory`). What
peers once made libzmq take is freed in the same way, but nobody will need it again. The two differ in time: the least
that was unused at any of several looks is what the job did without. A job that uses its memory only between
two looks loses pages now and then, and less often each time. No other job loses any.
"""

from __future__ import annotations

import math
from typing import Final

from kvd.transport.limits.process_memory import ProcessMemory

LOOK_S: Final = 1.0
FEW_LOOKS: Final = 4  # that find the same memory unused, until it is given back
MOST_LOOKS: Final = 16  # twice as many after each time, up to so many
NOTABLE_BYTES: Final = 1 << 20
NOTABLE_SHARE: Final = 32  # or this part of all that the process has, if that is more


class UnusedMemory:
    """Gives back what nothing uses. It belongs to one thread."""

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
