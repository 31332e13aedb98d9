"""One connection to a process of the same host: frames over a Unix socket, large payloads by reference.

What is sent by reference is lent: the buffers stay as they are until the other end has dropped the payload. It says so
with its next frame, or by itself when much has come together, or after a while. When the other end is gone, and has let
go of everything, the stream ends, and with it every lease.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress

from kvd.core.machine import Span
from kvd.transport.base import MAX_PAYLOAD_BYTES, OnGarbage, OnMessage, padded, pieces_of
from kvd.transport.borrowed import Borrowed, Wire
from kvd.transport.frames import (
    GOODBYE,
    HELLO,
    INLINE,
    INLINE_BELOW_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_RELEASED,
    MESSAGE,
    REFERENCE,
    RELEASE,
    SEGMENT,
    VERSION,
    BadFrameError,
    pack_numbers,
    prefix_of,
)
from kvd.transport.incoming import Frame, Incoming
from kvd.transport.outgoing import Outgoing
from kvd.transport.placing import Place, place, size_of
from kvd.transport.segments import Arena

MAX_LEASES = 1 << 16  # beyond, payloads go inline
SOCKET_BUFFER_BYTES = 1 << 20
GONE = "the other side is gone"


class Sink:
    """Where messages go; set when the transport starts."""

    on_message: OnMessage = staticmethod(lambda peer, header, payload: None)
    on_garbage: OnGarbage = staticmethod(lambda peer, text: None)


class Link:
    """Sends come from any thread, reads from one at a time.

    Args:
        peer: the name of the other end.
        connection: the socket; it is the link's from now on.
        arena: where payloads are put that are to be lent.
        epoll: what the readers wait at. The link is registered there until it ends.
    """

    def __init__(
        self, peer: Hashable, connection: socket.socket, arena: Arena, epoll: select.epoll, sink: Sink
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self.peer = peer
        self.descriptor = connection.fileno()
        self.is_up = True  # messages go both ways
        self.has_ended = False  # nothing is read any more
        self.reason = ""  # why it is not up
        self._arena = arena
        self._epoll = epoll
        self._sink = sink
        self._wire: Wire | None = Wire(connection)
        self._borrowed = Borrowed(self._wire)
        self._in = Incoming(connection)
        self._out = Outgoing(connection, epoll)
        self._lock = threading.Lock()  # around everything that is sent
        self._leases: dict[int, object] = {}
        self._lent = 0  # how many frames were sent by reference
        self._announced: set[int] = set()
        self._greeted = False
        self._more = False  # the buffer may have frames that were not taken yet
        epoll.register(connection, select.EPOLLIN)
        with self._lock:
            self._push_frame(HELLO, segment=VERSION, offset=MAGIC)

    # ── life ──

    @property
    def holds(self) -> bool:
        """Whether payloads are out of which the other end has yet to be told that they are gone."""
        return self.is_up and self._borrowed.holds

    @property
    def has_waiting(self) -> bool:
        """Whether there is something that the socket has not taken yet."""
        return not self._out.is_empty

    @property
    def leases(self) -> int:
        """How many frames the other end has not released."""
        return len(self._leases)

    def leave(self, reason: str) -> None:
        """Messages are neither sent nor delivered any more. The link ends when the other end has let go, too."""
        with self._lock:
            if self.is_up:
                self._push_frame(GOODBYE)
                self.is_up, self.reason = False, reason
                self._let_go_if_flushed()

    def end(self, reason: str) -> None:
        """Ends at once. The socket stays open as long as somebody keeps a payload."""
        with self._lock:
            if self.has_ended:
                return
            if self.is_up:
                self.is_up, self.reason = False, reason
            self.has_ended = True
            with suppress(OSError, ValueError):
                self._epoll.unregister(self.descriptor)
            wire, self._wire = self._wire, None
            if wire is not None:
                with suppress(OSError):
                    wire.socket.shutdown(socket.SHUT_RD)
            self._out.clear()
            self._in.close()
            self._borrowed.let_go()
            leases, self._leases = self._leases, {}
        del leases, wire  # outside the lock: this may run finalizers

    def _go_down(self, reason: str) -> None:
        """The other end takes no messages any more; its releases are still read."""
        with self._lock:
            if self.is_up:
                self.is_up, self.reason = False, reason
            self._out.clear()
            self._borrowed.let_go()

    def _let_go_if_flushed(self) -> None:
        if not self.is_up and self._out.is_empty:
            self._borrowed.let_go()

    # ── sending ──

    def send(self, header: bytes, payload: Sequence[Span]) -> bool:
        """Sends without waiting. False: the link is not up, or too much is queued."""
        if not payload:
            with self._lock:
                return self._push_frame(MESSAGE, header)
        nbytes = size_of(payload)
        if nbytes > INLINE_BELOW_BYTES:
            return self._send_large(header, payload, nbytes)
        pieces = padded(pieces_of(payload))
        with self._lock:
            return self._push_frame(INLINE, header, pieces, nbytes)

    def _send_large(self, header: bytes, payload: Sequence[Span], nbytes: int) -> bool:
        if not self.is_up or nbytes > MAX_PAYLOAD_BYTES:
            return False
        placed = None if len(self._leases) >= MAX_LEASES else place(self._arena, payload, nbytes)
        if placed is None:
            pieces = padded(pieces_of(payload))
            with self._lock:
                return self._push_frame(INLINE, header, (), nbytes) and all(map(self._push, pieces))
        with self._lock:
            return self.is_up and self._announce(placed.segment) and self._lend(placed, header, nbytes)

    def _announce(self, number: int) -> bool:
        """Passes the descriptor of a segment on, once."""
        if number not in self._announced:
            segment = self._arena.segment(number)
            if not self._push_frame(SEGMENT, segment=number, offset=segment.nbytes, descriptor=segment.descriptor):
                return False
            self._announced.add(number)
        return True

    def _lend(self, placed: Place, header: bytes, nbytes: int) -> bool:
        """Sends by reference. The frames are counted on both sides: one that is not sent has no number."""
        self._leases[self._lent] = placed.buffers
        sent = self._push_frame(REFERENCE, header, (), nbytes, placed.segment, placed.offset)
        if sent:
            self._lent += 1
        else:
            self._leases.pop(self._lent, None)
        return sent

    def release_gone(self) -> None:
        """Tells the other end of everything that is gone."""
        with self._lock:
            while self._borrowed.has_gone() and self._push_frame(RELEASE):
                pass

    def keep(self) -> None:
        """What waits is sent from copies."""
        with self._lock:
            self._out.keep()

    def flush(self) -> None:
        """Sends what waits, as much as the socket takes."""
        with self._lock:
            if self.has_ended:
                return
            try:
                self._out.flush()
            except OSError as error:
                self._broken(error)
            self._let_go_if_flushed()

    # ── sending, inside the lock ──

    def _push_frame(
        self,
        kind: int,
        header: bytes = b"",
        pieces: Sequence[bytes | memoryview] = (),
        nbytes: int = 0,
        segment: int = 0,
        offset: int = 0,
        descriptor: int | None = None,
    ) -> bool:
        if not self.is_up or self._out.is_full:
            return False
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes: {MAX_HEADER_BYTES} are the most")
        if self._borrowed.has_gone():
            gone = self._borrowed.take_released(MAX_RELEASED)
            prefix = prefix_of(kind, len(gone), len(header), nbytes, segment, offset) + pack_numbers(gone)
        else:
            prefix = prefix_of(kind, 0, len(header), nbytes, segment, offset)
        return self._push(b"".join((prefix, header, *pieces)), descriptor)

    def _push(self, data: bytes | memoryview, descriptor: int | None = None) -> bool:
        if not self.is_up:
            return False
        try:
            self._out.push(data, descriptor)
        except OSError as error:
            self._broken(error)
            return False
        return True

    def _broken(self, error: OSError) -> None:
        """Nothing can be sent. What was lent stays lent until the stream has ended, which a reader will see."""
        if self.is_up:
            self.is_up, self.reason = False, f"the link broke: {error.strerror}"
        self._out.clear()
        self._borrowed.let_go()

    # ── receiving ──

    def receive(self, limit: int) -> bool:
        """Reads once and delivers up to so many messages. True: there are more, which no poll will announce."""
        if self.has_ended or (not self._more and not self._fill()):
            return False
        self._more = True  # should a delivery raise, the next call goes on behind it
        try:
            for _ in range(limit):
                frame = None if self.has_ended else self._in.take()
                if frame is None:
                    self._more = False
                    break
                self._handle(frame)
        except BadFrameError as error:
            self._end_with_garbage(error)
            return False
        if self._borrowed.has_gone():
            self._release_if_much()
        return self._more

    def _fill(self) -> bool:
        """Reads once. False: the link has ended."""
        try:
            if self._in.fill():
                return True
            self.end(GONE)
        except BadFrameError as error:
            self._end_with_garbage(error)
        except ConnectionError:
            self.end(GONE)
        except OSError as error:
            self.end(f"the link broke: {error.strerror}")
        return False

    def _end_with_garbage(self, error: BadFrameError) -> None:
        self.end(f"garbage arrived: {error}")
        self._sink.on_garbage(self.peer, str(error))

    def _handle(self, frame: Frame) -> None:
        for number in frame.released:
            if self._leases.pop(number, None) is None:
                raise BadFrameError(f"frame {number} is released, but was not lent")
        kind = frame.kind
        if not self._greeted:
            self._check_hello(frame)
        elif kind in (INLINE, MESSAGE):
            if self.is_up:
                self._sink.on_message(self.peer, frame.header, frame.payload)
        elif kind == REFERENCE:
            if self.is_up:
                payload = self._borrowed.payload(frame.segment, frame.offset, frame.nbytes)
                self._sink.on_message(self.peer, frame.header, payload)
        elif kind == SEGMENT:
            self._take_segment(frame)
        elif kind == GOODBYE:
            self._go_down("the other side has ended the link")
        elif kind != RELEASE:
            raise BadFrameError("a second hello")

    def _check_hello(self, frame: Frame) -> None:
        if frame.kind != HELLO or frame.offset != MAGIC:
            raise BadFrameError("the other side does not speak the protocol of links")
        if frame.segment != VERSION:
            raise BadFrameError(f"the other side speaks version {frame.segment} of links, this one {VERSION}")
        self._greeted = True

    def _take_segment(self, frame: Frame) -> None:
        descriptor = self._in.take_descriptor()
        try:
            if self.is_up:
                self._borrowed.add_segment(frame.segment, descriptor, frame.offset)
        finally:
            os.close(descriptor)

    def _release_if_much(self) -> None:
        with self._lock:
            if self._borrowed.is_much_to_release():
                self._push_frame(RELEASE)
