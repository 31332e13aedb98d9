"""torch's threads among the CPU devices of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvd.parallel.device_threads import cpu_lanes


@contextlib.contextmanager
def share_of_threads(total: int) -> Iterator[None]:
    """Inside, this thread computes with its share of ``total`` threads: all of them by the number of CPU devices.

    More threads than cores would take turns, and lose more by it than they gain.
    """
    lanes = cpu_lanes()
    if lanes > 1:
        share = max(1, total // lanes)
        if torch.get_num_threads() != share:
            torch.set_num_threads(share)
    yield
