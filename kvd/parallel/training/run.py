"""The epochs of one call of `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kvd.client.facades.blocking import KVStore
from kvd.parallel.batch import DataBatch
from kvd.parallel.group.group import DataParallelExecutorGroup
from kvd.parallel.group.input_checks import batch_arrays, common_size
from kvd.parallel.group.monitoring import Metric
from kvd.parallel.group.parameters import host_arrays
from kvd.parallel.group.pipeline import GradientPipeline
from kvd.parallel.training.checkpoint import Checkpoint
from kvd.parallel.training.progress import Bar

#: Batches to iterate over in every epoch, or a function that returns them for an epoch (from 0).
Data: TypeAlias = Iterable[DataBatch] | Callable[[int], Iterable[DataBatch]]


@dataclass(frozen=True)
class EpochReport:
    """The outcome of an epoch for this worker.

    Attributes:
        epoch: from 0.
        steps: batches computed in it; fewer than the data has if the start of the epoch had been done before.
        samples: in these batches.
        seconds: for all of it, evaluation included.
        train, evaluation: metric → value; empty without a metric, or without ``eval_data``.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    train: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """The state of one call of `fit`.

    Attributes:
        step: batches done so far, in this run and those that it continues.
        to_skip: batches that a predecessor of this worker has done.
    """

    group: DataParallelExecutorGroup
    kv: KVStore
    pipeline: GradientPipeline
    metric: Metric | None
    checkpoint: Path | None
    checkpoint_steps: int | None
    step: int
    to_skip: int

    def epoch(
        self, epoch: int, data: Data, done: int, eval_data: Data | None, evaluator: Metric | None, bar: Bar
    ) -> EpochReport:
        """Train and evaluate an epoch of which ``done`` batches are done."""
        begun, steps, samples = time.monotonic(), 0, 0
        _reset(self.metric)
        batches = _batches(data, epoch)
        bar.begin(epoch, _length(batches))
        for number, batch in enumerate(batches):
            if number < done:
                continue
            if self.to_skip:
                self.to_skip -= 1
                self.step += 1
                continue
            samples += self._train(batch)
            steps += 1
            bar.step(number + 1, samples, _values(self.metric))
            if self.checkpoint_steps and self.step % self.checkpoint_steps == 0:
                self._save(epoch, number + 1)
        evaluation: dict[str, float] = {}
        if steps and eval_data is not None:
            evaluation = self._evaluate(eval_data, epoch, evaluator)
        if steps:
            self._save(epoch + 1, 0)
        bar.end(evaluation)
        train = _values(self.metric) if steps else {}
        return EpochReport(epoch, steps, samples, time.monotonic() - begun, train, evaluation)

    def end(self, uneven: bool) -> None:
        """Wait for the last weights, and share rank 0's states with every worker."""
        self.pipeline.receive()
        self.pipeline.done_before = self.to_skip  # a later fit of the same program continues from there
        if uneven and self.kv.num_workers > 1:
            self.kv.join()
            self.kv.barrier("kvd:fit:end")
            self.pipeline.pull()
        else:
            self.pipeline.share_states()

    def _train(self, batch: DataBatch) -> int:
        for executor in self.group.executors:
            executor.step = self.step  # random numbers are those of the step, after a restart too
        samples = _fit_to(self.group, batch, needs_labels=True)
        for executor in self.group.executors:
            executor.step = self.step
        self.group.forward_backward(batch)
        if self.metric is not None:
            self.group.update_metric(self.metric, list(batch.label or []))
        self.step += 1
        return samples

    def _evaluate(self, data: Data, epoch: int, metric: Metric | None) -> dict[str, float]:
        _reset(metric)
        for batch in _batches(data, epoch):
            _fit_to(self.group, batch, needs_labels=metric is not None)
            self.group.forward(batch, is_train=False)
            if metric is not None:
                self.group.update_metric(metric, list(batch.label or []))
        return _values(metric)

    def _save(self, epoch: int, batch: int) -> None:
        """Rank 0 writes the checkpoint.

        In rounds no other worker can be a step ahead of it then. Asynchronous workers wait until it is written, so
        that the optimizer's state is that of one moment.
        """
        if self.checkpoint is None:
            return
        self.pipeline.receive()
        waits = self.kv.merge == "" and self.kv.num_workers > 1
        if waits:
            self.kv.barrier(f"kvd:fit:save:{epoch}")
            self.pipeline.pull()
        if self.kv.rank == 0:
            params = host_arrays(self.group.binding, self.group.param_names)
            aux = host_arrays(self.group.binding, self.group.aux_names)
            self.group.get_params(params, aux)
            saved = Checkpoint(params, aux, epoch, batch, self.step, self.pipeline.local_states())
            saved.write(self.checkpoint, self.kv.save_optimizer_states if self.pipeline.update == "server" else None)
        if waits:
            self.kv.barrier(f"kvd:fit:saved:{epoch}")


def _fit_to(group: DataParallelExecutorGroup, batch: DataBatch, needs_labels: bool) -> int:
    """Bind the group to the size of the batch if it differs. Returns the number of samples."""
    size = common_size(*batch_arrays(batch, group.binding, needs_labels))
    if size is not None and size != group.get_batch_size():
        group.reshape(*group.binding.descs_for(size))
    return group.get_batch_size()


def _batches(data: Data, epoch: int) -> Iterable[DataBatch]:
    return data(epoch) if callable(data) else data


def _length(batches: Iterable[DataBatch]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def _reset(metric: Metric | None) -> None:
    reset: Callable[[], Any] | None = getattr(metric, "reset", None)
    if reset is not None:
        reset()


def _values(metric: Metric | None) -> dict[str, float]:
    """Name → value."""
    if metric is None:
        return {}
    name, value = metric.get()
    if isinstance(name, str):
        return {name: float(value)}
    return {one: float(number) for one, number in zip(name, value, strict=True)}
