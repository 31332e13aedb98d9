"""The training loop over a group and a store."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from kvd.errors import ConfigError, NotAllowed
from kvd.optimizer import Optimizer
from kvd.parallel.batch import DataBatch
from kvd.parallel.group.input_checks import batch_arrays, common_size
from kvd.parallel.group.parameters import host_arrays
from kvd.parallel.group.pipeline import Feed, Update
from kvd.parallel.training.checkpoint import Checkpoint
from kvd.parallel.training.metric import Metric
from kvd.parallel.training.progress import Bar, bar_of

if TYPE_CHECKING:
    from kvd.client.store import KVStore
    from kvd.parallel.group.group import DataParallelExecutorGroup

#: What can be gone through once per epoch, or what gives that for an epoch (from 0): the same batches every time.
Data: TypeAlias = Iterable[DataBatch] | Callable[[int], Iterable[DataBatch]]

PLACE_KEY = "kvd:fit"  # rank 0's epoch, batch and step at the start


@dataclass(frozen=True)
class EpochReport:
    """How an epoch went for this worker.

    Attributes:
        epoch: from 0.
        steps: batches that were computed in it; less than the data has if the start of the epoch was done before.
        samples: in these.
        seconds: for all of it, evaluation included.
        train, evaluation: metric → value; empty without a metric, or without ``eval_data``.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    train: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


def fit(
    group: DataParallelExecutorGroup,
    kv: KVStore,
    data: Data,
    epochs: int,
    *,
    metric: Metric | None = None,
    optimizer: Optimizer | None = None,
    update: Update = "server",
    eval_data: Data | None = None,
    eval_metric: Metric | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_steps: int | None = None,
    resume: bool = False,
    uneven: bool = False,
    detect_anomaly: bool | None = None,
    progress: bool | Literal["auto"] = "auto",
    on_epoch: Callable[[EpochReport], None] | None = None,
) -> list[EpochReport]:
    """Train ``group`` through ``kv`` for ``epochs`` epochs. Every worker calls it, each with its own share of the data.

    *Smaller batches*, such as the last one, are not padded: the group is bound to their size, and the gradient is that
    of the mean over the samples there are. Where workers have unequal batches, a cluster with ``merge="weighted"``
    gives the gradient of the mean over all their samples. A batch with fewer samples than devices is an error.

    *Fewer batches* for some workers: set ``uneven`` on all. A worker whose data ends leaves the rounds for good
    (``kv.join``), the others go on, and all end with the same weights; the store takes no pushes of this job after it.
    States then stay each worker's own. Without ``uneven`` such data makes the longer ones wait until their deadline.
    With ``merge="sum"`` the gradient gets smaller by each worker that has left; ``"mean"`` and ``"weighted"`` do not.

    *States* (running means) are each worker's own while it trains; at the end all get rank 0's.

    *Restart*: a worker that is started anew after its death runs this call again. It goes back to the step in which
    its predecessor died, skips the batches before it, and ends with the same bits. Its states start anew.

    *Resume*: rank 0 alone reads and writes the checkpoint, the others need not have the file. In ``dist_sync`` and
    with one worker, a run that resumed ends with the bits of one that was never stopped.

    Arguments:
        data: batches, or a function from the epoch to batches. Epoch by epoch the same ones come again in a restart.
        metric: updated with the outputs of every training batch; reset at each epoch if it has ``reset``.
        optimizer, update: see `DataParallelExecutorGroup.bind_to`. Not looked at if the group is bound already.
        eval_data, eval_metric: evaluated after each epoch, by each worker for itself; None: a copy of ``metric``.
        checkpoint: a file, written after each epoch, and every ``checkpoint_steps`` batches; see
            `kvd.parallel.training.checkpoint.Checkpoint`.
        resume: go on from ``checkpoint`` if that file exists.
        detect_anomaly: sets that of the group; None: as it is.
        progress: a bar on stderr; ``"auto"``: if that is a terminal.
        on_epoch: called after each epoch.

    Returns:
        A report for each epoch in which this call computed something, in order.

    Raises:
        ConfigError: arguments that make no sense, or data that can be gone through once only.
        NotAllowed: ``resume`` with a group that is bound already, a file that is no checkpoint; a restart with
            ``update="local"``.
        InputMismatch, ShapeMismatch, DtypeMismatch: a batch or a checkpoint that does not fit the group.
        GradientAnomaly: see ``detect_anomaly``.
        NodeLost, RequestTimeout: of the store.
    """
    _check(data, epochs, kv, checkpoint, checkpoint_steps, resume, uneven, update)
    if detect_anomaly is not None:
        group.detect_anomaly = detect_anomaly
    path = None if checkpoint is None else Path(checkpoint)
    start = _start(group, kv, path if resume else None, optimizer, update)
    evaluator = eval_metric if eval_metric is not None else copy.deepcopy(metric)
    run = _Run(group, kv, start.feed, metric, path, checkpoint_steps, start.step, start.feed.done_before)
    reports = []
    with bar_of(progress) as bar:
        for epoch in range(start.epoch, epochs):
            report = run.epoch(epoch, data, start.batch if epoch == start.epoch else 0, eval_data, evaluator, bar)
            if report.steps:
                reports.append(report)
                if on_epoch is not None:
                    on_epoch(report)
    run.end(uneven)
    return reports


@dataclass(frozen=True)
class _Place:
    """Where a run starts."""

    feed: Feed
    epoch: int
    batch: int
    step: int


