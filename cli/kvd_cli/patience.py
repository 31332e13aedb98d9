"""What a person who waits for a cluster is told: how long it may take, or that it cannot work."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Final

import click

from kvd.config import Config, parse_address
from kvd.errors import ConnectError

SILENT_FOR_S: Final = 2.0
"""How long a command may wait before it says so."""


@contextlib.contextmanager
def told_when_slow(config: Config) -> Iterator[None]:
    """Say on stderr what the command waits for, once that has taken a while.

    In scripts too: a reader of their log wants to know where the time went.
    """
    text = (
        f"waiting for an answer from the cluster at {config.scheduler}, for up to {config.request_timeout_s:g} s "
        "(--timeout); Ctrl-C ends it"
    )
    timer = threading.Timer(SILENT_FOR_S, click.echo, [text], {"err": True})
    timer.daemon = True
    if config.request_timeout_s > SILENT_FOR_S:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_host(config: Config) -> None:
    """Refuse an address with an unknown host. A host counts as known if the name server does not answer in time.

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
        error = found.get(timeout=min(SILENT_FOR_S, config.request_timeout_s))
    except queue.Empty:
        return
    if error is not None:
        raise ConnectError(
            f"the host {address.host!r} of {config.scheduler} is not known here ({error.strerror}): check its name in "
            "--scheduler or KVD_SCHEDULER, or give its number",
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
