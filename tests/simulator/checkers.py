"""What must hold at every moment of a simulated run, whatever happens in it."""

from __future__ import annotations

from kvd.core.server.router import ServerRouter
from kvd.errors import Deadlock
from tests.simulator.process import PendingCall, Process
from tests.simulator.simulator import World, slices_of


def watch_everything(world: World) -> None:
    """Checks the bounds after every step."""
    world.step_watchers.append(check_staging)
    world.step_watchers.append(StalenessCheck())


def check_staging(world: World, process: Process) -> None:
    """Staging is bounded by `rounds_ahead` × workers × the bytes led; that of tables by the limit of the memory."""
    router = process.machine
    if not isinstance(router, ServerRouter):
        return
    machine = router.latest()
    groups = [group for group in machine.table.groups.values() if not group.is_of_table]
    staged = sum(group.log.staged_nbytes for group in groups)
    bound = world.cluster.rounds_ahead * world.cluster.wire().most_workers * sum(group.nbytes for group in groups)
    if staged > bound:
        world.fail(f"{process.name} holds {staged} staged bytes, its bound is {bound}")


class StalenessCheck:
    """No push is counted that is ahead of the slowest active worker by more clocks than the staleness allows."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, int], dict[int, int]] = {}

    def __call__(self, world: World, process: Process) -> None:
        router, staleness = process.machine, world.cluster.staleness
        if staleness < 0 or not isinstance(router, ServerRouter):
            return
        machine = router.latest()
        required = machine.required_ranks
        for slice_ in slices_of(machine):
            counted = {rank: slice_.log.counted_clock(rank) for rank in range(world.cluster.wire().most_workers)}
            before = self._counted.get((slice_.key, slice_.index), {})
            self._counted[slice_.key, slice_.index] = counted
            slowest = min((slice_.log.staged_clock(rank) for rank in required), default=0)
            for rank in required:
                clock = counted[rank]
                is_push = slice_.log.committed_clock(rank) < clock  # otherwise it was moved there, as after a point
                if is_push and clock > before.get(rank, 0) and clock > slowest + staleness:
                    text = f"slice {slice_.index} of {slice_.key!r} counts push {clock} of worker {rank}, "
                    world.fail(f"{text}the slowest has made {slowest}")


class DeadlockCheck:
    """A call ends with Deadlock only if every worker's program waits for a call that the same deadlock ends.

    Programs of workers that have left, or have ended, wait for nothing.
    """

    def __init__(self) -> None:
        self.found = 0

    def __call__(self, world: World, process: Process, call: PendingCall) -> None:
        if not isinstance(call.error, Deadlock):
            return
        self.found += 1
        for other in world.processes.values():
            if other.program is None or other.finished:
                continue
            waited = other.calls.waiting.call
            is_stuck = waited is not None and (not waited.done or isinstance(waited.error, Deadlock))
            if not is_stuck:
                world.fail(f"{process.name} is told of a deadlock, and {other.name} can go on: {call.error}")


def check_everything_ended(world: World) -> None:
    """After the faults every process lives, and every program has run to its end without an error."""
    for process in world.processes.values():
        if not process.alive:
            world.fail(f"{process.name} is not there")
        if process.error is not None:
            world.fail(f"{process.name} ended with {type(process.error).__name__}: {process.error}")
        if process.program is not None and not process.finished:
            world.fail(f"{process.name} has not finished, it waits for {process.calls.requests()}")
