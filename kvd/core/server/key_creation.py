"""How slices of new keys come to be: the Init messages of worker 0.

A message brings many slices. Each is taken or refused by itself, so that one key that cannot be made does not keep the
others from being made; all that are taken are created in one job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvd.core.machine import Create, FirstBytes, JobDone, Received, Span
from kvd.core.refusals import refusal_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.control import ServerControl
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import Slice
from kvd.core.server.images import install_of, packs
from kvd.core.server.keys import MAX_SLICES, KeyTable
from kvd.core.server.memory_use import MemoryUse
from kvd.core.server.optimizer_fit import unfit_error
from kvd.core.server.records import LED_ELSEWHERE, Records
from kvd.core.server.rounds import SliceLog
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import (
    MAX_TEXT_CHARS,
    Done,
    ErrorCode,
    HoldDropped,
    Init,
    NotYetReason,
    Outdated,
    Refused,
)
from kvd.protocol.specs import KeySpec, padded


class _New(NamedTuple):
    """A slice of an Init."""

    place: int  # in the message
    key: str
    slice_index: int
    spec: KeySpec
    num_slices: int  # of the key
    span: Span  # of the payload


class ListRefusals:
    """Which entries of a request's list are refused, and why the first of them is."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._first: tuple[ErrorCode, str, str] = (ErrorCode.REMOTE_ERROR, "", "")

    def add(self, place: int, error: ErrorCode, text: str, key: str) -> None:
        if not self._places:
            self._first = (error, text[:MAX_TEXT_CHARS], key)
        self._places.append(place)

    def answer(self, request: int) -> Done | Refused:
        """Done if none is refused."""
        if not self._places:
            return Done(request)
        error, text, key = self._first
        return Refused(request, error, text, key, places=tuple(sorted(self._places)))


