"""kvd for PyTorch programs."""

from kvd.torch.mapping import Hyperparameters, from_torch

__all__ = ["from_torch", "Hyperparameters"]
