"""Who this process is: random ids, and facts about its host."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from kvd.config import parse_address


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
    """The address as other hosts can use it: this host's number replaces a wildcard."""
    parsed = parse_address(address)
    if not parsed.is_wildcard:
        return address
    with suppress(OSError):
        return f"tcp://{socket.gethostbyname(socket.gethostname())}:{parsed.port}"
    return address
