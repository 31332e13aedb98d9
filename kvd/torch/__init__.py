"""kvd for PyTorch programs."""

from kvd.torch.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
