"""A ZeroMQ connection to one peer, which is opened again where libzmq itself would give up or try the wrong address.

libzmq gives a connection up for good when its handshake was refused. But a key that is not allowed now may be allowed
after the list of allowed keys was read again, and a scheduler may replace what listens at an address.

Of a name libzmq tries one address of one family. So it is given numbers only: the name is looked up here, in a thread,
and again whenever the connection ends or cannot be made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq

from kvd.config import Address, parse_address, tcp_address
from kvd.errors import ConfigError
from kvd.transport.reaching import is_name, number_that_accepts
from kvd.transport.zmq.curve import Curve
from kvd.transport.zmq.socket_events import SocketEvents
from kvd.transport.zmq.socket_options import RECONNECT_FIRST_MS, RECONNECT_LIMIT_MS, set_options

AGAIN_AFTER_S: Final = 2.0
"""Pause after a refused handshake."""

ACCEPT_WITHIN_S: Final = 5.0
"""How long the addresses of a name may take to accept a connection."""

_REFUSED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH) | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_NOT_MADE: Final = int(zmq.EVENT_CONNECT_RETRIED)
_ENDED: Final = int(zmq.EVENT_DISCONNECTED) | _NOT_MADE


class Dealer:
    """One DEALER. Its methods belong to the loop's thread.

    Args:
        context: of libzmq.
        address: of the peer.
        key: as of `Curve.secure_connection`.
        curve: the keys of this node.
        lock: held to use the socket: other threads send.
        open_again: called on the loop, `AGAIN_AFTER_S` after the handshake was refused.

    Attributes:
        socket: connected to the address, or to be connected when its name is known.
        address, key: the same.
        endpoint: where the socket is connected to, in numbers; "" while a name is looked up.

    Raises:
        zmq.ZMQError: this is not an address to connect to, or not a key.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        key: str,
        curve: Curve | None,
        lock: threading.Lock,
        open_again: Callable[[], None],
    ) -> None:
        self.address = address
        self.key = key
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._lock = lock
        self._open_again = open_again
        self._name = _name_in(address)
        self.endpoint = "" if self._name is not None else address
        self._known = ""  # the number of the name where the last handshake succeeded
        self._pause_s = RECONNECT_FIRST_MS / 1000
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        set_options(self.socket, address)
        wanted = _REFUSED if self._name is None else _REFUSED | _SUCCEEDED | _ENDED
        self._events = SocketEvents(self.socket, wanted, self._happened)
        try:
            if curve is not None:
                curve.secure_connection(self.socket, key)
            if self._name is None:
                self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the connection, on this loop."""
        self._loop = loop
        self._events.start(loop)
        if self._name is not None:
            self._look_up(self._name)

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection. Messages that are queued get `linger_s` to leave."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = None
        self._events.stop()  # it has to come before the socket is closed
        self.socket.close(linger=int(linger_s * 1000))

    def _happened(self, event: int, _value: int) -> None:
        if self._loop is None:
            return
        if event & _REFUSED:
            if self._timer is None:
                self._timer = self._loop.call_later(AGAIN_AFTER_S, self._open_again)
        elif event & _SUCCEEDED:
            self._pause_s = RECONNECT_FIRST_MS / 1000
            self._known = _host_of(self.endpoint)
        elif self.endpoint:
            with self._lock, suppress(zmq.ZMQError):  # libzmq has closed it meanwhile
                self.socket.disconnect(self.endpoint)
            self.endpoint = ""
            if event & _NOT_MADE:
                self._known = ""
            self._look_up_later()

    # ── the name ──

    def _look_up_later(self) -> None:
        assert self._loop is not None
        assert self._name is not None
        if self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._look_up, self._name)
            self._pause_s = min(2 * self._pause_s, RECONNECT_LIMIT_MS / 1000)

    def _look_up(self, name: Address) -> None:
        """Find the number in a thread that the end of the process does not wait for: a name server may be slow."""
        self._timer = None
        loop, known = self._loop, self._known

        def work() -> None:
            try:
                number = number_that_accepts(name.host, name.port, ACCEPT_WITHIN_S, known=known)
            except OSError:
                number = ""
            with suppress(RuntimeError):  # the loop is closed
                assert loop is not None
                loop.call_soon_threadsafe(self._found, name, number)

        try:
            threading.Thread(target=work, name="kvd-look-up", daemon=True).start()
        except RuntimeError:  # there are too many threads
            self._look_up_later()

    def _found(self, name: Address, number: str) -> None:
        if self._loop is None:
            return
        if not number:
            self._look_up_later()
            return
        endpoint = tcp_address(number, name.port)
        try:
            with self._lock:
                self.socket.setsockopt(zmq.IPV6, int(":" in number))
                self.socket.connect(endpoint)
        except zmq.ZMQError:  # libzmq cannot take this number, or has no memory
            self._known = ""
            self._look_up_later()
            return
        self.endpoint = endpoint


def _host_of(endpoint: str) -> str:
    return parse_address(endpoint).host


def _name_in(address: str) -> Address | None:
    """The address, if its host has to be looked up; None if libzmq can take it as it is, or refuses it."""
    try:
        parsed = parse_address(address)
    except ConfigError:  # another node may have announced it
        return None
    return parsed if is_name(parsed) else None
