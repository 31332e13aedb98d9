"""Leaders of the partitions of one run, as known from its beginning, from the record, or from its servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvd.core.machine import Received
from kvd.core.membership import name_of
from kvd.core.scheduler.membership.liveness import Liveness
from kvd.core.scheduler.membership.roster import Roster, Seat
from kvd.core.scheduler.membership.views import MOST_TOLD, Views
from kvd.core.scheduler.placement.partitions import Entry, Holder, Partitions
from kvd.core.scheduler.runs.record import RecordCheck
from kvd.protocol.messages import (
    NO_RANK,
    NO_VIEW,
    Epoch,
    HandedOver,
    Join,
    NotYet,
    NotYetReason,
    OutOfSync,
    Partition,
    Synced,
)


class Arrival(NamedTuple):
    """A server that wants to join, and what it knows."""

    event: Received
    join: Join

    @property
    def holder(self) -> Holder:
        return Holder(self.join.rank, self.event.sender)


class TakeOver:
    """What the servers of a run know of its partitions, for a scheduler whose record is lost or too old.

    A scheduler that does not know the leaders lets nobody in. The nodes go on with the views that they have, and ask
    again. Once a server has come for each rank, the newest view that one of them knows has the leaders: any process
    that acted on a newer one is gone. So nobody is promoted by an old view.

    A server that does not come within its timeout counts as dead. But if a worker knows a newer view than all servers
    that have come, the missing one may lead by it, or lead without the backup that the others name: then it is waited
    for.
    """

    def __init__(self, num_servers: int, timeout_s: float) -> None:
        self._num_servers = num_servers
        self._timeout_s = timeout_s
        self.clear()

    def clear(self) -> None:
        """All is known: nobody is waited for."""
        self._arrivals: dict[int, Arrival] = {}  # by rank
        self._known_to_others = NO_VIEW  # the newest view that a worker knows
        self._wrong_generation = 0  # of a scheduler whose views say nothing
        self.deadline: float | None = None  # when those who have not come count as dead; None: they are waited for

    def distrust(self, generation: int) -> None:
        """The views of this generation were made from a record that was too old."""
        self._wrong_generation = generation

    def take(self, event: Received, join: Join, now: float) -> None:
        """A node asks to be let in. Of two servers that want one rank, the one counts that knows a newer view."""
        if join.role == "worker" and event.epoch.generation != self._wrong_generation:
            self._known_to_others = max(self._known_to_others, event.epoch)
        if join.role != "server" or not 0 <= join.rank < self._num_servers:
            return
        if not self._arrivals:
            self.deadline = now + self._timeout_s
        self._arrivals = {rank: known for rank, known in self._arrivals.items() if known.event.sender != event.sender}
        arrival = self._arrivals.get(join.rank)
        if arrival is None or arrival.event.epoch < event.epoch:
            self._arrivals[join.rank] = Arrival(event, join)

    def missing(self) -> list[str]:
        """The names of the servers that have not come."""
        return [name_of("server", rank) for rank in range(self._num_servers) if rank not in self._arrivals]

    def expire(self, now: float) -> bool:
        """Called at each step. True: who has not come counts as dead, and what the others know is enough."""
        if self.deadline is None or now < self.deadline:
            return False
        self.deadline = None
        return bool(self._sound()) and self._known_to_others <= self.newest()

    def arrivals(self) -> list[Arrival]:
        """One server for each rank that has come, by rank."""
        return [self._arrivals[rank] for rank in sorted(self._arrivals)]

    def newest(self) -> Epoch:
        """The newest view that any of them knows."""
        return max((arrival.event.epoch for arrival in self._arrivals.values()), default=NO_VIEW)

    def entries(self) -> list[Entry]:
        """The partitions as the newest view has them that any of them knows; nobody is waited for.

        Without any such view nobody is known to hold what another one leads: each leads its own, and has no backup.
        A copy that was under way starts over.
        """
        told = self._sound()
        if not told:  # then all have come
            return [Entry(own, None, None, own.incarnation) for own in (arrival.holder for arrival in self.arrivals())]
        newest = max(told, key=lambda arrival: arrival.event.epoch).join.partitions
        return [_entry(partition, newest.servers) for partition in newest.partitions]

    def _sound(self) -> list[Arrival]:
        """Those who know of partitions."""
        return [
            arrival
            for arrival in self.arrivals()
            if arrival.event.epoch.generation != self._wrong_generation and self._is_sound(*arrival.join.partitions)
        ]

    def _is_sound(self, partitions: Sequence[Partition], servers: Sequence[int]) -> bool:
        """Whether the partitions are such as a scheduler announces."""
        count = self._num_servers
        return (
            len(partitions) == len(servers) == count
            and all(servers)
            and len(set(servers)) == count
            and all(
                partition.leader < count
                and partition.backup < count
                and partition.backup != partition.leader
                and partition.lineage > 0
                for partition in partitions
            )
        )


def _entry(partition: Partition, servers: Sequence[int]) -> Entry:
    leader = Holder(partition.leader, servers[partition.leader])
    backup = None if partition.backup == NO_RANK else Holder(partition.backup, servers[partition.backup])
    return Entry(leader, backup, None, partition.lineage)


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
