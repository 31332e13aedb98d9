"""Where a call of `fit` starts: from nothing, from a checkpoint, or where a predecessor of this worker died."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvd.client.facades.blocking import KVStore
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.parallel.group.group import DataParallelExecutorGroup
from kvd.parallel.group.pipeline import GradientPipeline, Update
from kvd.parallel.training.checkpoint import Checkpoint

PLACE_KEY = "kvd:fit"  # rank 0's epoch, batch and step at the start


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        pipeline: of the group, which is bound now.
        epoch, batch: the first batch to compute; both from 0.
        step: batches done before it.
    """

    pipeline: GradientPipeline
    epoch: int
    batch: int
    step: int


def find_start(
    group: DataParallelExecutorGroup, kv: KVStore, path: Path | None, optimizer: Optimizer | None, update: Update
) -> Start:
    """Bind the group, from the checkpoint if there is one, and learn from rank 0 where to start."""
    saved = None
    if path is not None:
        if group.pipeline is not None:
            raise NotAllowed("resume sets the parameters, which the store has already: let fit bind the group")
        if kv.rank == 0 and path.exists():
            saved = Checkpoint.read(path)
            group.set_params(saved.params, saved.aux)
    pipeline = group.pipeline or group.bind_to(kv, optimizer=optimizer, update=update)
    if pipeline.kv is not kv:
        raise NotAllowed("the group is bound to another store")
    place = np.array([saved.epoch, saved.batch, saved.step] if saved else [0, 0, 0], np.int64)
    kv.broadcast(PLACE_KEY, place)
    if update == "local":
        _share_local_states(pipeline, kv, saved)
    elif saved is not None and saved.server_states and path is not None and not pipeline.done_before:
        kv.load_optimizer_states(path.with_name(saved.server_states))
    if path is not None:
        kv.barrier("kvd:fit:resumed")
    return Start(pipeline, int(place[0]), int(place[1]), int(place[2]))


def _share_local_states(pipeline: GradientPipeline, kv: KVStore, saved: Checkpoint | None) -> None:
    """Every worker updates for itself, so each needs the state that rank 0 has read."""
    states = dict(saved.local_states) if saved else {}
    packed = Checkpoint({}, {}, local_states=states).packed() if states else b""
    size = np.array([len(packed)], np.int64)
    kv.broadcast(f"{PLACE_KEY}:states:size", size)
    if not size[0]:
        return
    data = np.frombuffer(packed, np.uint8).copy() if packed else np.empty(int(size[0]), np.uint8)
    kv.broadcast(f"{PLACE_KEY}:states", data)
    pipeline.load_local_states(Checkpoint.unpacked(data.tobytes()).local_states)
