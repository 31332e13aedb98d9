"""How the CPU devices of a group share torch's threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from kvd.parallel.device_threads import cpu_devices_in_group


class CpuThreads:
    """The threads that torch has when this is made.

    No more devices compute at once than there are threads, because they would only take each other's cores.
    """

    def __init__(self) -> None:
        self._total = torch.get_num_threads()
        self._turns = threading.BoundedSemaphore(self._total)

    @contextlib.contextmanager
    def share(self) -> Iterator[None]:
        """Inside, this thread computes with its share: all threads divided by the CPU devices of the group, at least 1.

        More threads than cores would take turns, which costs more time than it saves.
        """
        with self._turns:
            devices = cpu_devices_in_group()
            if devices > 1:
                share = max(1, self._total // devices)
                if torch.get_num_threads() != share:
                    torch.set_num_threads(share)
            yield
