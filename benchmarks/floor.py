"""The least time that a step can take on this machine: the bytes that memory must move, by its measured bandwidth.

For a pushpull of B bytes by W workers with one server, without an optimizer, from gradients that the server reads where
they lie: the server reads W · B and writes B, the sum; and for its own copy of the weights each worker reads B and
writes B. Each byte counts once per read or write, and none is found in a cache. So

    least time = (W + 1) · B ÷ bandwidth of an addition + 2 · W · B ÷ bandwidth of a copy

with the bandwidths of *all usable cores at once* (one thread on each, at most as many as there are processes that move
bytes, W + 1). It is a limit of the machine and not of a design: a system that adds without a server, or whose
workers share one copy of the weights, moves fewer bytes.

It says something about values that no cache holds only: for smaller works than `SMALLEST_BYTES` there is no limit.
"""

from __future__ import annotations

import os
from typing import Final

SMALLEST_BYTES: Final = 64 << 20
"""As large as the arrays that the bandwidths are measured with."""


def cores_assumed(workers: int) -> int:
    """The largest number of cores that move bytes at once."""
    return min(len(os.sched_getaffinity(0)), workers + 1)


def bytes_moved(nbytes: int, workers: int) -> tuple[int, int]:
    """The bytes that the server's addition reads and writes, and those of the workers' copies."""
    return (workers + 1) * nbytes, 2 * workers * nbytes


def least_us(nbytes: int, workers: int, limits: dict[str, float]) -> float | None:
    """The least time of a step in which each worker pushes these bytes; None where caches would decide."""
    if nbytes < SMALLEST_BYTES or not {"all_add_gb_s", "all_copy_gb_s"} <= limits.keys():
        return None
    added, copied = bytes_moved(nbytes, workers)
    return (added / limits["all_add_gb_s"] + copied / limits["all_copy_gb_s"]) / 1e3
