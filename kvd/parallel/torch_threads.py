"""torch's threads among the CPU devices of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kvd.parallel.lanes import cpu_lanes

#: What torch had when this was imported, before any lane changed it for its own thread.
_threads_of_process = torch.get_num_threads()


@contextlib.contextmanager
def share_of_threads() -> Iterator[None]:
    """Inside, this thread computes with its share of torch's threads: all of them by the number of CPU devices.

    More threads than cores would take turns, and lose more by it than they gain.
    """
    lanes = cpu_lanes()
    if lanes > 1:
        share = max(1, _threads_of_process // lanes)
        if torch.get_num_threads() != share:
            torch.set_num_threads(share)
    yield
