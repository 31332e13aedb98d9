"""Who this process is: ids that it draws, and facts about its host."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def new_incarnation() -> int:
    """A random id for one start of one node."""
    return secrets.randbits(61) + 1


def host_id() -> str:
    """A text that is the same for processes that share a kernel and see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)
    return f"{boot}/{space.removeprefix('pid:')}"[:64]
