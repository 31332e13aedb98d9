"""A transport within one process and one event loop, for tests of the layers above."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count

from kvd.core.machine import CallerPeer, Peer, PeerPath, Span
from kvd.core.principals import HOLDER
from kvd.errors import ConnectError
from kvd.transport.base import UNKNOWN_PATH, HeaderOfPath, OnGarbage, OnMessage, joined, pieces_of


class MemoryNetwork:
    """The addresses at which the transports of one test listen."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryTransport] = {}
        self.ports = count(1)


class MemoryTransport:
    """Delivers in order, through the loop's queue."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._connections: dict[Peer, tuple[MemoryTransport, Peer]] = {}
        self._opened: dict[Peer, str] = {}  # the connections that we open, with their addresses
        self._addresses: list[str] = []
        self._on_message: OnMessage | None = None
        self._names = count(1)

    def start(self, on_message: OnMessage, on_garbage: OnGarbage) -> None:
        self._on_message = on_message

    def listen(self, address: str) -> str:
        if address.endswith(":0"):
            address = f"{address[:-2]}:{next(self._network.ports)}"
        if address in self._network.listeners:
            raise ConnectError(f"{address} is taken: choose another", address=address)
        self._network.listeners[address] = self
        self._addresses.append(address)
        return address

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        self._opened[peer] = address
        self._try_connect(peer)

    def _try_connect(self, peer: Peer) -> bool:
        other = self._network.listeners.get(self._opened[peer])
        if other is None:
            return False
        theirs = CallerPeer(b"%d" % next(other._names))
        self._connections[peer] = (other, theirs)
        other._connections[theirs] = (self, peer)
        return True

    def disconnect(self, peer: Peer) -> None:
        self._opened.pop(peer, None)
        self._cut(peer)

    def _cut(self, peer: Peer) -> None:
        """Ends the connection on both sides. One that we opened comes back when its address is listened at again."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            other, theirs = connection
            other._connections.pop(theirs, None)

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        if peer in self._opened and peer not in self._connections and not self._try_connect(peer):
            return False
        connection = self._connections.get(peer)
        if connection is None:
            return False
        body = memoryview(bytes(joined(pieces_of(payload)))) if payload else None
        other, name = connection
        asyncio.get_running_loop().call_soon(other._deliver, name, header, body)
        return True

    def _deliver(self, peer: Peer, header: bytes, payload: memoryview | None) -> None:
        if self._on_message is not None and peer in self._connections:
            self._on_message(peer, header, payload, HOLDER)

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        return self.send(peer, header(UNKNOWN_PATH), payload)

    def paths(self) -> Mapping[Peer, PeerPath]:
        return {}

    def close(self, linger_s: float) -> None:
        self._on_message = None
        for address in self._addresses:
            self._network.listeners.pop(address, None)
        self._opened = {}
        for peer in list(self._connections):
            self._cut(peer)
