"""DataParallelTrainer: what the original documents, what it does without saying so, and what strict refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import ConfigError, NotAllowed, ShapeMismatch
from kvd.parallel import DataParallelTrainer, ModelUpdate, WorkerUpdate

BOTH = pytest.mark.parametrize("trainer", [DataParallelTrainer(), DataParallelTrainer(strict=False)], ids=repr)


@pytest.mark.parametrize(
    ("samples", "workers", "parts"),
    [
        ([0, 1, 2, 3, 4, 5], 2, [[0, 2, 4], [1, 3, 5]]),
        ([0, 1, 2, 3, 4, 5, 6], 3, [[0, 3, 6], [1, 4], [2, 5]]),
        ([0, 1], 4, [[0], [1], [], []]),
        ([7], 1, [[7]]),
        ([], 3, []),
        ([1, 2], 0, []),
        ([], 0, []),
    ],
)
def test_split_batch(samples: list[int], workers: int, parts: list[list[int]]) -> None:
    assert DataParallelTrainer().split_batch(samples, workers) == parts
    assert DataParallelTrainer(strict=False).split_batch(tuple(samples), np.int64(workers)) == parts  # type: ignore[arg-type]


@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(1, 9))
def test_split_batch_loses_nothing(samples: list[int], workers: int) -> None:
    parts = DataParallelTrainer().split_batch(samples, workers)
    assert len(parts) == workers
    assert [parts[i % workers][i // workers] for i in range(len(samples))] == samples
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("workers", [-1, 1.5, "2", True, None])
def test_split_batch_for_no_number_of_workers(workers: Any) -> None:
    with pytest.raises(ConfigError, match="n_workers must be a whole number"):
        DataParallelTrainer().split_batch([1], workers)


@BOTH
def test_merge_weights_by_samples(trainer: DataParallelTrainer) -> None:
    update = trainer.merge_worker_updates(
        [WorkerUpdate(0, [1.0, 2.0], 0.5, 30), WorkerUpdate(1, np.array([5.0, -2.0], np.float32), 1.5, 10)]
    )
    assert isinstance(update, ModelUpdate)
    assert update.averaged_gradients.dtype == np.float64
    assert update.averaged_gradients.tolist() == [2.0, 1.0]
    assert (update.mean_loss, update.total_samples) == (0.75, 40)


@BOTH
@pytest.mark.parametrize("updates", [[], [WorkerUpdate(0, [1.0], 2.0, 0), WorkerUpdate(1, [math.nan], math.nan, 0)]])
def test_merge_of_nothing(trainer: DataParallelTrainer, updates: list[WorkerUpdate]) -> None:
    update = trainer.merge_worker_updates(updates)
    assert update.averaged_gradients.shape == (0,)
    assert (update.mean_loss, update.total_samples) == (0.0, 0)


def test_merge_adds_in_the_order_given() -> None:
    # 2⁵³ + 1 is not a float64: only in this order does the 1 survive
    big = float(2**53)
    updates = [WorkerUpdate(i, [gradient], 0.0, 1) for i, gradient in enumerate([4 * big, -4 * big, 4.0, 0.0])]
    trainer = DataParallelTrainer()
    assert trainer.merge_worker_updates(updates).averaged_gradients.tolist() == [1.0]
    reordered = [updates[0], updates[2], updates[1], updates[3]]
    assert trainer.merge_worker_updates(reordered).averaged_gradients.tolist() == [0.0]


def test_merge_equals_the_mean_over_all_samples() -> None:
    generator = np.random.default_rng(0)
    samples = generator.normal(size=(17, 5))
    parts = DataParallelTrainer().split_batch(list(samples), 4)
    updates = [WorkerUpdate(i, np.mean(part, axis=0), 0.0, len(part)) for i, part in enumerate(parts)]
    update = DataParallelTrainer().merge_worker_updates(updates)
    np.testing.assert_allclose(update.averaged_gradients, samples.mean(axis=0), rtol=1e-12)


def test_strict_refuses_different_lengths() -> None:
    updates = [WorkerUpdate(3, [1.0, 2.0], 0.0, 1), WorkerUpdate(8, [1.0], 0.0, 1)]
    with pytest.raises(ShapeMismatch, match="worker 8 has 1 gradients, worker 3 has 2"):
        DataParallelTrainer().merge_worker_updates(updates)
    with pytest.raises(ValueError, match="worker 8"):  # it is a ValueError as well
        DataParallelTrainer().merge_worker_updates(updates)


def test_original_pads_with_zeros_to_the_longest() -> None:
    updates = [WorkerUpdate(0, [4.0], 0.0, 1), WorkerUpdate(1, [8.0, 4.0, 2.0], 0.0, 3)]
    merged = DataParallelTrainer(strict=False).merge_worker_updates(updates)
    assert merged.averaged_gradients.tolist() == [7.0, 3.0, 1.5]  # not renormalised: 4 · 3/4, not 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_worker_without_samples(bad: float) -> None:
    updates = [WorkerUpdate(0, [2.0, 3.0], 0.5, 4), WorkerUpdate(1, [bad, 1.0], bad, 0)]
    strict = DataParallelTrainer().merge_worker_updates(updates)
    assert strict.averaged_gradients.tolist() == [2.0, 3.0]
    assert (strict.mean_loss, strict.total_samples) == (0.5, 4)
    original = DataParallelTrainer(strict=False).merge_worker_updates(updates)
    assert np.isnan(original.averaged_gradients[0])
    assert original.averaged_gradients[1] == 3.0
    assert math.isnan(original.mean_loss)


def test_worker_without_samples_may_have_no_gradients() -> None:
    updates = [WorkerUpdate(0, [], 0.0, 0), WorkerUpdate(1, [2.0], 1.0, 2)]
    assert DataParallelTrainer().merge_worker_updates(updates).averaged_gradients.tolist() == [2.0]


@BOTH
def test_nan_of_a_worker_with_samples_counts(trainer: DataParallelTrainer) -> None:
    updates = [WorkerUpdate(0, [1.0], 0.0, 1), WorkerUpdate(1, [math.nan], 0.0, 1)]
    assert np.isnan(trainer.merge_worker_updates(updates).averaged_gradients[0])


@BOTH
def test_samples_do_not_overflow(trainer: DataParallelTrainer) -> None:
    updates = [WorkerUpdate(i, [float(i)], 0.0, 2**32 - 1) for i in range(2)]
    update = trainer.merge_worker_updates(updates)
    assert update.total_samples == 2**33 - 2
    assert update.averaged_gradients.tolist() == [0.5]


@BOTH
@pytest.mark.parametrize("samples", [-1, 2.0, None, True])
def test_bad_number_of_samples(trainer: DataParallelTrainer, samples: Any) -> None:
    with pytest.raises(ConfigError, match="worker 5: samples_processed must be a whole number"):
        trainer.merge_worker_updates([WorkerUpdate(5, [1.0], 0.0, samples)])


@BOTH
def test_gradients_must_be_flat(trainer: DataParallelTrainer) -> None:
    with pytest.raises(ShapeMismatch, match=r"worker 2: gradients must be one-dimensional, not of shape \(2, 2\)"):
        trainer.merge_worker_updates([WorkerUpdate(2, np.ones((2, 2)), 0.0, 1)])


@BOTH
def test_masked_gradients_are_refused(trainer: DataParallelTrainer) -> None:
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(NotAllowed, match="would lose its mask"):
        trainer.merge_worker_updates([WorkerUpdate(2, masked, 0.0, 1)])


@pytest.mark.parametrize("gradients", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0], np.float32)])
def test_updates_of_equal_content_are_equal(gradients: Any) -> None:
    assert WorkerUpdate(1, [1.0, 2.0], 0.5, 4) == WorkerUpdate(1, gradients, 0.5, 4)
    assert ModelUpdate(np.array([1.0, 2.0]), 0.5, 4) == ModelUpdate(np.asarray(gradients, np.float64), 0.5, 4)


@pytest.mark.parametrize(
    "other",
    [
        WorkerUpdate(2, [1.0, 2.0], 0.5, 4),
        WorkerUpdate(1, [1.0, 3.0], 0.5, 4),
        WorkerUpdate(1, [1.0], 0.5, 4),
        WorkerUpdate(1, [[1.0, 2.0]], 0.5, 4),
        WorkerUpdate(1, [1.0, math.nan], 0.5, 4),
        WorkerUpdate(1, [1.0, 2.0], 0.25, 4),
        WorkerUpdate(1, [1.0, 2.0], 0.5, 5),
        ModelUpdate(np.array([1.0, 2.0]), 0.5, 4),
        (1, [1.0, 2.0], 0.5, 4),
    ],
    ids=repr,
)
def test_an_update_differs_from_any_other_content(other: object) -> None:
    assert WorkerUpdate(1, [1.0, 2.0], 0.5, 4) != other


@pytest.mark.parametrize("update", [WorkerUpdate(1, [1.0], 0.5, 4), ModelUpdate(np.ones(1), 0.5, 4)], ids=repr)
def test_updates_cannot_be_hashed_since_their_arrays_can_change(update: object) -> None:
    with pytest.raises(TypeError, match=r"unhashable type: '(Worker|Model)Update'"):
        hash(update)
