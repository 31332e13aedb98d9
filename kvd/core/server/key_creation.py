"""How slices of new keys come to be: the Init messages of worker 0.

A message brings many slices. Each is taken or refused by itself, so that one key that cannot be made does not keep the
others from being made; all that are taken are created in one job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvd.core.machine import Create, FirstBytes, JobDone, Received, Span
from kvd.core.refusals import refusal_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.control import ServerControl
from kvd.core.server.effects import ServerEffects
from kvd.core.server.keys import MAX_SLICES, KeyTable
from kvd.core.server.memory import ServerMemory
from kvd.core.server.rounds import SliceLog
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import MAX_TEXT_CHARS, Done, ErrorCode, Init, NotYetReason, Outdated, Refused
from kvd.protocol.specs import KeySpec, padded

COPIES = 3  # of each slice that a server leads: the version, the one before, and the one that is being made


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
        take_away: Callable[[str], None],
        memory: ServerMemory,
    ) -> None:
        self._session = session
        self._view = session.view
        self._table = table
        self._effects = effects
        self._attachments = attachments
        self._control = control
        self._take_away = take_away
        self._memory = memory
        self._creating: set[tuple[str, int]] = set()  # slices whose Create is under way
        self._creating_keys = Counter[str]()  # how many of each key
        self._creating_nbytes = 0

    def init(self, event: Received, init: Init) -> None:
        rank = self._attachments.rank_of(event, init.request)
        if rank is None:
            return
        slices = _slices_of(event, init)
        if isinstance(slices, str):
            self._effects.refuse(event.peer, init.request, ErrorCode.PROTOCOL_ERROR, slices, init.slices[0].key)
            return
        if init.creation < self._table.creation:
            self._effects.send(event.peer, Outdated(init.request, self._table.creation))
            return
        if any((new.key, new.slice_index) in self._creating for new in slices):
            return  # it is asked again, and this will be done by then
        leftovers = sorted({new.key for new in slices if rank == 0 and self._is_left_over(new.key, init.creation)})
        if not all(map(self._table.is_quiescent, leftovers)):
            text = "a slice is being updated"
            self._effects.not_yet(event.peer, init.request, NotYetReason.UPDATING, text, leftovers[0])
            return
        for key in leftovers:
            self._take_away(key)
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
        firsts = tuple([FirstBytes(new.key, new.slice_index, new.spec.dtype, new.span) for new in wanted])
        self._effects.start_job(
            lambda job: Create(job, firsts), lambda done: self._created(event, init, wanted, refused, done)
        )

    def _is_left_over(self, key: str, creation: int) -> bool:
        """Whether the slices here are those of a deleted key. Worker 0 makes a key of its name only if there is none at
        its home; nobody was left to have the others dropped."""
        slices = self._table.of_key(key)
        return bool(slices) and slices[0].creation < creation and self._view.partition_of(key, 0) != self._session.rank

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
        old = self._table.slices.get((new.key, new.slice_index))
        led = self._table.bytes_led + self._creating_nbytes - (0 if old is None else old.nbytes)
        demand = (led + self._still_to_come(new)) * self._copies
        is_full = len(self._table.slices) + len(self._creating) >= MAX_SLICES
        if is_full or not self._memory.grant(self._session.run, demand):
            others = self._memory.of_others(self._session.run)
            of_others = f", besides {others >> 20} MiB of other runs" if others else ""
            return ErrorCode.NOT_ALLOWED, (
                f"key {new.key!r} would take {self._session.name} to {demand >> 20} MiB ({COPIES} copies, and "
                f"{self._copies - COPIES} staged), its limit is {self._memory.limit_bytes >> 20} MiB{of_others}: add "
                f"servers, or raise memory_limit_bytes"
            )
        return None

    @property
    def _copies(self) -> int:
        """How often a byte that is led may be held, staged contributions included."""
        return COPIES + self._view.settings.rounds_ahead * self._view.settings.num_workers

    def give_back(self) -> None:
        """Keys were deleted: other runs may have their memory."""
        self._memory.grant(self._session.run, (self._table.bytes_led + self._creating_nbytes) * self._copies)

    def _still_to_come(self, new: _New) -> int:
        """The bytes of this slice, and of the others if it is the first of its key that comes here: a key that does not
        fit is refused before a part of it takes memory."""
        if new.num_slices == 1 or self._creating_keys[new.key] or self._table.of_key(new.key):
            return new.span.nbytes
        mine = self._session.rank
        return sum(
            new.spec.slice_nbytes(index)
            for index in range(new.num_slices)
            if index == new.slice_index or self._view.partition_of(new.key, index) == mine
        )

    def _begin(self, new: _New) -> None:
        self._creating.add((new.key, new.slice_index))
        self._creating_keys[new.key] += 1
        self._creating_nbytes += new.span.nbytes

    def _end(self, new: _New) -> None:
        self._creating.discard((new.key, new.slice_index))
        self._creating_keys[new.key] -= 1
        if not self._creating_keys[new.key]:
            del self._creating_keys[new.key]
        self._creating_nbytes -= new.span.nbytes

    def _created(
        self, event: Received, init: Init, wanted: Sequence[_New], refused: ListRefusals, done: JobDone
    ) -> None:
        for new in wanted:
            self._end(new)
        if self._attachments.find(event.sender) is None:
            return  # it was replaced: its successor makes the keys again
        if init.creation < self._table.creation:  # since it was asked
            self._effects.send(event.peer, Outdated(init.request, self._table.creation))
            return
        if done.error is not None:
            error = refusal_of(init.request, done.error)
            for new in wanted:
                refused.add(new.place, error.error, error.text, new.key)
        else:
            for new, buffer in zip(wanted, done.result, strict=True):
                if self._table.is_in_use(new.key):  # since it was asked
                    refused.add(new.place, *_in_use(new.key), new.key)
                else:
                    self._add(event, init, new, buffer)
        self._effects.send(event.peer, refused.answer(init.request))

    def _add(self, event: Received, init: Init, new: _New, buffer: object) -> None:
        settings = self._view.settings
        log = SliceLog(self._view.is_sync, settings.rounds_ahead, settings.staleness, buffer)
        self._table.add(
            new.key,
            new.slice_index,
            new.spec,
            log,
            event.sender,
            self._control.optimizer,
            init.request,
            init.creation,
        )

    def validate(self) -> None:
        """Raises AssertionError unless the slices that are being created are counted."""
        counted = Counter(key for key, _ in self._creating)
        assert counted == self._creating_keys, f"{counted} are being created, {self._creating_keys} are counted"
        assert bool(self._creating) or self._creating_nbytes == 0, f"{self._creating_nbytes} bytes of nothing"


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


def _in_use(key: str) -> tuple[ErrorCode, str]:
    return ErrorCode.KEY_EXISTS, f"key {key!r} is in use here already: take another name, or restart the cluster"
