"""How the scheduler tells its launcher that it is ready: with a message as to systemd."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket


class ReadySocket:
    """Where a daemon reports that it is ready, as with ``Type=notify`` of systemd.

    Attributes:
        name: for ``NOTIFY_SOCKET``.
        reported: done when the daemon has reported.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # an abstract name: a path might be longer than a socket's may be
        self.name = f"@kvd-launch-{secrets.token_hex(8)}"
        self.reported: asyncio.Future[None] = loop.create_future()

    def __enter__(self) -> ReadySocket:
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name[1:]}")
        self._loop.add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if b"READY=1" in self._socket.recv(8192).splitlines() and not self.reported.done():
                self.reported.set_result(None)
