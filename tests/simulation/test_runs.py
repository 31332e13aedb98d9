"""The machines under faults, by seed. A failing seed names itself and replays identically."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvd.core.machine import Send
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.protocol.messages import Push, PushBatch
from kvd.testing.campaign import CAMPAIGNS, Campaign
from kvd.testing.network import CALM, NASTY
from kvd.testing.process import Process
from kvd.testing.simulator import Violation, World

SEEDS = 20  # of each campaign in `make test`
SOAK_SEEDS = 1000  # of each campaign under -m soak
CHUNK = 10


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


@pytest.mark.parametrize("name", ["ledger", "rounds, nasty", "training, long pauses", "ledger, timeouts"])
def test_same_seed_same_run(name: str) -> None:
    digests = [CAMPAIGNS[name].run(seed).digest() for seed in (7, 7, 8)]
    assert digests[0] == digests[1] != digests[2]


def test_faults_do_happen() -> None:
    """A network that loses nothing and nodes that live for ever would prove little."""
    world = Campaign("ledger", faults=NASTY).run(3)
    assert world.network.lost > 10
    assert world.network.sent > 300
    assert any(process.life > 0 for process in world.processes.values())


@pytest.mark.parametrize("name", ["mixed", "mixed, nasty", "lists", "lists, stale by 1", "list training"])
def test_units_do_come_and_go(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns of lists that are never fused, or never parted with something staged, would prove little."""
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
    for seed in range(5):
        CAMPAIGNS[name].run(seed)
    assert min(counts.values()) >= 5, counts


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_pushes_are_made_while_there_are_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the workers took longer to join than the faults last, all that follows would happen in peace."""
    sent = {False: 0, True: 0}
    send = World._send

    def counting(world: World, process: Process, effect: Send) -> None:
        if isinstance(effect.message, Push | PushBatch):
            sent[world.network.faults is CALM] += 1
        send(world, process, effect)

    monkeypatch.setattr(World, "_send", counting)
    for seed in range(2):
        CAMPAIGNS[name].run(seed)
    assert sent[False] >= 0.1 * sum(sent.values()) > 0


def test_violation_names_the_seed() -> None:
    world = CAMPAIGNS["ledger"].run(5)
    with pytest.raises(Violation, match="seed 5"):
        world.fail("something")
