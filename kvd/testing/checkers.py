"""What must hold at every moment of a simulated run, whatever happens to it."""

from __future__ import annotations

from kvd.core.server import ServerMachine
from kvd.testing.process import Process
from kvd.testing.simulator import World, slices_of


def watch_everything(world: World) -> None:
    """Checks the bounds after every step."""
    world.watchers.append(check_staging)
    world.watchers.append(check_staleness)


def check_staging(world: World, process: Process) -> None:
    """Staging is bounded by `rounds_ahead` × workers × the bytes led."""
    machine = process.machine
    if not isinstance(machine, ServerMachine):
        return
    slices = slices_of(machine)
    staged = sum(slice_.log.staged_bytes(slice_.nbytes) for slice_ in slices)
    bound = world.cluster.rounds_ahead * world.cluster.workers * sum(slice_.nbytes for slice_ in slices)
    if staged > bound:
        world.fail(f"{process.name} holds {staged} staged bytes, its bound is {bound}")


def check_staleness(world: World, process: Process) -> None:
    """With a bounded staleness no worker's counted clock is more than that ahead of the slowest active one's."""
    machine = process.machine
    if world.cluster.staleness < 0 or not isinstance(machine, ServerMachine):
        return
    required = machine._required
    for slice_ in slices_of(machine):
        counted = {rank: slice_.log.counted_clock(rank) for rank in required}
        if counted and max(counted.values()) - min(counted.values()) > world.cluster.staleness:
            world.fail(f"slice {slice_.index} of {slice_.key!r} has counted {counted}")


def check_everything_ended(world: World) -> None:
    """After the faults: every program ran to its end, and no call is open."""
    for process in world.processes.values():
        if not process.alive:
            continue
        if process.error is not None:
            world.fail(f"{process.name} ended with {type(process.error).__name__}: {process.error}")
        if process.program is not None and not process.finished:
            waits = [type(ticket.request).__name__ for ticket in process.tickets.values()]
            world.fail(f"{process.name} has not finished, it waits for {waits}")
