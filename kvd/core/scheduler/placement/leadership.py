"""How one run comes to know which server leads what: from its beginning, from the record, or from its servers."""

from __future__ import annotations

from kvd.core.machine import Received
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.core.scheduler.membership.views import MOST_TOLD, Views
from kvd.core.scheduler.placement.partitions import Partitions
from kvd.core.scheduler.placement.takeover import TakeOver
from kvd.core.scheduler.runs.record_check import RecordCheck
from kvd.protocol.messages import NO_VIEW, HandedOver, Join, NotYet, NotYetReason, OutOfSync, Synced


class Leadership:
    """Fills the table of a run. While that is empty, nobody has a seat, and who joins has to wait.

    With one replica there is no table, and it is always known.
    """

    def __init__(
        self,
        partitions: Partitions,
        roster: Roster,
        liveness: Liveness,
        views: Views,
        server_timeout_s: float,
        check: RecordCheck,
    ) -> None:
        self._partitions = partitions
        self._roster = roster
        self._liveness = liveness
        self._views = views
        self._check = check
        self._take_over = TakeOver(partitions.count, server_timeout_s)

    def next_deadline(self) -> float | None:
        return self._take_over.deadline

    # ── without a record ──

    def awaits(self, event: Received, join: Join, now: float) -> NotYet | None:
        """What a node that joins is answered while it is not known who leads what; None: it is known, or `complete`
        makes it known."""
        if self._partitions.is_known:
            return None
        self._take_over.take(event, join, now)
        missing = ", ".join(self._take_over.missing())
        if not missing:
            return None
        text = f"waiting for {missing}, which may know more than the others of where values are"
        return NotYet(join.request, NotYetReason.BUSY, text)

    def complete(self, now: float) -> bool:
        """True: the servers that must come have come. They have the places that they had, for the next view."""
        if self._partitions.is_known or not (self._take_over.expire(now) or not self._take_over.missing()):
            return False
        newest = self._take_over.newest()
        if newest > self._views.newest_epoch:
            self._views.continue_after(newest)
        self._partitions.restore([(entry, self._views.next_epoch) for entry in self._take_over.entries()])
        for event, join in self._take_over.arrivals():
            seat, _ = self._roster.take_seat(join, join.rank, event.sender, event.peer, event.principal.name)
            self._liveness.joined(seat, now)
        self._check.give_up()  # the servers have told what it does not say
        self._take_over.clear()
        return True

    def forgets(self, event: Received, role: str) -> bool:
        """Forget all places if the sender knows a later view than this scheduler. Return whether that happened: all
        nodes must join again then."""
        is_refuted = self._check.is_refuted(event, role)
        if not (is_refuted or self._is_behind(event, role)):
            return False
        if is_refuted and event.epoch < self._check.began:
            self._take_over.distrust(self._check.began.generation)
        self._check.give_up()
        self._partitions.forget()
        self._roster.forget()
        return True

    def _is_behind(self, event: Received, role: str) -> bool:
        """Whether a server knows a view that this scheduler has not made, although it knows who leads what."""
        is_possible = role == "server" and event.epoch.generation <= MOST_TOLD["server"]
        is_later = event.epoch > self._views.newest_epoch
        return is_possible and is_later and self._partitions.count > 0 and self._partitions.is_known

    # ── what servers show ──

    def seated(self, event: Received) -> None:
        """A new process has a seat. One that knows no view of the run has nothing of any partition."""
        if event.epoch == NO_VIEW:
            self._partitions.heard(event.sender, self._views.next_epoch)

    def heard(self, seat: Seat, event: Received) -> bool:
        """A member was heard; True if the table changes with the next view, as it knows the one before."""
        return seat.member.role == "server" and self._partitions.heard(event.sender, event.epoch)

    def told(self, seat: Seat, event: Received, message: Synced | HandedOver | OutOfSync) -> bool:
        """A server says who holds what; True if that changes roles from the next view on."""
        sender, next_epoch = seat.member.incarnation, self._views.next_epoch
        if isinstance(message, Synced | HandedOver):
            tell = self._partitions.synced if isinstance(message, Synced) else self._partitions.handed_over
            return tell(message.partition, sender, message.incarnation, event.epoch, next_epoch)
        return self._partitions.out_of_sync(message.partition, message.incarnation, sender, next_epoch)
