"""A description of this machine that names neither it nor its owner."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("numpy", "pyzmq", "msgpack", "numba")


def describe() -> dict[str, Any]:
    """Cores, processor, kernel, memory, and the versions that kvd runs on."""
    return {
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "kernel": f"{platform.system()} {platform.release()}",
        "memory_gib": round(memory_bytes(Path("/proc/meminfo").read_text()) / (1 << 30), 1),
        "versions": {"python": platform.python_version(), "kvd": _kvd_version(), **_library_versions()},
    }


def cpu_model(cpuinfo: str) -> str:
    """The processor's name from the text of /proc/cpuinfo; its architecture where that has none (as on ARM)."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def memory_bytes(meminfo: str) -> int:
    """All memory, from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return 0


def _kvd_version() -> str:
    try:
        return metadata.version("kvd-ps")
    except metadata.PackageNotFoundError:
        return "not installed, run from its folder"


def _library_versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def load_warning() -> str | None:
    """A warning if other work runs on this machine now, which makes figures worthless."""
    running = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    if running < 0.5 * cores:
        return None
    return f"the load of the last minute was {running:.1f} on {cores} cores: other work disturbs the figures"
