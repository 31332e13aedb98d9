"""A connection whose other end has not proven itself yet: it is told little, may say little, and has little time."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import TypeAlias

from kvd.transport.links.handshake import HandshakeError, Proven, Talk

Done: TypeAlias = "Callable[[HalfOpen, Proven | str], None]"
"""(the connection, who the other end is or why that is not known). Called once."""


class HalfOpen:
    """Carries out one handshake on the loop. It owns the socket until the handshake succeeds.

    Args:
        connection: a socket that does not block, connected or about to be.
        talk: this side of the handshake.
        done: called with the outcome, on the loop, but never by the constructor.
        limit_s: how long the handshake may take.

    Attributes:
        socket: the connection. Whoever is told that the other end has proven itself owns it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        talk: Talk,
        done: Done,
        limit_s: float,
        *,
        connecting: bool = False,
    ) -> None:
        self.socket = connection
        self._loop = loop
        self._talk = talk
        self._done: Done | None = done
        self._needed = 0
        self._received = b""
        self._timer = loop.call_later(limit_s, self._end, f"the other side did not answer within {limit_s:g} s")
        if connecting:
            loop.add_writer(connection, self._connected)
        else:
            loop.call_soon(self._begin)

    def close(self) -> None:
        """Gives the handshake up, without a word."""
        if self._done is not None:
            self._done = None
            self._detach()
            self.socket.close()

    def _connected(self) -> None:
        self._loop.remove_writer(self.socket)
        number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(os.strerror(number))
        else:
            self._begin()

    def _begin(self) -> None:
        if self._done is not None:
            self._loop.add_reader(self.socket, self._read)
            self._go_on(None)

    def _read(self) -> None:
        try:
            data = self.socket.recv(self._needed - len(self._received))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.strerror or "the connection broke")
            return
        if not data:
            self._end("the other side closed the connection")
            return
        self._received += data
        if len(self._received) == self._needed:
            received, self._received = self._received, b""
            self._go_on(received)

    def _go_on(self, received: bytes | None) -> None:
        """Continues with what the talk needed, until it needs more."""
        try:
            said = next(self._talk) if received is None else self._talk.send(received)
            while isinstance(said, bytes):
                if self.socket.send(said) < len(said):
                    raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
                said = next(self._talk)
            self._needed = said
        except StopIteration as stop:
            self._end(stop.value)
        except HandshakeError as error:
            self._end(str(error))
        except OSError as error:
            self._end(error.strerror or "the connection broke")

    def _end(self, outcome: Proven | str) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._detach()
        if isinstance(outcome, str):
            self.socket.close()
        done(self, outcome)

    def _detach(self) -> None:
        self._timer.cancel()
        self._talk.close()
        if not self._loop.is_closed():
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
