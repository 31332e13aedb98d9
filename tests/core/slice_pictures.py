"""All that a server has of a slice, as values that can be compared."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import Export, ReadPart, Span
from kvd.node.jobs.runner import JobRunner
from kvd.optimizer import to_wire, with_hyperparameters

ANY_SIZE = 1 << 30


def bytes_of(span: Span) -> bytes:
    whole = memoryview(span.buffer).cast("B") if span.nbytes else b""
    return bytes(whole[span.offset : span.offset + span.nbytes])


def _state_of(runner: JobRunner, slice_: Any) -> Any:
    """What the optimizer keeps; of a part of a table, the rows too, as they are and as they were."""
    if slice_.spec.table is None:
        return runner.run(Export(0, slice_.key, slice_.index)).result
    piece, following = runner.run(ReadPart(0, slice_.key, slice_.index, 0, ANY_SIZE)).result
    pieces = [piece]
    while following is not None:
        piece, following = runner.run(ReadPart(0, slice_.key, slice_.index, following, ANY_SIZE)).result
        pieces.append(piece)
    return 0, (), pieces


def _version_of(slice_: Any, version: Any) -> Any:
    return bytes_of(slice_.span(version)) if slice_.spec.table is None else version.number


def picture_of(runner: JobRunner, slice_: Any) -> dict[str, Any]:
    """All that a server has, or holds, of a slice."""
    group, log = slice_.group, slice_.log
    step, slots, spans = _state_of(runner, slice_)
    optimizer, changes = group.optimizer, list(group.changes)
    while changes and changes[0].from_round <= log.closed + 1 and optimizer is not None:
        optimizer = with_hyperparameters(optimizer, changes.pop(0).changes)
    generation = group.generation
    return {
        "origin": (slice_.creation, slice_.creator, slice_.request, slice_.spec, slice_.loaded, slice_.partition),
        "optimizer": None if optimizer is None else to_wire(optimizer),
        "generation": generation,
        "changes": changes,
        "log": (log.version, log.closed, log.step, log.previous_step, log.newest),
        "current": _version_of(slice_, log.current),
        "encoded": {version: (each.method, bytes_of(each.span)) for version, each in slice_.encoded.items()},
        "previous": None if log.previous is None else _version_of(slice_, log.previous),
        "state": (step, slots, [bytes_of(span) for span in spans]),
        "shared": (list(log.shared.starts), list(log.shared.ends)),
        "progress": {
            rank: (
                log.own_clock(rank),
                log.counted_clock(rank),
                log.committed_clock(rank),
                log.resume_clock(rank),
                at.skipped,
                at.place,
                min(at.begun, log.resume_clock(rank)),
                at.trained if at.trained <= log.resume_clock(rank) else 0,
            )
            for rank, at in sorted(log.progress.items())
        },
    }
