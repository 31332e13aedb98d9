"""Who this process is: random ids, and facts about its host."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from kvd.config import parse_address, tcp_address
from kvd.transport.reaching import look_up


def new_incarnation() -> int:
    """A random id for one start of one node."""
    return secrets.randbits(61) + 1


def token_of(run: str) -> str:
    """The token of a program as it travels: any text may be one, so its hash does. "" stands for none."""
    return hashlib.sha256(run.encode(errors="surrogateescape")).hexdigest()[:32] if run else ""


def host_id() -> str:
    """A text that is equal for processes that share a kernel and see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)
    return f"{boot}/{space.removeprefix('pid:')}"[:64]


def host_name() -> str:
    """The name of this host, for people."""
    return socket.gethostname()[:64]


def reachable(address: str) -> str:
    """Return the address as other hosts can use it: a number of this host's name replaces a wildcard."""
    parsed = parse_address(address)
    if not parsed.is_wildcard:
        return address
    families = (socket.AF_INET,) if parsed.host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    with suppress(OSError):
        found = [where[0] for family, where in look_up(socket.gethostname(), parsed.port) if family in families]
        outside = [number for number in found if not ipaddress.ip_address(number).is_loopback]
        if found:
            return tcp_address([*outside, *found][0], parsed.port)
    return address