class KeyCreation:
    """Creates slices, within the memory of this server.

    Args:
        take_away: removes the slices of a key that was deleted.
    """

    def __init__(
        self,
        session: SchedulerSession,
        table: KeyTable,
        effects: ServerEffects,
        attachments: Attachments,
        control: ServerControl,
        take_away: Callable[[str], list[tuple[int, HoldDropped]]],
        memory: MemoryUse,
        records: Records,
        elsewhere: Elsewhere,
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._control = control
        self._take_away = take_away
        self._memory = memory
        self._records = records
        self._elsewhere = elsewhere
        self._creating: set[tuple[str, int]] = set()  # slices whose Create is under way
        self._creating_keys = Counter[str]()  # how many of each key
        self._holding: set[tuple[str, int]] = set()  # slices that a backup has yet to hold

    def init(self, event: Received, init: Init) -> None:
        rank = self._attachments.rank_of(event, init.request)
        if rank is None:
            return
        slices = _slices_of(event, init)
        if isinstance(slices, str):
            self._effects.refuse(event.peer, init.request, ErrorCode.PROTOCOL_ERROR, slices, init.slices[0].key)
            return
        if any(self._elsewhere.has(event, init.request, new.key, new.slice_index) for new in slices):
            return
        if init.creation < self._table.creation:
            self._effects.send(event.peer, Outdated(init.request, self._table.creation))
            return
        names = {(new.key, new.slice_index) for new in slices}
        if not (names.isdisjoint(self._creating) and names.isdisjoint(self._holding)):
            return  # it is asked again, and this will be done by then
        if self._is_resting(event, init, slices):
            return
        leftovers = sorted({new.key for new in slices if rank == 0 and self._is_left_over(new.key, init.creation)})
        of_leftovers = [slice_ for key in leftovers for slice_ in self._table.of_key(key)]
        if not all(map(self._table.is_quiescent, leftovers)) or self._elsewhere.leaves(of_leftovers):
            text = "a slice is being updated"
            self._effects.not_yet(event.peer, init.request, NotYetReason.UPDATING, text, leftovers[0])
            return
        for key in leftovers:
            self._records.hold_in(self._take_away(key), lambda: None)
        refused = ListRefusals()
        wanted: list[_New] = []
        for new in slices:
            if self._is_made(event, init, new):
                continue
            error = self._error(new, rank)
            if error is not None:
                refused.add(new.place, *error, new.key)
            else:
                wanted.append(new)
                self._begin(new)
        if not wanted:
            self._effects.send(event.peer, refused.answer(init.request))
            return
        firsts = tuple([_first_of(new) for new in wanted])
        self._effects.start_job(
            lambda job: Create(job, firsts), lambda done: self._created(event, init, wanted, refused, done)
        )

    def _is_resting(self, event: Received, init: Init, slices: Sequence[_New]) -> bool:
        """Whether slices of these keys are being sent to another server, or compared. The sender is told."""
        resting = next((new.key for new in slices if self._table.is_resting(new.key)), "")
        if resting:
            text = "a slice is being sent to another server, or compared with what that has"
            self._effects.not_yet(event.peer, init.request, NotYetReason.UPDATING, text, resting)
        return bool(resting)

    def _is_left_over(self, key: str, creation: int) -> bool:
        """Whether the slices here are those of a deleted key. Worker 0 makes a key of its name only if there is none at
        its home; nobody was left to have the others dropped."""
        slices = self._table.of_key(key)
        return bool(slices) and slices[0].creation < creation and (key, 0) not in self._table.slices

    def _is_made(self, event: Received, init: Init, new: _New) -> bool:
        """Whether this slice came before. An init that was given up may be made again with other values."""
        old = self._table.slices.get((new.key, new.slice_index))
        if old is None or old.creator != event.sender or old.spec != new.spec:
            return False
        return init.request <= old.request or (old.creation == init.creation and self._table.is_in_use(new.key))

    def _error(self, new: _New, rank: int) -> tuple[ErrorCode, str] | None:
        """Why the slice cannot be created."""
        settings = self._view.settings
        if rank != 0:
            return ErrorCode.NOT_ALLOWED, "only worker 0 makes keys; the others wait for them"
        if self._table.is_in_use(new.key):
            return _in_use(new.key)
        if new.num_slices > MAX_SLICES * settings.num_servers:
            text = f"key {new.key!r} has {new.num_slices} slices: choose a larger slice_bytes"
            return ErrorCode.NOT_ALLOWED, text
        text = unfit_error(self._control.optimizer, new.key, new.spec)
        if text:
            return ErrorCode.NOT_ALLOWED, text
        old = self._table.slices.get((new.key, new.slice_index))
        nbytes = self._still_to_come(new) - (0 if old is None else old.nbytes)
        is_full = len(self._table.slices) + len(self._creating) >= MAX_SLICES
        text = self._memory.key_error(new.key, nbytes, is_full=is_full)
        return (ErrorCode.NOT_ALLOWED, text) if text else None

    def _still_to_come(self, new: _New) -> int:
        """The bytes of this slice, and of the others if it is the first of its key that comes here: a key that does not
        fit is refused before a part of it takes memory."""
        if new.num_slices == 1 or self._creating_keys[new.key] or self._table.of_key(new.key):
            return new.span.nbytes
        mine = self._session.rank
        return sum(
            new.spec.slice_nbytes(index)
            for index in range(new.num_slices)
            if index == new.slice_index or self._view.is_led_by(mine, new.key, index)
        )

    def _begin(self, new: _New) -> None:
        self._creating.add((new.key, new.slice_index))
        self._creating_keys[new.key] += 1
        self._memory.creating_nbytes += new.span.nbytes

    def _end(self, new: _New) -> None:
        self._creating.discard((new.key, new.slice_index))
        self._creating_keys[new.key] -= 1
        if not self._creating_keys[new.key]:
            del self._creating_keys[new.key]
        self._memory.creating_nbytes -= new.span.nbytes

    def _created(
        self, event: Received, init: Init, wanted: Sequence[_New], refused: ListRefusals, done: JobDone
    ) -> None:
        for new in wanted:
            self._end(new)
        if self._attachments.find(event.sender) is None:
            return  # it was replaced: its successor makes the keys again
        mine = self._session.rank
        if self._view.partitions and not all(self._view.is_led_by(mine, new.key, new.slice_index) for new in wanted):
            return  # it is sent to the server that leads these slices now
        if any(self._view.partition_of(new.key, new.slice_index) in self._elsewhere.leaving for new in wanted):
            return  # it is asked again, there or here
        if self._is_resting(event, init, wanted):
            return
        if init.creation < self._table.creation:  # since it was asked
            self._effects.send(event.peer, Outdated(init.request, self._table.creation))
            return
        if done.error is not None:
            error = refusal_of(init.request, done.error)
            for new in wanted:
                refused.add(new.place, error.error, error.text, new.key)
        added: dict[int, list[tuple[_New, Slice]]] = {}
        for new, buffer in zip(wanted, done.result or (), strict=False):
            unfit = unfit_error(self._control.optimizer, new.key, new.spec)
            if self._table.is_in_use(new.key):  # since it was asked
                refused.add(new.place, *_in_use(new.key), new.key)
            elif unfit:  # it was set since then
                refused.add(new.place, ErrorCode.NOT_ALLOWED, unfit, new.key)
            else:
                slice_ = self._add(event, init, new, buffer)
                added.setdefault(slice_.partition, []).append((new, slice_))
        self._have_held(event, init, added, refused)

    def _have_held(
        self, event: Received, init: Init, added: dict[int, list[tuple[_New, Slice]]], refused: ListRefusals
    ) -> None:
        """The slices exist when the backups have them too: then the answer goes out."""
        remaining = 0
        is_lost = False

        def held(some: Sequence[_New], refusal: Refused | None) -> None:
            nonlocal remaining, is_lost
            remaining -= 1
            is_lost = is_lost or refusal is LED_ELSEWHERE
            for new in some:
                self._holding.discard((new.key, new.slice_index))
                if refusal is not None:
                    refused.add(new.place, refusal.error, refusal.text, new.key)
            if remaining <= 0 and not is_lost:
                self._effects.send(event.peer, refused.answer(init.request))

        held_elsewhere = {partition: some for partition, some in added.items() if self._records.is_held(partition)}
        by_id = {slice_.slice_id: new for some in held_elsewhere.values() for new, slice_ in some}
        self._holding.update([(new.key, new.slice_index) for new in by_id.values()])
        lists = [pack for some in held_elsewhere.values() for pack in packs([slice_ for _, slice_ in some])]
        remaining = len(lists)
        for slices in lists:
            partition, ids = slices[0].partition, [slice_.slice_id for slice_ in slices]
            message, payload = install_of(partition, slices, {})
            some = [by_id[slice_id] for slice_id in ids]
            self._records.hold_new(partition, message, partial(held, some), payload, ids)
        if not lists:
            held((), None)

    def _add(self, event: Received, init: Init, new: _New, buffer: object) -> Slice:
        settings = self._view.settings
        log = SliceLog(self._view.is_sync, settings.rounds_ahead, settings.staleness, buffer)
        return self._table.add(
            new.key,
            new.slice_index,
            new.spec,
            log,
            event.sender,
            self._control.optimizer,
            init.request,
            init.creation,
            self._view.partition_of(new.key, new.slice_index),
            self._control.generation,
        )

    def validate(self) -> None:
        """Raises AssertionError unless the slices that are being created are counted."""
        counted = Counter(key for key, _ in self._creating)
        assert counted == self._creating_keys, f"{counted} are being created, {self._creating_keys} are counted"
        assert bool(self._creating) or self._memory.creating_nbytes == 0, (
            f"{self._memory.creating_nbytes} bytes of nothing"
        )


def _slices_of(event: Received, init: Init) -> list[_New] | str:
    """The slices of a message and their bytes; or what is wrong with it."""
    slices: list[_New] = []
    sizes = [(spec, spec.num_slices, spec.slice_nbytes(0)) for spec in init.specs]
    offset = end = 0
    for place, (key, index, number) in enumerate(init.slices):
        if number >= len(init.specs):
            return f"an init names spec {number} of {len(init.specs)}"
        spec, num_slices, first_nbytes = sizes[number]
        if index >= num_slices:
            return f"{spec} has no slice {index}"
        nbytes = first_nbytes if index == 0 else spec.slice_nbytes(index)
        slices.append(_New(place, key, index, spec, num_slices, Span(event.payload, offset, nbytes)))
        end = offset + nbytes
        offset = padded(end)
    if event.nbytes != end:
        return f"an init of these {len(slices)} slices has {end} bytes, this one has {event.nbytes}"
    if len({(new.key, new.slice_index) for new in slices}) < len(slices):
        return "an init names the same slice twice"
    return slices


def _first_of(new: _New) -> FirstBytes:
    return FirstBytes(new.key, new.slice_index, new.spec.dtype, new.span, new.spec if new.spec.table else None)


def _in_use(key: str) -> tuple[ErrorCode, str]:
    return ErrorCode.KEY_EXISTS, f"key {key!r} is in use here already: take another name, or restart the cluster"
