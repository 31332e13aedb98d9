"""Writes a snapshot of a job whose workers need not know of it: the servers keep all keys as they were at one moment
(`kvd.client.cluster.captures`), and are asked for one part after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.values import Array
from kvd.client.cluster.ahead import one_ahead
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.captures import Captures, Whole
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.stored_tables import read_pages
from kvd.compute.tensors import named_dtype
from kvd.core import requests
from kvd.core.places import PlaceKind, kind_of, step_of
from kvd.core.requests import Item
from kvd.errors import KeyNotFound, NotAllowed, SnapshotError
from kvd.optimizer import Optimizer, from_wire
from kvd.protocol.messages import Captured, CapturedSlice, FetchCaptured, SliceId, Values
from kvd.protocol.specs import DTYPES, KeySpec, gradients_text, padded
from kvd.snapshots.folder import is_taken
from kvd.snapshots.layout import KeyMark, Layout
from kvd.snapshots.manifest import Origin
from kvd.snapshots.writer import PART_BYTES, KeyContent, SnapshotWriter, table_content
from kvd.tables.description import RowSparse
from kvd.tables.stored_rows import Page, joined
from kvd.tables.wire import table_of_spec

MESSAGE_BYTES = 4 << 20  # of the values in one answer
MOST_SLICES = 256  # in one answer
TRIES = 3


class Saved(NamedTuple):
    """What was written.

    Attributes:
        steps: how many steps of its loops the program had made.
        is_one_step: whether all keys are of the same step.
        oldest, newest: the versions of the keys.
    """

    keys: int
    nbytes: int
    steps: int
    is_one_step: bool
    oldest: int
    newest: int


class _Lost(Exception):
    """A server does not have what it has captured any more."""


class _Piece(NamedTuple):
    """A captured slice."""

    partition: int
    slice_id: SliceId
    found: CapturedSlice
    slots: tuple[tuple[str, str], ...]


class SnapshotSaver:
    """Saves the job that an observer looks at. For coroutines on the engine's loop, see `Engine.run`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._captures = Captures(engine)

    async def save(self, folder: Path) -> Saved:
        """Writes the folder.

        Raises:
            SnapshotError: it cannot be written, or the name is taken.
            NotAllowed: the job has no keys; the workers keep the weights of one; another key than an operator's.
            RequestTimeout, NodeLost: a server does not answer in time, or is gone.
        """
        await asyncio.to_thread(_check_is_free, folder)
        for left in range(TRIES - 1, -1, -1):
            try:
                return await self._save(folder)
            except (_Lost, KeyNotFound) as error:  # a server has died, or a key was deleted meanwhile
                if not left:
                    text = f"the servers or the keys changed {TRIES} times while {folder} was written: try again"
                    raise SnapshotError(text, path=str(folder)) from error
        raise AssertionError

    async def _save(self, folder: Path) -> Saved:
        deadline = Deadline(self._engine.config.request_timeout_s)
        specs = await self._specs(deadline)
        whole = await self._captures.take(tuple([Item(name, spec) for name, spec in specs.items()]), deadline)
        try:
            return await self._write(folder, specs, whole)
        finally:
            await self._captures.end(whole.number, Deadline(self._engine.config.request_timeout_s))

    async def _specs(self, deadline: Deadline) -> dict[str, KeySpec]:
        """The keys that are live, by name."""
        entries = [entry for _, entry in await list_keys(self._engine) if entry.live]
        names = sorted({entry.key for entry in entries})
        if not names:
            job = self._engine.config.job
            text = (
                f"job {job!r} has no keys, so there is nothing to save: wait until its workers have made some with init"
            )
            raise NotAllowed(f"{text} (kvd keys shows them), or name another job with --job (kvd jobs lists them)")
        asked = [self._engine.submit(requests.DescribeKey(name), deadline.left_s()) for name in names]
        specs: dict[str, KeySpec] = {name: await promise for name, promise in zip(names, asked, strict=True)}
        for name, spec in specs.items():
            if spec.gradients:
                raise NotAllowed(gradients_text(name), key=name)
        return specs

    async def _write(self, folder: Path, specs: Mapping[str, KeySpec], whole: Whole) -> Saved:
        origin = self._origin(whole)
        pieces: dict[str, list[_Piece]] = {}
        for part, slice_id, found in whole.slices():
            assert isinstance(part.answer, Captured)
            piece = _Piece(part.partition, slice_id, found, part.answer.slots[found.slots])
            pieces.setdefault(slice_id.key, []).append(piece)
        for own in pieces.values():
            own.sort(key=lambda piece: piece.slice_id.slice_index)
        writer = await asyncio.to_thread(SnapshotWriter, folder, origin)
        values_only = {name: spec for name, spec in specs.items() if spec.table is None}
        batches = Layout(PART_BYTES).next({name: KeyMark(spec.nbytes, 0) for name, spec in values_only.items()})
        work = [partial(self._fetch, whole.number, specs, pieces, names) for names in batches]
        tables = [
            partial(self._fetch_table, whole.number, name, spec, pieces[name])
            for name, spec in specs.items()
            if spec.table is not None
        ]
        nbytes = sum(spec.nbytes for spec in specs.values())
        try:
            async with one_ahead(work) as fetched:  # the next keys come while these are written
                async for values in fetched:
                    await asyncio.to_thread(_add, writer, values, pieces, specs)
            async with one_ahead(tables) as contents:
                async for content in contents:
                    await asyncio.to_thread(writer.add, *content)
                    nbytes += content.value.nbytes
            await asyncio.to_thread(writer.finish)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(writer.abort))
            raise
        versions = [piece.found.version for own in pieces.values() for piece in own]
        return Saved(len(specs), nbytes, origin.steps, origin.one_step, min(versions), max(versions))

    def _origin(self, whole: Whole) -> Origin:
        engine, settings = self._engine, self._engine.machine.view.settings
        job, _, _ = engine.config.job.partition("@")
        return Origin(
            job,
            f"dist_{settings.mode}",
            f"{engine.session.run:x}",
            _steps(whole),
            settings.num_workers,
            _optimizer(whole),
            whole.is_one_step,
        )

    # ── tables ──

    async def _fetch_table(self, number: int, name: str, spec: KeySpec, pieces: Sequence[_Piece]) -> KeyContent:
        """All rows of a table, as they are kept."""
        description = table_of_spec(spec)
        found = await asyncio.gather(*[self._fetch_part(number, description, piece) for piece in pieces])
        stored = joined([page.stored for part in found for page in part], description)
        return table_content(name, spec, stored, max(piece.found.version for piece in pieces))

    async def _fetch_part(self, number: int, description: RowSparse, piece: _Piece) -> Sequence[Page]:
        async def ask(first: int) -> Any:
            message = FetchCaptured(0, number, (piece.slice_id,), first)
            (answer,) = await self._engine.call(requests.Control((message,), partitions=(piece.partition,)))
            if not isinstance(answer[0], Values):
                raise _Lost
            return answer

        return await read_pages(ask, description, piece.slice_id.key)

    # ── values and states ──

    async def _fetch(
        self, number: int, specs: Mapping[str, KeySpec], pieces: Mapping[str, Sequence[_Piece]], names: Sequence[str]
    ) -> dict[str, tuple[Array, dict[str, Array]]]:
        """The values of these keys, and the arrays of their states."""
        values: dict[str, tuple[Array, dict[str, Array]]] = {}
        for name in names:
            spec, slots = specs[name], _slots(pieces[name])
            count = spec.nbytes // DTYPES[spec.dtype].itemsize
            value = np.empty(count, named_dtype(spec.dtype))
            values[name] = value, {slot: np.empty(count, dtype) for slot, dtype in slots}
        lists = _messages([piece for name in names for piece in pieces[name]], specs)
        asked = [
            self._engine.submit(
                requests.Control(
                    (FetchCaptured(0, number, tuple([piece.slice_id for piece in some])),),
                    partitions=(some[0].partition,),
                )
            )
            for some in lists
        ]
        for some, promise in zip(lists, asked, strict=True):
            ((answer, payload, nbytes),) = await promise
            if not isinstance(answer, Values):
                raise _Lost
            _take(some, specs, values, payload, nbytes)
        return {name: (value.reshape(specs[name].shape), state) for name, (value, state) in values.items()}


