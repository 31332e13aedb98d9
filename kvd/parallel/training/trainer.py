"""Splitting a batch over workers and merging their results, as oxirs-embed's ``distributed_training`` does.

``strict=False`` gives that module's arithmetic exactly; the default refuses what it would hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvd.compute.tensors import check_unmasked
from kvd.errors import ConfigError, ShapeMismatch

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class WorkerUpdate:
    """What one worker computed on its part of a batch.

    Two of them are equal if their contents are, whatever type the gradients have; NaN equals nothing. They cannot be
    hashed.

    Attributes:
        worker_id: of the worker, for messages.
        gradients: one-dimensional; the mean over the worker's samples. Any array or sequence of numbers.
        loss: the mean over the worker's samples.
        samples_processed: how many samples it had, 0 or more.
    """

    worker_id: int
    gradients: npt.ArrayLike
    loss: float
    samples_processed: int

    def __eq__(self, other: object) -> bool:
        return _equal_content(self, other) if type(other) is type(self) else NotImplemented


@dataclass(frozen=True, eq=False)
class ModelUpdate:
    """The mean over all samples of all workers. Compares as a `WorkerUpdate` does.

    Attributes:
        averaged_gradients: one-dimensional, float64; empty if there were no samples.
        mean_loss: 0.0 if there were no samples.
        total_samples: of all workers.
    """

    averaged_gradients: npt.NDArray[np.float64]
    mean_loss: float
    total_samples: int

    def __eq__(self, other: object) -> bool:
        return _equal_content(self, other) if type(other) is type(self) else NotImplemented


class DataParallelTrainer:
    """Splits batches and merges worker updates; keeps no state.

    Arguments:
        strict: refuse gradients of different lengths, and leave workers without samples out of the mean. If False,
            do as the original: short gradients are padded with zeros (to the longest one, without renormalising the
            weights), and a worker without samples takes part with weight 0, so that its NaN or infinity makes the
            result NaN.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict

    def __repr__(self) -> str:
        return f"DataParallelTrainer(strict={self.strict})"

    def split_batch(self, samples: Sequence[T], n_workers: int) -> list[list[T]]:
        """Sample i goes to worker i mod ``n_workers``: one list per worker, the last of them empty if samples run out.

        As in the original, no workers or no samples give no lists, rather than empty ones. Sample weights, which the
        original's samples have, influence neither that function nor this one.

        Raises:
            ConfigError: ``n_workers`` is negative or not a whole number.
        """
        workers = _count(n_workers, "n_workers")
        if workers == 0 or len(samples) == 0:
            return []
        return [[samples[i] for i in range(worker, len(samples), workers)] for worker in range(workers)]

    def merge_worker_updates(self, updates: Sequence[WorkerUpdate]) -> ModelUpdate:
        """The mean of gradients and losses, weighted by samples, added in the order of ``updates`` in float64.

        Each weight is samples / total samples. No updates, or none with samples, give an empty update.

        Raises:
            ConfigError: a negative number of samples, or one that is not whole.
            ShapeMismatch: gradients that are not one-dimensional; if strict, also gradients of different lengths (of
                workers with samples). The message names the workers.
        """
        counts = [_count(u.samples_processed, f"worker {u.worker_id}: samples_processed") for u in updates]
        total = sum(counts)
        if total == 0:
            return ModelUpdate(np.zeros(0), 0.0, 0)
        counted = [(u, n) for u, n in zip(updates, counts, strict=True) if n > 0 or not self.strict]
        gradients = [_vector(update) for update, _ in counted]
        length = max(len(gradient) for gradient in gradients)
        if self.strict:
            _check_lengths([update.worker_id for update, _ in counted], gradients)
        averaged, loss = np.zeros(length), 0.0
        for (update, count), gradient in zip(counted, gradients, strict=True):
            weight = count / total
            with np.errstate(invalid="ignore"):  # 0 · ∞ is NaN in the original too
                averaged[: len(gradient)] += gradient * weight
            loss += float(update.loss) * weight
        return ModelUpdate(averaged, loss, total)


def _equal_content(first: WorkerUpdate | ModelUpdate, second: object) -> bool:
    """The == that a dataclass has, for two of one type whose fields may be arrays."""
    names = [field.name for field in fields(first)]
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def _count(value: Any, what: str) -> int:
    """``value`` as an int. It cannot overflow, unlike the original's sum of u32."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < 0:
        raise ConfigError(f"{what} must be a whole number, 0 or more, not {value!r}", setting=what)
    return int(value)


def _vector(update: WorkerUpdate) -> npt.NDArray[np.float64]:
    check_unmasked(update.gradients)
    vector = np.asarray(update.gradients, dtype=np.float64)
    if vector.ndim != 1:
        raise ShapeMismatch(
            f"worker {update.worker_id}: gradients must be one-dimensional, not of shape {vector.shape}: flatten them"
        )
    return vector


def _check_lengths(worker_ids: Sequence[int], gradients: Sequence[npt.NDArray[np.float64]]) -> None:
    """Raise ShapeMismatch unless all gradients are as long as the first."""
    expected = len(gradients[0])
    for worker_id, gradient in zip(worker_ids, gradients, strict=True):
        if len(gradient) != expected:
            raise ShapeMismatch(
                f"worker {worker_id} has {len(gradient)} gradients, worker {worker_ids[0]} has {expected}: "
                "they train different models, or strict=False pads with zeros"
            )
