"""Embeddings of a module whose weights have gradients of rows: ``nn.Embedding`` and ``nn.EmbeddingBag``, ``sparse``."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from kvd.parallel.device import Device
from kvd.parallel.models.model import RowReader
from kvd.parallel.models.torch.tensors import as_device_array

_KINDS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_DTYPES = (torch.float32, torch.float64)  # of tables


def row_sparse_parameters(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the trained weights of such embeddings that nothing else in the module uses: a weight with several
    users may get a dense gradient."""
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    return tuple(
        [
            name
            for name, each in _weights(module).items()
            if each.weight.requires_grad and each.weight.dtype in _DTYPES and uses[id(each.weight)] == 1
        ]
    )


class RowReads:
    """Tells which rows the embeddings of a module are about to read.

    Attributes:
        reader: is told; None: nobody.

    Arguments:
        names: of the weights.
    """

    def __init__(self, module: torch.nn.Module, names: Collection[str], device: Device) -> None:
        self.reader: RowReader | None = None
        self._device = device
        for name, each in _weights(module).items():
            if name in names:
                each.register_forward_pre_hook(functools.partial(self._reads, name), with_kwargs=True)

    def _reads(self, name: str, _module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self.reader is not None:
            ids = given[0] if given else named["input"]
            self.reader(name, as_device_array(ids, self._device))


def _weights(module: torch.nn.Module) -> dict[str, Any]:
    def found() -> Iterator[tuple[str, Any]]:
        for path, each in module.named_modules():
            if isinstance(each, _KINDS) and each.sparse:
                yield f"{path}.weight" if path else "weight", each

    return dict(found())
