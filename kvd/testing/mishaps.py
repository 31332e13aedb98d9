"""What happens to the nodes of a simulated cluster, drawn by seed; and the healing afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvd.core.machine import SCHEDULER
from kvd.core.worker.machine import WorkerMachine
from kvd.testing.checkers import check_everything_ended, watch_everything
from kvd.testing.network import CALM
from kvd.testing.simulator import Program, World

SUPERVISION_S = 1.0


@dataclass(frozen=True, slots=True)
class Mishaps:
    """How often what happens within `within_s`.

    Attributes:
        crashes: workers that die between two effects, and are started again by their supervisor.
        pauses: nodes of any role that stop for a while; `longest_pause_s` may be longer than their timeout.
        cuts: nodes that nothing reaches for a while.
        ghosts: workers that stop, or cannot reach the scheduler, are replaced, and are there again, or all the time,
            while their successor is at work.
        scheduler_restarts: the scheduler dies and is started from its record.
    """

    within_s: float = 4.0
    crashes: int = 0
    pauses: int = 0
    cuts: int = 0
    ghosts: int = 0
    scheduler_restarts: int = 0
    longest_pause_s: float = 3.0
    restart_after_s: tuple[float, float] = (0.05, 4.0)


def plan(world: World, mishaps: Mishaps) -> None:
    """Draws the times and the victims from the seed of the world."""
    random = Random(world.seed * 31 + 7)
    workers = [f"worker {number}" for number in range(world.cluster.workers)]
    servers = [f"server {rank}" for rank in range(world.cluster.servers)]
    for _ in range(mishaps.crashes):
        time, victim, effects = random.uniform(0.0, mishaps.within_s), random.choice(workers), random.randrange(4)
        pause = random.uniform(*mishaps.restart_after_s)
        world.at(time, lambda name=victim, count=effects, pause=pause: _doom(world, name, count, pause))  # type: ignore[misc]
    for _ in range(mishaps.pauses):
        victim = random.choice([*workers, *servers, "scheduler"])
        time, length = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, mishaps.longest_pause_s)
        world.at(time, lambda name=victim, length=length: world.pause(name, length))  # type: ignore[misc]
    for _ in range(mishaps.ghosts):
        time, victim = random.uniform(0.0, mishaps.within_s), random.choice(workers)
        replaced_after_s, length = random.uniform(0.1, 2.0), random.uniform(0.1, 4.0)
        world.at(time, lambda name=victim, length=length, after=replaced_after_s: _haunt(world, name, length, after))  # type: ignore[misc]
    for _ in range(mishaps.cuts):
        victim = random.choice([*workers, *servers, "scheduler"])
        time, length = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, mishaps.longest_pause_s)
        world.at(time, lambda name=victim: world.network.cut_off.add(name))  # type: ignore[misc]
        world.at(time + length, lambda name=victim: world.network.cut_off.discard(name))  # type: ignore[misc]
    for _ in range(mishaps.scheduler_restarts):
        time, down = random.uniform(0.0, mishaps.within_s), random.uniform(0.0, 2.0)
        world.at(time, lambda: world.kill("scheduler"))
        world.at(time + down, lambda: _revive_scheduler(world))


def _doom(world: World, name: str, effects: int, pause_s: float) -> None:
    """The worker dies after so many effects of its next steps, and comes back later."""
    process = world.processes[name]
    if not process.alive or process.finished:
        return
    process.doom = effects
    number = int(name.split()[1])

    def restart() -> None:
        if world.processes[name] is process:
            if process.alive:
                world.kill(name)
            world.start_worker(number)

    world.after(pause_s, restart)


def _haunt(world: World, name: str, pause_s: float, replaced_after_s: float) -> None:
    """The worker stops, or stops to hear of the scheduler, and a successor starts. It has joined before."""
    process = world.processes[name]
    machine = process.machine
    if process.finished or not isinstance(machine, WorkerMachine) or not machine.session.joined:
        return
    if world.random.random() < 0.5:
        world.pause(name, pause_s)
    else:
        process.cut_off_from.add(SCHEDULER)
        world.after(pause_s + 4.0, process.cut_off_from.clear)

    def replace() -> None:
        if world.processes[name] is process and not process.finished:
            world.start_worker(int(name.split()[1]))

    world.after(replaced_after_s, replace)


def _supervise(world: World) -> None:
    """A worker that was told to stop has ended; its supervisor starts it again. So two that were mixed up on their way
    to the scheduler, where the one that died came last, do not leave the place to the dead."""
    for process in list(world.processes.values()):
        if isinstance(process.machine, WorkerMachine) and process.alive and process.halted is not None:
            process.alive = False
            world.start_worker(int(process.name.split()[1]))
    world.after(SUPERVISION_S, lambda: _supervise(world))


def _revive_scheduler(world: World) -> None:
    if not world.processes["scheduler"].alive:
        world.start_scheduler()


def live_through(world: World, program: Program, mishaps: Mishaps, patience_s: float = 240.0) -> None:
    """Runs a program on all workers through the mishaps; then all is well again, and everything has to end."""
    watch_everything(world)
    world.start_all(program)
    plan(world, mishaps)
    world.after(SUPERVISION_S, lambda: _supervise(world))
    world.run(mishaps.within_s)
    world.network.faults = CALM
    world.network.cut_off.clear()
    world.run(mishaps.longest_pause_s + mishaps.restart_after_s[1])
    world.run(patience_s, world.workers_finished)
    check_everything_ended(world)
