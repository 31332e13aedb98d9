"""The machines of a running cluster, while somebody says valid messages with arbitrary fields to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import pytest

from kvd.core.requests import Item, Versions
from kvd.errors import ProtocolError
from kvd.protocol.messages import EndRun, Join, Shutdown
from tests.fuzz.hostile import Hostile
from tests.fuzz.making import KINDS
from tests.simulator.checkers import check_everything_ended, watch_everything
from tests.simulator.settings import ClusterSettings
from tests.simulator.simulator import Me, World
from tests.simulator.trace import Violation
from tests.simulator.workloads.ledger import Ledger
from tests.simulator.workloads.tables import Pull, TableRounds

SEEDS = 4
TABLE_SEEDS = 1
SOAK_SEEDS = 200
HOLDERS_END_JOBS = (EndRun, Shutdown, Join)  # whoever holds the cluster's key may end a job, or take a place in it
STRANGE = [kind for kind in KINDS if kind not in HOLDERS_END_JOBS]
SECONDS = 60.0


def honest_work(seed: int, mode: str) -> int:
    """A ledger whose pushes must each count once, while a stranger talks; how much he said."""
    world = World(seed, ClusterSettings(mode=mode))
    watch_everything(world)
    ledger = Ledger(world.cluster.workers, 6)
    world.start_all(ledger.program)
    hostile = Hostile(world, seed, STRANGE, knows=False)
    world.run(SECONDS, world.workers_finished)
    check_everything_ended(world)
    ledger.check(world)
    return hostile.said


class Unwatched(Ledger):
    """Nobody looks whether its pushes are there: who speaks in the name of a server can acknowledge what it likes."""

    def place(self, me: Me, clock: int) -> int:
        return super().place(me, clock) % self.size  # a liar may have said any rank

    def watch(self, world: World) -> None:
        pass


class UnwatchedTables(TableRounds):
    """The same of tables."""

    def to_push(self, key: str, rank: int, clock: int) -> Item:
        return super().to_push(key, rank % self.workers, clock)

    def look(self, me: Me, pull: Pull, versions: Sequence[Versions | None]) -> None:
        pass


def harm(seed: int, mode: str, *, to_workers: bool, tables: bool = False) -> int:
    """Somebody who knows all the incarnations and runs, and speaks in any name: no machine raises, and each stays
    valid, whatever becomes of the job. How much he said."""
    world = World(seed, ClusterSettings(mode=mode))
    workers = world.cluster.workers
    if tables:
        program = UnwatchedTables(workers, 6, seed, world.cluster.servers, mode == "sync", replaces=False).program
    else:
        program = Unwatched(workers, 6).program
    world.start_all(program)
    hostile = Hostile(world, seed, knows=True, to_workers=to_workers)
    # A worker believes its daemons: lies may spoil what it knows and says, and must not make it raise.
    with suppress(Violation, ProtocolError) if to_workers else nullcontext():
        world.run(20.0)
    return hostile.said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_honest_pushes_count_once_while_a_stranger_talks(mode: str) -> None:
    assert min(honest_work(seed, mode) for seed in range(SEEDS)) > 20


@pytest.mark.parametrize("to_workers", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_machine_raises_whoever_says_what(mode: str, to_workers: bool) -> None:
    assert sum(harm(seed, mode, to_workers=to_workers) for seed in range(SEEDS)) > 20 * SEEDS


@pytest.mark.parametrize("to_workers", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_machine_raises_that_has_tables(mode: str, to_workers: bool) -> None:
    said = sum(harm(seed, mode, to_workers=to_workers, tables=True) for seed in range(TABLE_SEEDS))
    assert said > 20 * TABLE_SEEDS


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_many_seeds(mode: str) -> None:
    for seed in range(SEEDS, SEEDS + SOAK_SEEDS):
        honest_work(seed, mode)
        harm(seed, mode, to_workers=False)
        harm(seed, mode, to_workers=True)
        harm(seed, mode, to_workers=False, tables=True)
        harm(seed, mode, to_workers=True, tables=True)
