"""A table of partitions; the tests play the servers."""

from __future__ import annotations

from kvd.core.scheduler.placement.partitions import Entry, Holder, Partitions, Server
from kvd.protocol.messages import Epoch
from tests.core.fakes import server_id


def pid(rank: int, life: int = 0) -> Holder:
    return Holder(rank, server_id(rank, life))


class Table:
    """Partitions, and the servers that they are about. All servers come to know each view, unless one is deaf."""

    def __init__(self, count: int = 2, dead: tuple[int, ...] = ()) -> None:
        self.servers = {rank: Server(server_id(rank), rank not in dead, rank not in dead) for rank in range(count)}
        self.partitions = Partitions(count)
        self.change = 1
        self.deaf: set[int] = set()  # ranks whose servers do not know the newest views
        self.partitions.begin(self.servers, self.epoch)
        self.follow()

    @property
    def epoch(self) -> Epoch:
        return Epoch(1, self.change)

    def follow(self) -> list[str]:
        lines = self.partitions.follow(self.servers, self.epoch)
        self.partitions.validate(self.servers)
        return lines

    def settle(self) -> list[str]:
        """The servers know the newest view, and what the scheduler does then, until nothing changes any more."""
        lines: list[str] = []
        for _ in range(20):
            heard = [
                self.partitions.heard(server.incarnation, self.epoch)
                for rank, server in self.servers.items()
                if rank not in self.deaf and server.is_living
            ]
            if not any(heard):
                return lines
            self.change += 1
            lines += self.follow()
        raise AssertionError("the table never comes to rest")

    def set(self, rank: int, *, living: bool, life: int | None = None) -> list[str]:
        incarnation = self.servers[rank].incarnation if life is None else server_id(rank, life)
        if life is not None:
            self.partitions.heard(incarnation, Epoch(1, self.change + 1))
        self.servers[rank] = Server(incarnation, living, living)
        self.change += 1
        return self.follow() + self.settle()

    def kill(self, rank: int) -> list[str]:
        return self.set(rank, living=False)

    def wake(self, rank: int) -> list[str]:
        return self.set(rank, living=True)

    def replace(self, rank: int, life: int = 1) -> list[str]:
        return self.set(rank, living=True, life=life)

    def sync(self, partition: int) -> bool:
        """The leader says that who is syncing has everything."""
        entry = self.entry(partition)
        assert entry.syncing is not None
        return self.say_synced(partition, entry.leader, entry.syncing)

    def say_synced(self, partition: int, leader: Holder, synced: Holder, known: Epoch | None = None) -> bool:
        self.change += 1
        args = (partition, leader.incarnation, synced.incarnation, known or Epoch(1, self.change - 1), self.epoch)
        taken = self.partitions.synced(*args)
        self.follow()
        self.settle()
        return taken

    def entry(self, partition: int) -> Entry:
        return self.partitions.saved()[partition][0]

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Leader, backup, who is syncing, and lineage of each."""
        return [tuple(row[:4]) for row in self.partitions.public()]  # type: ignore[misc]

    def successors(self) -> list[int]:
        return [row.successor for row in self.partitions.public()]

    def hand_over(self, partition: int) -> bool:
        """The leader says that its successor has everything."""
        entry = self.entry(partition)
        assert entry.successor is not None
        return self.say_handed_over(partition, entry.leader, entry.successor)

    def say_handed_over(self, partition: int, leader: Holder, successor: Holder, known: Epoch | None = None) -> bool:
        self.change += 1
        args = (partition, leader.incarnation, successor.incarnation, known or Epoch(1, self.change - 1), self.epoch)
        taken = self.partitions.handed_over(*args)
        self.follow()
        self.settle()
        return taken


def everything_done(table: Table) -> int:
    """Lets leaders finish until nobody is syncing, and nothing is handed over; how many changes that takes."""
    for changes in range(200):
        rows = list(enumerate(table.partitions.public()))
        syncing = [partition for partition, row in rows if row.syncing >= 0]
        leaving = [partition for partition, row in rows if row.successor >= 0]
        if syncing:
            assert table.sync(syncing[0])
        elif leaving:
            assert table.hand_over(leaving[0])
        else:
            return changes
    raise AssertionError("the table never comes to rest")


def everything_synced(table: Table) -> int:
    """Lets leaders finish until nobody is syncing; the number of copies that this takes."""
    for copies in range(100):
        syncing = [partition for partition, row in enumerate(table.partitions.public()) if row.syncing >= 0]
        if not syncing:
            return copies
        assert table.sync(syncing[0])
    raise AssertionError("the table never comes to rest")
