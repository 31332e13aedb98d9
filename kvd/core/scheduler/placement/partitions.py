"""The partitions of a run: which server leads each, which one is its in-sync backup, and which one is to become that.

With one replica there are none. With two, `Partitions` has one `Entry` per partition, and changes it by these rules:

| what happened | the partition's entry after it |
|---|---|
| its backup, or who is syncing, is dead, has left or was replaced | without it; if it is heard again, it stays out |
| the same of its leader, and an in-sync backup is there | the backup leads; nobody is backup or syncing |
| its leader is dead or has left, and no backup is there | the leader stays, to be waited for; nobody is syncing |
| its leader was replaced, and no backup is there | the new process leads, in a new lineage: the contents are lost |
| it has no backup, and another server is active | syncing: the next active rank after the leader (the ring) |
| the leader has said that who is syncing has everything | it is the backup, in place of the earlier one |
| a backup, or who is syncing, is out of sync: it says so, or the leader | without it |
| some server leads at least two more than another, which is its backup | successor: the backup |
| the leader has said that its successor has everything | the successor leads, and the old leader is the backup |

Once all partitions have backups, they are spread evenly, one at a time. A server that leads two fewer than another is
to lead one of those, its *home*, the one with the number of its rank, if it can be that. It is made the backup first,
if it is none, and then the successor. When no server leads two fewer than another, a backup that is not the next active
rank after the leader gives way to that one, which is synced beside it. Each handover makes the loads less uneven, and
the backups only follow the leaders: this comes to an end.

Four things make this safe, together with what servers do:

- A backup is a rank with the incarnation that became in-sync. Another process of the rank is not in-sync.
- The leader waits for the answers of who is syncing from before it says Synced: at that moment nothing is committed
  that the new backup does not hold.
- Nobody is chosen for a partition before the leader and it have both shown that they know the entry without it, and
  Synced and HandedOver count only from a leader that knows the entry as it is. Else a copy that was broken off could be
  taken for another one.
- A leader that says HandedOver changes nothing more. If it changes its mind, since no view comes, it can commit nothing
  that the successor, its backup, does not hold; and the successor nothing that it does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

from kvd.core.membership import name_of
from kvd.core.scheduler.membership.roster import Roster
from kvd.protocol.messages import BIGGEST, NO_RANK, NO_VIEW, Epoch, Limit, MemberState, Partition

Incarnation: TypeAlias = Annotated[int, Limit(1, BIGGEST)]


class Holder(NamedTuple):
    """One process of a server."""

    rank: int
    incarnation: int


class Entry(NamedTuple):
    """One partition: see `kvd.protocol.messages.Partition`."""

    leader: Holder
    backup: Holder | None
    syncing: Holder | None
    lineage: int
    successor: Holder | None = None

    def public(self) -> Partition:
        """As the view has it: by rank."""
        backup, syncing, successor = (
            NO_RANK if holder is None else holder.rank for holder in (self.backup, self.syncing, self.successor)
        )
        return Partition(self.leader.rank, backup, syncing, self.lineage, successor)


class Server(NamedTuple):
    """How the holder of a server's rank is."""

    incarnation: int
    is_living: bool
    is_active: bool


Servers = Mapping[int, Server]  # by rank


def servers_of(roster: Roster) -> dict[int, Server]:
    """The servers that have seats."""
    return {
        seat.member.rank: Server(seat.member.incarnation, seat.is_living, seat.member.state is MemberState.ACTIVE)
        for seat in roster.seats()
        if seat.member.role == "server"
    }