def _check_is_free(folder: Path) -> None:
    try:
        taken = is_taken(folder)
    except OSError as error:
        raise SnapshotError(f"{folder}: {error.strerror}: choose another folder", path=str(folder)) from error
    if taken:
        text = f"{folder} is there already: choose another name for each snapshot, or move it away"
        raise SnapshotError(text, path=str(folder))


def _steps(whole: Whole) -> int:
    """How many steps of its loops every worker has made; 0 in a loop of shared steps, which starts over."""
    places: dict[int, int] = {}
    for part in whole.parts:
        if isinstance(part.answer, Captured):
            for rank, place in part.answer.reached:
                places[rank] = max(places.get(rank, 0), place)
    if any(kind_of(place) is not PlaceKind.OUTSIDE for place in places.values()):
        return 0
    return min(map(step_of, places.values()), default=0)


def _optimizer(whole: Whole) -> Optimizer | None:
    """That of the keys that training has brought farthest."""
    answers = [
        (found.step, part.answer.optimizers[found.optimizer])
        for part, _, found in whole.slices()
        if isinstance(part.answer, Captured)
    ]
    wire = max(answers, key=lambda answer: answer[0])[1]
    return None if wire is None else from_wire(wire)


def _slots(pieces: Sequence[_Piece]) -> tuple[tuple[str, str], ...]:
    """The arrays of a key's state. A slice that nothing was pushed to yet has none."""
    slots = {piece.slots for piece in pieces}
    if len(slots) > 1:
        key = pieces[0].slice_id.key
        raise NotAllowed(f"some slices of key {key!r} have had their first update, and others have not: try again")
    return slots.pop()


