"""Messages to systemd (``Type=notify``): ready, alive, stopping, and a line for ``systemctl status``.

The protocol is that of sd_notify(3): a datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

MAX_STATUS: Final = 1024
"""Characters of a status that are sent."""


class Notifier:
    """Notifier of systemd about the state of this service. Inactive if systemd did not start the service.

    No method blocks or raises; each returns whether its message was taken. The next watchdog message makes up for a
    lost one.

    Attributes:
        watchdog_interval_s: seconds after which `watchdog` should be called again, half of what systemd allows;
            ``None`` if systemd does not watch this service.
    """

    def __init__(self, notify_socket: str = "", watchdog_usec: int = 0) -> None:
        """Take what `kvd.config.systemd_environment` found.

        Args:
            notify_socket: path of the socket, or ``@`` and its abstract name; empty: nobody listens.
            watchdog_usec: microseconds of silence after which systemd kills the service; 0: never.
        """
        # an abstract name begins with a zero byte, which a variable cannot hold: @ stands for it
        self._address = f"\0{notify_socket[1:]}" if notify_socket.startswith("@") else notify_socket
        self._socket: socket.socket | None = None
        if notify_socket:
            with contextlib.suppress(OSError):  # no descriptor is left: continue without
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
        watched = self._socket is not None and watchdog_usec > 0
        self.watchdog_interval_s: float | None = watchdog_usec / 2e6 if watched else None

    def ready(self, status: str = "") -> bool:
        """Report that startup is complete; systemd then starts the services that come after this one."""
        return self._send("READY=1", status)

    def watchdog(self) -> bool:
        """Report that the service is alive. Call it from the loop that does the work, or it proves nothing."""
        return self.watchdog_interval_s is not None and self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> bool:
        """Report that the service has begun to stop."""
        return self._send("STOPPING=1", status)

    def status(self, text: str) -> bool:
        """Set the line that ``systemctl status`` shows."""
        return self._send("", text)

    def close(self) -> None:
        """Close the socket. Later calls do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.watchdog_interval_s = None

    def _send(self, state: str, status: str = "") -> bool:
        if self._socket is None:
            return False
        lines = [state] if state else []
        if status:
            # a line end in the text would begin an assignment of its own
            lines.append("STATUS=" + "".join(c if c.isprintable() else " " for c in status[:MAX_STATUS]))
        try:
            self._socket.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except OSError:  # gone, or its queue is full
            return False
        return True
