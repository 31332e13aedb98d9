"""Buffers of a module that are the mean over the workers after each backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvd.client.facades.blocking import KVStore, backend_of
from kvd.errors import NotAllowed
from kvd.torch.buckets import Bucket, Slot
from kvd.torch.parameters import DTYPES
from kvd.torch.state import buffers_of

_PREFIX = "kvd.torch/buffers/"
_PRIORITY = -(1 << 20)  # they are complete when backward has ended


class BufferMeans:
    """Floating-point buffers on their way. Each is a key, and all travel in one call.

    Args:
        buffers: by name.

    Attributes:
        bucket: brings the means when it has received them.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._slots = [
            Slot(f"{_PREFIX}{name}", buffer, number) for number, (name, buffer) in enumerate(buffers.items())
        ]
        self.bucket = Bucket(self._slots, _PRIORITY)
        self._store: KVStore

    def lines(self) -> list[str]:
        """One line per buffer, equal in two workers if it fits in both."""
        return [f"{slot.name} {tuple(slot.shape)} {slot.dtype}" for slot in self._slots]

    def make_keys(self, store: KVStore) -> None:
        """Make the keys, and get memory to send from."""
        self._store = store
        values = [torch.zeros_like(slot.parameter) for slot in self._slots]
        store.init(self.bucket.names, values, merge=["mean"] * len(values))
        self.bucket.bind(backend_of(store))

    def send(self) -> None:
        """Send the buffers as they are now."""
        for slot in self._slots:
            slot.gradient = slot.parameter.detach()
        self.bucket.send(backend_of(self._store), lambda slot: slot.parameter)


def mean_of(module: torch.nn.Module) -> BufferMeans:
    """The buffers of a module that can be averaged.

    Raises:
        NotAllowed: it has none, or one of a dtype that does not travel.
    """
    found = {name: buffer for name, buffer in buffers_of(module).items() if buffer.is_floating_point()}
    if not found:
        raise NotAllowed('buffers="mean": the module has no floating-point buffers in its state_dict; leave it out')
    for name, buffer in found.items():
        if buffer.dtype not in DTYPES:
            raise NotAllowed(f"buffer {name!r} has the dtype {buffer.dtype}, which does not travel", key=name)
    return BufferMeans(found)
