"""The other end's shared memory, mapped read-only here, and how it learns that this process is done with it.

A payload refers to the map that it lies in, the map to a `Hold`. The link refers to the `Hold`, too. When the last of
them is gone, this process shuts the stream down, and the other end may use its memory again. This works even if the
link ended long before.

A program may keep a payload for long (`PayloadReference.lend`). A child that it forks has it as well: what was lent is
released only when the child has ended, too.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import weakref
from collections import deque
from contextlib import suppress
from io import FileIO

import numpy as np

from kvd.transport.links.frames import InvalidFrameError
from kvd.transport.memory.offered import MapBudget, check_offer
from kvd.transport.memory.segments import LARGEST_SEGMENT_BYTES, Bytes

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


class Children:
    """Processes that were forked at one moment, and what they forked: they keep the other end of a pipe open.

    Args:
        reading: this end of the pipe. None: there is none, and nothing tells when they end.
    """

    def __init__(self, reading: int | None) -> None:
        self._pipe: FileIO | None = None
        if reading is not None:
            os.set_blocking(reading, False)
            self._pipe = FileIO(reading)

    def have_ended(self) -> bool:
        if self._pipe is None:
            return False
        try:
            if self._pipe.read(1) is None:
                return False
        except (OSError, ValueError):  # it was closed, when another thread saw that they have ended
            return True
        self._pipe.close()
        return True

    def __del__(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


class Hold:
    """Keeps the other end from using its memory again.

    Attributes:
        children: those that have payloads, too. While one of them lives, the stream is not shut down: it ends when all
            have closed it.
    """

    def __init__(self, link_socket: LinkSocket) -> None:
        self.link_socket = link_socket
        self.children: list[Children] = []

    def __del__(self) -> None:
        if not all(each.have_ended() for each in self.children):
            return
        with suppress(OSError):  # it is closed or broken
            self.link_socket.socket.shutdown(socket.SHUT_WR)


class ReadOnlyMap(mmap.mmap):
    """The map of a segment. Payloads keep it alive, and it keeps the hold alive."""

    hold: Hold | None
    budget: MapBudget | None = None

    def __del__(self) -> None:
        if self.budget is not None:
            self.budget.give_back(len(self))


class PayloadReference(weakref.ref[Bytes]):
    """Notices when a payload is gone: its callback then appends it to a deque."""

    __slots__ = ("children", "is_lent", "nbytes", "number")
    number: int
    nbytes: int
    is_lent: bool
    children: list[Children]

    def is_over(self) -> bool:
        """Whether neither this process nor a child of it uses the payload any more."""
        return self() is None and (not self.children or all(each.have_ended() for each in self.children))

    def lend(self) -> None:
        """The program keeps the payload, or views of it, for as long as it wants."""
        with _lending:
            self.is_lent = True


def reference_to(payload: memoryview) -> PayloadReference | None:
    """The reference to a payload, as it was delivered or a part of it. None: it lies in memory of this process."""
    owner = payload.obj
    if isinstance(owner, np.ndarray):
        for reference in weakref.getweakrefs(owner):
            if type(reference) is PayloadReference:
                return reference
    return None


class RemoteSegments:
    """The segments and payloads that one link has received.

    `add_segment` and `payload` belong to the thread that reads the link. `take_released` and `should_release_now`
    belong to the thread that has the link's lock.
    """

    def __init__(self, link_socket: LinkSocket, budget: MapBudget) -> None:
        self._hold: Hold | None = Hold(link_socket)
        self._budget = budget
        self._maps: dict[int, ReadOnlyMap] = {}
        self._in_use: dict[int, PayloadReference] = {}  # by the number of the frame
        self._gone: deque[PayloadReference] = deque()
        self._kept_by_children: list[PayloadReference] = []
        self._to_release: list[int] = []
        self._to_release_bytes = 0
        self._received = 0
        with _lending:  # a fork goes through them all
            _all_segments.add(self)

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
        reference = PayloadReference(array, self._gone.append)
        reference.number, reference.nbytes = self._received, nbytes
        reference.is_lent, reference.children = False, []
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

    def look_at_children(self) -> None:
        """What only children kept, and have dropped, is to be released."""
        kept, self._kept_by_children = self._kept_by_children, []
        self._gone.extend(kept)
        self._collect()

    def lent(self) -> list[tuple[PayloadReference, Bytes]]:
        """The payloads that the program keeps."""
        lent = [(each, each()) for each in list(self._in_use.values()) if each.is_lent]
        return [(reference, payload) for reference, payload in lent if payload is not None]

    def _collect(self) -> None:
        while self._gone:
            payload = self._gone.popleft()
            if not payload.is_over():
                self._kept_by_children.append(payload)
                continue
            del self._in_use[payload.number]
            self._to_release.append(payload.number)
            self._to_release_bytes += payload.nbytes


# ── forks ──


class _Fork:
    """What a fork that is under way has to know. The payloads stay alive meanwhile."""

    def __init__(self) -> None:
        self.payloads = [entry for segments in list(_all_segments) for entry in segments.lent()]
        self.reading: int | None = None
        self.writing: int | None = None
        if self.payloads:
            with suppress(OSError):  # no descriptor is left: the payloads are kept for good
                self.reading, self.writing = os.pipe2(os.O_CLOEXEC)

    @staticmethod
    def close(descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)

    def holds(self) -> set[Hold]:
        maps: list[ReadOnlyMap] = [payload.base.obj for _, payload in self.payloads]  # type: ignore[union-attr]
        return {each.hold for each in maps if each.hold is not None}


_open_sockets: weakref.WeakSet[LinkSocket] = weakref.WeakSet()
_all_segments: weakref.WeakSet[RemoteSegments] = weakref.WeakSet()
_lending = threading.RLock()  # a signal handler may fork while its own thread lends
_forks: list[_Fork] = []  # at most one, while `_lending` is held


def _before_fork() -> None:
    _lending.acquire()
    _forks.append(_Fork())


def _after_fork_in_parent() -> None:
    try:
        fork = _forks.pop()
        if fork.payloads:
            fork.close(fork.writing)
            children = Children(fork.reading)
            for reference, _ in fork.payloads:
                reference.children = [each for each in reference.children if not each.have_ended()] + [children]
            for hold in fork.holds():
                hold.children = [each for each in hold.children if not each.have_ended()] + [children]
    finally:
        _lending.release()


def _after_fork_in_child() -> None:
    """A child would keep its parent's connections open, and so hide the parent's death. It does so only for payloads
    that the program keeps: with copies of the descriptors, which are closed when the child ends."""
    try:
        fork = _forks.pop()
        if fork.payloads:
            fork.close(fork.reading)
            for hold in fork.holds():
                with suppress(OSError):  # it was closed
                    os.dup(hold.link_socket.socket.fileno())
        for link_socket in list(_open_sockets):
            link_socket.socket.close()
    finally:
        _lending.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
