"""Connections whose handshake was refused are opened again: libzmq itself gives them up for good.

A key that is not allowed now may be allowed after the list of allowed keys was read again, and what listens at an
address may be replaced by a scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from kvd.transport.socket_events import SocketEvents

AGAIN_AFTER_S: Final = 2.0


class RefusedHandshake:
    """Watches one DEALER.

    Args:
        dealer: before it connects.
        open_again: called on the loop, `AGAIN_AFTER_S` after the handshake was refused.
    """

    def __init__(self, dealer: zmq.Socket[bytes], open_again: Callable[[], None]) -> None:
        self._open_again = open_again
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Of the other failures, libzmq tries again by itself.
        wanted = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH) | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._events = SocketEvents(dealer, wanted, self._refused)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch, on this loop."""
        self._loop = loop
        self._events.start(loop)

    def stop(self) -> None:
        """Watch no more. It has to come before the DEALER is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = None
        self._events.stop()

    def _refused(self, _event: int, _value: int) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(AGAIN_AFTER_S, self._open_again)
