"""What the servers of a run know of its partitions, for a scheduler whose record is lost or too old.

A scheduler that does not know who leads what lets nobody in. The nodes go on with the views that they have, and ask
again. Once a server has come for each rank, the newest view that one of them knows says who leads what: whoever acted
on a newer one is gone. So nobody is promoted by an old view.

A server that does not come within its timeout counts as dead. But if a worker knows a newer view than all servers that
have come, the missing one may lead by it, or lead without the backup that the others name: then it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvd.core.machine import Received
from kvd.core.membership import name_of
from kvd.core.scheduler.placement.partitions import Entry, Holder
from kvd.protocol.messages import NO_RANK, NO_VIEW, Epoch, Join, Partition


class Arrival(NamedTuple):
    """A server that wants to join, and what it knows."""

    event: Received
    join: Join

    @property
    def holder(self) -> Holder:
        return Holder(self.join.rank, self.event.sender)


class TakeOver:
    """Collects the servers of a run until all are there."""

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