class Partitions:
    """The table of one run.

    Args:
        count: how many there are: one per server with two replicas, else 0. Until `begin` or `restore` is called, it
            is not known who leads them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._entries: list[Entry] = []
        self._since: list[Epoch] = []  # of each entry: the view that has it for the first time
        self._known: dict[int, Epoch] = {}  # by incarnation: the newest view that it has shown to know
        self._held_back: list[tuple[int, Holder]] = []  # to be chosen for a partition once its leader and it know more
        self._is_restored = False  # `follow` has yet to find out whom to hold back

    @property
    def is_known(self) -> bool:
        """Whether it is known who leads what."""
        return len(self._entries) == self.count

    def saved(self) -> list[tuple[Entry, Epoch]]:
        """For the record: each entry, and the view that has it for the first time."""
        return list(zip(self._entries, self._since, strict=True))

    def public(self) -> tuple[Partition, ...]:
        """As the view has them."""
        return tuple(entry.public() for entry in self._entries)

    # ── where they come from ──

    def awaits(self, epoch: Epoch) -> bool:
        """Whether servers must show that they know the view of this epoch, whatever it says."""
        return any(since >= epoch for since in self._since)

    def begin(self, servers: Servers, epoch: Epoch) -> None:
        """The run begins with this view. Nobody has anything, so each backup has everything."""
        fresh = []
        for partition in range(self.count):
            leader, *others = self._ring(servers, partition) or [Holder(partition, servers[partition].incarnation)]
            fresh.append((Entry(leader, others[0] if others else None, None, leader.incarnation), epoch))
        self.restore(fresh)

    def restore(self, saved: Sequence[tuple[Entry, Epoch]]) -> None:
        """Goes on with what `saved` gave. What servers know of it, they have yet to show."""
        self._entries = [entry for entry, _ in saved]
        self._since = [since for _, since in saved]
        self._is_restored = True

    def forget(self) -> None:
        """Servers know of later changes than this table has."""
        self._entries = []
        self._since = []
        self._held_back = []

    def is_alone(self, incarnation: int) -> bool:
        """Whether this server leads something of which nobody else is an in-sync replica."""
        return any(entry.backup is None and entry.leader.incarnation == incarnation for entry in self._entries)

    # ── what happens ──

    def heard(self, incarnation: int, known: Epoch) -> bool:
        """A server has shown that it knows this view; True if that makes `follow` choose somebody."""
        if not self.count or known <= self._known.get(incarnation, NO_VIEW):
            return False
        self._known[incarnation] = known
        if self._is_restored and self._may_change():
            return True
        return any(self._both_know(partition, chosen) for partition, chosen in self._held_back)

    def _may_change(self) -> bool:
        """Whether a table that was restored has a partition without a backup, or may be uneven."""
        if any(entry.backup is entry.syncing for entry in self._entries):  # None and None
            return True
        is_at_rest = all(entry.backup and not (entry.syncing or entry.successor) for entry in self._entries)
        return is_at_rest and len({entry.leader for entry in self._entries}) < len(self._entries)

    def synced(self, partition: int, leader: int, incarnation: int, known: Epoch, epoch: Epoch) -> bool:
        """This leader, which knows the view `known`, says that who is syncing, of this incarnation, has everything.

        False: that is not, or no more, what the table says. Otherwise the view of this epoch has a new backup.
        """
        if partition >= len(self._entries):
            return False
        entry = self._entries[partition]
        found = (entry.leader.incarnation, entry.syncing and entry.syncing.incarnation)
        if found != (leader, incarnation) or known < self._since[partition]:
            return False
        self._put(partition, entry._replace(backup=entry.syncing, syncing=None), epoch)
        return True

    def handed_over(self, partition: int, leader: int, incarnation: int, known: Epoch, epoch: Epoch) -> bool:
        """This leader, which knows the view `known`, says that its successor, of this incarnation, has everything.

        False: that is not, or no more, what the table says. Otherwise the successor leads from the view of this epoch
        on, and the old leader, which has everything too, is its backup.
        """
        if partition >= len(self._entries):
            return False
        entry = self._entries[partition]
        successor = entry.successor
        if successor is None or (entry.leader.incarnation, successor.incarnation) != (leader, incarnation):
            return False
        if known < self._since[partition]:
            return False
        self._put(partition, Entry(successor, entry.leader, None, entry.lineage), epoch)
        return True

    def out_of_sync(self, partition: int, incarnation: int, sender: int, epoch: Epoch) -> bool:
        """A server says that it does not hold what its role asks for, or the leader says so of it.

        True: it has lost that role from the view of this epoch on. What is sent late at worst costs another copy.
        """
        if partition >= len(self._entries):
            return False
        entry = self._entries[partition]
        if sender not in (incarnation, entry.leader.incarnation):
            return False
        backup, syncing = (
            None if holder is not None and holder.incarnation == incarnation else holder
            for holder in (entry.backup, entry.syncing)
        )
        successor = None if backup is None else entry.successor
        self._put(partition, entry._replace(backup=backup, syncing=syncing, successor=successor), epoch)
        return (backup, syncing) != (entry.backup, entry.syncing)

    def follow(self, servers: Servers, epoch: Epoch) -> list[str]:
        """Takes over what happened to the servers, for the view of this epoch. Returns what people should know."""
        if not self._entries:
            return []
        before = tuple(self._entries)
        for partition, entry in enumerate(before):
            self._put(partition, _without_the_gone(entry, servers), epoch)
        self._choose(servers, epoch)
        living = {server.incarnation for server in servers.values()}
        self._known = {incarnation: known for incarnation, known in self._known.items() if incarnation in living}
        return _changes(before, self._entries)

    # ── the rules ──

    def _choose(self, servers: Servers, epoch: Epoch) -> None:
        """Names who is to be synced, where somebody is and may be, and who is to lead."""
        self._held_back, self._is_restored = [], False
        moved = {}
        if self._is_redundant(servers) and not any(entry.syncing or entry.successor for entry in self._entries):
            uneven = self._uneven(servers)
            if uneven is not None and self._entries[uneven[0]].backup == uneven[1]:
                self._name_successor(*uneven, epoch)
            else:
                moved = self._moved(servers) if uneven is None else dict([uneven])
        for partition, entry in enumerate(self._entries):
            ring = self._ring(servers, entry.leader.rank + 1)
            leads_well = entry.leader in ring
            others = [holder for holder in ring if holder != entry.leader]
            chosen = moved.get(partition) if entry.backup else next(iter(others), None)
            if chosen is None or entry.syncing is not None or not leads_well:
                continue
            if self._both_know(partition, chosen):
                self._put(partition, entry._replace(syncing=chosen), epoch)
            else:
                self._held_back.append((partition, chosen))

    def _name_successor(self, partition: int, backup: Holder, epoch: Epoch) -> None:
        if self._both_know(partition, backup):
            self._put(partition, self._entries[partition]._replace(successor=backup), epoch)
        else:
            self._held_back.append((partition, backup))

    def _uneven(self, servers: Servers) -> tuple[int, Holder] | None:
        """The one partition that should have another leader next, and whom; None if the load is even."""
        active = self._ring(servers, 0)
        leads = Counter(entry.leader for entry in self._entries)
        least = min(active, key=lambda holder: leads[holder])
        movable = [
            partition
            for partition, entry in enumerate(self._entries)
            if entry.leader in active and leads[entry.leader] >= leads[least] + 2
        ]
        if not movable:
            return None
        best = min(movable, key=lambda at: (at != least.rank, -leads[self._entries[at].leader], at))
        return best, least

    def _moved(self, servers: Servers) -> dict[int, Holder]:
        """The one partition that should get another backup next, and whom."""
        active = self._ring(servers, 0)
        for partition, entry in enumerate(self._entries):
            if entry.leader in active and entry.backup != (best := self._ring(servers, entry.leader.rank + 1)[0]):
                return {partition: best}
        return {}

    def _is_redundant(self, servers: Servers) -> bool:
        """Whether there is a backup wherever there can be one."""
        active = self._ring(servers, 0)
        return len(active) > 1 and all(entry.backup for entry in self._entries if entry.leader in active)

    def _both_know(self, partition: int, chosen: Holder) -> bool:
        leader = self._entries[partition].leader
        least = min(self._known.get(holder.incarnation, NO_VIEW) for holder in (leader, chosen))
        return least >= self._since[partition]

    def _ring(self, servers: Servers, first: int) -> list[Holder]:
        """The active servers in the order of their ranks, from this one on and round."""
        ranks = sorted(servers, key=lambda rank: (rank < first, rank))
        return [Holder(rank, servers[rank].incarnation) for rank in ranks if servers[rank].is_active]

    def _put(self, partition: int, entry: Entry, epoch: Epoch) -> None:
        if entry != self._entries[partition]:
            self._entries[partition] = entry
            self._since[partition] = epoch

    # ── for people and tests ──

    def report(self) -> list[dict[str, object]]:
        """For `kvd status`."""
        return [
            {
                "partition": partition,
                "leader": _name(entry.leader),
                "backup": _name(entry.backup),
                "syncing": _name(entry.syncing),
                "successor": _name(entry.successor),
            }
            for partition, entry in enumerate(self._entries)
        ]

    def validate(self, servers: Servers) -> None:
        """Raises AssertionError if somebody has a role that it cannot have."""
        assert len(self._entries) in (0, self.count), f"{len(self._entries)} of {self.count} partitions"
        for partition, entry in enumerate(self._entries):
            leader, backup, syncing, lineage, successor = entry
            ranks = [holder.rank for holder in (leader, backup, syncing) if holder is not None]
            assert len(set(ranks)) == len(ranks), f"partition {partition}: a server has two roles in {entry}"
            for holder in (backup, syncing):
                assert holder is None or _is_there(holder, servers), f"partition {partition}: {holder} is not there"
            helped = backup is not None or syncing is not None
            assert _is_there(leader, servers) or not helped, f"partition {partition}: {entry} has no leader"
            present = servers.get(leader.rank)
            is_own = present is None or present.incarnation == leader.incarnation
            assert is_own, f"partition {partition}: {leader} was replaced by {present}"
            assert lineage > 0, f"partition {partition} has no lineage"
            is_fit = successor is None or (successor == backup and syncing is None)
            assert is_fit, f"partition {partition}: {successor} cannot take over in {entry}"
        assert sum(entry.successor is not None for entry in self._entries) <= 1, "two partitions are handed over"


def _without_the_gone(entry: Entry, servers: Servers) -> Entry:
    """What is left of an entry; see the first table above."""
    leader, backup, syncing, lineage, successor = entry
    backup = backup if backup is not None and _is_there(backup, servers) else None
    syncing = syncing if syncing is not None and _is_there(syncing, servers) else None
    if _is_there(leader, servers):
        return Entry(leader, backup, syncing, lineage, None if backup is None else successor)
    if backup is not None:
        return Entry(backup, None, None, lineage)
    present = servers.get(leader.rank)
    if present is not None and present.incarnation != leader.incarnation:
        return Entry(Holder(leader.rank, present.incarnation), None, None, present.incarnation)
    return Entry(leader, None, None, lineage)


def _is_there(holder: Holder, servers: Servers) -> bool:
    present = servers.get(holder.rank)
    return present is not None and present.is_living and present.incarnation == holder.incarnation


def _name(holder: Holder | None) -> str | None:
    return None if holder is None else name_of("server", holder.rank)


def _changes(before: Sequence[Entry], after: Sequence[Entry]) -> list[str]:
    """What changed, by leader."""
    lines: dict[str, list[int]] = {}
    for partition, (old, new) in enumerate(zip(before, after, strict=True)):
        if new.lineage != old.lineage:
            lines.setdefault(f"{_name(new.leader)} starts over, without the contents of", []).append(partition)
        elif new.leader != old.leader:
            lines.setdefault(f"{_name(new.leader)} leads, in place of {_name(old.leader)},", []).append(partition)
        elif new.successor is not None and new.successor != old.successor:
            lines.setdefault(f"{_name(new.successor)} is to lead, in place of {_name(new.leader)},", []).append(
                partition
            )
        elif new.syncing is not None and new.syncing != old.syncing:
            lines.setdefault(f"{_name(new.syncing)} is made the backup of {_name(new.leader)} for", []).append(
                partition
            )
    return [f"{text} {_listed(partitions)}" for text, partitions in lines.items()]


def _listed(partitions: Sequence[int]) -> str:
    word = "partition" if len(partitions) == 1 else "partitions"
    return f"{word} {', '.join(map(str, partitions))}"
