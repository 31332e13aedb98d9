"""The other end's shared memory, mapped read-only here, and how it learns that this process is done with it.

A payload refers to the map that it lies in, the map to a `Hold`. The link refers to the `Hold`, too. When the last of
them is gone, this process shuts the stream down, and the other end may use its memory again. This works even if the
link ended long before.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

from kvd.transport.frames import InvalidFrameError
from kvd.transport.offered import MapBudget, check_offer
from kvd.transport.segments import LARGEST_SEGMENT_BYTES, Bytes

MAX_SEGMENTS = 4096
RELEASE_EAGERLY_ABOVE = 32  # frames
RELEASE_EAGERLY_ABOVE_BYTES = 32 << 20


class LinkSocket:
    """A socket that is closed when nothing refers to it any more, neither a link nor a hold."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        _open_sockets.add(self)

    def __del__(self) -> None:
        self.socket.close()


class Hold:
    """Keeps the other end from using its memory again."""

    def __init__(self, link_socket: LinkSocket) -> None:
        self._link_socket = link_socket

    def __del__(self) -> None:
        with suppress(OSError):  # it is closed or broken
            self._link_socket.socket.shutdown(socket.SHUT_WR)


class ReadOnlyMap(mmap.mmap):
    """The map of a segment. Payloads keep it alive, and it keeps the hold alive."""

    hold: Hold | None
    budget: MapBudget | None = None

    def __del__(self) -> None:
        if self.budget is not None:
            self.budget.give_back(len(self))


class _PayloadRef(weakref.ref[Bytes]):
    """Notices when a payload is gone: its callback then appends it to a deque."""

    __slots__ = ("nbytes", "number")
    number: int
    nbytes: int


class RemoteSegments:
    """The segments and payloads that one link has received.

    `add_segment` and `payload` belong to the thread that reads the link. `take_released` and `should_release_now`
    belong to the thread that has the link's lock.
    """

    def __init__(self, link_socket: LinkSocket, budget: MapBudget) -> None:
        self._hold: Hold | None = Hold(link_socket)
        self._budget = budget
        self._maps: dict[int, ReadOnlyMap] = {}
        self._in_use: dict[int, _PayloadRef] = {}  # by the number of the frame
        self._gone: deque[_PayloadRef] = deque()
        self._to_release: list[int] = []
        self._to_release_bytes = 0
        self._received = 0

    @property
    def has_unreleased(self) -> bool:
        """Whether there are payloads whose release the other end has not been told of."""
        return bool(self._in_use or self._to_release)

    def add_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Checks a segment and maps it. The caller keeps the descriptor. Raises InvalidFrameError."""
        if number in self._maps or len(self._maps) >= MAX_SEGMENTS:
            raise InvalidFrameError(f"segment {number} came twice, or there are more than {MAX_SEGMENTS} segments")
        check_offer(number, descriptor, nbytes)
        if not self._budget.take(nbytes):
            raise InvalidFrameError(f"segment {number}: no more than {self._budget.limit_bytes} bytes can be mapped")
        populate = mmap.MAP_POPULATE if nbytes <= LARGEST_SEGMENT_BYTES else 0
        try:
            mapped = ReadOnlyMap(descriptor, nbytes, mmap.MAP_SHARED | populate, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            self._budget.give_back(nbytes)
            raise InvalidFrameError(f"segment {number} cannot be mapped: {error}") from None
        mapped.hold, mapped.budget = self._hold, self._budget
        self._maps[number] = mapped

    def payload(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """The payload of the next REFERENCE: bytes of a segment, read-only. Raises InvalidFrameError."""
        mapped = self._maps.get(segment)
        if mapped is None:
            raise InvalidFrameError(f"there is no segment {segment}")
        if not nbytes or offset + nbytes > len(mapped):
            raise InvalidFrameError(f"segment {segment} does not contain {nbytes} bytes at {offset}")
        array: Bytes = np.frombuffer(mapped, np.uint8, nbytes, offset)
        reference = _PayloadRef(array, self._gone.append)
        reference.number, reference.nbytes = self._received, nbytes
        self._in_use[self._received] = reference
        self._received += 1
        return array.data

    def take_released(self, most: int) -> list[int]:
        """At most `most` numbers of frames whose payloads are gone, to tell the other end."""
        self._collect()
        numbers, self._to_release = self._to_release[:most], self._to_release[most:]
        if not self._to_release:
            self._to_release_bytes = 0
        return numbers

    def should_release_now(self) -> bool:
        """Whether the other end should be told without waiting for the next message to it."""
        self._collect()
        return len(self._to_release) > RELEASE_EAGERLY_ABOVE or self._to_release_bytes > RELEASE_EAGERLY_ABOVE_BYTES

    def has_gone(self) -> bool:
        """Whether there is something to release. Cheap; any thread may ask."""
        return bool(self._gone or self._to_release)

    def drop(self) -> None:
        """The link takes no more payloads. The other end is told when those in use are gone."""
        self._maps = {}
        self._hold = None

    def _collect(self) -> None:
        while self._gone:
            payload = self._gone.popleft()
            del self._in_use[payload.number]
            self._to_release.append(payload.number)
            self._to_release_bytes += payload.nbytes


_open_sockets: weakref.WeakSet[LinkSocket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child would keep its parent's connections open, and so hide the parent's death."""
    for link_socket in list(_open_sockets):
        link_socket.socket.close()


os.register_at_fork(after_in_child=_close_in_child)
