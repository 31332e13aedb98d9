"""Messages between nodes in virtual time: by reference within a host, through the ports of two hosts otherwise.

Connections that share a port take turns, message by message, and the other end's port takes the bytes as they come.
Short messages do not wait for the long ones of other connections. Messages of a connection keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.virtual.hosts import Pipe
from kvd.core.machine import CallerPeer, Peer
from tests.simulator.clock import VirtualClock

if TYPE_CHECKING:
    from benchmarks.virtual.nodes import Node

FRAME_NBYTES = 16  # around a header
SHORT_NBYTES = 4096
PACKET_NBYTES, PACKET_OVERHEAD_NBYTES = 1448, 90
"""Of Ethernet with TCP over IPv4: what a full packet brings, and what it takes besides."""

Arrive = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of every host's port, in each direction; and the time of a packet from one host to another."""

    bytes_per_s: float
    latency_s: float


@dataclass(slots=True, eq=False)
class _Direction:
    """From one end of a connection to the other.

    Attributes:
        peer: the receiver's name for the sender.
        under_way: messages that have not arrived.
        queue: those that have not left: the bytes of each on the wire, and what happens when it arrives.
        arrived_at: when the latest one arrives.
    """

    receiver: Node
    peer: Peer
    under_way: int = 0
    queue: deque[tuple[int, Arrive]] = field(default_factory=deque)
    arrived_at: float = 0.0


class Port:
    """Connects a host to the network, in both directions at once.

    Attributes:
        sent_nbytes: on the wire, so far.
        received: what comes in.
    """

    def __init__(self, clock: VirtualClock, rates: Rates) -> None:
        self.sent_nbytes = 0
        self.received = Pipe(rates.bytes_per_s)
        self._clock = clock
        self._rates = rates
        self._turns: deque[_Direction] = deque()  # connections with something to send
        self._is_busy = False

    def send(self, way: _Direction, nbytes: int, arrive: Arrive) -> None:
        """A message of so many bytes leaves by this way."""
        on_wire = wire_nbytes(nbytes)
        way.under_way += 1
        if nbytes <= SHORT_NBYTES and way.under_way == 1:
            self.sent_nbytes += on_wire
            way.receiver.host.port.received.nbytes += on_wire
            self._arrives(way, self._clock.now + self._rates.latency_s + on_wire / self._rates.bytes_per_s, arrive)
            return
        way.queue.append((on_wire, arrive))
        if len(way.queue) == 1:
            self._turns.append(way)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        """The connection whose turn it is sends a message."""
        self._is_busy = bool(self._turns)
        if not self._turns:
            return
        way = self._turns.popleft()
        on_wire, arrive = way.queue.popleft()
        if way.queue:
            self._turns.append(way)
        self.sent_nbytes += on_wire
        self._clock.after(self._rates.latency_s, lambda: self._receive(way, on_wire, arrive))
        self._clock.after(on_wire / self._rates.bytes_per_s, self._next)

    def _receive(self, way: _Direction, on_wire: int, arrive: Arrive) -> None:
        self._arrives(way, way.receiver.host.port.received.take(self._clock.now, on_wire), arrive)

    def _arrives(self, way: _Direction, at: float, arrive: Arrive) -> None:
        way.arrived_at = max(at, way.arrived_at)
        self._clock.at(way.arrived_at, arrive)


class Network:
    """All connections.

    Args:
        shares_memory: values pass by reference within a host; otherwise through sockets there, too.
    """

    def __init__(self, clock: VirtualClock, *, shares_memory: bool) -> None:
        self._clock = clock
        self._shares_memory = shares_memory
        self._listeners: dict[str, Node] = {}
        self._connections = 0

    def listen(self, address: str, node: Node) -> None:
        self._listeners[address] = node

    def connect(self, client: Node, peer: Peer, address: str) -> None:
        """Both ends know each other at once: what it takes to connect is not counted."""
        self._connections += 1
        route = CallerPeer(b"%08d" % self._connections)
        listener = self._listeners[address]
        client.ways[peer] = _Direction(listener, route)
        listener.ways[route] = _Direction(client, peer)

    def disconnect(self, client: Node, peer: Peer) -> None:
        client.ways.pop(peer, None)

    def is_by_reference(self, sender: Node, peer: Peer) -> bool:
        """Whether values reach this peer without being copied."""
        return self._shares_memory and sender.ways[peer].receiver.host is sender.host

    def carry(self, sender: Node, peer: Peer, message: Any, header_nbytes: int, nbytes: int, payload: Any) -> None:
        """Brings a message, with so many bytes of payload, to the other end."""
        way: _Direction = sender.ways[peer]
        by_reference = self.is_by_reference(sender, peer)

        def arrive() -> None:
            way.under_way -= 1
            way.receiver.take(way.peer, sender, message, nbytes, payload, by_reference=by_reference)

        if way.receiver.host is sender.host:
            way.under_way += 1
            self._clock.after(0.0, arrive)
        else:
            sender.host.port.send(way, header_nbytes + FRAME_NBYTES + nbytes, arrive)


def wire_nbytes(nbytes: int) -> int:
    """The bytes on the wire for so many bytes of a connection."""
    return nbytes + -(-nbytes // PACKET_NBYTES) * PACKET_OVERHEAD_NBYTES
