"""The training loop over a group and a store."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from kvd.client.facades.blocking import KVStore
from kvd.errors import ConfigError
from kvd.optimizer import Optimizer
from kvd.parallel.group.group import DataParallelExecutorGroup
from kvd.parallel.group.monitoring import Metric
from kvd.parallel.group.pipeline import Update
from kvd.parallel.training.progress import bar_of
from kvd.parallel.training.run import Data, EpochReport, Run
from kvd.parallel.training.start import find_start


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
    of the mean over the samples they have. Where workers have unequal batches, a cluster with ``merge="weighted"``
    gives the gradient of the mean over all their samples. A batch with fewer samples than devices is an error.

    *Fewer batches* for some workers: set ``uneven`` on all. A worker whose data ends leaves the rounds for good
    (``kv.join``), the others continue, and all end with the same weights; the store takes no pushes of this job after
    it. States then stay each worker's own. Without ``uneven``, workers with more batches wait until their deadline.
    The gradient is then the mean over those that are left.

    *States* (running means) are each worker's own while it trains; at the end all get rank 0's.

    *Restart*: a worker that is restarted after its death runs this call again. It goes back to the step in which its
    predecessor died, skips the batches before it, and ends with the same bits. Its states start from the beginning.

    *Resume*: only rank 0 reads and writes the checkpoint; the others do not need the file. In ``dist_sync`` and with
    one worker, a resumed run ends with the bits of a run that was never stopped.

    Arguments:
        data: batches, or a function from the epoch to batches. After a restart each epoch must have the same ones.
        metric: updated with the outputs of every training batch; reset at each epoch if it has ``reset``.
        optimizer, update: see `DataParallelExecutorGroup.bind_to`. Ignored if the group is bound already.
        eval_data, eval_metric: evaluated after each epoch, by each worker for itself; None: a copy of ``metric``.
        checkpoint: a file, written after each epoch, and every ``checkpoint_steps`` batches; see
            `Checkpoint`.
        resume: continue from ``checkpoint`` if that file exists.
        detect_anomaly: sets that of the group; None: leaves it.
        progress: a bar on stderr; ``"auto"``: if it is a terminal.
        on_epoch: called after each epoch.

    Returns:
        A report for each epoch in which this call computed something, in order.

    Raises:
        ConfigError: invalid arguments, or data that can be iterated only once.
        NotAllowed: ``resume`` with a group that is bound already, a file that is not a checkpoint; a restart with
            ``update="local"``.
        InputMismatch, ShapeMismatch, DtypeMismatch: a batch or a checkpoint that does not fit the group.
        GradientAnomaly: see ``detect_anomaly``.
        NodeLost, RequestTimeout: of the store.
    """
    _check(data, epochs, kv, checkpoint, checkpoint_steps, resume, uneven, update)
    if detect_anomaly is not None:
        group.detect_anomaly = detect_anomaly
    path = None if checkpoint is None else Path(checkpoint)
    start = find_start(group, kv, path if resume else None, optimizer, update)
    evaluator = eval_metric if eval_metric is not None else copy.deepcopy(metric)
    run = Run(group, kv, start.pipeline, metric, path, checkpoint_steps, start.step, start.pipeline.done_before)
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
    """Raises ConfigError for invalid arguments."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
        raise ConfigError(f"epochs must be a whole number ≥ 0, not {epochs!r}", setting="epochs")
    if not callable(data) and isinstance(data, Iterator):
        raise ConfigError(
            "data can be iterated only once: pass a list, a loader, or a function from the epoch to batches",
            setting="data",
        )
    if (resume or checkpoint_steps is not None) and checkpoint is None:
        raise ConfigError("resume and checkpoint_steps need a checkpoint: the path of its file", setting="checkpoint")
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ConfigError(f"checkpoint_steps must be above 0, not {checkpoint_steps}", setting="checkpoint_steps")
    if checkpoint_steps is not None and kv.merge == "" and kv.num_workers > 1:
        raise ConfigError(
            "asynchronous workers are at different steps: they write checkpoints only after epochs",
            setting="checkpoint_steps",
        )
    if uneven and update == "local" and kv.num_workers > 1:
        raise ConfigError(
            'uneven needs update="server": a worker that has left the rounds gets its last weights from the store',
            setting="uneven",
        )
