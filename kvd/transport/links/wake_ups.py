"""How much of a large payload must have arrived over TCP before its reader wakes up (SO_RCVLOWAT)."""

from __future__ import annotations

import socket

WAKE_BYTES = 512 << 10  # a reader that wakes up for less is slower


class WakeUps:
    """Those of the readers of one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._at = 1  # bytes that make the socket readable

    def come_for(self, at_least_to_come: int) -> None:
        """Readers wake up when so many bytes have arrived that it is worth the while, if so many are on their way."""
        wanted = max(1, min(at_least_to_come, WAKE_BYTES))
        if wanted != self._at:
            self._at = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
