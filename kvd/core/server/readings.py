"""Reads of one step: several slices, on several servers, as they were between two steps of the program.

A push says in which step of its worker it was made (`kvd.core.worker.steps`). The step of a version is the largest of
its round's pushes. What a slice was after step s is its newest version of a step up to s. That is known for good

- when the slice has a version of a later step,
- when its version has the number s: the next one has a larger number, and no version has a step below its number, or
- when the step is over: a worker has said that its pushes up to s are committed. Each round has a push of every worker,
  so all rounds up to s are.

A slice that is asked for a step waits until one of these holds, and is then answered from that version's buffer, which
never changes; or at once, if the version is not kept any more, and the reader asks for a later step. No round waits for
a reader. What a reader was sent counts as held until it says that it is done, reads again, or is silent for too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.core.machine import Peer, Received, Span
from kvd.core.membership import ViewState
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.core.server.participants import Participants
from kvd.core.server.rounds import NoVersion
from kvd.protocol.messages import Done, ErrorCode, ReadDone, ReadSlices, SliceId, Survey, Surveyed, Values
from kvd.protocol.specs import table_text

MAX_READERS = 1 << 10  # that hold something
MAX_CUTS_OF_ONE = 2  # times the bytes that the server leads: what one reader may hold
MAX_CUTS = 16  # times the bytes that the server leads: what all readers may hold
HOLD_EXPIRES_S = 60.0


@dataclass(slots=True, eq=False)
class _Reading:
    """A message of a reader, some of whose slices are not there yet."""

    reader: _Reader
    peer: Peer
    message: ReadSlices
    slices: tuple[Slice, ...]
    spans: list[Span | None]
    versions: list[int]
    remaining: int

    @property
    def missing(self) -> list[int]:
        """The positions of the slices that are not there yet."""
        return [position for position, span in enumerate(self.spans) if span is None]

    def take(self, position: int, version: int) -> None:
        """A slice has its version of the step."""
        slice_ = self.slices[position]
        buffer = slice_.log.at_version(version)
        assert buffer is not None
        self.spans[position], self.versions[position] = slice_.span(buffer), version
        self.remaining -= 1


@dataclass(slots=True, eq=False)
class _Reader:
    """What a reader holds, and its messages that wait."""

    number: int  # of its read
    expires_at: float
    held_nbytes: int = 0  # of what it was sent for this read, or waits for
    waiting: dict[int, _Reading] = field(default_factory=dict)  # by request


class Readings:
    """The readers of a server.

    Attributes:
        is_on: whether there are any: otherwise nothing is due.
        now: the time of the step that is under way.
        held_nbytes: what all readers hold.
        over: the newest step that a worker said to be over.
    """

    def __init__(
        self,
        view: ViewState,
        table: KeyTable,
        effects: ServerEffects,
        participants: Participants,
        elsewhere: Elsewhere,
    ) -> None:
        self.is_on = False
        self.held_nbytes = 0
        self._view = view
        self._table = table
        self._effects = effects
        self._participants = participants
        self._elsewhere = elsewhere
        self.over = 0
        self.now = 0.0
        self._readers: dict[int, _Reader] = {}  # by incarnation
        self._waiting: dict[Slice, dict[_Reading, int]] = {}  # the messages that wait for a slice, and its position

    # ── time ──

    def tick(self, now: float) -> None:
        """Forgets readers that have been silent for too long."""
        for sender in [sender for sender, reader in self._readers.items() if reader.expires_at <= now]:
            self._forget(sender)

    def next_deadline(self) -> float | None:
        """When the next reader is forgotten if it stays silent."""
        if not self._readers:
            return None
        return min(reader.expires_at for reader in self._readers.values())

    # ── what readers ask ──

    def survey(self, event: Received, survey: Survey) -> None:
        """Which steps there are of some slices, or of all."""
        slices = self.find_slices(event, survey.request, survey.slice_ids)
        if slices is not None:
            self._effects.send(event.peer, self.surveyed(survey.request, slices))

    def read(self, event: Received, message: ReadSlices) -> None:
        """Some slices as they were after a step: answered when they are there."""
        if not self._view.is_sync:
            text = "this cluster trains asynchronously: its workers share no steps"
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text)
            return
        reader = self._readers.get(event.sender)
        if reader is not None and message.number > reader.number:
            self._forget(event.sender)
            reader = None
        open_ = None if reader is None else reader.waiting.get(message.request)
        if open_ is not None:
            open_.peer = event.peer  # it came again: the sender may have a new connection
            return
        slices = self.find_slices(event, message.request, message.slice_ids)
        if slices is None:
            return
        table = next((slice_ for slice_ in slices if slice_.spec.table), None)
        if table is not None:
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, table_text(table.key), table.key)
            return
        if reader is not None and message.number < reader.number:  # of a read that has ended
            self._effects.send(event.peer, self.surveyed(message.request, slices))
            return
        if reader is None and len(self._readers) < MAX_READERS:
            reader = self._readers[event.sender] = _Reader(message.number, 0.0)
            self.is_on = True
        nbytes = sum(slice_.nbytes for slice_ in slices)
        if reader is None or not self._may_hold(reader, nbytes):
            self._effects.send(event.peer, self.surveyed(message.request, slices))
            return
        reader.expires_at = self.now + HOLD_EXPIRES_S
        reader.held_nbytes += nbytes
        self.held_nbytes += nbytes
        count = len(slices)
        reading = _Reading(reader, event.peer, message, slices, [None] * count, [0] * count, count)
        reader.waiting[message.request] = reading
        for position, slice_ in enumerate(slices):
            self._waiting.setdefault(slice_, {})[reading] = position
        self._go_on(reading, range(count))

    def done(self, event: Received, message: ReadDone) -> None:
        """The reader holds nothing any more of this read, and those before."""
        reader = self._readers.get(event.sender)
        if reader is not None and reader.number <= message.number:
            self._forget(event.sender)
        self._effects.send(event.peer, Done(message.request))

    def _may_hold(self, reader: _Reader, nbytes: int) -> bool:
        led = self._table.bytes_led
        return (
            reader.held_nbytes + nbytes <= MAX_CUTS_OF_ONE * led and self.held_nbytes + nbytes <= MAX_CUTS * led
        ) or nbytes == 0

    def _find(self, slice_id: SliceId) -> Slice | None:
        slice_ = self._table.slices.get((slice_id.key, slice_id.slice_index))
        if slice_ is None or slice_.creation != slice_id.creation or self._elsewhere.leaves((slice_,)):
            return None
        return slice_

    def find_slices(self, event: Received, request: int, slice_ids: tuple[SliceId, ...]) -> tuple[Slice, ...] | None:
        """The slices that a reader names; None if one is not here, and the sender was told."""
        found = [self._find(slice_id) for slice_id in slice_ids]
        if len(set(slice_ids)) < len(slice_ids):
            text = "a reader names the same slice twice"
            self._effects.refuse(event.peer, request, ErrorCode.PROTOCOL_ERROR, text, slice_ids[0].key)
            return None
        if None not in found:
            return tuple([slice_ for slice_ in found if slice_ is not None])
        missing = slice_ids[found.index(None)]
        if self._elsewhere.has(event, request, missing.key, missing.slice_index):
            return None
        name = missing.key
        text = f"a part of key {name!r} is not here"
        if (name, slice_ids[found.index(None)].slice_index) in self._table.slices:
            text = f"key {name!r} was deleted, and made again: look at its new shape and value first"
        self._effects.refuse(event.peer, request, ErrorCode.KEY_NOT_FOUND, text, name)
        return None

    def surveyed(self, request: int, slices: tuple[Slice, ...]) -> Surveyed:
        """The steps of these slices, or of all."""
        groups = {slice_.group: None for slice_ in slices} if slices else self._table.groups.values()
        logs = [group.log for group in groups]
        steps = [log.step for log in logs]
        over = self.over
        if not self._participants.required:  # all have left, and their pushes were committed before
            over = max([group.log.step for group in self._table.groups.values()], default=0)
        return Surveyed(
            request,
            min(steps, default=0),
            max(steps, default=0),
            max([log.previous_step for log in logs if log.previous is not None], default=0),
            all(log.step == log.version for log in logs),
            over,
        )

    # ── what happens meanwhile ──

    def committed(self, group: FusedGroup) -> None:
        """The group has a new version."""
        if self._waiting:
            for slice_ in group.slices:
                for reading, position in list(self._waiting.get(slice_, {}).items()):
                    self._go_on(reading, (position,))

    def step_is_over(self, step: int) -> None:
        """A worker says that its pushes up to this step, later than `over`, are committed."""
        self.over = step
        for reader in list(self._readers.values()):
            for reading in list(reader.waiting.values()):
                self._go_on(reading, reading.missing)

    def _go_on(self, reading: _Reading, positions: Sequence[int]) -> None:
        """Takes the versions of these slices that are there now. Answers when all slices are, or when the version of
        one is not kept any more."""
        message = reading.message
        for position in positions:
            log = reading.slices[position].log
            version = log.version_at(message.step, message.step if message.is_over else self.over)
            if version is NoVersion.GONE:
                self._close(reading)
                self._effects.send(reading.peer, self.surveyed(message.request, reading.slices))
                return
            if version is not NoVersion.LATER:
                reading.take(position, version)
                self._leave(reading, position)
        if reading.remaining == 0:
            self._close(reading)
            spans = tuple([span for span in reading.spans if span is not None])
            self._effects.send(reading.peer, Values(message.request, tuple(reading.versions)), spans)

    def drop_slices(self, slices: Sequence[Slice]) -> None:
        """Another server leads them: readers ask there."""
        for slice_ in slices:
            for reading in list(self._waiting.get(slice_, {})):
                self._close(reading)

    def led_less(self) -> None:
        """This server leads less than before. Readers that hold too much now are forgotten, and ask again."""
        while self.held_nbytes > MAX_CUTS * self._table.bytes_led:
            self._forget(max(self._readers, key=lambda sender: self._readers[sender].held_nbytes))

    # ── the end of waiting ──

    def _leave(self, reading: _Reading, position: int) -> None:
        slice_ = reading.slices[position]
        there = self._waiting[slice_]
        del there[reading]
        if not there:
            del self._waiting[slice_]

    def _close(self, reading: _Reading) -> None:
        """The message waits no more."""
        for position in reading.missing:
            self._leave(reading, position)
        del reading.reader.waiting[reading.message.request]

    def _forget(self, sender: int) -> None:
        """The reader holds nothing any more, and waits for nothing."""
        reader = self._readers.pop(sender)
        self.is_on = bool(self._readers)
        self.held_nbytes -= reader.held_nbytes
        for reading in list(reader.waiting.values()):
            self._close(reading)

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError unless readers hold what is counted, within the bounds, and wait only for what is not
        known yet."""
        held = sum(reader.held_nbytes for reader in self._readers.values())
        assert held == self.held_nbytes <= MAX_CUTS * self._table.bytes_led, f"readers hold {held}: {self.held_nbytes}"
        waiting = 0
        for reader in self._readers.values():
            for reading in reader.waiting.values():
                assert len(reading.missing) == reading.remaining > 0, "a read counts its missing slices wrongly"
                waiting += reading.remaining
                for position in reading.missing:
                    slice_, step = reading.slices[position], reading.message.step
                    assert self._waiting[slice_][reading] == position, "a read does not wait for its slice"
                    found = slice_.log.version_at(step, self.over)
                    assert found is NoVersion.LATER, f"step {step} of {slice_.key!r} is there: {found}"
        assert waiting == sum(map(len, self._waiting.values())), "a read that has ended waits"
