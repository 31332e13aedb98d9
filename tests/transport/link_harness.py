"""Two ends of a link in one process, which the tests read by hand."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvd.core.machine import LinkPeer, Peer, Span
from kvd.core.principals import HOLDER, Principal
from kvd.transport.links.delivery import Sink
from kvd.transport.links.frames import HELLO, MAGIC, VERSION, prefix_of
from kvd.transport.links.handshake import Medium, Proven
from kvd.transport.links.link import Link
from kvd.transport.links.reader import LinkReader
from kvd.transport.memory.offered import MapBudget
from kvd.transport.memory.segments import Arena

MIB = 1 << 20


def spans(*pieces: Any) -> list[Span]:
    return [Span(piece, 0, memoryview(piece).nbytes) for piece in pieces]


def pattern(nbytes: int, seed: int = 1) -> Any:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def memory_in_use() -> tuple[int, int, int]:
    """The descriptors of this process, those of segments among them, and the maps of segments."""
    gc.collect()
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that listed them
            continue
    with open("/proc/self/maps") as file:
        maps = sum("memfd:kvd" in line for line in file)
    return len(links), sum("memfd:kvd" in link for link in links), maps


def until(holds: Callable[[], Any], *ends: End, timeout_s: float = 20.0) -> None:
    """Reads the ends until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        for end in ends:
            end.read()
        time.sleep(0.0005)


def punch(descriptor: int, offset: int, nbytes: int) -> bool:
    """Gives the pages of this range back to the system, as fallocate(2) can. False: the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    return bool(libc.fallocate(descriptor, flags, ctypes.c_long(offset), ctypes.c_long(nbytes)) == 0)


class End:
    """One end and the messages that it has received. `keeps`: whether it keeps their payloads."""

    def __init__(self, connection: socket.socket, limit_bytes: int = 256 * MIB) -> None:
        self.messages: list[tuple[bytes, memoryview | None]] = []
        self.garbage: list[str] = []
        self.keeps = True
        self.arena = Arena(limit_bytes)
        self.budget = MapBudget()
        self.reader = LinkReader(self._notice)
        sink = Sink()
        sink.on_message = self._take
        sink.on_garbage = lambda peer, text: self.garbage.append(text)
        medium = Medium.UNIX if connection.family == socket.AF_UNIX else Medium.PLAIN_TCP
        proven = Proven(HOLDER, medium, None)
        self.link = Link(LinkPeer("link"), connection, proven, self.arena, self.reader.epoll, sink, self.budget)
        self.reader.add(self.link)

    def _take(self, peer: Peer, header: bytes, payload: memoryview | None, principal: Principal) -> None:
        self.messages.append((header, payload if self.keeps else None))

    def _notice(self, link: Link) -> None:
        if link.has_ended:
            self.reader.remove(link)

    def read(self) -> None:
        self.reader.read()

    def send(self, header: bytes, *pieces: Any) -> bool:
        return self.link.send(header, spans(*pieces))

    def bodies(self) -> list[bytes | None]:
        return [None if body is None else bytes(body) for _, body in self.messages]

    def close(self) -> None:
        self.messages.clear()
        self.reader.close("closed")
        self.arena.close()


def block_of(end: End, nbytes: int, seed: int = 1) -> Any:
    """A block of the end's shared memory, filled with `pattern`."""
    block = end.arena.allocate(nbytes)
    assert block is not None
    block[:] = pattern(nbytes, seed)
    return block


@contextmanager
def pair(left_limit_bytes: int = 256 * MIB, right_limit_bytes: int = 256 * MIB) -> Iterator[tuple[End, End]]:
    one, other = socket.socketpair()
    left, right = End(one, left_limit_bytes), End(other, right_limit_bytes)
    try:
        yield left, right
    finally:
        left.close()
        right.close()


class Raw:
    """An end that sends any bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(20.0)

    def hello(self) -> None:
        self.socket.sendall(prefix_of(HELLO, 0, 0, 0, VERSION, MAGIC))

    def is_cut_off(self) -> bool:
        """Whether the other end closes the connection. Bytes that it sent before are skipped."""
        self.socket.settimeout(5.0)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        return True


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


@contextmanager
def raw_pair(*, over_tcp: bool = False) -> Iterator[tuple[Raw, End]]:
    """A raw end, and a proper one that has received nothing yet: within the host, or over TCP and not sealed."""
    one, other = tcp_pair() if over_tcp else socket.socketpair()
    raw, end = Raw(one), End(other)
    try:
        yield raw, end
    finally:
        raw.socket.close()
        end.close()
