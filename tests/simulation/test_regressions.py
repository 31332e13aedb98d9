"""Mistakes found by the simulator or by review, each as the smallest run that shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Apply
from kvd.core.pseudonyms import pseudonym
from kvd.core.requests import (
    Barrier,
    ClockOf,
    Control,
    Depart,
    DescribeKey,
    Flush,
    InitKeys,
    JoinCluster,
    Rewind,
    Transfer,
)
from kvd.errors import BarrierBroken, NotAllowed, RequestTimeout
from kvd.node.jobs.runner import JobRunner
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import Departure, SetOptimizer
from tests.simulation.seeds import seeds
from tests.simulator.checkers import check_everything_ended
from tests.simulator.mishaps import Mishaps, live_through
from tests.simulator.network import CALM, NASTY, Faults
from tests.simulator.process import Coroutine, Sleep, Start
from tests.simulator.settings import ClusterSettings, ShellSettings, Timeouts
from tests.simulator.simulator import Me, World, slices_of
from tests.simulator.workloads.ledger import Ledger
from tests.simulator.workloads.rounds import Rounds
from tests.simulator.workloads.steps import SIZE, Floats, item


def full(value: float, size: int = SIZE) -> Floats:
    return np.full(size, value, np.float32)


def push(key: str, value: float, how: int = 0, priority: int = 0) -> Transfer:
    return Transfer((item(key, full(value)),), push=True, pull=False, how=how, priority=priority)


def pull(key: str, target: Floats, priority: int = 0) -> Transfer:
    return Transfer((item(key, None, target),), push=False, pull=True, priority=priority)


def begun(me: Me, *keys: str) -> Any:
    yield JoinCluster()
    yield InitKeys(tuple(item(key, full(0.0)) for key in keys))


def test_push_taken_in_part_keeps_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server commits its slice, the other's update fails: the clock must not be used for other bytes."""
    apply = JobRunner._apply
    failed: list[str] = []

    def fails_once(runner: JobRunner, job: Apply) -> Any:
        if job.layout[0].slice_index == 1 and not failed:
            failed.append("yes")
            raise NotAllowed("out of memory")
        return apply(runner, job)

    monkeypatch.setattr(JobRunner, "_apply", fails_once)

    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        with pytest.raises(NotAllowed, match="out of memory"):
            yield push("w", 1.0)
        with pytest.raises(NotAllowed, match="in part"):
            yield push("w", 5.0)
        yield Rewind(0)
        yield push("w", 1.0)
        yield push("w", 2.0)

    world = World(2, ClusterSettings(workers=2))
    world.start_all(program)
    world.run(20)
    check_everything_ended(world)
    assert [slice_.log.version for server in world.servers() for slice_ in slices_of(server)] == [2, 2]
    assert set(world.value("w").tolist()) == {4.0}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("asks", [Barrier("b"), Depart(Departure.DONE)])
def test_paused_worker_does_not_take_its_place_back(asks: Any, seed: int) -> None:
    """A replaced worker that wakes up is told to stop whatever it asks, and its successor stays."""

    def program(me: Me) -> Coroutine:
        yield JoinCluster()
        if me.life == 0 and me.number == 1:
            yield Sleep(2.0)
            yield asks
        else:
            yield Sleep(60.0)

    world = World(seed, ClusterSettings(workers=2))
    world.start_all(program)
    world.run(1.999)
    old = world.processes["worker 1"]
    world.clock.at(2.0002, lambda: world.pause("worker 1", 5.0))
    world.run(2.0)
    new = world.start_worker(1)
    world.run(4)
    world.network.faults = Faults(loss=0.5)
    world.run(1)
    world.run(20)
    assert isinstance(old.halted, NotAllowed)
    assert new.halted is None
    assert world.worker(0).view.worker(1).incarnation == pseudonym(new.machine.incarnation)  # type: ignore[union-attr]


def test_barriers_outlive_the_scheduler() -> None:
    """The next scheduler keeps settled generations settled, and the next generation can be reached."""
    passed: list[tuple[int, int]] = []

    def program(me: Me) -> Coroutine:
        yield JoinCluster()
        for generation in range(6):
            yield Barrier("b")
            passed.append((me.rank, generation))
            yield Sleep(1.0)

    world = World(3)
    world.start_all(program)
    world.run(2.6)
    world.kill("scheduler")
    world.run(0.5)
    world.start_scheduler()
    world.run(60)
    check_everything_ended(world)
    assert sorted(passed) == [(rank, generation) for rank in range(3) for generation in range(6)]


