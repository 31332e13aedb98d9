"""Slices that a leader sends as they are, made again: their bytes, and the states of their optimizers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvd.core.machine import Buffer, Create, FirstBytes, JobDone, Load, LoadRows, Received, Span, TableVersion
from kvd.core.refusals import refusal_of
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Change, Slice
from kvd.core.server.images import log_of
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_names import OptimizerNames
from kvd.core.session import SchedulerSession
from kvd.errors import KvdError, ProtocolError
from kvd.optimizer import Optimizer, changes_from_wire
from kvd.protocol.messages import ErrorCode, HoldState, Install, InstallRows, NotYetReason, SliceImage
from kvd.protocol.specs import DTYPES, KeySpec, padded


class _New(NamedTuple):
    """A slice of an Install, and its parts of the payload."""

    image: SliceImage
    spec: KeySpec
    optimizer: Optimizer | None
    changes: tuple[Change, ...]
    current: Span
    previous: Span | None
    state: Span


@dataclass(slots=True, eq=False)
class _Making:
    """An Install whose slices are being made.

    Attributes:
        slices: those that are not in the table yet.
        buffers: their bytes: of each slice those of the version before, if there is one, and those of its version.
        is_loaded: whether the shell has the state of the first one's optimizer.
    """

    event: Received
    request: int
    partition: int
    table: KeyTable
    then: Callable[[], None]
    slices: deque[_New]
    buffers: deque[Buffer] = field(default_factory=deque)
    is_loaded: bool = False


class Installs:
    """Makes slices from their images.

    Args:
        grant: whether there is memory for so many more bytes of slices.
        grant_rows: whether there is for so many more of rows of tables.
        ended: a job for this partition has ended.
    """

    def __init__(
        self,
        session: SchedulerSession,
        effects: ServerEffects,
        optimizers: OptimizerNames,
        grant: Callable[[int], bool],
        grant_rows: Callable[[int], bool],
        ended: Callable[[int], None],
    ) -> None:
        self._view = session.view
        self._session = session
        self._effects = effects
        self._optimizers = optimizers
        self._grant = grant
        self._grant_rows = grant_rows
        self._ended = ended
        self._busy = Counter[int]()  # jobs by partition

    def is_busy(self, partition: int) -> bool:
        """Whether slices of this partition are being made."""
        return self._busy[partition] > 0

    # ── slices ──

    def take(self, event: Received, message: Install, table: KeyTable, then: Callable[[], None]) -> None:
        """Makes the slices in `table`, and calls `then`; or tells the sender why not."""
        if self._busy[message.partition] or any(self._is_busy_slice(table, image) for image in message.images):
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, "slices are being made")
            return
        try:
            slices = self._parsed(event, message)
        except KvdError as error:
            self._effects.send(event.peer, refusal_of(message.request, error))
            return
        if not self._grant(sum(new.current.nbytes for new in slices)):
            self._refuse_memory(event, message.request, slices[0].image.key)
            return
        firsts = []
        for new in slices:
            firsts += _firsts_of(new)
        self._busy[message.partition] += 1
        making = _Making(event, message.request, message.partition, table, then, deque(slices))
        self._effects.start_job(lambda job: Create(job, tuple(firsts)), partial(self._created, making))

    def _is_busy_slice(self, table: KeyTable, image: SliceImage) -> bool:
        slice_ = table.slices.get((image.key, image.slice_index))
        return slice_ is not None and not slice_.group.is_quiescent

    def _parsed(self, event: Received, message: Install) -> list[_New]:
        slices = []
        offset = 0

        def span(nbytes: int) -> Span:
            nonlocal offset
            part = Span(event.payload, offset, nbytes)
            offset = padded(offset + nbytes)
            return part

        for image in message.images:
            if image.spec >= len(message.specs) or image.use.optimizer >= len(message.optimizers):
                raise ProtocolError(f"an image names spec {image.spec}, or optimizer {image.use.optimizer}: too large")
            spec = message.specs[image.spec]
            self._check_place(image.key, image.slice_index, spec, message.partition)
            optimizer = self._optimizers.find(message.optimizers[image.use.optimizer])
            if isinstance(optimizer, KvdError):
                raise optimizer
            changes = tuple([Change(later.from_round, changes_from_wire(later.changes)) for later in image.use.changes])
            nbytes = spec.slice_nbytes(image.slice_index)
            current = span(nbytes)
            previous = span(nbytes) if image.has_previous else None
            count = nbytes // DTYPES[spec.dtype].itemsize
            start = offset
            for _, dtype in image.use.slots:
                span(count * _itemsize(dtype))
            state = Span(event.payload, start, offset - start)
            slices.append(_New(image, spec, optimizer, changes, current, previous, state))
        if padded(event.nbytes) != offset:
            raise ProtocolError(f"an install of these {len(slices)} slices has {offset} bytes, not {event.nbytes}")
        last = slices[-1].state
        slices[-1] = slices[-1]._replace(state=last._replace(nbytes=last.nbytes - (offset - event.nbytes)))
        return slices

    def _check_place(self, key: str, index: int, spec: KeySpec, partition: int) -> None:
        if index >= spec.num_slices or self._view.partition_of(key, index) != partition:
            raise ProtocolError(f"slice {index} of {key!r} is not in {partition}")

    def _created(self, making: _Making, done: JobDone) -> None:
        if done.error is not None:
            self._fail(making, done.error)
            return
        making.buffers.extend(done.result)
        self._add_next(making)

    def _add_next(self, making: _Making) -> None:
        """Adds the slices one after the other, each when the shell has the state of its optimizer."""
        while making.slices:
            image, state = making.slices[0].image, making.slices[0].state
            use = image.use
            if (use.step or use.slots) and not making.is_loaded:
                load = partial(_load, image=image, source=state)
                self._effects.start_job(load, partial(self._loaded, making))
                return
            self._add(making, making.slices.popleft())
            making.is_loaded = False
        self._busy[making.partition] -= 1
        making.then()
        self._ended(making.partition)

    def _loaded(self, making: _Making, done: JobDone) -> None:
        if done.error is not None:
            self._fail(making, done.error)
            return
        making.is_loaded = True
        self._add_next(making)

    def _add(self, making: _Making, new: _New) -> None:
        image = new.image
        slice_ = making.table.add(
            image.key,
            image.slice_index,
            new.spec,
            log_of(image, self._view, *self._versions(making, new)),
            image.origin.creator,
            new.optimizer,
            image.origin.init,
            image.creation,
            making.partition,
            image.use.generation,
        )
        slice_.loaded = image.origin.loaded_by, image.origin.loaded
        slice_.group.changes = list(new.changes)

    def _versions(self, making: _Making, new: _New) -> tuple[Buffer, Buffer | None]:
        """The newest version, and the one before, of a slice whose bytes are here."""
        if new.spec.table is not None:
            current: TableVersion = making.buffers.popleft()
            return current, None if new.previous is None else current._replace(number=new.image.updates_before)
        previous = None if new.previous is None else making.buffers.popleft()
        return making.buffers.popleft(), previous

    def _fail(self, making: _Making, error: KvdError) -> None:
        self._busy[making.partition] -= 1
        self._effects.send(making.event.peer, refusal_of(making.request, error))
        self._ended(making.partition)

    # ── rows of tables ──

    def take_rows(self, event: Received, message: InstallRows, table: KeyTable, then: Callable[[int], None]) -> None:
        """Keeps a piece of a part of a table, and calls `then` with the memory of those that are here; or tells the
        sender why not."""
        key, index, partition = message.part.key, message.part.slice_index, message.partition
        if self._busy[partition]:
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, "slices are being made")
            return
        try:
            self._check_place(key, index, message.spec, partition)
            if message.spec.table is None or (key, index) in table.slices:
                raise ProtocolError(f"slice {index} of {key!r} is no table whose rows are to come")
        except KvdError as error:
            self._effects.send(event.peer, refusal_of(message.request, error))
            return
        if not self._grant_rows(event.nbytes):
            self._refuse_memory(event, message.request, key)
            return
        self._busy[partition] += 1

        def done(job: JobDone) -> None:
            self._busy[partition] -= 1
            if job.error is not None:
                self._effects.send(event.peer, refusal_of(message.request, job.error))
            else:
                then(job.result)
            self._ended(partition)

        piece = Span(event.payload, 0, event.nbytes)
        self._effects.start_job(lambda job: LoadRows(job, key, index, message.spec, piece), done)

    def _refuse_memory(self, event: Received, request: int, key: str) -> None:
        text = f"{self._session.name} has no memory to hold key {key!r}: raise memory_limit_bytes"
        self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, text, key)

    # ── the state of one slice ──

    def load(self, event: Received, message: HoldState, slice_: Slice, then: Callable[[], None]) -> None:
        """Gives a slice, which is not being updated, another state of its optimizer."""
        group, source = slice_.group, Span(event.payload, 0, event.nbytes)
        group.working = True
        self._busy[message.partition] += 1

        def done(job: JobDone) -> None:
            group.working = False
            self._busy[message.partition] -= 1
            if job.error is not None:
                self._effects.send(event.peer, refusal_of(message.request, job.error))
            else:
                if isinstance(job.result, TableVersion):
                    slice_.log.current = job.result
                then()
            self._ended(message.partition)

        self._effects.start_job(
            lambda job: Load(job, slice_.key, slice_.index, message.step, message.slots, source), done
        )


def _firsts_of(new: _New) -> list[FirstBytes]:
    """What makes the versions of a slice, the older one first; of a part of a table, all versions are one thing."""
    key, index, dtype = new.image.key, new.image.slice_index, new.spec.dtype
    if new.spec.table is not None:
        return [FirstBytes(key, index, dtype, new.current, new.spec, is_copied=new.image.updates > 0)]
    return [FirstBytes(key, index, dtype, span) for span in (new.previous, new.current) if span is not None]


def _load(job: int, image: SliceImage, source: Span) -> Load:
    return Load(job, image.key, image.slice_index, image.use.step, image.use.slots, source)


def _itemsize(dtype: str) -> int:
    """Of an array of an optimizer's state."""
    if dtype not in ("float32", "float64"):
        raise ProtocolError(f"optimizer states are float32 or float64, not {dtype!r:.40}")
    return DTYPES[dtype].itemsize
