"""Horovod's and BytePS's names for the form in which a tensor travels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Compressor:
    """A tensor travels as it is.

    Attributes:
        options: the same for `kvd.KVStore.set_gradient_compression`.
    """

    options: ClassVar[dict[str, Any]] = {"type": "none"}

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return a tensor that has travelled as what it was."""
        return tensor


class HalfCompressor(Compressor):
    """A floating tensor travels as float16."""

    options: ClassVar[dict[str, Any]] = {"type": "fp16"}

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return a floating tensor as float16, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(context)


class Compression:
    """Compressors by Horovod's and BytePS's names, such as ``compression=Compression.fp16``."""

    none = Compressor
    """Send every tensor unchanged."""
    fp16 = HalfCompressor
    """Send floating tensors as float16."""
