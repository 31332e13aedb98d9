"""Lists of keys, from all servers that lead some, while partitions move."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.core.membership import ViewState
from kvd.core.requests import Control
from kvd.protocol.messages import NO_RANK, Epoch, KeyEntry, KeyList, Partition
from tests.core.fakes import cluster, members, view

SETTINGS = cluster(2, 2, replicas=2)


class Servers:
    """Two servers with a page of keys per partition, and what happens before each answer."""

    def __init__(self, *happenings: tuple[int, int]) -> None:
        self.machine = SimpleNamespace(view=ViewState())
        self.happenings = list(happenings)
        self.asked: list[int] = []
        self.lead(0, 1)

    def lead(self, *leaders: int) -> None:
        state = self.machine.view
        told = view(SETTINGS, members(2, 2))
        partitions = tuple([Partition(rank, NO_RANK, NO_RANK, 1) for rank in leaders])
        state.update(Epoch(1, state.epoch.change + 1), replace(told, partitions=partitions))

    async def call(self, request: Control) -> Any:
        assert request.partitions is not None
        (partition,) = request.partitions
        self.asked.append(partition)
        if self.happenings:
            self.lead(*self.happenings.pop(0))
        leader = self.machine.view.leader_of(partition)
        led = [number for number in range(2) if self.machine.view.leader_of(number) == leader]
        entries = tuple([KeyEntry(f"key {number}", "float32", (1,), 1, 4, 0, True) for number in led])
        after = request.messages[0].after
        rest = [entry for entry in entries if entry.key > after]
        return [(KeyList(0, tuple(rest[:1]), len(rest) > 1), None, 0)]

    def list(self) -> list[tuple[int, str]]:
        found = asyncio.run(list_keys(cast(Engine, self)))
        return [(rank, entry.key) for rank, entry in found]


def test_every_leader_is_asked_for_all_its_pages() -> None:
    servers = Servers()
    assert servers.list() == [(0, "key 0"), (1, "key 1")]
    servers.lead(1, 1)
    servers.asked.clear()
    assert servers.list() == [(1, "key 0"), (1, "key 1")]
    assert servers.asked == [0, 0]


def test_a_list_begins_anew_when_partitions_move_meanwhile() -> None:
    """The first server was asked when it led its keys no more, the second when it did not lead them yet."""
    servers = Servers((0, 1), (1, 1))
    assert servers.list() == [(1, "key 0"), (1, "key 1")]
    assert len(servers.asked) >= 4
