"""What must hold between the leader of a partition and its backup: both have what was acknowledged, and in the end they
are equal, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvd.core.machine import Export, ReadPart, Span
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.server.groups import Slice
from kvd.core.server.images import OptimizerState, image_of
from kvd.core.server.keys import KeyTable
from kvd.core.server.machine import ServerMachine
from kvd.core.server.router import ServerRouter
from kvd.node.jobs.runner import JobRunner, view
from kvd.protocol.messages import View
from tests.simulator.process import Process
from tests.simulator.simulator import World, slices_of

SETTLING_S = 60.0


class Copy(NamedTuple):
    """What one server has of a partition."""

    process: Process
    machine: ServerMachine
    table: KeyTable  # that of the slices that it leads, or of those that it holds


class Pair(NamedTuple):
    """A partition as the scheduler has saved it. None: the process is not there, or does not know its role yet."""

    partition: int
    leader: Copy | None
    backup: Copy | None


def pairs(world: World) -> list[Pair]:
    """The partitions of the latest run; none while the scheduler is not there."""
    saved = _saved_view(world)
    if saved is None:
        return []
    there = {member.rank: member.incarnation for member in saved.members if member.role == "server"}

    def copy_at(rank: int, partition: int) -> Copy | None:
        process = world.processes.get(f"server {rank}")
        if process is None or not process.alive or process.machine.incarnation != there.get(rank):
            return None
        router = process.machine
        assert isinstance(router, ServerRouter)
        machine = router.latest()
        held = machine.held(partition)
        if held is not None:
            return Copy(process, machine, held.table)
        return Copy(process, machine, machine.table) if machine.leads(partition) else None

    return [
        Pair(partition, copy_at(entry.leader, partition), copy_at(entry.backup, partition))
        for partition, entry in enumerate(saved.partitions)
    ]


def led(world: World) -> list[tuple[Process, Slice]]:
    """The slices, and the process of the server that leads each by the newest view."""
    servers = world.servers()
    newest = max((server.session.view for server in servers), key=lambda view: view.epoch)
    return [
        (world.processes[f"server {rank}"], slice_)
        for rank, server in enumerate(servers)
        for slice_ in slices_of(server)
        if newest.leader_of(newest.partition_of(slice_.key, slice_.index)) == rank
    ]


def _saved_view(world: World) -> View | None:
    scheduler = world.processes["scheduler"]
    router = scheduler.machine
    assert isinstance(router, SchedulerRouter)
    machines = [slot.machine for slot in router.runs if slot.machine is not None]
    return machines[-1].told_to("server") if scheduler.alive and machines else None


def is_counted(world: World, key: str, place: int) -> bool:
    """Whether all who must have what was acknowledged have 1 at this place of a float32 value."""
    return reaches_all(world, key, place, lambda value: value == 1)


def reaches_all(world: World, key: str, place: int, holds: Callable[[float], bool]) -> bool:
    """Whether that holds of this place of a float32 value, with all who must have what was acknowledged."""
    if world.cluster.replicas < 2:
        return holds(float(world.value(key)[place]))
    for pair in pairs(world):
        for copy in (pair.leader, pair.backup):
            for slice_ in copy.table.of_key(key) if copy is not None else ():
                start = slice_.index * slice_.spec.slice_bytes // 4
                if slice_.partition != pair.partition or not 0 <= place - start < slice_.nbytes // 4:
                    continue
                if slice_.log.closing is None and not holds(float(_values(slice_, np.float32)[place - start])):
                    return False
    return True


def _values(slice_: Slice, dtype: Any) -> np.ndarray[Any, Any]:
    return view(slice_.span(slice_.log.current), np.dtype(dtype))


# ── at every moment ──


def check_versions(world: World, process: Process) -> None:
    """A backup holds no round that its leader has not closed."""
    if world.cluster.replicas < 2 or not isinstance(process.machine, ServerRouter):
        return
    for pair in pairs(world):
        if pair.leader is None or pair.backup is None or process is not pair.backup.process:
            continue
        if not pair.leader.machine.leads(pair.partition) or pair.backup.machine.leads(pair.partition):
            continue  # after a handover, the old leader may have gone on until it knows: then it starts over
        for name, slice_ in pair.backup.table.slices.items():
            own = pair.leader.machine.table.slices.get(name)
            if own is not None and own.creation == slice_.creation and slice_.log.closed > own.log.closed:
                text = (
                    f"holds round {slice_.log.closed} of slice {slice_.index} of {slice_.key!r}, the leader has closed "
                )
                world.fail(f"{process.name} {text}{own.log.closed}")


def check_comparisons(world: World, process: Process) -> None:
    """No leader finds that its backup has something else: nothing flips bits here."""
    if world.cluster.replicas < 2 or not isinstance(process.machine, ServerRouter):
        return
    for text in process.machine.latest().differences:
        world.fail(f"{process.name} finds another value at {text}")


# ── in the end ──


def check_copies(world: World) -> None:
    """Lets the cluster come to rest; then each backup is the same as its leader."""
    if world.cluster.replicas < 2:
        return
    world.run(SETTLING_S, lambda: _is_at_rest(world))
    if not _is_at_rest(world):
        world.fail("the servers do not come to rest, or partitions stay without a backup")
    for partition, leader, backup in pairs(world):
        assert leader is not None
        assert backup is not None
        own, held = _described(leader, partition), _described(backup, partition)
        for name in sorted(own.keys() | held.keys(), key=str):
            if own.get(name) == held.get(name):
                continue
            if name[0] == "place" and (name not in own or name not in held):
                continue  # one of them knows of a later push there, which never counted
            text = f"{name} of partition {partition} is {own.get(name)}"
            world.fail(f"{text} at {leader.process.name}, and {held.get(name)} at {backup.process.name}")


def _pieces(runner: JobRunner, slice_: Slice) -> list[Span]:
    """All of a part of a table: its rows as they are and as they were, and what the optimizer keeps of them."""
    pieces: list[Span] = []
    position: int | None = 0
    while position is not None:
        piece, position = runner.run(ReadPart(0, slice_.key, slice_.index, position, 1 << 20)).result
        pieces.append(piece)
    return pieces


def _is_at_rest(world: World) -> bool:
    found = pairs(world)
    if not found or any(copy is None for pair in found for copy in (pair.leader, pair.backup)):
        return not found and _saved_view(world) is not None and not world.servers()[0].session.view.partitions
    machines = {id(copy.machine): copy.machine for pair in found for copy in (pair.leader, pair.backup) if copy}
    if any(machine.explain(world.clock.now)["records_waiting"] for machine in machines.values()):
        return False
    return all(
        slice_.group.is_quiescent
        for pair in found
        for copy in (pair.leader, pair.backup)
        if copy is not None
        for slice_ in copy.table.slices.values()
    )


def _described(copy: Copy, partition: int) -> dict[Any, Any]:
    """Everything that a successor would go on with, by name."""
    found: dict[Any, Any] = {}
    runner = copy.process.runners.get(copy.machine.run)
    for name, slice_ in copy.table.slices.items():
        if slice_.partition != partition:
            continue
        step: int = 0
        slots: tuple[tuple[str, str], ...] = ()
        state: tuple[Span, ...] = ()
        if runner is not None and slice_.spec.table is not None:
            state = tuple(_pieces(runner, slice_))
        elif runner is not None:
            step, slots, state = runner.run(Export(0, slice_.key, slice_.index)).result
        image = image_of(slice_, 0, 0, OptimizerState(step, slots))
        found[name] = image._replace(use=image.use._replace(generation=0, changes=()), progress=())
        for rank, staged, counted, committed, skipped, *place in image.progress:
            if staged or counted or committed or skipped:  # else what it staged never counted: a backup knows no such
                found["clocks", name, rank] = staged, counted, committed, skipped
            if place[-1]:  # a contribution has counted there; that of a push that was only staged says nothing
                found["place", name, rank] = tuple(place)
        found["optimizer", name] = slice_.group.optimizer
        if slice_.spec.table is None:
            found["value", name] = _values(slice_, np.uint8).tobytes()
        found["state", name] = tuple([bytes(view(span, np.dtype(np.uint8))) for span in state])
        if slice_.log.previous is not None and slice_.spec.table is None:
            found["previous", name] = view(slice_.span(slice_.log.previous), np.dtype(np.uint8)).tobytes()
        found["live", name] = copy.table.live.get(slice_.key) if slice_.index == 0 else None
    return found
