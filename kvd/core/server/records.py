"""Records: a lasting change of a partition is held by its backup before anyone is told that it has happened.

`Records.hold` sends a record to the backup, and to the server that is to become the backup and has been sent what the
partition was before. `then` is called when all of them hold it: at once if there are none, which is always so with one
replica. Who they are, the view says, which is saved before it gets here: a server that it does not name any more is
not waited for, since it will never lead with what it has.

A backup is sent records side by side. They commute: those of one group of slices come one at a time, and each of the
others says what it comes after. A server that is being synced is sent one at a time, in their order, so that what it is
sent of a slice and the changes of that slice arrive in this order too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvd.core.machine import Connect, Disconnect, Effect, LogEntry, Received, Send, ServerPeer, Span
from kvd.core.membership import name_of
from kvd.core.outbox import Entry, Outbox
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Slice
from kvd.core.session import FIRST_REQUEST, SchedulerSession
from kvd.protocol.messages import Done, ErrorCode, Member, NotYet, Refused, SliceId, StartHolding

CREDIT_BYTES = 32 << 20  # of records on their way to one server, well below what it lets a peer have waiting

Answer = Callable[["Refused | None"], None]
LED_ELSEWHERE = Refused(0, ErrorCode.NOT_ALLOWED, "another server leads the partition now")
"""What `then` gets of a record that was not held when another server began to lead its partition: nobody is told that
it has happened. It is asked for again there."""


@dataclass(slots=True, eq=False)
class _Record:
    """A record that some servers have yet to hold.

    Attributes:
        may_be_refused: `then` hears of it. Any other that a server refuses shows that it has not what it should.
        is_question: nothing is to be held: `then` alone deals with the answer.
    """

    then: Answer
    missing: int
    may_be_refused: bool
    is_question: bool = False
    refused: Refused | None = None


@dataclass(slots=True, eq=False)
class Holder:
    """A server that holds the records of one partition.

    Attributes:
        is_syncing: it is not the backup yet.
        copied: while it is syncing: the slices that it was sent; it gets the rounds of these.
        unheld: the records that it refused. They are not held until the view names it no more.
    """

    partition: int
    peer: ServerPeer
    rank: int
    is_syncing: bool
    is_started: bool = False  # it was told that it holds the partition
    is_over: bool = False  # the view names it no more, or it was dropped
    copied: set[SliceId] = field(default_factory=set)
    open: dict[int, _Record] = field(default_factory=dict)  # by request
    queue: deque[tuple[Any, tuple[Span, ...], _Record]] = field(default_factory=deque)
    unheld: list[_Record] = field(default_factory=list)

    def has_unheld(self) -> bool:
        """Whether there are records that it does not hold, or has not said that it does."""
        open_ = any(not record.is_question for record in self.open.values())
        return open_ or bool(self.queue or self.unheld)


class Records:
    """The records of the partitions that this server leads.

    Args:
        creation: what StartHolding says.
        out_of_sync: a server (its incarnation comes second) does not hold what it should of a partition.
        unfit: a server that is being synced cannot have slices, for this reason: it is to be dropped.

    Attributes:
        holders: by partition; one without any is not in it.
        has_new: whether there are records that `due` has not been asked for.
    """

    def __init__(
        self,
        session: SchedulerSession,
        effects: ServerEffects,
        creation: Callable[[], int],
        out_of_sync: Callable[[int, int], None],
        unfit: Callable[[Holder, str], None],
    ) -> None:
        self._view = session.view
        self._effects = effects
        self._creation = creation
        self._out_of_sync = out_of_sync
        self._unfit = unfit
        self._outbox = Outbox(CREDIT_BYTES)
        self.has_new = False
        self.holders: dict[int, list[Holder]] = {}
        self._connected: set[ServerPeer] = set()
        self._last_request = FIRST_REQUEST

    # ── who holds what ──

    def is_held(self, partition: int) -> bool:
        """Whether there are servers to hold the records of this partition."""
        return partition in self.holders

    def are_held(self, partition: int, backup: ServerPeer) -> bool:
        """Whether this server is the one that holds the records of this partition, and holds all of them."""
        holders = self.holders_of(partition)
        return [holder.peer for holder in holders] == [backup] and not any(
            holder.is_syncing or holder.has_unheld() for holder in holders
        )

    @property
    def partitions(self) -> list[int]:
        """The partitions whose records some server holds."""
        return sorted(self.holders)

    @property
    def waiting(self) -> int:
        """The records that some server has yet to hold."""
        return len(self._outbox) + sum(len(holder.queue) for here in self.holders.values() for holder in here)

    def holders_of(self, partition: int) -> Sequence[Holder]:
        return self.holders.get(partition, ())

    def syncing_of(self, partition: int) -> Holder | None:
        """The server that is to become the backup of this partition."""
        return next((holder for holder in self.holders_of(partition) if holder.is_syncing), None)

    def may_join(self, slices: Sequence[Slice]) -> bool:
        """Whether the rounds of these slices go to the same servers, so that they can be one."""
        holder = self.syncing_of(slices[0].partition) if self.holders else None
        return holder is None or len({slice_.slice_id in holder.copied for slice_ in slices}) == 1

    # ── the view ──

    def view_changed(self, led: Sequence[int], promoted: Collection[int] = ()) -> None:
        """Takes over who the holders are of the partitions that are led here. Those that are none any more are not
        waited for.

        Args:
            promoted: partitions that this server has held until now. One that has a backup was handed over: the backup
                is its old leader, and has all of it.
        """
        wanted = self._wanted(led)
        ended: list[Holder] = []
        for partition in sorted(self.holders.keys() | wanted.keys()):
            before = {holder.peer: holder for holder in self.holders_of(partition)}
            now = []
            for peer, rank, is_syncing in wanted.get(partition, ()):
                holder = before.pop(peer, None)
                if holder is not None and is_syncing and not holder.is_syncing:
                    ended.append(holder)  # it fell out of step, and starts over
                    holder = None
                if holder is None:
                    is_old_leader = partition in promoted and not is_syncing
                    holder = Holder(partition, peer, rank, is_syncing, is_started=is_old_leader)
                holder.is_syncing = is_syncing
                now.append(holder)
            ended += before.values()
            self.holders[partition] = now
            if not now:
                del self.holders[partition]
        self._reconnect()
        for here in list(self.holders.values()):
            for holder in here:
                if not holder.is_started:
                    self._start(holder)
                self._send_queued(holder)
        for holder in ended:
            self._release(holder, is_led=holder.partition in led)

    def _wanted(self, led: Sequence[int]) -> dict[int, list[tuple[ServerPeer, int, bool]]]:
        """Who is to hold these partitions: peer, rank, and whether it is being synced.

        A scheduler that was restarted without its record may wait for servers that it names: these are what they were.
        """
        wanted: dict[int, list[tuple[ServerPeer, int, bool]]] = {}
        for partition in led:
            leader, backup, syncing, *_ = self._view.partitions[partition]
            before = {holder.rank: holder for holder in self.holders_of(partition)}
            if ("server", leader) not in self._view.members:
                if before:
                    wanted[partition] = [(holder.peer, rank, holder.is_syncing) for rank, holder in before.items()]
                continue
            for rank, is_syncing in ((backup, False), (syncing, True)):
                member = self._view.members.get(("server", rank))
                if member is not None:
                    wanted.setdefault(partition, []).append((ServerPeer(member.incarnation), rank, is_syncing))
                elif rank in before:
                    wanted.setdefault(partition, []).append((before[rank].peer, rank, is_syncing))
        return wanted

    def _reconnect(self) -> None:
        """Connects to those who are holders now, and leaves those who are none any more."""
        peers = {holder.peer for here in self.holders.values() for holder in here}
        for peer in sorted(self._connected - peers):
            self._effects.emit(Disconnect(peer))
        for peer in sorted(peers - self._connected):
            member: Member | None = self._view.by_incarnation(peer)
            assert member is not None, "a holder that no view names"
            self._effects.emit(Connect(peer, member.address, member.key))
        self._connected = peers

    def drop(self, holder: Holder) -> None:
        """This server is sent nothing more, as long as the view names it."""
        self._release(holder, is_led=True)
        holder.copied.clear()

    def begin_anew(self, holder: Holder) -> None:
        """A server that is to be synced, and was dropped, begins with nothing."""
        here = self.holders.get(holder.partition, [])
        if holder in here:
            fresh = Holder(holder.partition, holder.peer, holder.rank, is_syncing=True)
            here[here.index(holder)] = fresh
            self._start(fresh)

    def _start(self, holder: Holder) -> None:
        holder.is_started = True
        start = StartHolding(0, holder.partition, self._creation())
        self._send([holder], start, lambda refused: None, ())

    def _release(self, holder: Holder, *, is_led: bool) -> None:
        """Nothing waits for this server any more. What it has not held counts if its partition is still led here."""
        holder.is_over = True
        records = [*holder.unheld, *[record for _, _, record in holder.queue]]
        holder.unheld.clear()
        holder.queue.clear()
        for request, record in list(holder.open.items()):
            entry = self._outbox.find(request)
            if entry is not None:
                self._outbox.settle(entry)
            records.append(record)
        holder.open.clear()
        for record in records:
            if not is_led:
                record.refused = LED_ELSEWHERE
            self._held(record)

    # ── records out ──

    def hold(self, partition: int, message: Any, then: Answer, payload: tuple[Span, ...] = ()) -> None:
        """Has a record held by the backup, and by the server that is being synced; its number is filled in here."""
        self._send(self.holders_of(partition), message, then, payload)

    def hold_round(self, partition: int, message: Any, then: Answer, payload: tuple[Span, ...], first: SliceId) -> None:
        """The same for the record of a round of the slices of which this is the first."""
        holders = [holder for holder in self.holders_of(partition) if not holder.is_syncing or first in holder.copied]
        self._send(holders, message, then, payload)

    def hold_new(
        self, partition: int, message: Any, then: Answer, payload: tuple[Span, ...], slice_ids: Iterable[SliceId]
    ) -> None:
        """The same for new slices. `then` may be told that they do not fit."""
        holders = self.holders_of(partition)
        for holder in holders:
            if holder.is_syncing and not holder.is_over:
                holder.copied.update(slice_ids)
        self._send(holders, message, then, payload, may_be_refused=True)

    def hold_in(
        self,
        messages: Sequence[tuple[int, Any]],
        then: Callable[[], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Has records held in several partitions; `then` is called when all are. If another server leads one of them
        before that, `lost` is called instead."""
        remaining = len(messages)
        is_lost = False

        def held(refused: Refused | None) -> None:
            nonlocal remaining, is_lost
            remaining -= 1
            is_lost = is_lost or refused is LED_ELSEWHERE
            if not remaining:
                (lost if is_lost else then)()

        for partition, message in messages:
            self.hold(partition, message, held)
        if not messages:
            then()

    def copy(self, holder: Holder, message: Any, then: Answer, payload: tuple[Span, ...] = ()) -> None:
        """Has a server that is being synced hold what the partition is. `then` may be told that it does not fit."""
        if not holder.is_over:
            self._send([holder], message, then, payload, may_be_refused=True)

    def ask(self, holder: Holder, message: Any, then: Answer) -> None:
        """Asks the backup something that comes after the records that were sent to it. `then` is told what it says."""
        if not holder.is_over:
            self._send([holder], message, then, (), is_question=True)

    def _send(
        self,
        holders: Sequence[Holder],
        message: Any,
        then: Answer,
        payload: tuple[Span, ...],
        *,
        may_be_refused: bool = False,
        is_question: bool = False,
    ) -> None:
        holders = [holder for holder in holders if not holder.is_over]
        record = _Record(then, len(holders), may_be_refused, is_question)
        for holder in holders:
            holder.queue.append((message, payload, record))
            self._send_queued(holder)
        if not holders:
            then(None)

    def _send_queued(self, holder: Holder) -> None:
        while holder.queue and not (holder.is_syncing and holder.open):
            message, payload, record = holder.queue.popleft()
            self._last_request += 1
            request = self._last_request
            send = Send(holder.peer, replace(message, request=request), payload)
            holder.open[request] = record
            nbytes = sum([span.nbytes for span in payload])
            self.has_new = True
            self._outbox.add(Entry(send, partial(self._answered, holder), nbytes))

    # ── answers in ──

    def receive(self, event: Received, now: float) -> None:
        """Takes the answer of another server."""
        message: Any = event.message
        entry = self._outbox.find(getattr(message, "request", 0))
        if entry is None or entry.peer != event.peer:
            return
        if isinstance(message, NotYet):
            self._outbox.retry_soon(entry, now)
        elif isinstance(message, Done | Refused):
            self._outbox.settle(entry)
            entry.answered(event)

    def _answered(self, holder: Holder, event: Received) -> None:
        message: Any = event.message
        record = holder.open.pop(message.request)
        if isinstance(message, Refused) and record.is_question:
            record.refused = message
        elif isinstance(message, Refused):
            if holder.is_syncing and record.may_be_refused:
                self._unfit(holder, message.text)
                self._held(record)
                return
            text = f"{name_of('server', holder.rank)} cannot hold partition {holder.partition}: {message.text}"
            self._effects.emit(LogEntry("error", text))
            record.refused = message
        if record.refused is None or record.may_be_refused or record.is_question:
            self._held(record)
        else:
            holder.unheld.append(record)
            self._out_of_sync(holder.partition, holder.peer)
        self._send_queued(holder)

    def _held(self, record: _Record) -> None:
        record.missing -= 1
        if not record.missing:
            record.then(record.refused)

    # ── time ──

    def due(self, now: float) -> list[Effect]:
        """The records that go out now."""
        self.has_new = False
        if not self._connected:
            return []
        return [*self._outbox.due(now), *self._outbox.pump(now)]

    def next_deadline(self) -> float | None:
        return self._outbox.next_deadline() if self._connected else None

    def validate(self) -> None:
        """Raises AssertionError if a record is waited for that nobody is asked to hold."""
        self._outbox.validate()
        open_ = {request for here in self.holders.values() for holder in here for request in holder.open}
        assert open_ == {entry.request for entry in self._outbox.entries()}, "a record is lost, or belongs to nobody"
        for here in self.holders.values():
            for holder in here:
                assert not holder.is_syncing or len(holder.open) <= 1, "records to a server that is synced overtake"
                assert not holder.queue or holder.is_syncing, "records wait for nothing"
