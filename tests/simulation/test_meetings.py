"""Where workers wait for each other: barriers that break, and workers that give up joining."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvd.core.requests import Depart, JoinCluster
from kvd.core.scheduler.barriers.barriers import Barriers, Settled
from kvd.errors import RequestTimeout
from kvd.protocol.messages import Departure
from tests.simulator.campaign import CAMPAIGNS, Campaign
from tests.simulator.checkers import check_everything_ended
from tests.simulator.mishaps import live_through
from tests.simulator.network import CALM, ROUGH, Faults
from tests.simulator.process import Coroutine, Start
from tests.simulator.settings import ClusterSettings
from tests.simulator.simulator import Me, World
from tests.simulator.trace import Violation
from tests.simulator.workloads.meetings import Meetings

LATE_RESTARTS = CAMPAIGNS["meetings, late restarts"]


def broken_in(campaign: Campaign, seeds: int) -> int:
    """How often workers are told that a barrier broke."""
    count = 0
    for seed in range(seeds):
        world = World(seed, ClusterSettings(), campaign.faults)
        meetings = Meetings(3, 8)
        live_through(world, meetings.program, campaign.mishaps)
        meetings.check(world)
        count += meetings.broken
    return count


def test_barriers_do_break() -> None:
    """Campaigns in which every barrier is passed at the first attempt would prove little."""
    assert broken_in(LATE_RESTARTS, 10) > 10


def test_a_scheduler_whose_broken_barriers_are_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Barriers.settle

    def hasty(barriers: Barriers, *whom: Any) -> list[Settled]:
        settled = settle(barriers, *whom)
        for entry in settled:
            if entry.verdict.missing:
                barriers._barriers[entry.name].open(entry.generation + 1)
        return settled

    monkeypatch.setattr(Barriers, "settle", hasty)
    with pytest.raises(Violation, match="have not come so often"):
        broken_in(LATE_RESTARTS, 20)


@pytest.mark.parametrize("faults", [CALM, ROUGH])
@pytest.mark.parametrize("seed", range(10))
def test_workers_that_give_up_joining_hold_nobody_up(seed: int, faults: Faults) -> None:
    """Each worker gives up a few times; in the end all are there. If no message was lost, none is a successor."""
    joined: dict[int, int] = {}
    meetings = Meetings(3, 1)

    def program(me: Me) -> Coroutine:
        if me.life < 2 + (seed + me.number) % 3:
            call = yield Start(JoinCluster(), 0.1 * (1 + (seed + me.life) % 4))
            try:
                yield call
            except RequestTimeout:
                leave = yield Start(Depart(Departure.WITHDRAWN), 0.5)
                me.world.clock.after(0.5, partial(again, me))
                try:
                    yield leave
                except RequestTimeout:
                    return
                return
        else:
            yield JoinCluster()
        assert faults is not CALM or me.machine.session.predecessor is None
        joined[me.number] = me.rank
        yield from meetings.meet(me, "all", 1)

    def again(me: Me) -> None:
        me.world.kill(f"worker {me.number}")
        me.world.start_worker(me.number)

    world = World(seed, ClusterSettings(workers=3), faults)
    world.start_all(program)
    world.run(60, lambda: len(joined) == 3 and world.workers_finished())
    check_everything_ended(world)
    assert sorted(joined.values()) == [0, 1, 2]