@pytest.mark.parametrize("seed", range(6))
def test_scheduler_without_record_takes_its_nodes_back(seed: int) -> None:
    """Its views count, though its numbers start from scratch: a death after the restart is seen by everyone."""
    rounds = Rounds(3, 8)

    def program(me: Me) -> Coroutine:
        yield from rounds.program(me)
        yield Barrier("end")

    world = World(seed, ClusterSettings(shell=ShellSettings(state_dir=False)))
    world.start_all(program)
    world.run(1.5)
    world.kill("scheduler")
    world.run(0.3 * seed)
    world.start_scheduler(keep_record=False)
    world.run(60)
    check_everything_ended(world)
    rounds.check(world)
    world.kill("worker 2", noticed=True)
    world.run(30)
    assert {world.worker(rank).view.worker(2).state for rank in range(2)} == {"gone"}  # type: ignore[union-attr]


@pytest.mark.parametrize("comes_back", [False, True])
def test_worker_that_left_the_rounds_and_dies_is_not_waited_for(comes_back: bool) -> None:
    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        if me.number == 2:
            yield Depart(Departure.DONE)
            yield Sleep(500.0)
        for _ in range(8):
            yield push("w", 1.0)
            yield Sleep(3.0)

    world = World(4)
    world.start_all(program)
    world.run(3)
    if comes_back:
        world.pause("worker 2", 13.0)
    else:
        world.kill("worker 2")
    world.run(60)
    for rank in range(2):
        process = world.processes[f"worker {rank}"]
        assert process.finished
        assert process.error is None


@pytest.mark.parametrize("seed", range(8))
def test_init_that_arrives_twice_makes_a_slice_once(seed: int) -> None:
    """A second Create of a slice, still under way when the first is pushed to, must not take the pushes away."""
    ledger = Ledger(2, 6, pace_s=0.05)
    faults = Faults(delay_s=(0.0005, 0.02), duplicates=0.5, ordered=False)
    world = World(seed, ClusterSettings(workers=2, shell=ShellSettings(job_s=(0.0, 1.0))), faults)
    live_through(world, ledger.program, Mishaps(within_s=20.0))
    ledger.check(world)


@pytest.mark.parametrize("together", [False, True])
def test_pull_is_not_overtaken_by_rounds(together: bool) -> None:
    """A pull that is still on its way keeps its version: later pushes of this worker wait for it."""
    targets = [full(np.nan) for _ in range(9)]

    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        calls = []
        for clock in range(1, 9):
            first = (item("w", full(clock), targets[clock] if me.rank == 0 else full(0.0)),)
            if together:
                calls.append((yield Start(Transfer(first, push=True, pull=True))))
            else:
                calls.append((yield Start(push("w", clock, priority=1))))
                calls.append((yield Start(pull("w", targets[clock] if me.rank == 0 else full(0.0), priority=-1))))
        for call in calls:  # noqa: UP028  a list takes no results
            yield call

    world = World(
        5, ClusterSettings(workers=2, rounds_ahead=4, credit_bytes=4096), Faults(delay_s=(0.0005, 0.2), breaks=0.05)
    )
    world.start_all(program)
    world.run(60)
    check_everything_ended(world)
    assert [set(target.tolist()) for target in targets[1:]] == [{2.0 * clock} for clock in range(1, 9)]


def test_flush_does_not_wait_for_a_push_that_never_began() -> None:
    ends: list[float] = []

    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        if me.rank == 1:
            yield Sleep(20.0)
        for _ in range(2):
            yield Start(push("w", 1.0), 100.0)
        if me.rank == 1:
            return
        late = yield Start(push("w", 1.0), 1.0)  # the window is full: it is not begun before its deadline
        flush = yield Start(Flush(), 60.0)
        control = yield Start(Control((SetOptimizer(0, None),), staged_first=True), 60.0)
        with pytest.raises(RequestTimeout) as caught:
            yield late
        assert caught.value.outcome == "not_sent"
        yield control
        ends.append(me.world.clock.now)
        yield flush

    world = World(6, ClusterSettings(workers=2))
    world.start_all(program)
    world.run(200)
    check_everything_ended(world)
    assert ends[0] < 5.0


def test_push_that_timed_out_in_the_queue_may_still_arrive() -> None:
    """It has begun, and it goes out when the credit comes back: its outcome is unknown."""

    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        me.world.network.cut_off.add(me.process.name)
        with pytest.raises(RequestTimeout) as caught:
            yield Transfer(tuple(item(key, full(1.0)) for key in ("w",)), push=True, pull=False, priority=0)
        assert caught.value.outcome == "unknown"
        late = yield Start(push("w", 2.0), 1.0)
        with pytest.raises(RequestTimeout) as caught:
            yield late
        assert caught.value.outcome == "unknown"
        me.world.network.cut_off.clear()
        yield Flush()
        assert (yield ClockOf("w")) == 2

    world = World(
        7,
        ClusterSettings(
            workers=1, servers=1, credit_bytes=4096, timeouts=Timeouts(call_timeout_s=5.0, worker_timeout_s=60.0)
        ),
    )
    world.start_all(program)
    world.run(100)
    check_everything_ended(world)
    assert set(world.value("w").tolist()) == {2.0}


