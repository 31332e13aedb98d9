"""Requests that wait for a group to commit a push or to reach a version, and their answers.

A push waits for its commit, a pull for its version, a pushpull for both. This is the one place where the answer to a
request that was let in is decided: Done, Values, Uncounted, or a refusal that ends the waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from kvd.core.machine import JobDone, Peer, ReadRows, Received, Send, Span, spans_of
from kvd.core.refusals import code_of
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Waiting
from kvd.core.server.merged_codings import coding_of, is_taken
from kvd.core.server.pending import Pending, PendingTable
from kvd.core.server.targets import PushTarget
from kvd.errors import KvdError
from kvd.protocol.messages import (
    ANY_CLOCK,
    MAX_TEXT_CHARS,
    NO_RANK,
    Done,
    ErrorCode,
    Message,
    Refused,
    Staged,
    Taken,
    Uncounted,
    Values,
)


class _Wanted(NamedTuple):
    """Rows that a pull wants of a version, which is there."""

    waiting: Waiting
    version: int
    buffer: Any
    ids: Span


class Waiters:
    """Lets requests wait at the groups that they are about, and answers them."""

    def __init__(self, effects: ServerEffects) -> None:
        self.pending = PendingTable()
        self._effects = effects
        self._to_read: list[_Wanted] = []  # since the last job that reads rows
        self._reading: set[Pending] = set()  # whose rows the shell is reading

    def joins_open(self, event: Received, request: int) -> bool:
        """Whether the request is open already: its answer then goes to where it was asked first, and last."""
        pending = self.pending.find(event.sender, request)
        if pending is None:
            return False
        pending.asked_again(event.peer)
        if pending.push:
            self._effects.send(event.peer, Staged(request))
        return True

    def wait(self, pending: Pending, rank: int, targets: Sequence[PushTarget], uncounted: Collection[int] = ()) -> None:
        """Lets the request wait for each of its targets, or takes what is there already.

        Args:
            uncounted: the positions of targets for which the push comes too late: it waits for nothing there.
        """
        pending.spans = [()] * len(targets)
        pending.versions = [0] * len(targets)
        self.pending.open(pending)
        for position, target in enumerate(targets):
            waiting = Waiting(pending, position, rank, target.clock, target.slice)
            if position in uncounted:
                self._leave_out(target.group, waiting)
            elif not self._settle(target.group, waiting):
                target.group.waiting.append(waiting)
            if self._to_read:
                self._read_rows(target.group)
            if pending.closed:
                return

    def wait_for_round(self, pending: Pending, group: FusedGroup, rank: int, clock: int) -> bool:
        """The same for a request about all of a group, whose round is open. False: the request is open already, or its
        peer may open no more."""
        if not self.pending.open_new(pending):
            return False
        pending.spans, pending.versions = [()], [0]
        group.waiting.append(Waiting(pending, 0, rank, clock, None))
        return True

    def answer_newest(self, peer: Peer, sender: int, request: int, group: FusedGroup) -> bool:
        """Answer a pull of all of a group with its newest version. False if the request is open already."""
        if self.pending.find(sender, request) is not None:
            return False
        version = group.log.version
        self._effects.emit(Send(peer, Values(request, (version,)), spans_of(group.log.current, group.nbytes)))
        return True

    def settle(self, group: FusedGroup) -> None:
        """The group has a new version: what that answers is answered."""
        waiting, group.waiting = group.waiting, []
        log = group.log
        version, sync, spans = log.version, log.sync, None
        for entry in waiting:
            pending = entry.pending
            if (
                sync
                and entry.clock == version
                and entry.slice is None
                and not pending.closed
                and pending.remaining == len(pending.versions) == 1
                and pending.counts
                and pending.row_ids is None
                and not pending.takes
                and pending.asked_first is None
            ):  # what most are: it wants all of this version of one group as it is, or to know of it
                if pending.pull:
                    spans = spans or spans_of(log.current, group.nbytes)
                    self._effects.emit(Send(pending.peer, Values(pending.request, (version,)), spans))
                else:
                    self._effects.emit(Send(pending.peer, Done(pending.request)))
                self.pending.close(pending)
            elif not self._settle(group, entry):
                group.waiting.append(entry)
        if self._to_read:
            self._read_rows(group)

    def leave_out(self, group: FusedGroup, rank: int) -> None:
        """The pushes of this rank whose rounds are still open do not count in the group: they are answered."""
        counted, waiting = group.log.counted_clock(rank), group.waiting
        group.waiting = []
        for entry in waiting:
            if entry.rank != rank or not entry.pending.push or entry.clock <= counted:
                group.waiting.append(entry)
            elif not entry.pending.closed:
                self._leave_out(group, entry)
        if self._to_read:
            self._read_rows(group)

    def _leave_out(self, group: FusedGroup, waiting: Waiting) -> None:
        """A push does not count in the group: what it pulls is the newest value."""
        waiting.pending.counts = False
        if not self._settle(group, waiting._replace(clock=ANY_CLOCK)):
            raise AssertionError("the newest version is always there")

    def _settle(self, group: FusedGroup, waiting: Waiting) -> bool:
        """Takes the group's part of the answer if it is there; answers when it was the last. True: waits no more."""
        pending, log = waiting.pending, group.log
        if pending.closed:
            return True
        if waiting.clock != ANY_CLOCK and log.committed_clock(waiting.rank) < waiting.clock:
            return False
        if pending.pull:
            exact = log.sync and waiting.clock != ANY_CLOCK
            version = waiting.clock if exact else log.version
            buffer = log.at_version(version)
            if buffer is None:
                self._version_is_gone(group, pending, version)
                return True
            slice_ = waiting.slice
            if pending.row_ids is not None:
                self._to_read.append(_Wanted(waiting, version, buffer, pending.row_ids))
                return True
            spans = spans_of(buffer, group.nbytes) if slice_ is None else (slice_.span(buffer),)
            encoded = slice_.encoded.get(version) if pending.takes and slice_ is not None else None
            if encoded is not None and is_taken(pending, encoded.method):
                spans, pending.coding = (encoded.span,), coding_of(group, encoded.method)
            if not log.sync and waiting.rank != NO_RANK:
                if slice_ is None or len(group.slices) == 1:
                    log.was_sent(waiting.rank, version, buffer if group.keeps_pulled else None)
                else:
                    log.was_sent_one_of(len(group.slices), slice_.position, waiting.rank, version)
            pending.spans[waiting.position] = spans
            pending.versions[waiting.position] = version
        pending.remaining -= 1
        if pending.remaining == 0:
            self._answer(pending)
        return True

    def _read_rows(self, group: FusedGroup) -> None:
        """Has rows of a part of a table read, those of one version in one job. Later updates come after it, so it is
        the version that is asked for."""
        to_read, self._to_read = self._to_read, []
        self._reading.update([wanted.waiting.pending for wanted in to_read])
        for version in dict.fromkeys([wanted.version for wanted in to_read]):
            self._start_reading(group, [wanted for wanted in to_read if wanted.version == version])

    def _start_reading(self, group: FusedGroup, to_read: Sequence[_Wanted]) -> None:
        key, index = group.slices[0].key, group.slices[0].index
        buffer, ids = to_read[0].buffer, tuple([wanted.ids for wanted in to_read])

        def done(job: JobDone) -> None:
            found = [job.error] * len(to_read) if job.error is not None else job.result
            for wanted, rows in zip(to_read, found, strict=True):
                self._rows_are_read(group, wanted, rows)

        self._effects.start_job(lambda job: ReadRows(job, key, index, buffer, ids), done)

    def _rows_are_read(self, group: FusedGroup, wanted: _Wanted, rows: Span | KvdError) -> None:
        waiting, version, pending = wanted.waiting, wanted.version, wanted.waiting.pending
        self._reading.discard(pending)
        if pending.closed:
            return
        if isinstance(rows, KvdError):
            text = str(rows)[:MAX_TEXT_CHARS]
            self.fail(pending, Refused(pending.request, code_of(rows), text, group.slices[0].key))
            return
        if not group.log.sync and waiting.rank != NO_RANK:
            group.log.was_sent(waiting.rank, version)
        pending.spans[0], pending.versions[0] = (rows,), version
        pending.remaining -= 1
        self._answer(pending)

    def _version_is_gone(self, group: FusedGroup, pending: Pending, version: int) -> None:
        text = (
            f"version {version} of {group.key!r} is not kept any more, the store is at {group.log.version}: "
            f"rewind to a step that is"
        )
        taken = Taken.PART if pending.push else Taken.NOTHING
        self.fail(pending, Refused(pending.request, ErrorCode.NOT_ALLOWED, text, group.key, taken))

    def _answer(self, pending: Pending) -> None:
        spans: tuple[Span, ...] = ()
        answer: Message
        if pending.pull:
            spans = pending.spans[0] if len(pending.spans) == 1 else tuple(chain.from_iterable(pending.spans))
        if not pending.counts:
            answer = Uncounted(pending.request, tuple(pending.versions) if pending.pull else ())
        elif pending.pull:
            answer = Values(pending.request, tuple(pending.versions), pending.coding)
        else:
            answer = Done(pending.request)
        for peer in pending.peers():
            self._effects.send(peer, answer, spans)
        self.pending.close(pending)

    def fail(self, pending: Pending, refusal: Refused) -> None:
        """Ends the waiting with a refusal."""
        if not pending.closed:
            for peer in pending.peers():
                self._effects.send(peer, refusal)
            self.pending.close(pending)

    def drop_group(self, group: FusedGroup) -> None:
        """Another server leads its slices: those who wait ask there."""
        waiting, group.waiting = group.waiting, []
        for entry in waiting:
            if not entry.pending.closed:
                self.pending.close(entry.pending)

    def drop_sender(self, incarnation: int, groups: Sequence[FusedGroup]) -> None:
        """The sender was replaced: nobody waits for its answers."""
        self.pending.drop_sender(incarnation)
        for group in groups:
            group.waiting = [waiting for waiting in group.waiting if not waiting.pending.closed]

    # ── invariants ──

    def validate(self, groups: Iterable[FusedGroup]) -> None:
        """Raises AssertionError unless each open request waits for exactly what its answer lacks."""
        missing = Counter((pending.sender, pending.request) for pending in self._reading if not pending.closed)
        for group in groups:
            for waiting in group.waiting:
                pending = waiting.pending
                if pending.closed:
                    continue
                missing[pending.sender, pending.request] += 1
                is_there = group.log.committed_clock(waiting.rank) >= waiting.clock
                assert not is_there, f"request {pending.request} waits for clock {waiting.clock}, which is committed"
        self.pending.validate(missing)
