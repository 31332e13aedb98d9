"""kvd for PyTorch programs."""

from kvd.torch.broadcast import broadcast_buffers, broadcast_object, broadcast_parameters
from kvd.torch.local_sgd import LocalSGD
from kvd.torch.mapping import Hyperparameters, from_torch

__all__ = [
    "LocalSGD",
    "from_torch",
    "Hyperparameters",
    "broadcast_parameters",
    "broadcast_buffers",
    "broadcast_object",
]
