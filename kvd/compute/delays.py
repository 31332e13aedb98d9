"""Delay compensation of gradients by :class:`kvd.optimizer.DCASGD`, before they are applied as by SGD."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.compute.kernels import Array
from kvd.compute.merge import EVERYTHING, MergeMode, merge_tile, plan_merge
from kvd.compute.quiet import quietly
from kvd.optimizer import DCASGD


def compensated(
    optimizer: DCASGD,
    current: Array,
    pulled: Array,
    contributions: Sequence[Array],
    mode: MergeMode = "sum",
    samples: Sequence[int] | None = None,
) -> Array:
    """Return the merged gradient at ``current``, estimated from that at ``pulled``, in the dtype of the accumulator.

    An element that has not changed since gets no compensation, however large its gradient is.

    Args:
        current, pulled: the version to be updated, and the one that the gradient was taken at; shape (n,).
        contributions, mode, samples: as for :func:`kvd.compute.merge.merge`; of the dtype and length of ``current``.

    Raises:
        ShapeMismatch, DtypeMismatch, NotAllowed: as for ``merge``.
    """
    plan = plan_merge(contributions, mode, samples, like=current)
    gradient, delay = np.empty(current.size, plan.accumulator), np.empty(current.size, plan.accumulator)
    merge_tile(plan, EVERYTHING, gradient, delay)
    quietly(_compensate, gradient, delay, current, pulled, optimizer.compensation * optimizer.rescale_grad)
    return gradient


def _compensate(gradient: Array, delay: Array, current: Array, pulled: Array, factor: float) -> None:
    np.copyto(delay, current)
    np.subtract(delay, pulled.astype(delay.dtype, copy=False), out=delay)
    np.multiply(delay, gradient, out=delay)  # in this order 0 stays 0, even if the square is too large for the dtype
    np.multiply(delay, gradient, out=delay)
    np.multiply(delay, np.asarray(factor, delay.dtype), out=delay)
    np.add(gradient, delay, out=gradient)
