"""The name of the scheduler's host: ZeroMQ would try an unknown one again for ever, and say nothing."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from typing import Final

from kvd.config import Config, parse_address
from kvd.errors import ConnectError

LOOK_UP_S: Final = 2.0
"""How long to wait for a name server."""


def check_host(config: Config) -> None:
    """Refuse a scheduler with an unknown host. A host counts as known if the name server does not answer in time.

    Raises:
        ConnectError: no address is known for the host.
    """
    address = parse_address(config.scheduler)
    if address.scheme != "tcp" or _is_number(address.host):
        return
    found: queue.Queue[OSError | None] = queue.Queue()
    # in a thread: a name server that does not answer takes longer than anyone wants to wait
    threading.Thread(target=lambda: found.put(_look_up(address.host)), daemon=True).start()
    try:
        error = found.get(timeout=min(LOOK_UP_S, config.request_timeout_s / 2))
    except queue.Empty:
        return
    if error is not None:
        raise ConnectError(
            f"the host {address.host!r} of {config.scheduler} is not known here ({error.strerror}): correct the "
            "scheduler's address (--scheduler, KVD_SCHEDULER), or give the host's number",
            address=config.scheduler,
        )


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(host: str) -> OSError | None:
    """The error of looking up a host; None if it is known."""
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError:  # no host name looks like this
        return OSError(0, "it is not a host name")
    except OSError as error:
        return error
    return None
