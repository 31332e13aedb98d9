"""Buffers of a module, and their means over the workers after each backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvd.client.facades.blocking import KVStore, backend_of
from kvd.errors import NotAllowed
from kvd.torch.buckets import Bucket, Slot
from kvd.torch.parameters import DTYPES

_PREFIX = "kvd.torch/buffers/"
_PRIORITY = -(1 << 20)  # they are complete when backward has ended


class _Place(NamedTuple):
    """Where a module has a buffer: forward passes may put another tensor there."""

    owner: Mapping[str, object]  # the buffers of the module, by attribute
    attribute: str


class ModuleBuffers:
    """The buffers of a module that are in its `state_dict`, each once, by name.

    Args:
        module: the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        saved = set(module.state_dict(keep_vars=True))
        self._places: dict[str, _Place] = {}
        for name, _ in module.named_buffers():
            if name in saved:
                owner, _, attribute = name.rpartition(".")
                self._places[name.replace("_orig_mod.", "")] = _Place(module.get_submodule(owner)._buffers, attribute)

    def live(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the module has now.

        Raises:
            NotAllowed: it has lost one.
        """
        found: dict[str, torch.Tensor] = {}
        for name, place in self._places.items():
            buffer = place.owner.get(place.attribute)
            if not isinstance(buffer, torch.Tensor):
                raise NotAllowed(
                    f"the module has no buffer {name!r} any more, and had one when it was wrapped", key=name
                )
            found[name] = buffer
        return found


class BufferMeans:
    """Floating-point buffers on their way. Each is a key, and all travel in one call.

    Args:
        module: all of its buffers.
        names: of those that are averaged.

    Attributes:
        bucket: brings the means when it has received them.
    """

    def __init__(self, module: ModuleBuffers, names: Sequence[str]) -> None:
        live = module.live()
        self._module = module
        self._names = list(names)
        self._slots = [Slot(f"{_PREFIX}{name}", live[name], number) for number, name in enumerate(names)]
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
        """Send the buffers as they are now.

        Raises:
            NotAllowed: one has become another kind of tensor.
        """
        live = self._module.live()
        for name, slot in zip(self._names, self._slots, strict=True):
            buffer = slot.parameter = live[name]
            if (buffer.dtype, buffer.shape) != (slot.dtype, slot.shape):
                raise NotAllowed(
                    f"buffer {name!r} has become {buffer.dtype} of shape {tuple(buffer.shape)} since it was wrapped, "
                    f"when it was {slot.dtype} of shape {tuple(slot.shape)}",
                    key=name,
                )
            slot.gradient = buffer.detach()
        self.bucket.send(backend_of(self._store), lambda slot: slot.parameter.detach())


def mean_of(module: ModuleBuffers) -> BufferMeans:
    """The buffers of a module that can be averaged.

    Raises:
        NotAllowed: it has none, or one of a dtype that does not travel.
    """
    found = {name: buffer for name, buffer in module.live().items() if buffer.is_floating_point()}
    if not found:
        raise NotAllowed('buffers="mean": the module has no floating-point buffers in its state_dict; leave it out')
    for name, buffer in found.items():
        if buffer.dtype not in DTYPES:
            raise NotAllowed(f"buffer {name!r} has the dtype {buffer.dtype}, which does not travel", key=name)
    return BufferMeans(module, list(found))
