"""Collective calls with gradients, for tensors that require them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvd.compat.collectives import Collectives, ReduceOp

_Function: TypeAlias = Any  # torch's class has no types


@dataclass(frozen=True)
class Reduction:
    """A reduction, without its tensors; see `Collectives.reduce`."""

    op: ReduceOp
    name: str | None = None
    priority: int = 0
    prescale: float = 1.0
    postscale: float = 1.0

    def of(
        self, collectives: Collectives, tensors: Sequence[torch.Tensor], *, named: bool = True
    ) -> list[torch.Tensor]:
        """Return the reduced tensors. `named`: by its name, which one call under way may have."""
        results: list[torch.Tensor] = collectives.reduce(
            tensors,
            self.op,
            name=self.name if named else None,
            priority=self.priority,
            prescale=self.prescale,
            postscale=self.postscale,
        ).wait()
        return results


def reduced(collectives: Collectives, reduction: Reduction, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the reduced tensors; their gradients are reduced in the same way."""
    apply: _Function = _Reduce.apply
    return list(apply(collectives, reduction, *tensors))


def broadcasted(collectives: Collectives, tensor: torch.Tensor, root: int, name: str | None) -> torch.Tensor:
    """Return the root's tensor; the root's gradient is the mean of all workers', those of the others are zero."""
    apply: _Function = _Broadcast.apply
    result: torch.Tensor = apply(collectives, tensor, root, name)
    return result


def gathered(collectives: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all workers, joined; each gets the mean of the workers' gradients for its part."""
    apply: _Function = _Gather.apply
    result: torch.Tensor = apply(collectives, tensor)
    return result


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, reduction: Reduction, *tensors: torch.Tensor) -> Any:
        ctx.collectives, ctx.reduction = collectives, reduction
        return tuple(reduction.of(collectives, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.reduction.of(ctx.collectives, gradients, named=False)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, tensor: torch.Tensor, root: int, name: str | None) -> Any:
        ctx.collectives, ctx.root = collectives, root
        return collectives.broadcast(tensor, root, name=name).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        [mean] = Reduction(ReduceOp.AVERAGE).of(ctx.collectives, gradients)
        return None, mean if ctx.collectives.store.rank == ctx.root else torch.zeros_like(mean), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, tensor: torch.Tensor) -> Any:
        joined, ctx.start = collectives.gather(tensor)
        ctx.collectives, ctx.length = collectives, tensor.shape[0]
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        [mean] = Reduction(ReduceOp.AVERAGE).of(ctx.collectives, gradients)
        return None, mean.narrow(0, ctx.start, ctx.length)
