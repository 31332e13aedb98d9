"""Whether this process has more memory than it may have. What nothing uses any more it gives back."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvd.transport.limits.process_memory import ProcessMemory
from kvd.transport.limits.unused_memory import UnusedMemory

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
    """Looks at the memory of the process.

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
