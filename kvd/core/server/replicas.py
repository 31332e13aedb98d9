"""What a server holds of partitions that another one leads: the other end of `records`.

A replica of a slice is the same as the slice: a log, bytes and an optimizer's state, made by the same records in the
same order. A record is held from the moment at which its round is closed here and its update has begun, so at most one
of a group is not applied yet; the next waits, and so does its answer.

The way of a record:

1. `Replicas.receive` refuses it unless it comes from the server that the newest view names as the leader.
2. `_hold` finds the group of its slices; `_begin` closes the round in the log, as the leader did, and has it applied.
3. Done is sent; `_applied` makes the version.

The way of a promotion: a view names this server as the leader. `take` gives away the groups of the partition, each as
soon as its last record is applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvd.core.machine import Apply, Contribution, ForgetState, JobDone, LogEntry, Received, ResetState, Span
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.handled import Handled
from kvd.core.server.installs import Installs
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_names import OptimizerNames
from kvd.core.server.progress import PushRequest
from kvd.core.session import SchedulerSession
from kvd.errors import KvdError
from kvd.optimizer import Optimizer, changes_from_wire, with_hyperparameters
from kvd.protocol.messages import (
    MOST_COUNTED,
    Done,
    ErrorCode,
    Hold,
    HoldActivated,
    HoldChange,
    HoldDropped,
    HoldLoop,
    HoldOptimizer,
    HoldPlace,
    HoldPublished,
    HoldState,
    Install,
    Made,
    NotYetReason,
    SliceId,
    StartHolding,
)
from kvd.protocol.specs import accumulator_scale, padded

RECORDS = (
    StartHolding,
    Install,
    Hold,
    HoldPublished,
    HoldDropped,
    HoldActivated,
    HoldPlace,
    HoldChange,
    HoldState,
    HoldOptimizer,
    HoldLoop,
)
NO_PUSH = PushRequest(0, 0)
_NO_SUCH_SLICE = "this server does not hold slice {} of key {!r}"


@dataclass(slots=True, eq=False)
class HeldPartition:
    """What this server holds of one partition.

    Attributes:
        leader: the incarnation whose records made it so.
        table: the slices; keys are live in it as they are at the leader.
        loops: by their first step: the newest HoldLoop.
        optimizer, generation: the newest that was set there, with all changes.
        handled: requests of the leader that need not be carried out again.
    """

    leader: int
    table: KeyTable
    loops: dict[int, HoldLoop] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    generation: int = 0
    handled: Handled = field(default_factory=Handled)


class Replicas:
    """The partitions that this server holds for others.

    Args:
        broken: a partition cannot be held any more, for this reason.
    """

    def __init__(
        self,
        session: SchedulerSession,
        led: KeyTable,
        effects: ServerEffects,
        grant: Callable[[int], bool],
        broken: Callable[[int], None],
    ) -> None:
        self._session = session
        self._view = session.view
        self._led = led
        self._effects = effects
        self._broken = broken
        self._held: dict[int, HeldPartition] = {}
        self._waiting: dict[FusedGroup, deque[tuple[Received, Hold]]] = {}  # behind a round that is being applied
        self._taken: dict[int, Callable[[FusedGroup], None]] = {}  # partitions that this server is to lead
        self._optimizers = OptimizerNames()
        self._installs = Installs(session, effects, self._optimizers, grant, self._hand_over)
        self._handlers: dict[type[Any], Callable[[Received, Any, HeldPartition], None]] = {
            Install: self._install,
            Hold: self._hold,
            HoldPublished: self._published,
            HoldDropped: self._dropped,
            HoldActivated: self._activated,
            HoldPlace: self._come_to,
            HoldChange: self._change,
            HoldState: self._state,
            HoldOptimizer: self._optimizer,
            HoldLoop: self._loop,
        }

    # ── what is held ──

    @property
    def partitions(self) -> list[int]:
        return sorted(self._held)

    def find(self, partition: int) -> HeldPartition | None:
        return self._held.get(partition)

    @property
    def nbytes(self) -> int:
        """Bytes of the slices that are held, once each."""
        return sum(held.table.bytes_led for held in self._held.values())

    def is_handing_over(self) -> bool:
        """Whether this server is to lead slices whose last records are not applied yet."""
        return bool(self._taken)

    # ── records in ──

    def receive(self, event: Received) -> None:
        """Takes a record."""
        message: Any = event.message
        held = self._held.get(message.partition)
        is_known = held is not None and held.leader == event.sender
        handler = self._handlers.get(type(message))
        if not self._is_from_leader(event, message.partition):
            self._elsewhere(event, message.request, message.partition)
        elif held is not None and is_known and message.request in held.handled:
            self._effects.send(event.peer, Done(message.request))
        elif isinstance(message, StartHolding):
            self._start(event, message, is_known=is_known)
        elif held is None or not is_known or handler is None:
            self._elsewhere(event, message.request, message.partition)  # what begins it is on its way
        else:
            handler(event, message, held)

    def _is_from_leader(self, event: Received, partition: int) -> bool:
        view = self._view
        if event.epoch > view.epoch or partition >= len(view.partitions):
            return False
        member = view.members.get(("server", view.leader_of(partition)))
        return (
            member is not None
            and member.incarnation == event.sender != self._session.incarnation
            and member.principal == event.principal.name
        )

    def _elsewhere(self, event: Received, request: int, partition: int) -> None:
        text = f"this server does not hold partition {partition} for the sender"
        self._effects.not_yet(event.peer, request, NotYetReason.ELSEWHERE, text)

    def _done(self, event: Received, held: HeldPartition) -> None:
        """The record is held: from now on a copy of the message changes nothing."""
        message: Any = event.message
        held.handled.add(message.request)
        self._effects.send(event.peer, Done(message.request))

    def _start(self, event: Received, message: StartHolding, *, is_known: bool) -> None:
        handled = self._held[message.partition].handled if is_known else Handled()
        if not self.forget(message.partition):
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, "an earlier record is applied")
            return
        held = HeldPartition(event.sender, KeyTable(self._led.numbers), handled=handled)
        held.table.creation = message.creation
        self._held[message.partition] = held
        self._done(event, held)

    def forget(self, partition: int) -> bool:
        """Forgets what is held of a partition. False if that must wait: a job is still at work on it."""
        held = self._held.get(partition)
        if held is None:
            return True
        if self._installs.is_busy(partition) or not all(group.is_quiescent for group in held.table.groups.values()):
            return False
        del self._held[partition]
        self._give_back(held.table.slices.values())
        return True

    def _give_back(self, slices: Collection[Slice]) -> None:
        if slices:
            self._effects.emit(ForgetState(tuple([(slice_.key, slice_.index) for slice_ in slices])))

    # ── slices ──

    def _install(self, event: Received, message: Install, held: HeldPartition) -> None:
        self._installs.take(event, message, held.table, partial(self._done, event, held))

    def _dropped(self, event: Received, message: HoldDropped, held: HeldPartition) -> None:
        old = [key for key, creation in message.keys if any(s.creation <= creation for s in held.table.of_key(key))]
        if not all(map(held.table.is_quiescent, old)):
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, "a slice is being updated")
            return
        for _, creation in message.keys:
            held.table.creation = max(held.table.creation, min(creation + 1, MOST_COUNTED))
        for key in sorted(set(old)):
            slices = held.table.of_key(key)
            held.table.remove(key)
            self._give_back(slices)
        self._done(event, held)

    def _published(self, event: Received, message: HoldPublished, held: HeldPartition) -> None:
        for key, creation in message.keys:
            first = held.table.slices.get((key, 0))
            if first is not None and first.creation == creation:
                held.table.live[key] = Made(first.spec, creation)
        self._done(event, held)

    # ── rounds ──

    def _hold(self, event: Received, message: Hold, held: HeldPartition) -> None:
        slices = self._slices(event, message, message.slice_ids, held)
        if slices is None:
            return
        if any((event.sender, message.request) == asked for queue in self._waiting.values() for asked in _asked(queue)):
            return  # it came again, and is answered when its turn comes
        busy = next((slice_.group for slice_ in slices if not slice_.group.is_quiescent), None)
        if busy is not None:
            self._waiting.setdefault(busy, deque()).append((event, message))
            return
        optimizer = self._optimizers.find(message.optimizer)
        if isinstance(optimizer, KvdError):
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, str(optimizer))
            return
        version = slices[0].log.closed
        if any(slice_.log.closed != version for slice_ in slices) or message.version > version + 1:
            text = f"record {message.version} of {slices[0].key!r} came when {version} were held"
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text, slices[0].key)
        elif message.version <= version:
            self._done(event, held)
        else:
            self._begin(event, message, held, slices)

    def _slices(
        self, event: Received, message: Any, slice_ids: Sequence[SliceId], held: HeldPartition
    ) -> list[Slice] | None:
        slices = []
        for key, index, creation in slice_ids:
            slice_ = held.table.slices.get((key, index))
            if slice_ is None or slice_.creation != creation:
                text = _NO_SUCH_SLICE.format(index, key)
                self._effects.refuse(event.peer, message.request, ErrorCode.KEY_NOT_FOUND, text, key)
                return None
            slices.append(slice_)
        return slices

    def _begin(self, event: Received, message: Hold, held: HeldPartition, slices: list[Slice]) -> None:
        """Closes the round as the leader has closed it, for all slices as one, or for each if they differ here."""
        group = slices[0].group if slices[0].group.slices == tuple(slices) else None
        if group is None:
            for slice_ in slices:
                if len(slice_.group.slices) > 1:
                    held.table.part(slice_.group)
            group = held.table.fuse(slices)
        if group is not None:
            self._close(group, message, Span(event.payload, 0, event.nbytes))
        else:
            for slice_, span in zip(slices, _spans(event, message, slices), strict=True):
                self._close(slice_.group, message, span)
        self._done(event, held)

    def _close(self, group: FusedGroup, message: Hold, span: Span) -> None:
        log = group.log
        for rank, clock, samples, how, step, place in message.given:
            log.stage(Contribution(rank, clock, None, samples, how, step, place), NO_PUSH)
        if not message.given:
            record = log.close_empty()
        else:
            closed = log.close_next([given.rank for given in message.given] if log.sync else ())
            assert closed is not None, f"a round that the leader closed is open here: {message}"
            record = closed
        optimizer = self._optimizers.find(message.optimizer)
        assert not isinstance(optimizer, KvdError)
        if message.generation > group.generation:
            self._renew(group, message.generation)
        group.optimizer_for(message.version)  # changes that took effect before
        group.optimizer = optimizer if message.generation == group.generation else group.optimizer
        if not record.contributions:
            log.commit(log.current)
            return
        merged = Contribution(0, 1, span, 1, record.contributions[0].how)
        self._effects.start_job(
            lambda job: Apply(
                job,
                group.number,
                group.layout,
                group.dtype,
                group.nbytes,
                log.current,
                (merged,),
                record.assign,
                "sum",
                optimizer if message.is_gradient else None,
                is_merged=message.is_gradient,
            ),
            partial(self._applied, group),
        )

    def _applied(self, group: FusedGroup, done: JobDone) -> None:
        if done.error is not None:
            text = f"{group.description} could not be updated as its leader has updated it: {done.error}"
            self._effects.emit(LogEntry("error", text))
            group.log.give_up()
            self._broken(group.partition)
        else:
            group.log.commit(done.result)
        for event, message in self._waiting.pop(group, ()):
            held = self._held.get(message.partition)
            if held is not None and held.leader == event.sender:
                self._hold(event, message, held)
        self._hand_over(group.partition)

    # ── what else changes a slice ──

    def _activated(self, event: Received, message: HoldActivated, held: HeldPartition) -> None:
        slice_ = held.table.slices.get((message.slice_id.key, message.slice_id.slice_index))
        if slice_ is not None and slice_.creation == message.slice_id.creation:
            if slice_.log.closed < message.closed:
                text = "records that come before are on their way"
                self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, text)
                return
            slice_.log.activate(message.rank, message.clock)
        self._done(event, held)

    def _come_to(self, event: Received, message: HoldPlace, held: HeldPartition) -> None:
        for group in held.table.groups.values():
            group.log.move_to(message.rank, message.place)
        self._done(event, held)

    def _change(self, event: Received, message: HoldChange, held: HeldPartition) -> None:
        try:
            changes = changes_from_wire(message.changes)
            if held.optimizer is not None:
                held.optimizer = with_hyperparameters(held.optimizer, changes)
            for key, index, creation, from_round in message.slices:
                slice_ = held.table.slices.get((key, index))
                if slice_ is None or slice_.creation != creation:
                    continue
                group = slice_.group
                if from_round:
                    group.change_from(from_round, changes)
                elif group.optimizer is not None:
                    group.optimizer = with_hyperparameters(group.optimizer, changes)
        except KvdError as error:
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, str(error))
        else:
            self._done(event, held)

    def _state(self, event: Received, message: HoldState, held: HeldPartition) -> None:
        slice_ = held.table.slices.get((message.slice_id.key, message.slice_id.slice_index))
        if slice_ is None or slice_.creation != message.slice_id.creation:
            self._done(event, held)
        elif not slice_.group.is_quiescent:
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, "a slice is being updated")
        else:
            slice_.loaded = message.loaded_by, message.loaded
            self._installs.load(event, message, slice_, partial(self._done, event, held))

    def _optimizer(self, event: Received, message: HoldOptimizer, held: HeldPartition) -> None:
        optimizer = self._optimizers.find(message.optimizer)
        if isinstance(optimizer, KvdError):
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, str(optimizer))
            return
        if message.generation >= held.generation:
            held.optimizer, held.generation = optimizer, message.generation
        for group in held.table.groups.values():
            if message.generation > group.generation:
                self._renew(group, message.generation)
                group.optimizer = optimizer
        self._done(event, held)

    def _renew(self, group: FusedGroup, generation: int) -> None:
        """Another optimizer was set: the state of these slices begins anew."""
        group.generation, group.changes = generation, []
        self._effects.emit(ResetState(tuple([(slice_.key, slice_.index) for slice_ in group.slices])))

    def _loop(self, event: Received, message: HoldLoop, held: HeldPartition) -> None:
        held.loops[message.first] = message
        self._done(event, held)

    # ── the view ──

    def view_changed(self) -> None:
        """Forgets what another leader made it hold, or what another server holds now."""
        for partition, held in list(self._held.items()):
            if partition >= len(self._view.partitions) or partition in self._taken:
                continue
            leader, backup, syncing, _ = self._view.partitions[partition]
            member = self._view.members.get(("server", leader))
            is_mine = member is not None and member.incarnation in (held.leader, self._session.incarnation)
            if not is_mine or (backup >= 0 and not self._is_me(backup) and not self._is_me(syncing)):
                self.forget(partition)

    def _is_me(self, rank: int) -> bool:
        member = self._view.members.get(("server", rank))
        return member is not None and member.incarnation == self._session.incarnation

    def take(self, partition: int, adopt: Callable[[FusedGroup], None]) -> HeldPartition | None:
        """This server leads the partition from now on: `adopt` gets each of its groups, once its records are applied.
        Returns what was held besides; None if nothing was."""
        held = self._held.get(partition)
        if held is None:
            return None
        for group in [group for group in self._waiting if group.partition == partition]:
            del self._waiting[group]  # they were not answered: they are not held
        self._taken[partition] = adopt
        self._hand_over(partition)
        return held

    def _hand_over(self, partition: int) -> None:
        adopt = self._taken.get(partition)
        if adopt is None or self._installs.is_busy(partition):
            return
        held = self._held[partition]
        for group in [group for group in held.table.groups.values() if group.is_quiescent]:
            held.table.release(group)
            adopt(group)
        if not held.table.groups:
            del self._held[partition], self._taken[partition]

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for partition, held in self._held.items():
            held.table.validate()
            for group in held.table.groups.values():
                assert group.partition == partition, f"{group.description} is held as part of partition {partition}"
                assert not group.waiting, f"somebody waits for {group.description}, which this server does not lead"
        for group in self._waiting:
            assert not group.is_quiescent, f"records wait for {group.description}, which is not being updated"


def _spans(event: Received, message: Hold, slices: Sequence[Slice]) -> list[Span]:
    """The part of the payload of each slice. Slices start at multiples of 8 bytes of their values; a gradient may have
    a wider dtype."""
    spans = []
    offset = 0
    for slice_ in slices:
        scale = accumulator_scale(slice_.spec.dtype) if message.is_gradient else 1
        offset = padded(offset)
        spans.append(Span(event.payload, offset * scale, slice_.nbytes * scale))
        offset += slice_.nbytes
    return spans


def _asked(queue: Iterable[tuple[Received, Hold]]) -> Iterator[tuple[int, int]]:
    """The sender and the number of each record."""
    return ((event.sender, message.request) for event, message in queue)
