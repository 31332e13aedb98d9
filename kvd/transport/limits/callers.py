"""Those who connect to the ROUTER of this process over TCP: how many may come, and what they may make it keep."""

from __future__ import annotations

import asyncio

import zmq

from kvd.transport.limits.arrivals import Arrivals
from kvd.transport.limits.quotas import Quotas
from kvd.transport.zmq.socket_options import FRAME_OVERHEAD_BYTES


class Callers:
    """Nobody is counted until `open`, and nobody refused until `start`.

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
