"""Where a daemon listens if it is not told: the addresses of this host, as other hosts see them."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Final

from kvd.config import Address, Config, Role, parse_address, tcp_address
from kvd.errors import ConfigError
from kvd.observe.log import event

logger = logging.getLogger("kvd.node")

LOOPBACK: Final = "tcp://127.0.0.1:0"


def address_towards(other: Address) -> str:
    """The number of the address from which this host reaches another. Nothing is sent.

    Raises:
        OSError: there is no route to it, or no number is known for its name.
    """
    family = socket.AF_INET6 if ":" in other.host else socket.AF_INET  # as ZeroMQ connects
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other.host, other.port))  # only chooses the route
        number: str = probe.getsockname()[0]
        return number


def listen_address(config: Config, role: Role, towards: Callable[[Address], str] = address_towards) -> str:
    """Where a daemon of this role listens: `bind`, or a default that nodes which reach the scheduler reach, too.

    The default of the scheduler is its own address. That of a server is a free port of the address from which this host
    reaches the scheduler; of 127.0.0.1, if the scheduler is on loopback.

    Args:
        config: the settings of the daemon.
        role: its role.
        towards: finds the number of this host's address towards another one; raises OSError if there is none.

    Raises:
        ConfigError: this host has no address towards the scheduler, so `bind` has to be given.
    """
    if config.bind or role == "scheduler":
        return config.bind or config.scheduler
    scheduler = parse_address(config.scheduler)
    if scheduler.is_local:
        return LOOPBACK
    try:
        number = towards(scheduler)
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
