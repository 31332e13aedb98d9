"""Where a daemon listens if it is not told: the addresses of this host, as other hosts see them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvd.config import Address, Config, Role, parse_address, tcp_address
from kvd.errors import ConfigError, ConnectError
from kvd.node.daemon.scheduler_search import Notices, in_daemon_thread
from kvd.observe.log import event
from kvd.transport.reaching import UnknownNameError, connect_to_any, is_name, look_up, number_of

logger = logging.getLogger("kvd.node")

LOOPBACK: Final = "tcp://127.0.0.1:0"
ACCEPT_WITHIN_S: Final = 2.0
LOOK_UP_EVERY_S: Final = 0.5


def address_towards(other: Address) -> str:
    """Return the number of the address from which this host reaches another. Blocks for the name server.

    Of a name with several addresses, one that accepts connections counts. To others, nothing is sent.

    Raises:
        OSError: there is no route to it, no number is known for its name, or none of several accepts connections.
    """
    found = look_up(other.host, other.port)
    if len(found) > 1:
        with connect_to_any(other.host, other.port, ACCEPT_WITHIN_S) as connection:
            return number_of(connection.getsockname())
    family, where = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # only chooses the route
        return number_of(probe.getsockname())


def listen_address(config: Config, role: Role, towards: Callable[[Address], str] = address_towards) -> str:
    """Where a daemon of this role listens: `bind`, or a default that nodes which reach the scheduler reach, too.

    The default of the scheduler is its own address. That of a server is a free port of the address from which this host
    reaches the scheduler; of 127.0.0.1, if the scheduler is on loopback.

    Args:
        config: the settings of the daemon.
        role: its role.
        towards: finds the number of this host's address towards another one; raises OSError if there is none.

    Raises:
        UnknownNameError, ConnectionRefusedError, TimeoutError: the scheduler's host is not known yet, or does not
            accept connections yet.
        ConfigError: this host has no address towards the scheduler, so `bind` has to be given.
    """
    if config.bind or role == "scheduler":
        return config.bind or config.scheduler
    scheduler = parse_address(config.scheduler)
    if scheduler.is_local:
        return LOOPBACK
    try:
        number = towards(scheduler)
    except (UnknownNameError, ConnectionRefusedError, TimeoutError):
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot find the address from which this host reaches the scheduler at {config.scheduler} "
            f"({error.strerror or error}): check the network, or give --bind tcp://ADDRESS:0 (KVD_BIND) with an "
            "address of this host that the workers reach",
            setting="bind",
        ) from None
    if ipaddress.ip_address(number).is_loopback:  # a name of this host
        return LOOPBACK

    event(
        logger,
        logging.INFO,
        f"no --bind is given: listening on {number}, from where this host reaches the scheduler at {config.scheduler}",
    )
    return tcp_address(number, 0)


def own_addresses(address: str) -> list[str]:
    """Return the addresses to listen at for an address, in numbers: all addresses of a name that this host has.

    Port 0 is a free port of the first one. Blocks for the name server.

    Raises:
        UnknownNameError: no address is known for the name.
        ConnectError: this host has none of its addresses.
    """
    parsed = parse_address(address)
    if not is_name(parsed) or parsed.host in [name for _, name in socket.if_nameindex()]:
        return [address]
    found = look_up(parsed.host, parsed.port)
    own = [tcp_address(number_of(where), parsed.port) for family, where in found if _is_own(family, where)]
    if not own:
        numbers = ", ".join(str(where[0]) for _, where in found)
        raise ConnectError(
            f"cannot listen at {address}: this machine has no such address ({parsed.host} is {numbers}); give --bind "
            f"(KVD_BIND) with an address that it has, or --bind tcp://*:{parsed.port} for all of them",
            address=address,
        )
    return own if parsed.port else own[:1]


async def when_known(address: str, timeout_s: float) -> list[str]:
    """Return `own_addresses` once the name is known.

    Raises:
        ConnectError: it is not within `timeout_s`, or this host has none of its addresses.
    """
    begun, notices = time.monotonic(), Notices()
    while True:
        try:
            return await in_daemon_thread(partial(own_addresses, address))
        except UnknownNameError as error:
            parsed = parse_address(address)
            text = (
                f"cannot listen at {address}: the host {parsed.host!r} is not known here ({error.strerror}); correct "
                f"the name, or give --bind tcp://*:{parsed.port} (KVD_BIND) to listen at all addresses of this machine"
            )
            if time.monotonic() > begun + timeout_s:
                raise ConnectError(f"{text}; tried for {timeout_s:g} s (join_timeout_s)", address=address) from None
            if notices.is_due():
                event(logger, logging.WARNING, f"{text}; trying for {timeout_s:g} s (join_timeout_s)")
            await asyncio.sleep(LOOK_UP_EVERY_S)


def _is_own(family: int, where: Any) -> bool:
    """Whether this host has the address."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True
