"""A virtual network: connections that keep the order while they live, break, and lose what was on its way.

In the nasty mode there is no order at all: every message is lost, doubled and delayed on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvd.core.machine import CallerPeer, Peer
from kvd.testing.process import Process

Deliver = Callable[[Process, Peer, bytes, "bytes | None"], None]
NO_ROUTE = CallerPeer(b"")
At = Callable[[float, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the network is.

    Attributes:
        delay_s: the shortest and the longest way of a message.
        breaks: the chance, per message, that its connection breaks: what is on its way is lost from some point on, and
            the other side sees a new connection, which may overtake what is left of the old one.
        loss, duplicates: chances per message, whatever the connection does.
        ordered: messages of a connection arrive in their order.
    """

    delay_s: tuple[float, float] = (0.0005, 0.005)
    breaks: float = 0.0
    loss: float = 0.0
    duplicates: float = 0.0
    ordered: bool = True


CALM = Faults()
ROUGH = Faults(delay_s=(0.0005, 0.05), breaks=0.01)
NASTY = Faults(delay_s=(0.0005, 0.6), breaks=0.005, loss=0.03, duplicates=0.15, ordered=False)


@dataclass(slots=True, eq=False)
class _Connection:
    """From the process that opened it to whoever listens at the address."""

    client: Process
    peer: Peer  # what the client calls the other end
    address: str
    route: CallerPeer = NO_ROUTE  # what the listening end calls the client; a new one after each break
    server: Process | None = None
    cut_at: dict[Peer, float] = field(default_factory=dict)  # of earlier routes: what arrives later is lost
    arrival: dict[tuple[Peer, bool], float] = field(default_factory=dict)


class Network:
    """All connections. `at` schedules, `deliver` gives a message to a process that may have died meanwhile."""

    def __init__(self, random: Random, faults: Faults, clock: Callable[[], float], at: At, deliver: Deliver) -> None:
        self.faults = faults
        self.sent = 0
        self.lost = 0
        self.cut_off: set[str] = set()  # names of nodes that nothing reaches and nothing leaves
        self._random = random
        self._clock = clock
        self._at = at
        self._deliver = deliver
        self._listeners: dict[str, Process] = {}
        self._routes: dict[Peer, _Connection] = {}

    def listen(self, process: Process) -> None:
        """The process takes what is sent to its address, in place of one that did before."""
        self._listeners[process.address] = process

    def connect(self, client: Process, peer: Peer, address: str) -> None:
        client.connections[peer] = _Connection(client, peer, address)

    def disconnect(self, client: Process, peer: Peer) -> None:
        client.connections.pop(peer, None)

    def send(self, sender: Process, peer: Peer, header: bytes, payload: bytes | None) -> None:
        """Sends to a peer as the sender calls it: the name of a connection it opened, or a route that came in."""
        self.sent += 1
        connection: Any = sender.connections.get(peer)
        if connection is not None:
            self._reconnect_if_dead(connection)
            self._carry(connection, connection.route, True, header, payload)
            return
        connection = self._routes.get(peer)
        if connection is not None and connection.route == peer:
            self._carry(connection, connection.route, False, header, payload)
        else:
            self.lost += 1

    def _reconnect_if_dead(self, connection: _Connection) -> None:
        listener = self._listeners.get(connection.address)
        if not connection.route or connection.server is not listener:
            self._renew(connection, listener)

    def _renew(self, connection: _Connection, server: Process | None) -> None:
        """A new route. A random part of what is on the old one still arrives."""
        if connection.route:
            connection.cut_at[connection.route] = self._clock() + self._random.uniform(0.0, self.faults.delay_s[1])
        connection.route = CallerPeer(b"%016x" % self._random.getrandbits(64))
        connection.server = server
        self._routes[connection.route] = connection

    def _carry(
        self, connection: _Connection, route: CallerPeer, to_server: bool, header: bytes, payload: bytes | None
    ) -> None:
        faults, chance = self.faults, self._random.random
        if faults.breaks and chance() < faults.breaks:
            self._renew(connection, self._listeners.get(connection.address))
        if faults.loss and chance() < faults.loss:
            self.lost += 1
            return
        copies = 2 if faults.duplicates and chance() < faults.duplicates else 1
        for _ in range(copies):
            arrival = self._clock() + self._random.uniform(*faults.delay_s)
            if faults.ordered:
                arrival = max(arrival, connection.arrival.get((route, to_server), 0.0))
                connection.arrival[route, to_server] = arrival
            self._at(arrival, lambda: self._arrive(connection, route, to_server, header, payload))

    def _arrive(
        self, connection: _Connection, route: CallerPeer, to_server: bool, header: bytes, payload: bytes | None
    ) -> None:
        target = connection.server if to_server else connection.client
        cut = route != connection.route and self._clock() > connection.cut_at.get(route, 0.0)
        unreachable = connection.client.name in self.cut_off or (target is not None and target.name in self.cut_off)
        unreachable = unreachable or connection.peer in connection.client.cut_off_from
        if target is None or cut or unreachable or not target.alive:
            self.lost += 1
        elif to_server:
            self._deliver(target, route, header, payload)
        elif connection.client.connections.get(connection.peer) is connection:
            self._deliver(target, connection.peer, header, payload)
