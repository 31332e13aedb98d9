"""What a server holds of partitions that another one leads: the other end of `records`.

A replica of a slice is the same as the slice: a log, bytes and an optimizer's state, made by the same records in the
same order: `installs` makes the slices, `held_rounds` their versions, and `held_changes` does the rest.

A view that names this server as the leader promotes the replicas: `take` gives away the groups of the partition, each
as soon as its last record is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.core.machine import ForgetState, Received
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup, forget_state
from kvd.core.server.handled import Handled
from kvd.core.server.held import HeldPartition, RecordAnswers
from kvd.core.server.held_changes import Handler, HeldChanges
from kvd.core.server.held_checks import HeldChecks
from kvd.core.server.held_rounds import HeldRounds
from kvd.core.server.installs import Installs
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_names import OptimizerNames
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import Compare, Hold, HoldReady, HoldRows, Install, InstallRows, NotYetReason, StartHolding


class Replicas:
    """The partitions that this server holds for others.

    Args:
        led: the slices that this server leads.
        grant: whether there is memory for so many more bytes of slices.
        grant_rows: whether there is for so many more of rows of tables.
        broken: a partition cannot be held any more.
    """

    def __init__(
        self,
        session: SchedulerSession,
        led: KeyTable,
        effects: ServerEffects,
        grant: Callable[[int], bool],
        grant_rows: Callable[[int], bool],
        broken: Callable[[int], None],
    ) -> None:
        self._session = session
        self._view = session.view
        self._led = led
        self._effects = effects
        self._held: dict[int, HeldPartition] = {}
        self._is_late = False  # something is to be forgotten on which a job is still at work
        self._taken: dict[int, Callable[[FusedGroup], None]] = {}  # partitions that this server is to lead
        self._answers = answers = RecordAnswers(effects)
        optimizers = OptimizerNames()
        self._installs = Installs(session, effects, optimizers, grant, grant_rows, self._hand_over)
        self._rounds = HeldRounds(effects, answers, optimizers, self._break, self._hand_over)
        checks = HeldChecks(effects, answers, self._rounds)
        self._broken = broken
        self._handlers: dict[type[Any], Handler] = {
            **HeldChanges(effects, answers, optimizers, self._installs).handlers,
            Install: self._install,
            InstallRows: self._install_rows,
            Hold: self._rounds.hold,
            HoldRows: self._rounds.hold_rows,
            HoldReady: self._ready,
            Compare: checks.compare,
        }

    # ── what is held ──

    @property
    def kinds(self) -> list[type[Any]]:
        """The messages that `receive` takes."""
        return [StartHolding, *self._handlers]

    @property
    def partitions(self) -> list[int]:
        return sorted(self._held)

    def find(self, partition: int) -> HeldPartition | None:
        """What is held of a partition; None if nothing is."""
        return self._held.get(partition)

    @property
    def nbytes(self) -> int:
        """Bytes of the slices that are held, once each; without tables."""
        return sum([held.table.bytes_led for held in self._held.values()]) if self._held else 0

    @property
    def table_nbytes(self) -> int:
        """The memory of parts of tables that are held."""
        return sum([held.table_nbytes for held in self._held.values()]) if self._held else 0

    def is_handing_over(self) -> bool:
        """Whether this server is to lead slices whose last records are not applied yet."""
        return bool(self._taken)

    # ── records in ──

    def receive(self, event: Received) -> None:
        """Takes a record."""
        message: Any = event.message
        held = self._held.get(message.partition)
        if held is not None and held.leader != event.sender:
            held = None  # it was held for another leader
        is_late = held is not None and event.epoch < held.since  # a copy of what was sent before this time began
        if is_late or not self._is_from_leader(event, message.partition):
            self._elsewhere(event, message.request, message.partition)
        elif held is not None and message.request in held.handled:
            self._answers.confirm(event)
        elif isinstance(message, StartHolding):
            self._start(event, message, Handled() if held is None else held.handled)
        elif held is None:
            self._elsewhere(event, message.request, message.partition)  # what begins it is on its way
        elif message.request <= held.handled.floor and not isinstance(message, Hold | HoldRows | Compare):
            text = "this record comes so late that it may have been held: the partition has to be sent again"
            self._answers.refuse(event, text)
        else:
            self._handlers[type(message)](event, message, held)

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

    def _start(self, event: Received, message: StartHolding, handled: Handled) -> None:
        if not self.forget(message.partition):
            self._answers.later(event, "an earlier record is applied")
            return
        held = HeldPartition(event.sender, KeyTable(self._led.numbers), handled=handled, since=event.epoch)
        held.table.creation = message.creation
        self._held[message.partition] = held
        self._answers.done(event, held)

    def put(self, partition: int, held: HeldPartition) -> None:
        """This server has led the partition until now, and holds it from now on."""
        self._held[partition] = held

    def _install(self, event: Received, message: Install, held: HeldPartition) -> None:
        def done() -> None:
            for image in message.images:
                held.rows.pop((image.key, image.slice_index), None)
            self._answers.done(event, held)

        self._installs.take(event, message, held.table, done)

    def _install_rows(self, event: Received, message: InstallRows, held: HeldPartition) -> None:
        def done(nbytes: int) -> None:
            held.rows[message.part.key, message.part.slice_index] = nbytes
            self._answers.done(event, held)

        self._installs.take_rows(event, message, held.table, done)

    def _ready(self, event: Received, message: HoldReady, held: HeldPartition) -> None:
        if held.is_broken:
            self._answers.refuse(event, "a round could not be applied here: the partition has to be sent again")
        elif not self._is_quiescent(message.partition, held):
            self._answers.later(event, "an earlier record is applied")
        else:
            self._answers.done(event, held)

    def _break(self, partition: int) -> None:
        if partition in self._held:
            self._held[partition].is_broken = True
        self._broken(partition)

    def _is_quiescent(self, partition: int, held: HeldPartition) -> bool:
        groups = held.table.groups.values()
        return not self._installs.is_busy(partition) and all(group.is_quiescent for group in groups)

    def forget(self, partition: int) -> bool:
        """Forgets what is held of a partition. False if that must wait: a job is still at work on it."""
        held = self._held.get(partition)
        if held is None:
            return True
        if not self._is_quiescent(partition, held):
            return False
        del self._held[partition]
        held.table.drop_values()
        if held.table.slices:
            self._effects.emit(forget_state(held.table.slices.values()))
        if held.rows:
            self._effects.emit(ForgetState(tuple(held.rows)))
        return True

    def drop_values(self) -> None:
        """Drop all bytes that are held: the run is given up."""
        for held in self._held.values():
            held.table.drop_values()

    # ── the view ──

    def job_ended(self) -> None:
        """An update has ended: what had to wait for it is forgotten."""
        if self._is_late:
            self.view_changed()

    def view_changed(self) -> None:
        """Forgets what another leader made it hold, or what another server holds now."""
        self._is_late = False
        for partition, held in list(self._held.items()):
            if partition >= len(self._view.partitions) or partition in self._taken:
                continue
            leader, backup, syncing, *_ = self._view.partitions[partition]
            member = self._view.members.get(("server", leader))
            if member is None or self._view.by_incarnation(self._session.incarnation) is None:
                continue  # a scheduler that was restarted waits for it, or for this server
            is_mine = member.incarnation in (held.leader, self._session.incarnation)
            if not is_mine or (backup >= 0 and not self._is_me(backup) and not self._is_me(syncing)):
                self._is_late = not self.forget(partition) or self._is_late

    def _is_me(self, rank: int) -> bool:
        member = self._view.members.get(("server", rank))
        return member is not None and member.incarnation == self._session.incarnation

    def take(self, partition: int, adopt: Callable[[FusedGroup], None]) -> HeldPartition | None:
        """This server leads the partition from now on: `adopt` gets each of its groups, once its records are applied.
        Returns what was held besides; None if nothing was."""
        held = self._held.get(partition)
        if held is None:
            return None
        self._rounds.forget_waiting(partition)
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
        self._rounds.validate()
