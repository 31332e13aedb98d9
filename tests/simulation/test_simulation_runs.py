"""The machines under faults, by seed. A failing seed names itself and replays identically."""

from __future__ import annotations

import pytest

from kvd.testing.campaign import CAMPAIGNS, Campaign
from kvd.testing.network import NASTY
from kvd.testing.simulator import Violation

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


def test_violation_names_the_seed() -> None:
    world = CAMPAIGNS["ledger"].run(5)
    with pytest.raises(Violation, match="seed 5"):
        world.fail("something")
