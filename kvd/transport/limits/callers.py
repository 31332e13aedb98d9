"""Callers: peers that connect to the ROUTER of this process over TCP. How many may come, and what it keeps for them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Collection
from typing import Final

import zmq

from kvd.transport.limits.connection_rate_limit import ANYWHERE, THIS_HOST, ConnectionRateLimit, Place, place_of
from kvd.transport.limits.connections import listening_at, peer_host
from kvd.transport.limits.quotas import Quotas
from kvd.transport.limits.syn_filter import SynFilter
from kvd.transport.zmq.socket_events import SocketEvents
from kvd.transport.zmq.socket_options import FRAME_OVERHEAD_BYTES

LOOK_AGAIN_S: Final = 0.1  # while somebody is refused
LOG_INTERVAL_S: Final = 10.0

logger = logging.getLogger("kvd.transport")


class Arrivals:
    """Connections that arrive at one port of this process. Newcomers are refused from where too many come
    without a key.

    libzmq says which descriptor it has accepted (zmq_socket_monitor). The address is asked of the descriptor. If that
    was closed meanwhile, it is not known where it came from, and it counts for `ANYWHERE`; if it means another
    connection by then, that one's place is charged for it, which makes no difference in the numbers that matter here.
    libzmq does not say which handshake has succeeded, so a connection counts as proven from its first message on.

    Args:
        router: listens at the port.
        port: of TCP.

    Attributes:
        refused: the places that are refused now.
    """

    def __init__(self, router: zmq.Socket[bytes], port: int) -> None:
        self.refused: frozenset[Place] = frozenset()
        self._newcomers = ConnectionRateLimit()
        self._filters = [SynFilter(descriptor) for descriptor in listening_at(port)]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._log_at = 0.0
        self._events = SocketEvents(router, int(zmq.EVENT_ACCEPTED), self._accepted, self._look)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch, on this loop."""
        self._loop = loop
        self._events.start(loop)

    def proved(self, descriptor: int) -> None:
        """The first message has come over this connection."""
        self._newcomers.proved(_place_behind(descriptor))

    def close(self) -> None:
        """Watch no more. It has to come before the ROUTER is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = None
        self._events.stop()
        for own in self._filters:
            own.close()

    def _accepted(self, _event: int, descriptor: int) -> None:
        self._newcomers.came(_place_behind(descriptor))

    def _look(self) -> None:
        """Tells the kernel which places are refused now."""
        refused = self._newcomers.refused()
        if refused != self.refused:
            for own in self._filters:
                own.refuse(refused)
            self._tell(refused - self.refused)
            self.refused = refused
        if refused and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _tell(self, places: frozenset[Place]) -> None:
        now, line = time.monotonic(), refusal_line(places)
        if line and now > self._log_at:
            self._log_at = now + LOG_INTERVAL_S
            logger.warning(line)


def refusal_line(places: Collection[Place]) -> str:
    """Return the log line about places that are refused from now on; "" if there are none."""
    names = ", ".join(map(_name, sorted(places)))
    return names and f"too many connections that prove no key: refusing new ones from {names} for a while"


def _place_behind(descriptor: int) -> Place:
    host = peer_host(descriptor)
    return place_of(host) if host else ANYWHERE


def _name(place: Place) -> str:
    if place in (ANYWHERE, THIS_HOST):
        return "this host" if place else "everywhere"
    return str(ipaddress.ip_network((place.ljust(16, b"\0"), 64)) if len(place) == 8 else ipaddress.ip_address(place))


class Callers:
    """Callers of one ROUTER. Nobody is counted until `open`, and nobody refused until `start`.

    Args:
        quotas: count what callers send and are sent.

    Attributes:
        quotas: the same.
    """

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._arrivals: Arrivals | None = None

    def open(self, router: zmq.Socket[bytes], port: int) -> None:
        """The router listens at this port from now on."""
        self.quotas.open(port)
        self._arrivals = Arrivals(router, port)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Refuses newcomers, from now on, where too many come."""
        if self._arrivals is not None:
            self._arrivals.start(loop)

    def close(self) -> None:
        """To be called before the router is closed."""
        self.quotas.close()
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    def received(self, route: bytes, frames: list[zmq.Frame]) -> bool:
        """Counts a message. False: its sender was cut off, and it is to be dropped."""
        if not self.quotas.is_open or not frames:
            return True
        nbytes = sum(map(len, frames)) + FRAME_OVERHEAD_BYTES * len(frames)
        return self.quotas.received(route, nbytes, lambda: self._descriptor_of_newcomer(frames[0]))

    def _descriptor_of_newcomer(self, frame: zmq.Frame) -> int:
        """Of the connection whose first message this is."""
        descriptor = int(frame.get(zmq.SRCFD))
        if self._arrivals is not None:
            self._arrivals.proved(descriptor)
        return descriptor
