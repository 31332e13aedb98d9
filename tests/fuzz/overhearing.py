"""A proxy that writes down what a real peer says to a daemon, for those who say it again."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress

from kvd.config import parse_address
from kvd.protocol.messages import StatusQuery, StatusReport
from tests.fuzz.peers import Insider
from tests.fuzz.target import Target


class Proxy:
    """One connection to an address, both ways.

    Attributes:
        address: where the peer connects.
        said: what it has said so far.
    """

    def __init__(self, address: str) -> None:
        parsed = parse_address(address)
        self._there = (parsed.host, parsed.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = socket.socketpair()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.said = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._listener, suppress(ConnectionError):
            here, _ = self._listener.accept()
            with here, socket.create_connection(self._there) as there, selectors.DefaultSelector() as ready:
                ready.register(here, selectors.EVENT_READ, there)
                ready.register(there, selectors.EVENT_READ, here)
                ready.register(self._closed[0], selectors.EVENT_READ, None)
                while True:
                    for key, _ in ready.select():
                        source, target = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        data = source.recv(1 << 16)
                        if target is None or not data:
                            return
                        self.said += data if source is here else b""
                        target.sendall(data)

    def close(self) -> None:
        self._closed[1].send(b"x")
        self._thread.join()
        for end in self._closed:
            end.close()


def handshake_of(target: Target, address: str) -> bytes:
    """What a peer that may speak to the daemon says: the handshake, and a question, which was answered."""
    proxy = Proxy(address)
    try:
        with Insider(target, proxy.address) as peer:
            assert isinstance(peer.answers(StatusQuery(1)), StatusReport)
    finally:
        proxy.close()
    return proxy.said
