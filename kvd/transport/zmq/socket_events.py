"""What libzmq says of a socket (zmq_socket_monitor), on the loop."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from itertools import count
from typing import Final

import zmq

NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
FD, EVENTS = int(zmq.FD), int(zmq.EVENTS)

EVENTS_AT_A_TIME: Final = 256  # before the loop runs other callbacks

_EVENT = struct.Struct("=HI")
_numbers = count(1)


class SocketEvents:
    """Watches one socket.

    Args:
        wanted: which events, as of `zmq.Event`, in one number.
        take: called on the loop with each event and its value, such as a descriptor.
        looked: called on the loop after some events, or none.
    """

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        wanted: int,
        take: Callable[[int, int], None],
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self._watched = watched
        self._wanted = wanted
        self._take = take
        self._looked = looked
        self._loop: asyncio.AbstractEventLoop | None = None
        address = f"inproc://events-{next(_numbers)}"
        watched.monitor(address, wanted)
        self._events: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # with a mark, libzmq's thread would stop while this process is busy
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch, on this loop."""
        self._loop = loop
        loop.add_reader(int(self._events.getsockopt(FD)), self._read)
        loop.call_soon(self._read)  # what has happened by now made no edge

    def stop(self) -> None:
        """Watch no more. It has to come before the socket is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(int(self._events.getsockopt(FD)))
        self._loop = None
        self._watched.disable_monitor()
        self._events.close()

    def _read(self) -> None:
        if self._loop is None:
            return  # stopped meanwhile
        for _ in range(EVENTS_AT_A_TIME):
            if not int(self._events.getsockopt(EVENTS)) & POLLIN:
                break
            event, value = _EVENT.unpack(self._events.recv_multipart(NOBLOCK)[0])
            if event & self._wanted:  # the last one says that the monitor ends
                self._take(event, value)
        else:
            self._loop.call_soon(self._read)
        self._looked()
