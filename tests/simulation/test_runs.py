"""The machines under faults, by seed. A failing seed names itself and replays identically."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import pytest

from kvd.core.cuts import Available, Choice, Chooser
from kvd.core.machine import Send
from kvd.core.server.groups import FusedGroup, Slice
from kvd.core.server.keys import KeyTable
from kvd.protocol.messages import Enter, Epoch, Push, PushBatch
from tests.simulator.campaign import CAMPAIGNS, FAILOVERS, STEPS, Campaign
from tests.simulator.network import CALM, NASTY
from tests.simulator.process import Process
from tests.simulator.shell import Shell
from tests.simulator.trace import Violation
from tests.simulator.workloads.captured import Operators
from tests.simulator.workloads.readings import Readers, Seen
from tests.simulator.workloads.steps import Keys

SEEDS = 2  # of each campaign in `make test`
MOST_SEEDS = 20  # until what a campaign is about has happened
SOAK_SEEDS = 1000  # of each campaign under -m soak
FAILOVER_SEEDS = 2  # of each campaign in which servers die, in `make test`
FUSED = ("mixed", "mixed, nasty", "lists", "lists, stale by 1", "list training")
READ = tuple(name for name in CAMPAIGNS if name.startswith("watched"))
TABLES = tuple(name for name in CAMPAIGNS if name.startswith("tables"))
TABLE_SEEDS = 2  # one with an optimizer and one without
SEEDS_OF = dict.fromkeys(TABLES, TABLE_SEEDS)

Check = Callable[[], None]


def has_passed(check: Check) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checker complains, and what the campaign is about has happened: more seeds until it has."""
    checks = [watch(monkeypatch) for watch, names in WATCHED if name in names]
    for seed in range(MOST_SEEDS):
        CAMPAIGNS[name].run(seed)
        if seed + 1 >= SEEDS_OF.get(name, SEEDS) and all(map(has_passed, checks)):
            return
    for check in checks:
        check()


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


def test_violation_names_the_seed() -> None:
    world = CAMPAIGNS["ledger"].run(5)
    with pytest.raises(Violation, match="seed 5"):
        world.fail("something")


# ── what must have happened ──


def groups_are_fused_and_parted(patch: pytest.MonkeyPatch) -> Check:
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

    patch.setattr(KeyTable, "fuse", counting_fuse)
    patch.setattr(KeyTable, "part", counting_part)

    def check() -> None:
        assert min(counts.values()) >= 5, counts

    return check


def readers_read_in_the_middle(patch: pytest.MonkeyPatch) -> Check:
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

    patch.setattr(Readers, "read", counting_read)
    patch.setattr(Chooser, "was_too_late", counting_late)
    patch.setattr(Chooser, "choose", counting_choose)

    def check() -> None:
        assert min(counts.values()) >= 1, counts
        assert counts["in the middle"] >= 20, counts

    return check


def snapshots_are_taken(patch: pytest.MonkeyPatch) -> Check:
    """Campaigns whose operators never get a snapshot of a step in the middle would prove little."""
    taken: list[int] = []
    fetch = Operators._fetch

    def counting(operators: Operators, number: int, parts: list[Any]) -> Generator[Any, Any, Any]:
        slices = yield from fetch(operators, number, parts)
        taken.extend([] if slices is None else [len(slices)])
        return slices

    patch.setattr(Operators, "_fetch", counting)

    def check() -> None:
        assert len(taken) >= 5, taken

    return check


def pushes_and_meetings_meet_faults(patch: pytest.MonkeyPatch) -> Check:
    """If joining took longer than the faults last, everything after it would happen in peace."""
    sent = {False: 0, True: 0}
    send = Shell._send

    def counting(shell: Shell, process: Process, effect: Send, run: int, epoch: Epoch) -> None:
        if isinstance(effect.message, Push | PushBatch | Enter):
            sent[shell._network.faults is CALM] += 1
        send(shell, process, effect, run, epoch)

    patch.setattr(Shell, "_send", counting)

    def check() -> None:
        assert sent[False] >= 0.1 * sum(sent.values()) > 0

    return check


WATCHED: list[tuple[Callable[[pytest.MonkeyPatch], Check], Iterable[str]]] = [
    (groups_are_fused_and_parted, FUSED),
    (readers_read_in_the_middle, READ),
    (snapshots_are_taken, ("captured, nasty",)),
    (pushes_and_meetings_meet_faults, CAMPAIGNS),
]
