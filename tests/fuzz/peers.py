"""A peer that may speak, and says what it likes."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import zmq

from kvd.node.keys.keyring import Keyring
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import NO_RUN, NO_VIEW
from tests.fuzz.target import Target

TIMEOUT_MS = 20_000
NOBODY = 0x1234


class Insider:
    """A DEALER, with the key of the cluster if it has one.

    Args:
        unread: how many messages it takes before it stops reading its connection.
        identity: the routing id that it asks for.
    """

    def __init__(self, target: Target, address: str, *, unread: int = 1000, identity: bytes = b"") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = TIMEOUT_MS
        self.socket.sndtimeo = 500
        self.socket.set(zmq.RCVHWM, unread)
        if identity:
            self.socket.set(zmq.ROUTING_ID, identity)
        curve = Keyring(target.config, "observer").curve
        if curve is not None:
            curve.secure_connection(self.socket, "")
        self.socket.connect(address)

    def send(self, *frames: bytes) -> bool:
        """False: the other side takes nothing more."""
        try:
            self.socket.send_multipart(frames)
        except zmq.Again:
            return False
        return True

    def say(self, message: Any, *payload: bytes, run: int = NO_RUN, sender: int = NOBODY) -> bool:
        return self.send(encode(message, sender, NO_VIEW, run), *payload)

    def answers(self, message: Any, run: int = NO_RUN) -> Any:
        """What comes back first."""
        self.say(message, run=run)
        return decode(self.socket.recv_multipart()[0]).message

    def hear(self, quiet_ms: int = 50) -> int:
        """Takes what is answered, until nothing has come for a while; how much that was."""
        count = 0
        while self.socket.poll(quiet_ms):
            self.socket.recv_multipart()
            count += 1
        return count

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def __enter__(self) -> Insider:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
