"""Slices as they are sent to another server, and as it makes them again: all that a slice is, besides its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvd.core.machine import Buffer, Span, TableVersion
from kvd.core.membership import ViewState
from kvd.core.open_waits import Pace
from kvd.core.server.counted_steps import CountedSteps
from kvd.core.server.groups import Change, Slice
from kvd.core.server.progress import WorkerProgress
from kvd.core.server.rounds import SliceLog
from kvd.optimizer import Optimizer, changes_to_wire, to_wire
from kvd.protocol.messages import Install, LaterChange, OptimizerUse, Origin, RankProgress, SliceImage
from kvd.protocol.specs import KeySpec

MOST_BYTES = 8 << 20  # of the values in one message
HEADER_BUDGET = 48 << 10  # of the 64 KiB of a header, for the images


class OptimizerState(NamedTuple):
    """The state of a slice's optimizer, as Export gives it."""

    step: int = 0
    slots: tuple[tuple[str, str], ...] = ()
    spans: tuple[Span, ...] = ()


def install_of(
    partition: int, slices: Sequence[Slice], states: Mapping[Slice, OptimizerState]
) -> tuple[Install, tuple[Span, ...]]:
    """The message by which another server holds these slices as they are, and its payload.

    Args:
        states: of their optimizers; of a slice that is not in it, there is none.
    """
    specs: dict[KeySpec, int] = {}
    optimizers: list[Optimizer | None] = []
    images = []
    payload: list[Span] = []
    for slice_ in slices:
        log, optimizer, state = slice_.log, slice_.group.optimizer, states.get(slice_, OptimizerState())
        spec = specs.setdefault(slice_.spec, len(specs))
        if optimizer not in optimizers:
            optimizers.append(optimizer)
        images.append(image_of(slice_, spec, optimizers.index(optimizer), state))
        payload.append(slice_.span(log.current))
        if log.previous is not None:
            payload.append(slice_.span(log.previous))
        payload += state.spans
    wire = tuple([None if optimizer is None else to_wire(optimizer) for optimizer in optimizers])
    return Install(0, partition, tuple(specs), wire, tuple(images)), tuple(payload)


def image_of(slice_: Slice, spec: int, optimizer: int, state: OptimizerState) -> SliceImage:
    """What there is to know of a slice no round of which is closing. What is staged is left out: its workers send it
    again.

    Args:
        spec, optimizer: places in the lists of the message.
    """
    group, log = slice_.group, slice_.log
    changes = tuple([LaterChange(change.from_round, changes_to_wire(change.changes)) for change in group.changes])
    shared = log.shared
    return SliceImage(
        slice_.key,
        slice_.index,
        slice_.creation,
        spec,
        Origin(slice_.creator, slice_.request, *slice_.loaded),
        OptimizerUse(optimizer, group.generation, changes, state.step, state.slots),
        log.version,
        log.step,
        log.previous_step,
        log.previous is not None,
        tuple([_progress_image(log, rank) for rank in sorted(log.progress)]),
        tuple(zip(shared.starts, shared.ends, strict=True)),
        log.newest,
        *_updates_of(log),
    )


def _updates_of(log: SliceLog) -> tuple[int, int]:
    """Of a part of a table: in its version, and in the one before."""
    numbers = [version.number if isinstance(version, TableVersion) else 0 for version in (log.current, log.previous)]
    return numbers[0], numbers[1]


def _progress_image(log: SliceLog, rank: int) -> RankProgress:
    progress = replace(log.progress[rank])
    progress.fall_back(log.resume_clock(rank))
    return RankProgress(
        rank,
        progress.staged,
        progress.counted,
        progress.committed,
        progress.skipped,
        progress.place,
        progress.begun,
        progress.trained,
    )


def log_of(image: SliceImage, view: ViewState, current: Buffer, previous: Buffer | None) -> SliceLog:
    """The log of a slice that is like its image, with these bytes."""
    settings = view.settings
    log = SliceLog(view.is_sync, settings.rounds_ahead, settings.staleness, current, previous)
    log.version = log.closed = image.version
    log.pace = Pace(image.version)
    log.step, log.previous_step, log.newest = image.step, image.previous_step, image.newest
    for rank, staged, counted, committed, skipped, place, begun, trained in image.progress:
        log.progress[rank] = WorkerProgress(staged, counted, committed, skipped, place, begun, trained)
    starts = [start for start, _ in image.counted_steps]
    log.shared = CountedSteps(starts, [end for _, end in image.counted_steps])
    return log


def packs(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices in lists whose images and bytes fit into a message each."""
    found: list[list[Slice]] = []
    nbytes = header = 0
    for slice_ in slices:
        own = _image_nbytes(slice_)
        if not found or nbytes + slice_.nbytes > MOST_BYTES or header + own > HEADER_BUDGET:
            found.append([])
            nbytes = header = 0
        found[-1].append(slice_)
        nbytes += slice_.nbytes
        header += own
    return found


def _image_nbytes(slice_: Slice) -> int:
    """What an image takes in a header, at most: as msgpack, a character is at most 4 bytes, and a number 9."""
    log, changes = slice_.log, slice_.group.changes
    spec = 9 * len(slice_.spec.shape) + 32
    later = sum([_change_nbytes(change) for change in changes])
    return 4 * len(slice_.key) + spec + 200 + 75 * len(log.progress) + 18 * len(log.shared.starts) + later


def _change_nbytes(change: Change) -> int:
    multipliers = [name for value in change.changes.values() if isinstance(value, Mapping) for name in value]
    return 300 + sum([4 * len(name) + 12 for name in multipliers])
