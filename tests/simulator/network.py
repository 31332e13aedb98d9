"""A virtual network: connections keep the order of messages while they live, break, and lose what was under way.

In the nasty mode there is no order at all: each message is lost, doubled and delayed on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvd.core.machine import CallerPeer, Peer
from tests.simulator.clock import VirtualClock
from tests.simulator.process import Process

Deliver = Callable[[Process, Peer, bytes, "bytes | None"], None]
NO_ROUTE = CallerPeer(b"")


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the network is.

    Attributes:
        delay_s: the shortest and the longest time that a message takes.
        breaks: the chance, per message, that its connection breaks: what is under way is lost from some point on, and
            the other side sees a new connection, which may overtake the rest of the old one.
        loss, duplicates: chances per message, whatever the connection does.
        late_s: the longest time by which the second copy of a message is late, besides its delay.
        ordered: messages of a connection arrive in order.
    """

    delay_s: tuple[float, float] = (0.0005, 0.005)
    breaks: float = 0.0
    loss: float = 0.0
    duplicates: float = 0.0
    late_s: float = 0.0
    ordered: bool = True


CALM = Faults()
ROUGH = Faults(delay_s=(0.0005, 0.05), breaks=0.01)
LATE_COPIES = Faults(delay_s=(0.0005, 0.05), duplicates=0.5, late_s=8.0, ordered=False)
NASTY = Faults(delay_s=(0.0005, 0.6), breaks=0.005, loss=0.03, duplicates=0.15, ordered=False)


@dataclass(slots=True, eq=False)
class _Connection:
    """From the process that opened it to the one that listens at the address.

    Attributes:
        peer: the client's name for the other end.
        route: the listener's name for the client; a new one after each break.
        cut_at: of earlier routes: what arrives after this time is lost.
        arrival: of (route, to the server): when the latest message arrives.
    """

    client: Process
    peer: Peer
    address: str
    route: CallerPeer = NO_ROUTE
    server: Process | None = None
    cut_at: dict[Peer, float] = field(default_factory=dict)
    arrival: dict[tuple[Peer, bool], float] = field(default_factory=dict)


class Network:
    """All connections.

    Attributes:
        cut_off: names of nodes that no message reaches and no message leaves.
        one_way: what the first node of a pair sends does not reach the second one.
    """

    def __init__(self, random: Random, faults: Faults, clock: VirtualClock) -> None:
        self.faults = faults
        self.sent = 0
        self.lost = 0
        self.cut_off: set[str] = set()
        self.one_way: set[tuple[str, str]] = set()
        self._random = random
        self._clock = clock
        self._deliver: Deliver = lambda *message: None
        self._listeners: dict[str, Process] = {}
        self._routes: dict[Peer, _Connection] = {}

    def start(self, deliver: Deliver) -> None:
        """From now on `deliver` gives messages to their process, which may have died in the meantime."""
        self._deliver = deliver

    def listen(self, process: Process) -> None:
        """The process takes what is sent to its address, in place of an earlier one."""
        self._listeners[process.address] = process

    def connect(self, client: Process, peer: Peer, address: str) -> None:
        client.connections[peer] = _Connection(client, peer, address)

    def disconnect(self, client: Process, peer: Peer) -> None:
        client.connections.pop(peer, None)

    def send(self, sender: Process, peer: Peer, header: bytes, payload: bytes | None) -> None:
        """Sends to a peer by the sender's name for it: that of a connection it opened, or a route that came in."""
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
        """Opens a new route. Some of the messages on the old one still arrive."""
        if connection.route:
            connection.cut_at[connection.route] = self._clock.now + self._random.uniform(0.0, self.faults.delay_s[1])
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
        for copy in range(copies):
            arrival = self._clock.now + self._random.uniform(*faults.delay_s)
            if copy and faults.late_s:
                arrival += self._random.uniform(0.0, faults.late_s)
            if faults.ordered:
                arrival = max(arrival, connection.arrival.get((route, to_server), 0.0))
                connection.arrival[route, to_server] = arrival
            self._clock.at(arrival, lambda: self._arrive(connection, route, to_server, header, payload))

    def _arrive(
        self, connection: _Connection, route: CallerPeer, to_server: bool, header: bytes, payload: bytes | None
    ) -> None:
        target = connection.server if to_server else connection.client
        cut = route != connection.route and self._clock.now > connection.cut_at.get(route, 0.0)
        unreachable = connection.client.name in self.cut_off or (target is not None and target.name in self.cut_off)
        unreachable = unreachable or connection.peer in connection.client.cut_off_from
        if target is not None and connection.server is not None:
            sender = connection.client if to_server else connection.server
            unreachable = unreachable or (sender.name, target.name) in self.one_way
        if target is None or cut or unreachable or not target.alive:
            self.lost += 1
        elif to_server:
            self._deliver(target, route, header, payload)
        elif connection.client.connections.get(connection.peer) is connection:
            self._deliver(target, connection.peer, header, payload)
