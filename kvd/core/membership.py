"""The view as each node reads it: the members, their addresses and their states."""

from __future__ import annotations

from kvd.core.placement import shard_of
from kvd.errors import ProtocolError
from kvd.protocol.messages import (
    NO_RANK,
    NO_VIEW,
    Epoch,
    Member,
    MemberState,
    Partition,
    RunEntry,
    Settings,
    View,
    ViewChange,
)

EMPTY_SETTINGS = Settings("", "", -1, 0, 0, 0, 0, 0, 0)


def name_of(role: str, rank: int) -> str:
    """A node's name in texts: "server 1"."""
    return role if role == "scheduler" else f"{role} {rank}"


_IN_WORDS = {
    MemberState.ACTIVE: "is active",
    MemberState.IDLE: "waits at a point until all have come there",
    MemberState.DONE: "has left the rounds",
    MemberState.LEFT: "has left",
    MemberState.DEAD: "is dead",
    MemberState.GONE: "left the rounds, and is dead now",
    MemberState.LOST: "is dead, and the rounds go on without it",
    MemberState.BACK: "is there, and takes no part in the rounds yet",
    MemberState.RETURNING: "is about to take part in the rounds",
}

TAKING_PART = (MemberState.ACTIVE, MemberState.RETURNING)  # and well
_NOT_AWAITED = frozenset(
    {
        MemberState.IDLE,
        MemberState.DONE,
        MemberState.LEFT,
        MemberState.GONE,
        MemberState.LOST,
        MemberState.BACK,
    }
)


def in_words(state: MemberState) -> str:
    """What to say of a node in this state, after its name: "has left"."""
    return _IN_WORDS[state]


