"""The machines under faults, by seed. A failing seed names itself and replays identically."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from kvd.core.cuts import Available, Choice, Chooser
from kvd.core.machine import Peer
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.protocol.codec import decode
from kvd.protocol.messages import Enter, Push, PushBatch
from kvd.testing.campaign import CAMPAIGNS, FAILOVERS, STEPS, Campaign
from kvd.testing.network import CALM, NASTY, Network
from kvd.testing.process import Process
from kvd.testing.trace import Violation
from kvd.testing.workloads.readings import Readers, Seen
from kvd.testing.workloads.steps import Keys

SEEDS = 10  # of each campaign in `make test`
SOAK_SEEDS = 1000  # of each campaign under -m soak
FAILOVER_SEEDS = 2  # of each campaign in which servers die, in `make test`
CHUNK = 5


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign(name: str, first: int) -> None:
    for seed in range(first, first + CHUNK):
        CAMPAIGNS[name].run(seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign_soak(name: str, first: int) -> None:
    for seed in range(first, first + 100):
        CAMPAIGNS[name].run(seed)


@pytest.mark.parametrize("name", FAILOVERS)
def test_failover_campaign(name: str) -> None:
    run_failovers(name, range(FAILOVER_SEEDS))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(FAILOVER_SEEDS, FAILOVER_SEEDS + SOAK_SEEDS, 100))
@pytest.mark.parametrize("name", FAILOVERS)
def test_failover_campaign_soak(name: str, first: int) -> None:
    run_failovers(name, range(first, first + 100))


def run_failovers(name: str, seeds: Sequence[int]) -> None:
    """Campaigns in which no server dies would prove little."""
    deaths = 0
    for seed in seeds:
        world = FAILOVERS[name].run(seed)
        deaths += sum(process.life for process in world.processes.values() if process.name.startswith("server"))
    assert deaths >= len(seeds), deaths


@pytest.mark.parametrize("name", ["ledger", "rounds, nasty", "training, long pauses", "ledger, timeouts"])
def test_same_seed_same_run(name: str) -> None:
    digests = [CAMPAIGNS[name].run(seed).digest() for seed in (7, 7, 8)]
    assert digests[0] == digests[1] != digests[2]


def test_faults_do_happen() -> None:
    """A network that loses nothing and nodes that never die would prove little."""
    world = Campaign("ledger", faults=NASTY).run(3)
    assert world.network.lost > 10
    assert world.network.sent > 300
    assert any(process.life > 0 for process in world.processes.values())


@pytest.mark.parametrize("name", ["mixed", "mixed, nasty", "lists", "lists, stale by 1", "list training"])
def test_groups_are_fused_and_parted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns whose lists are never fused, or never parted with something staged, would prove little."""
    counts = {"fused": 0, "parted": 0, "parted with something staged": 0, "parted with someone waiting": 0}
    fuse, part = KeyTable.fuse, KeyTable.part

    def counting_fuse(table: KeyTable, slices: Sequence[Slice]) -> FusedGroup | None:
        before = {slice_.group for slice_ in slices}
        group = fuse(table, slices)
        counts["fused"] += group is not None and group not in before
        return group

    def counting_part(table: KeyTable, group: FusedGroup) -> None:
        counts["parted"] += 1
        counts["parted with something staged"] += not group.log.is_idle
        counts["parted with someone waiting"] += any(waiting.slice is None for waiting in group.waiting)
        part(table, group)

    monkeypatch.setattr(KeyTable, "fuse", counting_fuse)
    monkeypatch.setattr(KeyTable, "part", counting_part)
    for seed in range(12):
        CAMPAIGNS[name].run(seed)
    assert min(counts.values()) >= 5, counts


@pytest.mark.parametrize("name", [name for name in CAMPAIGNS if name.startswith("watched")])
def test_readers_read_in_the_middle_of_a_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns whose readers come when all is over, are always in time or never wait, would prove little."""
    counts = {"in the middle": 0, "too late": 0, "of a step to come": 0}
    read, too_late, choose = Readers.read, Chooser.was_too_late, Chooser.choose

    def counting_read(readers: Readers, keys: Keys, numbers: Iterator[int]) -> Generator[Any, Any, Seen]:
        seen = yield from read(readers, keys, numbers)
        counts["in the middle"] += 0 < seen.step < STEPS and len(keys) > 1
        return seen

    def counting_late(chooser: Chooser) -> None:
        counts["too late"] += 1
        too_late(chooser)

    def counting_choose(chooser: Chooser, there: Available) -> Choice:
        choice = choose(chooser, there)
        counts["of a step to come"] += choice.patience_s is not None
        return choice

    monkeypatch.setattr(Readers, "read", counting_read)
    monkeypatch.setattr(Chooser, "was_too_late", counting_late)
    monkeypatch.setattr(Chooser, "choose", counting_choose)
    for seed in range(30 if name == "watched, nasty" else 10):  # a rare meeting in a network that loses much
        CAMPAIGNS[name].run(seed)
    assert min(counts.values()) >= 1, counts
    assert counts["in the middle"] >= 20, counts


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_pushes_and_meetings_happen_while_there_are_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If joining took longer than the faults last, everything after it would happen in peace."""
    sent = {False: 0, True: 0}
    send = Network.send

    def counting(network: Network, sender: Process, peer: Peer, header: bytes, payload: bytes | None) -> None:
        if isinstance(decode(header).message, Push | PushBatch | Enter):
            sent[network.faults is CALM] += 1
        send(network, sender, peer, header, payload)

    monkeypatch.setattr(Network, "send", counting)
    for seed in range(2):
        CAMPAIGNS[name].run(seed)
    assert sent[False] >= 0.1 * sum(sent.values()) > 0


def test_violation_names_the_seed() -> None:
    world = CAMPAIGNS["ledger"].run(5)
    with pytest.raises(Violation, match="seed 5"):
        world.fail("something")