def _messages(pieces: Sequence[_Piece], specs: Mapping[str, KeySpec]) -> list[list[_Piece]]:
    """The slices in lists for one server each."""
    lists: list[list[_Piece]] = []
    open_: dict[int, tuple[list[_Piece], int]] = {}
    for piece in pieces:
        spec = specs[piece.slice_id.key]
        own = _nbytes(piece, spec)
        some, nbytes = open_.get(piece.partition, ([], 0))
        if not some or nbytes + own > MESSAGE_BYTES or len(some) >= MOST_SLICES:
            some, nbytes = [], 0
            lists.append(some)
        some.append(piece)
        open_[piece.partition] = some, nbytes + own
    return lists


def _nbytes(piece: _Piece, spec: KeySpec) -> int:
    nbytes = spec.slice_nbytes(piece.slice_id.slice_index)
    count = nbytes // DTYPES[spec.dtype].itemsize
    return nbytes + sum(count * np.dtype(dtype).itemsize for _, dtype in piece.slots)


def _take(
    pieces: Sequence[_Piece],
    specs: Mapping[str, KeySpec],
    values: Mapping[str, tuple[Array, dict[str, Array]]],
    payload: Any,
    nbytes: int,
) -> None:
    """Copies slices to where they belong. Each array begins at a multiple of 8."""
    offset = end = 0
    for piece in pieces:
        spec, (value, state) = specs[piece.slice_id.key], values[piece.slice_id.key]
        start, size = spec.span(piece.slice_id.slice_index)
        itemsize = DTYPES[spec.dtype].itemsize
        first, count = start // itemsize, size // itemsize
        for array in (value, *[state[slot] for slot, _ in piece.slots]):
            end = offset + count * array.itemsize
            if end > nbytes:
                raise _Lost
            if count:
                array[first : first + count] = np.frombuffer(payload, array.dtype, count, offset)
            offset = padded(end)


def _add(
    writer: SnapshotWriter,
    values: Mapping[str, tuple[Array, dict[str, Array]]],
    pieces: Mapping[str, Sequence[_Piece]],
    specs: Mapping[str, KeySpec],
) -> None:
    for name, (value, state) in values.items():
        found = [piece.found for piece in pieces[name]]
        clock, updates = max(one.version for one in found), max(one.updates for one in found)
        writer.add(name, value, clock, updates, state, specs[name].merge)