@dataclass
class _Run:
    """One call of `fit` at work.

    Attributes:
        step: batches done before the next, of this run and those that it goes on from.
        to_skip: batches that a predecessor of this worker did.
    """

    group: DataParallelExecutorGroup
    kv: KVStore
    feed: Feed
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
        """Every worker is done, and has the last weights and rank 0's states."""
        self.feed.receive()
        self.feed.done_before = self.to_skip  # a later fit of the same program goes on from there
        if uneven and self.kv.num_workers > 1:
            self.kv.join()
            self.kv.barrier("kvd:fit:end")
            self.feed.pull()
        else:
            self.feed.share_states()

    def _train(self, batch: DataBatch) -> int:
        for executor in self.group.executors:
            executor.step = self.step  # chance is that of the step, also after a restart
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

        In rounds nobody can be a step ahead of it then. Asynchronous workers wait for it, so that the optimizer's
        state is that of one moment.
        """
        if self.checkpoint is None:
            return
        self.feed.receive()
        waits = self.kv.merge == "" and self.kv.num_workers > 1
        if waits:
            self.kv.barrier(f"kvd:fit:save:{epoch}")
            self.feed.pull()
        if self.kv.rank == 0:
            params = host_arrays(self.group.executors, self.group.param_names)
            aux = host_arrays(self.group.executors, self.group.aux_names)
            self.group.get_params(params, aux)
            saved = Checkpoint(params, aux, epoch, batch, self.step, self.feed.local_states())
            saved.write(self.checkpoint, self.kv.save_optimizer_states if self.feed.update == "server" else None)
        if waits:
            self.kv.barrier(f"kvd:fit:saved:{epoch}")


def _start(
    group: DataParallelExecutorGroup, kv: KVStore, path: Path | None, optimizer: Optimizer | None, update: Update
) -> _Place:
    """Bind the group, from the checkpoint if there is one, and learn from rank 0 where to start."""
    saved = None
    if path is not None:
        if group.feed is not None:
            raise NotAllowed("resume sets the parameters, which the store has already: let fit bind the group")
        if kv.rank == 0 and path.exists():
            saved = Checkpoint.read(path)
            group.set_params(saved.params, saved.aux)
    feed = group.feed or group.bind_to(kv, optimizer=optimizer, update=update)
    if feed.kv is not kv:
        raise NotAllowed("the group is bound to another store")
    place = np.array([saved.epoch, saved.batch, saved.step] if saved else [0, 0, 0], np.int64)
    kv.broadcast(PLACE_KEY, place)
    if update == "local":
        _share_local_states(feed, kv, saved)
    elif saved is not None and saved.server_states and path is not None and not feed.done_before:
        kv.load_optimizer_states(path.with_name(saved.server_states))
    if path is not None:
        kv.barrier("kvd:fit:resumed")
    return _Place(feed, int(place[0]), int(place[1]), int(place[2]))


def _share_local_states(feed: Feed, kv: KVStore, saved: Checkpoint | None) -> None:
    """Every worker updates for itself, so each needs the state that rank 0 has read."""
    states = dict(saved.local_states) if saved else {}
    packed = Checkpoint({}, {}, local_states=states).packed() if states else b""
    size = np.array([len(packed)], np.int64)
    kv.broadcast(f"{PLACE_KEY}:states:size", size)
    if not size[0]:
        return
    data = np.frombuffer(packed, np.uint8).copy() if packed else np.empty(int(size[0]), np.uint8)
    kv.broadcast(f"{PLACE_KEY}:states", data)
    feed.load_local_states(Checkpoint.unpacked(data.tobytes()).local_states)


def _fit_to(group: DataParallelExecutorGroup, batch: DataBatch, needs_labels: bool) -> int:
    """Bind to the size of the batch if it has another; how many samples it has."""
    size = common_size(*batch_arrays(batch, group.binding, needs_labels))
    if size is not None and size != group.get_batch_size():
        group.reshape(
            [desc.with_batch_size(size) for desc in group.data_shapes],
            [desc.with_batch_size(size) for desc in group.label_shapes],
        )
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


def _check(
    data: Data,
    epochs: int,
    kv: KVStore,
    checkpoint: Any,
    checkpoint_steps: int | None,
    resume: bool,
    uneven: bool,
    update: Update,
) -> None:
    """Raises ConfigError for arguments that make no sense."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
        raise ConfigError(f"epochs must be a whole number ≥ 0, not {epochs!r}", setting="epochs")
    if not callable(data) and isinstance(data, Iterator):
        raise ConfigError(
            "data can be gone through only once: pass a list, a loader, or a function from the epoch to batches",
            setting="data",
        )
    if (resume or checkpoint_steps is not None) and checkpoint is None:
        raise ConfigError("resume and checkpoint_steps need a checkpoint: the path of its file", setting="checkpoint")
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ConfigError(f"checkpoint_steps must be above 0, not {checkpoint_steps}", setting="checkpoint_steps")
    if checkpoint_steps is not None and kv.merge == "" and kv.num_workers > 1:
        raise ConfigError(
            "asynchronous workers are at different steps: they write checkpoints after epochs only",
            setting="checkpoint_steps",
        )
    if uneven and update == "local" and kv.num_workers > 1:
        raise ConfigError(
            'uneven needs update="server": a worker that left the rounds gets its last weights from the store',
            setting="uneven",
        )
