"""PyTorch on a store: a training of all workers of a job, with the model, the loop and the optimizer of a program.

It needs PyTorch 2.4 or later.
"""

from __future__ import annotations

try:
    import torch

    from kvd.torch.broadcast import broadcast_buffers, broadcast_object, broadcast_parameters
    from kvd.torch.ddp import BucketReducer, ddp_hook
    from kvd.torch.embedding import Embedding
    from kvd.torch.local_sgd import LocalSGD
    from kvd.torch.mapping import Hyperparameters, from_torch
    from kvd.torch.optimizer import DistributedOptimizer
    from kvd.torch.sampler import ShardedSampler
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError('kvd.torch needs PyTorch, which is not installed: pip install "torch>=2.4"') from error

__all__ = [
    "DistributedOptimizer",
    "LocalSGD",
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

LEAST = (2, 4)
"""The first version of PyTorch that has all that is used here."""


def check_version(version: str) -> None:
    """Raise ImportError if this version of PyTorch, such as ``"2.13.0+cpu"``, is too old."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < LEAST:
        raise ImportError(f'kvd.torch needs PyTorch 2.4 or later, not {version}: pip install -U "torch>=2.4"')


check_version(torch.__version__)