@pytest.mark.parametrize("seed", seeds(5, soak=10))
def test_key_that_is_found_twice_is_taken_up_once(seed: int) -> None:
    """An init and a look-up at the same time after a restart: the clock is not set back once pushes have begun."""
    sums = full(0.0)

    def program(me: Me) -> Coroutine:
        yield JoinCluster()
        if me.life == 0:
            yield InitKeys((item("w", full(0.0)),))
            yield push("w", 1.0)
            yield Sleep(100.0)
        init = yield Start(InitKeys((item("w", full(0.0)),)))
        yield DescribeKey("w")
        for clock in range(2, 7):
            yield push("w", float(clock))
            assert (yield ClockOf("w")) == clock
        yield init
        yield pull("w", sums)

    world = World(seed, ClusterSettings(workers=1), Faults(delay_s=(0.0005, 0.2)))
    world.start_all(program)
    world.run(5)
    world.kill("worker 0")
    world.start_worker(0)
    world.run(100)
    check_everything_ended(world)
    assert set(sums.tolist()) == {6.0}


def test_key_twice_in_one_call_is_refused() -> None:
    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        with pytest.raises(NotAllowed, match="twice"):
            yield Transfer((item("w", full(1.0)), item("w", full(1.0))), push=True, pull=False)
        yield push("w", 1.0)

    world = World(8, ClusterSettings(workers=1))
    world.start_all(program)
    world.run(20)
    check_everything_ended(world)


@pytest.mark.parametrize("seed", range(20))
def test_optimizer_that_was_replaced_does_not_return(seed: int) -> None:
    """A copy of the first set_optimizer that arrives after the second changes nothing."""

    def program(me: Me) -> Coroutine:
        yield from begun(me, "w")
        yield Control((SetOptimizer(0, to_wire(SGD(learning_rate=1.0))),))
        yield Control((SetOptimizer(0, to_wire(SGD(learning_rate=2.0))),))
        yield Sleep(2.0)
        yield push("w", -1.0)

    world = World(seed, ClusterSettings(workers=1), Faults(delay_s=(0.0005, 0.5), duplicates=0.5, ordered=False))
    world.start_all(program)
    world.run(60)
    check_everything_ended(world)
    assert set(world.value("w").tolist()) == {2.0}


@pytest.mark.parametrize("seed", seeds(7, soak=20))
def test_activation_that_arrives_twice_counts_nothing(seed: int) -> None:
    """Async: a late copy of Activate must not make a push count that is only staged."""
    ledger = Ledger(2, 8, keys=("a",), pace_s=0.02)

    def program(me: Me) -> Coroutine:
        if me.number == 0:
            yield from ledger.program(me)
            return
        if me.life == 0:
            yield from begun(me, "a")
            yield Depart(Departure.LEFT)
            return
        yield from ledger.program(me)

    world = World(seed, ClusterSettings(workers=2, mode="async", shell=ShellSettings(job_s=(0.0, 0.5))), NASTY)
    world.start_all(program)
    world.run(30, lambda: world.processes["worker 1"].finished)
    world.start_worker(1)
    world.run(60)
    world.network.faults = CALM
    world.run(100)
    check_everything_ended(world)
    ledger.check(world)


@pytest.mark.parametrize("seed", range(6))
def test_restart_that_a_new_scheduler_does_not_know_of(seed: int) -> None:
    """Scheduler without a record and worker die together: the worker must still find the clocks of its rank."""
    ledger = Ledger(2, 10, pace_s=0.3)
    world = World(seed, ClusterSettings(workers=2, shell=ShellSettings(state_dir=False)))
    world.start_all(ledger.program)
    world.run(2.0)
    world.kill("scheduler")
    world.kill("worker 1")
    world.start_scheduler(keep_record=False)
    world.run(3.0)
    world.start_worker(1)
    world.run(100)
    ledger.check(world)


def test_broken_barrier_names_the_missing_workers() -> None:
    def program(me: Me) -> Coroutine:
        yield JoinCluster()
        if me.number == 2:
            yield Sleep(100.0)
        with pytest.raises(BarrierBroken) as caught:
            yield Barrier("b")
        assert caught.value.missing == ("worker 2",)

    world = World(9)
    world.start_all(program)
    world.run(2)
    world.kill("worker 2")
    world.run(30)
    assert world.processes["worker 0"].finished
    assert world.processes["worker 0"].error is None
