"""TCP connections to a host by its name: all of its addresses, of any family, are tried."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import select
import socket
import time
from typing import Any, Final, TypeAlias

from kvd.config import Address

MOST_ADDRESSES: Final = 16
"""Addresses of one name that are tried."""

_LINK_LOCAL: Final = re.compile(
    r"(?P<host>tcp://\[fe[89ab][0-9a-f]:[0-9a-f:]*)(?:%(?P<zone>[^\]]+))?(?=\])", re.IGNORECASE
)

SocketAddress: TypeAlias = tuple[int, Any]
"""Family, and the address as `socket.connect` takes it."""


class UnknownNameError(OSError):
    """No address is known for a name."""


def is_name(address: Address) -> bool:
    """Whether this address has to be looked up before it can be used."""
    if address.scheme != "tcp" or address.is_wildcard:
        return False
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return True
    return False


def zone_of(address: str) -> str:
    """Return the interface in a link-local address of IPv6, such as ``eth0``; "" if there is none."""
    match = _LINK_LOCAL.match(address)
    return match["zone"] or "" if match is not None else ""


def with_zone(address: str, zone: str) -> str:
    """Return an address with another interface, if it is a link-local one; "": with none.

    Interfaces have names on their own host only: others reach the address by the interface that leads to the scheduler.
    """
    return _LINK_LOCAL.sub(rf"\g<host>{f'%{zone}' if zone else ''}", address)


def number_of(where: Any) -> str:
    """Return the number in a socket's address; a link-local one of IPv6 with its interface."""
    number, scope = str(where[0]), where[3] if len(where) > 3 else 0
    return f"{number}%{socket.if_indextoname(scope)}" if scope and "%" not in number else number


def look_up(host: str, port: int) -> list[SocketAddress]:
    """Return the addresses of a host. Blocks until the name server has answered.

    Raises:
        UnknownNameError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise UnknownNameError(0, "it is not a host name") from None
    except socket.gaierror as error:
        raise UnknownNameError(error.errno, error.strerror) from None
    return list(dict.fromkeys((int(family), where) for family, _, _, _, where in found))[:MOST_ADDRESSES]


def connect_to_any(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to the first address of a host that accepts. All are tried at once.

    Raises:
        UnknownNameError: the host has no address.
        OSError: no address accepts. Of several errors, a refusal is raised: it comes from the host itself.
    """
    errors: list[OSError] = []
    trying: dict[int, socket.socket] = {}
    poll = select.poll()
    try:
        for family, where in look_up(host, port):
            try:
                connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:  # such as a kernel without IPv6
                errors.append(error)
                continue
            number = _begin(connection, where)
            if number in (0, errno.EINPROGRESS):
                trying[connection.fileno()] = connection
                poll.register(connection, select.POLLOUT)
            else:
                connection.close()
                errors.append(OSError(number, os.strerror(number)))
        until = time.monotonic() + timeout_s
        while trying and (left_s := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left_s * 1000):
                number = trying[descriptor].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                connection = trying.pop(descriptor)
                poll.unregister(descriptor)
                if not number:
                    return connection
                connection.close()
                errors.append(OSError(number, os.strerror(number)))
    finally:
        for connection in trying.values():
            connection.close()
    refusals = [error for error in errors if isinstance(error, ConnectionRefusedError)]
    if trying and not refusals:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    raise [*refusals, *errors][0]


def number_that_accepts(host: str, port: int, timeout_s: float, *, known: str = "") -> str:
    """Return the number of the address of a host that accepts connections.

    A host with one address is not asked, nor is one that still has the known number: at its other end, a connection
    that is opened only to find the number counts as one that proves no key.

    Args:
        known: a number that has accepted a connection, and has refused none since.

    Raises:
        OSError: as `connect_to_any`.
    """
    numbers = [number_of(where) for _, where in look_up(host, port)]
    if len(numbers) == 1:
        return numbers[0]
    if known in numbers:
        return known
    with connect_to_any(host, port, timeout_s) as connection:
        return number_of(connection.getpeername())


def _begin(connection: socket.socket, where: Any) -> int:
    try:
        return connection.connect_ex(where)
    except OSError as error:  # as for an address of a family that this host does not have
        return error.errno or errno.EADDRNOTAVAIL
