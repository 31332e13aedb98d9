"""What a server does with others, so that any one of them may die: the parts, and how they are put together.

A leader sends its `records` to the backups of its partitions, and brings servers in by `syncing`. A backup keeps
`replicas`. `leadership` takes over and gives up what the view says; by a `handover` the two change places.
`checks` finds out whether leader and backup have the same.
"""

from __future__ import annotations

from typing import Any

from kvd.core.machine import Effect, Received
from kvd.core.server.checks import Checks
from kvd.core.server.effects import ServerEffects
from kvd.core.server.elsewhere import Elsewhere
from kvd.core.server.giving_up import GivingUp
from kvd.core.server.handover import Handovers
from kvd.core.server.held import HeldPartition
from kvd.core.server.leadership import Leadership
from kvd.core.server.out_of_step import OutOfStep
from kvd.core.server.records import Records
from kvd.core.server.replicas import Replicas
from kvd.core.server.syncing import Syncing
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import NotYetReason, StartHolding


class Replication:
    """The parts of a server that talk to other servers.

    Attributes:
        is_on: whether the view names backups at all.
        postpones: tells the sender of a request about all slices of this server to wait, if it must.
    """

    def __init__(
        self,
        session: SchedulerSession,
        effects: ServerEffects,
        records: Records,
        replicas: Replicas,
        leadership: Leadership,
        syncing: Syncing,
        out_of_step: OutOfStep,
        elsewhere: Elsewhere,
        handovers: Handovers,
        giving_up: GivingUp,
        checks: Checks,
    ) -> None:
        self._session = session
        self._effects = effects
        self._records = records
        self._replicas = replicas
        self._leadership = leadership
        self._syncing = syncing
        self._out_of_step = out_of_step
        self._handovers = handovers
        self._giving_up = giving_up
        self._checks = checks
        self.is_on = False
        self.postpones = elsewhere.postpones

    def leads(self, partition: int) -> bool:
        """Whether this server leads a partition."""
        return partition in self._leadership.led

    def held(self, partition: int) -> HeldPartition | None:
        """What this server holds of a partition that another one leads."""
        return self._replicas.find(partition)

    @property
    def differences(self) -> list[str]:
        """The newest difference between what is led here and what a backup holds; none if there was none."""
        last = self._checks.last
        return [] if last is None else [f"{last.backup}, partition {last.partition}: {last.text}"]

    def answered(self, event: Received, now: float) -> None:
        """Takes the answer of a backup to a record."""
        self._records.receive(event, now)
        self._giving_up.end_groups()

    def record(self, event: Received, message: Any) -> None:
        """Takes a record of a leader."""
        if isinstance(message, StartHolding) and self._giving_up.is_ending(message.partition):
            text = "an update of this partition is under way"
            self._effects.not_yet(event.peer, message.request, NotYetReason.UPDATING, text)
        else:
            self._replicas.receive(event)

    def view_changed(self) -> None:
        """Gives up and takes over partitions, before anyone asks about them; then sees who holds what is led here."""
        self.is_on = bool(self._session.view.partitions)
        self._leadership.view_changed()
        self._records.view_changed(self._leadership.led, self._leadership.promoted)
        self._leadership.advance_adopted()
        self._replicas.view_changed()
        self._syncing.view_changed()
        self._handovers.view_changed(self._leadership.led)
        self._giving_up.end_groups()  # the others have let go of those that were given up
        self._out_of_step.view_changed()

    def job_ended(self) -> None:
        """An update has ended: a group that had to wait for it may be taken over, given up or sent."""
        self._leadership.advance_adopted()
        self._syncing.job_ended()
        self._replicas.job_ended()
        self._giving_up.end_groups()

    def tick(self, now: float) -> list[Effect]:
        """What is due: records, and what the scheduler is told."""
        self._syncing.tick(now)
        self._handovers.tick(now)
        self._out_of_step.tick(now)
        self._checks.tick(now)
        return self._records.due(now)

    def next_deadline(self) -> float | None:
        if not self.is_on:
            return None
        due = self._records.next_deadline()
        for at in (
            self._syncing.next_deadline(),
            self._out_of_step.next_deadline(),
            self._handovers.next_deadline(),
            self._checks.next_deadline(),
        ):
            if at is not None and (due is None or at < due):  # without a generator: this is asked after each event
                due = at
        return due

    def explain(self) -> dict[str, object]:
        """For `kvd status`: the partitions that are led and held here."""
        return {
            "leads": self._leadership.led,
            "holds": self._replicas.partitions,
            "bytes_held": self._replicas.nbytes,
            "records_waiting": self._records.waiting,
            "hands_over": self._handovers.describe(),
            "not_backed_up": self._syncing.describe(),
            **self._checks.describe(),
        }

    def validate(self) -> None:
        """Raises AssertionError if an invariant of a part is broken."""
        for part in (self._records, self._replicas, self._leadership, self._handovers, self._giving_up):
            part.validate()
