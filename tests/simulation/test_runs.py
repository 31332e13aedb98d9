"""The machines under faults, by seed. A failing seed names itself and replays identically."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvd.core.machine import Peer
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.protocol.codec import decode
from kvd.protocol.messages import Enter, Push, PushBatch
from kvd.testing.campaign import CAMPAIGNS, Campaign
from kvd.testing.network import CALM, NASTY, Network
from kvd.testing.process import Process
from kvd.testing.trace import Violation

pytestmark = pytest.mark.no_cover  # thousands of runs of the same lines: coverage would triple their time

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
