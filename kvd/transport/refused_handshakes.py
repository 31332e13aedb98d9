"""Connections whose handshake was refused are opened again: libzmq itself gives them up for good.

A key that is not allowed now may be allowed after the list of allowed keys was read again, and what listens at an
address may be replaced by a scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
FD, EVENTS = int(zmq.FD), int(zmq.EVENTS)

AGAIN_AFTER_S: Final = 2.0


class RefusedHandshake:
    """Watches one DEALER.

    Args:
        dealer: before it connects.
        open_again: called on the loop, `AGAIN_AFTER_S` after the handshake was refused.
    """

    def __init__(self, dealer: zmq.Socket[bytes], open_again: Callable[[], None]) -> None:
        self._dealer = dealer
        self._open_again = open_again
        # Of the other failures, libzmq tries again by itself.
        self._events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch, on this loop."""
        self._loop = loop
        loop.add_reader(int(self._events.getsockopt(FD)), self._look)
        loop.call_soon(self._look)  # what has happened by now made no edge

    def stop(self) -> None:
        """Watch no more. It has to come before the DEALER is closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(int(self._events.getsockopt(FD)))
        self._loop = None
        self._dealer.disable_monitor()
        self._events.close(linger=0)

    def _look(self) -> None:
        if self._loop is None:
            return  # stopped meanwhile
        refused = False
        while int(self._events.getsockopt(EVENTS)) & POLLIN:
            self._events.recv_multipart(NOBLOCK)
            refused = True
        if refused and self._timer is None:
            self._timer = self._loop.call_later(AGAIN_AFTER_S, self._open_again)
