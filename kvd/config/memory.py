"""Memory limit of this process."""

from __future__ import annotations

import os
from pathlib import Path


def machine_memory_bytes(*, cgroup: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine, or of the control group that confines this process, in bytes.

    Args:
        cgroup: the file that names this process's group.
        groups: the directory that holds a directory for each group.
    """
    smallest = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        inside = groups / cgroup.read_text(encoding="ascii").strip().removeprefix("0::").lstrip("/")
    except (OSError, ValueError):
        return smallest
    for folder in (inside, *inside.parents):
        if not folder.is_relative_to(groups):
            break
        try:
            smallest = min(smallest, int((folder / "memory.max").read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # no limit here ("max"), or no such file
    return smallest
