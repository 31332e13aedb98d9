"""The scheduler of a run with two replicas; the tests play its nodes."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import PeerLost, Send
from kvd.protocol.messages import (
    NO_PARTITIONS,
    Epoch,
    Heartbeat,
    Join,
    KnownPartitions,
    Synced,
    View,
)
from tests.core.fakes import OPEN, cluster, of, server_id
from tests.core.scheduler_harness import Harness

A, B = (server_id(rank) for rank in range(2))
Rows = list[tuple[int, int, int]]


def settings(servers: int = 2, replicas: int = 2) -> Any:
    return cluster(1, servers, replicas=replicas)


class Run(Harness):
    """A run with two replicas. Its servers hear each view that they are told, unless they are deaf."""

    def __init__(self, servers: int = 2, *, begins: bool = True, saved: Any = None, generation: int = 1) -> None:
        super().__init__(settings(servers), saved=saved, generation=generation)
        self.views: dict[int, tuple[Epoch, View]] = {}  # by incarnation: the newest
        self.deaf: set[int] = set()
        if begins:
            seats = Harness(settings(servers, replicas=1))
            for rank in range(servers):
                seats.join("server", server_id(rank), f"server-{rank}", rank=rank)
            self.machine.seat_servers(seats.machine.roster.seats(), 0.0)
            self.worker(0)
            for rank in range(servers):
                self.comes(rank)

    def step(self, event: Any) -> Any:
        effects = super().step(event)
        for send in of(Send, effects):
            if isinstance(send.message, View) and send.peer not in self.deaf:
                self.views[send.peer] = (self.machine.epoch, send.message)  # type: ignore[index]
        return effects

    def epoch(self, who: int) -> Epoch:
        return self.views[who][0] if who in self.views else Epoch(0, 0)

    def known(self, who: int) -> KnownPartitions:
        if who not in self.views:
            return NO_PARTITIONS
        view = self.views[who][1]
        servers = sorted((member for member in view.members if member.role == "server"), key=lambda it: it.rank)
        return KnownPartitions(view.partitions, tuple(server.incarnation for server in servers))

    def comes(self, rank: int, life: int = 0, *, old: Run | None = None) -> Any:
        """A server joins; with `old`, it knows what it knew in that run of the scheduler."""
        who = server_id(rank, life)
        known, epoch = (old or self).known(who), (old or self).epoch(who)
        join = Join(1, "server", f"server-{rank}", "", "host", who, rank, OPEN, partitions=known)
        return self.say(who, join, view=epoch)

    def beats(self, rank: int, life: int = 0) -> Any:
        who = server_id(rank, life)
        return self.say(who, Heartbeat("server", rank), view=self.epoch(who))

    def rest(self, *ranks: tuple[int, int]) -> None:
        """These servers show what they know, until nothing changes any more."""
        for _ in range(4):
            for rank, life in ranks:
                self.beats(rank, life)

    def dies(self, rank: int, life: int = 0) -> Any:
        return self.step(PeerLost(server_id(rank, life), "exit 9"))

    def synced(self, partition: int, leader: tuple[int, int], synced: tuple[int, int]) -> Any:
        who = server_id(*leader)
        return self.say(who, Synced(30, partition, server_id(*synced)), view=self.epoch(who))

    def rows(self) -> Rows:
        """As the newest view has them that is announced."""
        return [(row.leader, row.backup, row.syncing) for row in self.machine.told_to("server").partitions]


def back_in_place() -> Run:
    """Server 0 was replaced, and is being synced by server 1, which leads both partitions."""
    run = Run()
    run.dies(0)
    run.beats(1)
    run.comes(0, 1)
    run.rest((0, 1), (1, 0))
    assert run.rows() == [(1, -1, 0), (1, -1, 0)]
    return run
