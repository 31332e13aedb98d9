"""Connections without an end, as fast as a process opens them: each says a few bytes, and goes when it is answered."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import cycle
from typing import NamedTuple

from kvd.config import parse_address
from tests.fuzz.zmtp import RESET_ON_CLOSE

PATIENCE_S = 0.25  # then a connection is given up, and another one begun


class Flood(NamedTuple):
    """How many connections were begun, and over how many anything came back."""

    begun: int
    answered: int


class _Stranger:
    """One connection that does not block."""

    def __init__(self, address: str, said: bytes, ready: selectors.BaseSelector) -> None:
        parsed = parse_address(address)
        self.until = time.monotonic() + PATIENCE_S
        self._said = said
        self._ready = ready
        self.socket = socket.socket(socket.AF_INET6 if ":" in parsed.host else socket.AF_INET)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)  # its port is free at once
        self.socket.connect_ex((parsed.host, parsed.port))
        ready.register(self.socket, selectors.EVENT_WRITE, self)
        self.is_closed = False

    def go_on(self, events: int) -> bool:
        """Says what it has to say, then listens. True: it was answered."""
        answered = False
        try:
            if events & selectors.EVENT_WRITE:
                self.socket.sendall(self._said)
                self._ready.modify(self.socket, selectors.EVENT_READ, self)
                return False
            answered = len(self.socket.recv(1 << 12)) > 64 or not self.socket.recv(1 << 12)  # more than a greeting
        except BlockingIOError:
            return False
        except OSError:
            pass
        self.close()
        return answered

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            with suppress(KeyError):
                self._ready.unregister(self.socket)
            self.socket.close()


def flood(said: Mapping[str, bytes], peers: int, seconds: float) -> Flood:
    """Says this to these addresses, over so many connections at a time."""
    begun = answered = 0
    targets = cycle(said.items())
    strangers: deque[_Stranger] = deque()
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as ready:
        try:
            while (now := time.monotonic()) < until:
                while strangers and (strangers[0].is_closed or strangers[0].until < now):
                    strangers.popleft().close()
                while len(ready.get_map()) < peers and len(strangers) < 2 * peers:
                    strangers.append(_Stranger(*next(targets), ready))
                    begun += 1
                answered += sum(key.data.go_on(events) for key, events in ready.select(PATIENCE_S))
        finally:
            for stranger in strangers:
                stranger.close()
    return Flood(begun, answered)
