"""One connection to another process: frames over a Unix socket, large payloads by reference; or all over TCP.

A payload sent by reference is leased: its buffers must not change until the other end has dropped the payload. That end
releases it with its next frame, or with a RELEASE when much has piled up or some time has passed. If the other end is
gone and nothing there refers to its payloads, the stream ends, and all leases with it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvd.core.machine import Peer, Span
from kvd.protocol.specs import MAX_PAYLOAD_BYTES
from kvd.transport.base import padded, pieces_of
from kvd.transport.links.delivery import Delivery, Sink
from kvd.transport.links.frames import (
    GOODBYE,
    HELLO,
    INLINE,
    INLINE_BELOW_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_RELEASED,
    MESSAGE,
    PREFIX,
    REFERENCE,
    RELEASE,
    SEGMENT,
    VERSION,
    ExpectedFrame,
    InvalidFrameError,
    pack_numbers,
    prefix_of,
)
from kvd.transport.links.handshake import Medium, Proven
from kvd.transport.links.incoming import Frame, Incoming, check_hello
from kvd.transport.links.outgoing import Outgoing, PlainWriter, gathered
from kvd.transport.links.streams import PlainIncoming, SealedIncoming, SealedWriter
from kvd.transport.memory.leases import Leases, SharedPayload, payload_nbytes
from kvd.transport.memory.offered import MapBudget, close_refused
from kvd.transport.memory.remote_segments import LinkSocket, RemoteSegments
from kvd.transport.memory.segments import Arena

SOCKET_BUFFER_BYTES = 1 << 20
GONE = "the other side is gone"


class Link:
    """Any thread may send; one thread at a time reads.

    Args:
        peer: the name of the other end.
        connection: the socket. The link owns it from now on.
        proven: who is at the other end, and what the link consists of.
        arena: where payloads sent by reference lie.
        epoll: where readers wait. The link is registered there until it ends.
        sink: takes what arrives.
        budget: how much of others' memory may be mapped.

    Attributes:
        proven: who is at the other end, and what the link consists of.
        is_up: whether messages go both ways.
        has_ended: whether nothing is read any more.
        reason: why the link is not up.
        has_more: whether frames may have been read that are not delivered yet. Belongs to the thread that reads.
        delivery: where frames go.
    """

    def __init__(
        self,
        peer: Peer,
        connection: socket.socket,
        proven: Proven,
        arena: Arena,
        epoll: select.epoll,
        sink: Sink,
        budget: MapBudget,
    ) -> None:
        connection.setblocking(False)
        self.peer = peer
        self.descriptor = connection.fileno()
        self.is_up = True
        self.has_ended = False
        self.reason = ""
        self.proven = proven
        self.delivery = Delivery(sink)
        self._socket: LinkSocket | None = LinkSocket(connection)
        self._remote = RemoteSegments(self._socket, budget)
        self._in: Incoming | PlainIncoming | SealedIncoming
        writer: PlainWriter | SealedWriter = PlainWriter(connection)
        if proven.seals is not None:
            self._in = SealedIncoming(connection, proven.seals.opener)
            writer = SealedWriter(connection, proven.seals.sealer)
        elif proven.medium is Medium.UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self._in = Incoming(connection)
        else:
            self._in = PlainIncoming(connection)
        self._out = Outgoing(connection, writer, epoll)
        self._lock = threading.Lock()  # held while a frame is sent
        self._leases = Leases(arena)
        self.has_more = False
        with self._lock:
            self._push_frame(HELLO, segment=VERSION, offset=MAGIC)

    # ── life ──

    @property
    def has_unreleased(self) -> bool:
        """Whether there are payloads whose release the other end has not been told of."""
        return self.is_up and self._remote.has_unreleased

    @property
    def has_queued(self) -> bool:
        """Whether frames wait for room in the socket."""
        return self._out.waits

    @property
    def leases(self) -> int:
        """The number of frames that the other end has not released."""
        return len(self._leases)

    def leave(self, reason: str) -> None:
        """Stops sending and delivering messages. The link ends when the other end has dropped its payloads, too."""
        with self._lock:
            if self.is_up:
                self._push_frame(GOODBYE)
                self.is_up, self.reason = False, reason
                self._drop_if_flushed()

    def end(self, reason: str) -> None:
        """Ends at once. The socket stays open while payloads from the other end are in use."""
        with self._lock:
            if self.has_ended:
                return
            if self.is_up:
                self.is_up, self.reason = False, reason
            self.has_ended = True
            self._out.close()
            link_socket, self._socket = self._socket, None
            if link_socket is not None:
                with suppress(OSError):
                    link_socket.socket.shutdown(socket.SHUT_RD)
            self._in.close()
            self._remote.drop()
            leased = self._leases.take_all()
        del leased, link_socket  # outside the lock: this may run finalizers

    def _go_down(self, reason: str) -> None:
        """The other end has stopped taking messages. Its releases are still read."""
        with self._lock:
            if self.is_up:
                self.is_up, self.reason = False, reason
            self._out.clear()
            self._remote.drop()

    def _drop_if_flushed(self) -> None:
        if not self.is_up and not self._out.waits:
            self._remote.drop()

    # ── sending ──

    def send(self, header: bytes, payload: Sequence[Span]) -> bool:
        """Sends without waiting. False: the link is not up, or its queue is full."""
        if not payload:
            holding = self.delivery.sink.holding
            with self._lock:
                sent = self._push_frame(MESSAGE, header, waits=holding.is_on)
            if sent and holding.is_on:
                holding.held(self)
            return sent
        nbytes = payload[0].nbytes if len(payload) == 1 else payload_nbytes(payload)
        if nbytes > INLINE_BELOW_BYTES:
            return self._send_large(header, payload, nbytes)
        views = pieces_of(payload)
        pieces = views if len(views) == 1 else padded(views)
        with self._lock:
            return self._push_frame(INLINE, header, pieces, nbytes)

    def send_prepared(self, frame: bytearray) -> bool:
        """Sends a frame of `inline_frame`, which the caller may change afterwards. False: nothing was sent, and the
        message goes by `send`: the link is down, frames wait before this one, or releases have to go along."""
        with self._lock:
            try:
                return self.is_up and not self._remote.has_gone() and self._out.push_whole(frame)
            except OSError as error:
                self._broken(error)
                return False

    def send_frames(self, frames: bytes) -> bool:
        """Sends one or more whole frames that release nothing. False: the link is not up, or its queue is full."""
        with self._lock:
            out = self._out
            if not self.is_up or (out.waits and out.is_full):
                return False
            try:
                out.push(frames)
            except OSError as error:
                self._broken(error)
                return False
            return True

    def _send_large(self, header: bytes, payload: Sequence[Span], nbytes: int) -> bool:
        if not self.is_up or nbytes > MAX_PAYLOAD_BYTES:
            return False
        shared = self._leases.share(payload, nbytes)
        if shared is None:
            pieces = gathered(padded(pieces_of(payload)))
            with self._lock:
                return self._push_frame(INLINE, header, pieces, nbytes)
        with self._lock:
            return self.is_up and self._announce(shared.segment) and self._send_reference(shared, header, nbytes)

    def _announce(self, number: int) -> bool:
        """Sends the descriptor of a segment, once."""
        if number not in self._leases.announced:
            segment = self._leases.segment(number)
            if not self._push_frame(SEGMENT, segment=number, offset=segment.nbytes, descriptor=segment.descriptor):
                return False
            self._leases.announced.add(number)
        return True

    def _send_reference(self, shared: SharedPayload, header: bytes, nbytes: int) -> bool:
        number = self._leases.grant(shared.buffers)
        sent = False
        try:
            sent = self._push_frame(REFERENCE, header, (), nbytes, shared.segment, shared.offset)
        finally:
            if not sent:  # also after an error: the other end counts only the frames that it gets
                self._leases.revoke(number)
        return sent

    def release_gone(self) -> None:
        """Releases all payloads that are gone, in RELEASE frames."""
        with self._lock:
            self._remote.look_at_children()
            while self._remote.has_gone() and self._push_frame(RELEASE):
                pass

    def copy_queued(self) -> None:
        """Queued frames are sent from copies from now on."""
        with self._lock:
            self._out.copy_queued()

    def write_held(self) -> None:
        """Writes the frames that were held back, if the next one has not taken them along."""
        with self._lock:
            if self._out.has_held:
                self._push(b"")

    def flush(self) -> None:
        """Sends as much of the queue as the socket takes."""
        with self._lock:
            if self.has_ended:
                return
            try:
                self._out.flush()
            except OSError as error:
                self._broken(error)
            self._drop_if_flushed()

    # ── sending, with the lock held ──

    def _push_frame(
        self,
        kind: int,
        header: bytes = b"",
        pieces: Sequence[bytes | memoryview] = (),
        nbytes: int = 0,
        segment: int = 0,
        offset: int = 0,
        descriptor: int | None = None,
        waits: bool = False,
    ) -> bool:
        if not self.is_up or self._out.is_full:
            return False
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes: at most {MAX_HEADER_BYTES} are allowed")
        if self._remote.has_gone():
            gone = self._remote.take_released(MAX_RELEASED)
            prefix = prefix_of(kind, len(gone), len(header), nbytes, segment, offset) + pack_numbers(gone)
        else:
            prefix = PREFIX.pack(kind, 0, 0, len(header), nbytes, segment, offset)
        if nbytes > INLINE_BELOW_BYTES and pieces:
            return self._push_large(b"".join((prefix, header)), pieces)
        return self._push(b"".join((prefix, header, *pieces)), descriptor, waits)

    def _push_large(self, head: bytes, pieces: Sequence[bytes | memoryview]) -> bool:
        try:
            self._out.push_all([head, *pieces])
        except OSError as error:
            self._broken(error)
            return False
        return True

    def _push(self, data: bytes | memoryview, descriptor: int | None = None, waits: bool = False) -> bool:
        if not self.is_up:
            return False
        try:
            if waits:
                self._out.hold(data)
            else:
                self._out.push(data, descriptor)
        except OSError as error:
            self._broken(error)
            return False
        return True

    def _broken(self, error: OSError) -> None:
        """Nothing can be sent. Leases last until the stream ends, which a reader will notice."""
        if self.is_up:
            self.is_up, self.reason = False, f"the link broke: {error.strerror}"
        self._out.clear()
        self._remote.drop()

    # ── receiving ──

    def receive(self, limit: int) -> bool:
        """Sends what waits, if the socket takes more of it. Reads once, and delivers at most `limit` frames. True:
        there are more, which no poll will announce."""
        if self._out.waits:
            self.flush()
        if self.has_ended or (not self.has_more and not self._fill()):
            return False
        self.has_more = True  # if a delivery raises, the next call continues after it
        delivery, frames = self.delivery, self._in
        try:
            while limit > 0:
                repeated = delivery.repeated
                if repeated is not None and self.is_up:
                    rests = frames.take_all_like(repeated.head, repeated.rest_nbytes, limit)
                    if rests:
                        repeated.take_all(rests)
                        limit -= len(rests)
                        if not limit:
                            break
                limit -= 1
                frame = None if self.has_ended else frames.take()
                if frame is None:
                    self.has_more = False
                    break
                self._handle(frame)
        except InvalidFrameError as error:
            self._end_with_garbage(error)
            return False
        if self._remote.has_gone():
            self._release_if_due()
        return self.has_more

    def receive_expected(self, expected: ExpectedFrame) -> bool:
        """Reads once, unless frames are left to deliver. True: that was the expected frame. False: it was not, and
        `receive` delivers what was read."""
        if self.has_ended or self.has_more or not self.delivery.is_greeted or self._out.waits or not self.is_up:
            return False
        try:
            if self._in.take_expected(expected):
                self.has_more = self._in.reads_ahead and self._in.has_rest
                return True
            self.has_more = True
        except (InvalidFrameError, OSError) as error:
            self._end_with(error)
        return False

    def _fill(self) -> bool:
        """Reads once. False: the link has ended."""
        try:
            if self._in.fill():
                return True
            self.end(GONE)
        except (InvalidFrameError, OSError) as error:
            self._end_with(error)
        return False

    def _end_with(self, error: InvalidFrameError | OSError) -> None:
        if isinstance(error, InvalidFrameError):
            self._end_with_garbage(error)
        else:
            self.end(GONE if isinstance(error, ConnectionError) else f"the link broke: {error.strerror}")

    def _end_with_garbage(self, error: InvalidFrameError) -> None:
        self.end(f"garbage arrived: {error}")
        self.delivery.sink.on_garbage(self.peer, str(error))

    def _handle(self, frame: Frame) -> None:
        for number in frame.released:
            if not self._leases.release(number):
                raise InvalidFrameError(f"frame {number} is released, but it is not leased")
        kind = frame.kind
        if not self.delivery.is_greeted:
            check_hello(frame)
            self.delivery.is_greeted = True
        elif kind in (INLINE, MESSAGE):
            if self.is_up:
                self.delivery.sink.on_message(self.peer, frame.header, frame.payload, self.proven.principal)
        elif kind == REFERENCE:
            if self.is_up:
                payload = self._remote.payload(frame.segment, frame.offset, frame.nbytes)
                self.delivery.sink.on_message(self.peer, frame.header, payload, self.proven.principal)
        elif kind == SEGMENT:
            self._take_segment(frame)
        elif kind == GOODBYE:
            self._go_down("the other side ended the link")
        elif kind != RELEASE:
            raise InvalidFrameError("a second hello")

    def _take_segment(self, frame: Frame) -> None:
        descriptor = self._in.take_descriptor()
        try:
            if self.is_up:
                self._remote.add_segment(frame.segment, descriptor, frame.offset)
        except BaseException:
            close_refused(descriptor)
            raise
        os.close(descriptor)

    def _release_if_due(self) -> None:
        with self._lock:
            if self._remote.should_release_now():
                self._push_frame(RELEASE)
