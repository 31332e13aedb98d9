"""kvd for PyTorch programs."""

from kvd.torch.broadcast import broadcast_buffers, broadcast_object, broadcast_parameters
from kvd.torch.ddp import BucketReducer, ddp_hook
from kvd.torch.embedding import Embedding
from kvd.torch.mapping import Hyperparameters, from_torch
from kvd.torch.sampler import ShardedSampler

__all__ = [
    "from_torch",
    "Hyperparameters",
    "Embedding",
    "ShardedSampler",
    "broadcast_parameters",
    "broadcast_buffers",
    "broadcast_object",
    "ddp_hook",
    "BucketReducer",
]
