"""Mishaps of a simulated cluster, drawn by seed, and the time after them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from kvd.core.machine import SCHEDULER
from kvd.core.worker.machine import WorkerMachine
from tests.simulator.checkers import DeadlockCheck, check_everything_ended, watch_everything
from tests.simulator.copies import check_comparisons, check_copies, check_versions
from tests.simulator.network import CALM
from tests.simulator.process import Doom
from tests.simulator.simulator import Program, World

SUPERVISION_S = 1.0
READERS = 3


@dataclass(frozen=True, slots=True)
class Mishaps:
    """How often each mishap happens within `within_s`.

    Attributes:
        crashes: workers that die between two effects, and are started again by their supervisor.
        pauses: nodes of any role that stop for a while; `longest_pause_s` may be longer than their timeout.
        cuts: nodes that no message reaches for a while.
        ghosts: workers that stop, or cannot reach the scheduler, and are replaced; they live on, or come back, while
            their successor works.
        scheduler_restarts: the scheduler dies and is started from its record.
        old_records: the scheduler dies and is started from a record that was put back from an earlier time.
        server_crashes: servers that die between two effects while every partition has a backup, and are started again.
        one_way_cuts: what a node sends does not reach another one for a while, which it hears all the same.
        clock_jumps: nodes whose clock is ahead of what it was, by up to `longest_pause_s`.
    """

    within_s: float = 8.0
    crashes: int = 0
    pauses: int = 0
    cuts: int = 0
    ghosts: int = 0
    scheduler_restarts: int = 0
    server_crashes: int = 0
    one_way_cuts: int = 0
    clock_jumps: int = 0
    old_records: int = 0
    longest_pause_s: float = 3.0
    restart_after_s: tuple[float, float] = (0.05, 4.0)


def plan(world: World, mishaps: Mishaps) -> None:
    """Draws the times and the victims from the seed of the world."""
    random, at = Random(world.seed * 31 + 7), world.clock.at
    workers = [f"worker {number}" for number in range(world.cluster.wire().most_workers)]
    readers = [name for name in world.processes if name.startswith("reader")]
    nodes = [*workers, *readers, *[f"server {rank}" for rank in range(world.cluster.servers)], "scheduler"]
    for victim in readers[1:]:  # one is left to read
        at(random.uniform(0.0, mishaps.within_s), partial(_bury, world, victim))
    for _ in range(mishaps.crashes):
        time, victim, effects = random.uniform(0.0, mishaps.within_s), random.choice(workers), random.randrange(4)
        restart_after_s = random.uniform(*mishaps.restart_after_s)
        at(time, partial(_crash, world, victim, effects, restart_after_s))
    for _ in range(mishaps.pauses):
        victim = random.choice(nodes)
        time, length_s = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, mishaps.longest_pause_s)
        at(time, partial(_pause, world, victim, length_s))
    for _ in range(mishaps.ghosts):
        time, victim = random.uniform(0.0, mishaps.within_s), random.choice(workers)
        replaced_after_s, length_s = random.uniform(0.1, 2.0), random.uniform(0.1, 4.0)
        at(time, partial(_haunt, world, victim, length_s, replaced_after_s))
    for _ in range(mishaps.cuts):
        victim = random.choice(nodes)
        time, length_s = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, mishaps.longest_pause_s)
        at(time, partial(world.network.cut_off.add, victim))
        at(time + length_s, partial(world.network.cut_off.discard, victim))
    for _ in range(mishaps.server_crashes):
        victim = f"server {random.randrange(world.cluster.servers)}"
        time, effects, noticed = random.uniform(0.0, mishaps.within_s), random.randrange(6), random.random() < 0.5
        restart_after_s = random.uniform(*mishaps.restart_after_s)
        at(time, partial(_crash_server, world, victim, effects, restart_after_s, noticed=noticed))
    for _ in range(mishaps.one_way_cuts):
        sender, receiver = random.sample(nodes, 2)
        time, length_s = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, mishaps.longest_pause_s)
        at(time, partial(world.network.one_way.add, (sender, receiver)))
        at(time + length_s, partial(world.network.one_way.discard, (sender, receiver)))
    for _ in range(mishaps.clock_jumps):
        victim, ahead_s = random.choice(nodes), random.uniform(0.0, mishaps.longest_pause_s)
        at(random.uniform(0.0, mishaps.within_s), partial(_set_clock, world, victim, ahead_s))
    for _ in range(mishaps.scheduler_restarts):
        time, down_s = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, 2.0)
        at(time, partial(world.kill, "scheduler"))
        at(time + down_s, partial(_revive_scheduler, world))
    for _ in range(mishaps.old_records):
        time, down_s = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, 2.0)
        at(time, partial(world.kill, "scheduler"))
        at(time + down_s, partial(_revive_scheduler, world, put_back=True))


def _set_clock(world: World, name: str, ahead_s: float) -> None:
    if name in world.processes:  # else it is dead for good
        world.processes[name].timer.ahead_s += ahead_s


def _pause(world: World, name: str, length_s: float) -> None:
    if name in world.processes:  # else it is dead for good
        world.pause(name, length_s)


def _crash(world: World, name: str, effects: int, restart_after_s: float) -> None:
    """The worker dies after it has carried out a few more effects, and is started again later."""
    process = world.processes.get(name)
    if process is None or not process.alive or process.finished:
        return
    process.doom = Doom(effects)

    def restart() -> None:
        if world.processes[name] is process:
            if process.alive:
                world.kill(name)
            world.start_worker(_number_of(name))

    world.clock.after(restart_after_s, restart)


def _crash_server(
    world: World, name: str, effects: int, restart_after_s: float, *, noticed: bool, patience: int = 100
) -> None:
    """The server dies after it has carried out a few more effects, as soon as another one holds what it leads."""
    process = world.processes[name]
    others = [world.processes[f"server {rank}"] for rank in range(world.cluster.servers)]
    if any(other.doom is not None for other in others) or not world.is_replicated():
        if patience:
            again = partial(
                _crash_server, world, name, effects, restart_after_s, noticed=noticed, patience=patience - 1
            )
            world.clock.after(0.3, again)
        return
    process.doom = Doom(effects, lambda: not world.is_replicated())

    def restart() -> None:
        if world.processes[name] is not process or (process.alive and not world.is_replicated()):
            process.doom = None
            return
        if process.alive:
            world.kill(name)
        world.start_server(_number_of(name))

    def notice() -> None:
        if not process.alive:
            world.report_end(process)

    if noticed:
        world.clock.after(min(0.1, restart_after_s / 2), notice)
    world.clock.after(restart_after_s, restart)


def _bury(world: World, name: str) -> None:
    """The node dies, and nobody starts it again."""
    world.kill(name)
    del world.processes[name]


def _haunt(world: World, name: str, pause_s: float, replaced_after_s: float) -> None:
    """A worker that has joined stops, or no longer hears the scheduler, and a successor starts."""
    process = world.processes.get(name)
    machine = None if process is None else process.machine
    if process is None or process.finished or not isinstance(machine, WorkerMachine) or not machine.session.joined:
        return
    if world.random.random() < 0.5:
        world.pause(name, pause_s)
    else:
        process.cut_off_from.add(SCHEDULER)
        world.clock.after(pause_s + 4.0, process.cut_off_from.clear)

    def replace() -> None:
        if world.processes[name] is process and not process.finished:
            world.start_worker(_number_of(name))

    world.clock.after(replaced_after_s, replace)


def _number_of(name: str) -> int:
    return int(name.split()[1])


def _supervise(world: World) -> None:
    """Starts workers again that were told to stop.

    Two incarnations can overtake each other on their way to the scheduler, so that the dead one comes last and holds
    the rank. The supervisor then starts the living one again.
    """
    for process in list(world.processes.values()):
        if isinstance(process.machine, WorkerMachine) and process.alive and process.halted is not None:
            process.alive = False
            world.start_worker(_number_of(process.name))
    world.clock.after(SUPERVISION_S, lambda: _supervise(world))


def _revive_scheduler(world: World, *, put_back: bool = False) -> None:
    if not world.processes["scheduler"].alive:
        world.start_scheduler(put_back=put_back)


def live_through(
    world: World, program: Program, mishaps: Mishaps, patience_s: float = 240.0, reader: Program | None = None
) -> None:
    """Runs a program on all workers through the mishaps, and then without any until every program has ended.

    Args:
        reader: a program that READERS observers run; all but one of them die on the way.
    """
    watch_everything(world)
    world.step_watchers.append(check_versions)
    world.step_watchers.append(check_comparisons)
    world.call_watchers.append(DeadlockCheck())
    world.start_all(program)
    for number in range(READERS if reader is not None else 0):
        assert reader is not None
        world.start_reader(number, reader)
    plan(world, mishaps)
    world.clock.after(SUPERVISION_S, lambda: _supervise(world))
    world.run(mishaps.within_s)
    world.network.faults = CALM
    world.network.cut_off.clear()
    world.run(mishaps.longest_pause_s + mishaps.restart_after_s[1])
    world.run(patience_s, lambda: world.workers_finished() and all(each.alive for each in world.processes.values()))
    check_everything_ended(world)
    check_copies(world)
