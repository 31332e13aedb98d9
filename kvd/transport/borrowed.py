"""Memory of another process that this one reads: maps of its segments, and what it is told when we are done with it.

Whoever keeps a payload keeps, through the map, a `Hold`; the link keeps it too. When the last lets go of it, the other
end sees the end of the stream and may use its memory again. This holds even when the link is long gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

from kvd.transport.frames import BadFrameError
from kvd.transport.segments import Bytes

MAX_SEGMENTS = 4096
RELEASE_EAGERLY_ABOVE = 32  # frames
RELEASE_EAGERLY_ABOVE_BYTES = 32 << 20


class Wire:
    """A socket that is closed when nobody refers to it any more: neither a link nor a hold."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        _wires.add(self)

    def __del__(self) -> None:
        self.socket.close()


class Hold:
    """What keeps the other end from using its memory again."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def __del__(self) -> None:
        with suppress(OSError):  # it is closed, or broken
            self.wire.socket.shutdown(socket.SHUT_WR)


class ReadOnlyMap(mmap.mmap):
    """The map of a segment. Payloads keep it alive, and it keeps the hold."""

    hold: Hold | None


class _Payload(weakref.ref[Bytes]):
    """Notices that a payload is gone; the callback appends it to a deque."""

    __slots__ = ("nbytes", "number")
    number: int
    nbytes: int


class Borrowed:
    """The maps and payloads of one link."""

    def __init__(self, wire: Wire) -> None:
        self._hold: Hold | None = Hold(wire)
        self._maps: dict[int, ReadOnlyMap] = {}
        self._held: dict[int, _Payload] = {}
        self._gone: deque[_Payload] = deque()
        self._to_release: list[int] = []
        self._to_release_bytes = 0
        self._received = 0

    @property
    def holds(self) -> bool:
        """Whether there is something that is not released yet."""
        return bool(self._held)

    def add_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Maps a segment, if it is what it has to be. The descriptor stays the caller's."""
        if number in self._maps or len(self._maps) >= MAX_SEGMENTS:
            raise BadFrameError(f"segment {number} is one too many")
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise BadFrameError(f"segment {number} is not sealed against shrinking")
        if nbytes <= 0 or os.fstat(descriptor).st_size != nbytes:
            raise BadFrameError(f"segment {number} has not the {nbytes} bytes that it is said to have")
        try:
            mapped = ReadOnlyMap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise BadFrameError(f"segment {number} cannot be mapped: {error}") from None
        mapped.hold = self._hold
        self._maps[number] = mapped

    def payload(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """The next payload: bytes of a segment, read-only."""
        mapped = self._maps.get(segment)
        if mapped is None:
            raise BadFrameError(f"there is no segment {segment}")
        if not nbytes or offset + nbytes > len(mapped):
            raise BadFrameError(f"{nbytes} bytes from {offset} on are not all in segment {segment}")
        array: Bytes = np.frombuffer(mapped, np.uint8, nbytes, offset)
        held = _Payload(array, self._gone.append)
        held.number, held.nbytes = self._received, nbytes
        self._held[self._received] = held
        self._received += 1
        return array.data

    def take_released(self, most: int) -> list[int]:
        """Numbers of frames whose payloads are gone, for the other end. Not for two threads at once."""
        self._collect()
        numbers, self._to_release = self._to_release[:most], self._to_release[most:]
        if not self._to_release:
            self._to_release_bytes = 0
        return numbers

    def is_much_to_release(self) -> bool:
        """Whether the other end should be told now. Not for two threads at once."""
        self._collect()
        return len(self._to_release) > RELEASE_EAGERLY_ABOVE or self._to_release_bytes > RELEASE_EAGERLY_ABOVE_BYTES

    def has_gone(self) -> bool:
        """Whether there is something to release; cheap."""
        return bool(self._gone or self._to_release)

    def let_go(self) -> None:
        """The link takes no more payloads: when those that are out are gone, the other end is told."""
        self._maps = {}
        self._hold = None

    def _collect(self) -> None:
        while self._gone:
            payload = self._gone.popleft()
            del self._held[payload.number]
            self._to_release.append(payload.number)
            self._to_release_bytes += payload.nbytes


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child would keep the connections of its parent open, and so hide the parent's death."""
    for wire in list(_wires):
        wire.socket.close()


os.register_at_fork(after_in_child=_close_in_child)