class ViewState:
    """The newest view that a node knows."""

    def __init__(self) -> None:
        self.epoch = NO_VIEW
        self.settings = EMPTY_SETTINGS
        self.newest_epoch = NO_VIEW  # that any node has told of
        self.scheduler = 0  # whose views count; 0: of whichever
        self.is_sync = True  # whether workers share rounds; false in async mode
        self.shards: tuple[int, ...] = ()
        self.runs: tuple[RunEntry, ...] = ()
        self.partitions: tuple[Partition, ...] = ()
        self.members: dict[tuple[str, int], Member] = {}
        self._by_incarnation: dict[int, Member] = {}
        self._pages: dict[int, View] = {}  # of a view of which not all messages have come
        self._pages_of = NO_VIEW

    @property
    def is_up_to_date(self) -> bool:
        """Whether it names all servers, and is the newest view that another node has told of."""
        return self.knows_all_servers and self.newest_epoch <= self.epoch

    def hear_of(self, epoch: Epoch) -> bool:
        """Another node knows the view of this epoch; True if it is newer than this one."""
        self.newest_epoch = max(self.newest_epoch, epoch)
        return epoch > self.epoch

    def forget(self) -> None:
        """The next view is of another run: its epochs are counted from their own beginning."""
        self.epoch = self.newest_epoch = NO_VIEW
        self.partitions = ()
        self._pages, self._pages_of = {}, NO_VIEW

    def begin_with(self, scheduler: int) -> None:
        """An observer is let in by this incarnation of the scheduler. One that has lost the record of those before it
        counts its views from the beginning, and believes no observer that there were others."""
        if self.scheduler not in (0, scheduler):
            self.forget()
        self.scheduler = scheduler

    def update(self, epoch: Epoch, view: View) -> bool:
        """Takes the view if it is newer than the known one; True if it is, and all of it has come."""
        if epoch <= self.epoch:
            return False
        if view.pages > 1:
            whole = self._put_together(epoch, view)
            if whole is None:
                return False
            view = whole
        self.epoch = epoch
        self.settings = view.settings
        self.is_sync = view.settings.mode != "async"
        self.shards = view.shards
        self.runs = view.runs
        self.partitions = view.partitions or self.partitions  # a scheduler without its record has yet to learn them
        self.members = {(member.role, member.rank): member for member in view.members}
        self._by_incarnation = {member.incarnation: member for member in view.members}
        return True

    def can_take(self, epoch: Epoch, change: ViewChange) -> bool:
        """Whether the change begins with the known view or an earlier one of this scheduler. Whatever has changed since
        the known one is in it then."""
        return self.epoch.generation == epoch.generation and change.base <= self.epoch.change

    def change(self, epoch: Epoch, change: ViewChange) -> bool:
        """Takes a change that it can take, if that ends with a newer view than the known one; True if it does."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        if change.has_runs:
            self.runs = change.runs
        if change.partitions:
            partitions = dict(enumerate(self.partitions))
            partitions.update({number: entry for number, entry in change.partitions if number in partitions})
            self.partitions = tuple(partitions.values())
        self._change_members(change)
        return True

    def _change_members(self, change: ViewChange) -> None:
        """Of thousands of members, a change names few. Whoever has the earlier members keeps them as they were."""
        members, by_incarnation = dict(self.members), self._by_incarnation
        named = {(member.role, member.rank): member for member in change.members}
        left = [(place.role, place.rank) for place in change.left]
        for place in (*left, *named):
            before = members.get(place)
            if before is not None:
                by_incarnation.pop(before.incarnation, None)
        for place in left:
            members.pop(place, None)
        members.update(named)
        by_incarnation.update({member.incarnation: member for member in change.members})
        self.members = members

    def _put_together(self, epoch: Epoch, page: View) -> View | None:
        """The view, if this was the last of its messages to come. Of two views, only the newer one is waited for."""
        if epoch > self._pages_of:
            self._pages, self._pages_of = {}, epoch
        if epoch != self._pages_of or page.page >= page.pages:
            return None
        self._pages[page.page] = page
        parts = [self._pages.get(number) for number in range(page.pages)]
        found = [part for part in parts if part is not None and part.pages == page.pages]
        if len(found) < page.pages:
            return None
        self._pages = {}
        first = found[0]
        members = tuple([member for part in found for member in part.members])
        return View(first.settings, members, first.shards, first.runs, first.partitions)

    def by_incarnation(self, incarnation: int) -> Member | None:
        return self._by_incarnation.get(incarnation)

    def servers(self) -> list[Member]:
        """All servers by rank, also those that are dead or left."""
        return sorted((m for m in self.members.values() if m.role == "server"), key=lambda member: member.rank)

    def worker(self, rank: int) -> Member | None:
        return self.members.get(("worker", rank))

    def all_leaders_active(self) -> bool:
        """Whether every partition is served."""
        return self.settings.num_servers > 0 and not self.missing_servers()

    @property
    def knows_all_servers(self) -> bool:
        """Whether each server has joined, also if it is gone now."""
        return 0 < self.settings.num_servers == sum(role == "server" for role, _ in self.members)

    def missing_servers(self) -> list[int]:
        """The ranks of servers that lead a partition, and have not joined or are not active."""
        alive = {server.rank for server in self.servers() if server.state is MemberState.ACTIVE}
        return [rank for rank in self.leads() if rank not in alive]

    def missing_workers(self) -> list[int]:
        """The ranks that no worker has taken yet, and without which the job does not begin. One that joined and is
        dead, or has left, is not missing."""
        return [rank for rank in range(self.settings.num_workers) if ("worker", rank) not in self.members]

    def required_ranks(self) -> list[int]:
        """The ranks of the workers that rounds wait for: all that have not left the rounds, except those that are lost,
        wait at a point, or have yet to come in. Those that the job begins with count joined or not."""
        workers = [member for member in self.members.values() if member.role == "worker"]
        ranks = {*range(self.settings.num_workers), *(member.rank for member in workers)}
        return sorted(ranks - {member.rank for member in workers if member.state in _NOT_AWAITED})

    def ranks_apart(self) -> list[int]:
        """The ranks of the workers without which the rounds go on, whether they are back or not. There are none in
        async mode, where no round waits for anyone: a worker that is back takes part there at once."""
        apart = (MemberState.LOST, MemberState.BACK)
        return [m.rank for m in self.members.values() if m.role == "worker" and m.state in apart and self.is_sync]

    def ranks_taking_part(self) -> list[int]:
        """The ranks of the workers of the job, without those that are lost and have yet to take part again, and
        those that wait at a point. Where workers may join later, those that rounds wait for."""
        if self.settings.is_elastic:
            return self.required_ranks()
        apart = (MemberState.LOST, MemberState.BACK, MemberState.IDLE)
        gone = {member.rank for member in self.members.values() if member.role == "worker" and member.state in apart}
        return [rank for rank in range(self.settings.num_workers) if rank not in gone]

    def all_worker_ranks(self) -> list[int]:
        """The ranks of the workers that the job begins with, and of all that have joined."""
        joined = {member.rank for member in self.members.values() if member.role == "worker"}
        return sorted({*range(self.settings.num_workers), *joined})

    def lost_ranks(self) -> list[int]:
        """The ranks of the workers that died, and without which the others go on."""
        return [m.rank for m in self.members.values() if (m.role, m.state) == ("worker", MemberState.LOST)]

    def dead_workers(self) -> dict[int, Member]:
        return {m.rank: m for m in self.members.values() if m.role == "worker" and m.state is MemberState.DEAD}

    # ── where slices are ──

    def partition_of(self, key: str, slice_index: int) -> int:
        """The partition that a slice belongs to, for good."""
        if not self.shards:  # a scheduler names them all before there is a key
            raise ProtocolError("the scheduler has sent a view without shards, though there are keys: restart it")
        return self.shards[shard_of(key, slice_index, len(self.shards))]

    @property
    def first_partition(self) -> int:
        """The partition where what belongs to no key is kept."""
        return self.shards[0] if self.shards else 0

    def partition_numbers(self) -> range:
        return range(len(self.partitions) or self.settings.num_servers)

    def leads(self) -> dict[int, int]:
        """The ranks of the servers that lead something, in order, each with the first partition that it leads."""
        leads: dict[int, int] = {}
        for partition in self.partition_numbers():
            leads.setdefault(self.leader_of(partition), partition)
        return dict(sorted(leads.items()))

    def leader_of(self, partition: int) -> int:
        """The rank of the server that leads a partition."""
        return self.partitions[partition].leader if self.partitions else partition

    def is_led_by(self, rank: int, key: str, slice_index: int) -> bool:
        """Whether the server of this rank leads a slice."""
        return self.leader_of(self.partition_of(key, slice_index)) == rank

    def needs(self, rank: int) -> bool:
        """Whether the server of this rank alone has what it leads, though another one could hold it too."""
        others = any(server.state is MemberState.ACTIVE and server.rank != rank for server in self.servers())
        return others and any(entry.leader == rank and entry.backup == NO_RANK for entry in self.partitions)

    def backup_of(self, partition: int) -> int:
        """The rank of the server that holds all committed records of a partition too; NO_RANK if none does."""
        return self.partitions[partition].backup if self.partitions else NO_RANK

    def lineage_of(self, partition: int) -> int:
        """What changes when a partition is lost, and starts over without contents; 0 if nobody leads it yet."""
        if self.partitions:  # a view may lie, and know fewer
            return self.partitions[partition].lineage if partition < len(self.partitions) else 0
        if self.settings.replicas > 1:
            return 0  # the next view says it
        member = self.members.get(("server", partition))
        return 0 if member is None else member.incarnation

    def has_begun_anew(self, partition: int, lineage: int) -> bool:
        """Whether what was in the partition under this lineage is lost. Of lineage 0 nothing was known."""
        return lineage != 0 and self.lineage_of(partition) not in (0, lineage)
