"""The simulator: a whole cluster in one thread, on a virtual clock, deterministic by seed.

The machines and the kernels are the real ones; clock, network and shell are simulated. Processes are suspended, killed
between any two effects, and started again.

The same seed gives the same run: `digest()` is a hash over everything that happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvd.core.machine import PeerLost, Tick
from kvd.core.requests import Request
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.server.groups import Slice
from kvd.core.server.machine import ServerMachine
from kvd.core.server.router import ServerRouter
from kvd.core.session import RunKey
from kvd.core.worker.machine import WorkerMachine
from kvd.node.jobs.runner import view
from kvd.protocol.messages import Settings
from tests.simulator.clock import VirtualClock
from tests.simulator.machines import SCHEDULER_ADDRESS, MachineFactory
from tests.simulator.network import CALM, Faults, Network
from tests.simulator.process import Coroutine, PendingCall, Process
from tests.simulator.programs import ProgramRunner
from tests.simulator.settings import ClusterSettings
from tests.simulator.shell import Shell
from tests.simulator.trace import Trace

HEARTBEATS_S = 1.0  # at most, between two of a node

Program = Callable[["Me"], Coroutine]


class Me(NamedTuple):
    """What a program knows of the process that it runs in.

    Attributes:
        number: that of the worker's node id, which is its rank if it got the one that it asked for.
    """

    world: World
    process: Process
    number: int

    @property
    def machine(self) -> WorkerMachine:
        machine = self.process.machine
        assert isinstance(machine, WorkerMachine)
        return machine

    @property
    def rank(self) -> int:
        return self.machine.session.rank

    @property
    def life(self) -> int:
        return self.process.life


class World:
    """A cluster under simulation.

    Attributes:
        random: draws the times of the shell and what mishaps decide on their way.
        processes: the latest process of each node.
        worker_settings: of workers that insist on other settings than the cluster's.
        step_watchers: called after each step of a process.
        call_watchers: called when a call ends.
    """

    def __init__(self, seed: int, cluster: ClusterSettings | None = None, faults: Faults = CALM) -> None:
        self.seed = seed
        self.cluster = cluster or ClusterSettings()
        self.clock = VirtualClock()
        self.random = Random(seed)
        self.trace = Trace(seed, self.clock)
        self.network = Network(Random(seed + 1), faults, self.clock)
        self.processes: dict[str, Process] = {}
        self.worker_settings: dict[str, Settings] = {}
        self.step_watchers: list[Callable[[World, Process], None]] = []
        self.call_watchers: list[Callable[[World, Process, PendingCall], None]] = []
        self._machines = MachineFactory(self.cluster, self.random)
        self._shell = Shell(
            self.cluster.shell, self.clock, self.random, self.network, self.trace, self._stepped, self._call_ended
        )
        self._runner = ProgramRunner(self.clock, self._shell, self.cluster.timeouts)
        self._programs: dict[str, Program] = {}
        self._lives: dict[str, int] = {}

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Lets `seconds` of virtual time pass, or fewer if `until` becomes true earlier."""
        self.clock.run(seconds, until)

    @property
    def run_keys(self) -> dict[str, RunKey]:
        """Of workers that belong to other jobs than the others, by name."""
        return self._machines.run_keys

    def digest(self) -> str:
        """A hash over every event so far."""
        return self.trace.digest()

    def fail(self, text: str) -> NoReturn:
        """Raises Violation with the seed and the time."""
        self.trace.fail(text)

    def _stepped(self, process: Process) -> None:
        for watcher in self.step_watchers:
            watcher(self, process)

    def _call_ended(self, process: Process, call: PendingCall) -> None:
        for watcher in self.call_watchers:
            watcher(self, process, call)

    # ── processes ──

    def start_all(self, program: Program | None = None) -> None:
        """Starts the scheduler, all servers and all workers, the workers with this program."""
        self.start_scheduler()
        for rank in range(self.cluster.servers):
            self.start_server(rank)
        for number in range(self.cluster.workers):
            self.start_worker(number, program)

    def start_scheduler(self, keep_record: bool = True, *, put_back: bool = False) -> Process:
        """Starts a scheduler, from the record of an earlier one if that saved it. `put_back`: from one of the records
        before that."""
        record_file = self._shell.record_file
        record_file.recover(self.random)
        if put_back:
            record_file.put_back(self.random)
        machine = self._machines.scheduler(self.clock.now, record_file.record if keep_record else None)
        record_file.save(json.dumps(machine.record()))
        return self._start(Process("scheduler", self._next_life("scheduler"), machine, SCHEDULER_ADDRESS))

    def start_server(self, rank: int) -> Process:
        name = f"server {rank}"
        life = self._next_life(name)
        address = f"sim://server{rank}/{life}"
        return self._start(Process(name, life, self._machines.server(rank, address), address))

    def start_worker(self, number: int, program: Program | None = None) -> Process:
        """Starts a worker under its node id. Without a program it runs the one that its node ran before, if any."""
        name = f"worker {number}"
        if program is not None:
            self._programs[name] = program
        wanted = self.worker_settings.get(name, self.cluster.wire())
        machine = self._machines.worker(number, wanted)
        process = self._start(Process(name, self._next_life(name), machine))
        if name in self._programs:
            self._runner.start(process, self._programs[name](Me(self, process, number)))
        return process

    def start_reader(self, number: int, program: Program) -> Process:
        """Starts an observer with this program."""
        name = f"reader {number}"
        process = self._start(Process(name, self._next_life(name), self._machines.reader(number)))
        self._runner.start(process, program(Me(self, process, number)))
        return process

    def _start(self, process: Process) -> Process:
        self.processes[process.name] = process
        if process.address:
            self.network.listen(process)
        self.trace.record(f"start {process.name}")
        self.clock.after(0.0, lambda: self._shell.feed(process, Tick()))
        return process

    def _next_life(self, name: str) -> int:
        life = self._lives.get(name, 0)
        self._lives[name] = life + 1
        return life

    def kill(self, name: str, noticed: bool = False) -> None:
        """SIGKILL. `noticed`: the kernel tells the scheduler."""
        process = self.processes[name]
        process.alive = False
        self.trace.record(f"kill {name}")
        if noticed:
            self.report_end(process)

    def report_end(self, process: Process) -> None:
        """The kernel tells the scheduler that this process has ended."""
        scheduler = self.processes.get("scheduler")
        if scheduler is not None and scheduler.alive:
            self._shell.feed(scheduler, PeerLost(process.machine.incarnation, "its process ended"))

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`."""
        process = self.processes[name]
        if process.suspension.active or not process.alive:
            return
        process.suspension.active = True
        self.trace.record(f"pause {name}")
        self.clock.after(seconds, lambda: self._wake(process))

    def _wake(self, process: Process) -> None:
        suspension = process.suspension
        suspension.active = False
        suspension.ended_at = self.clock.now
        backlog, suspension.backlog = suspension.backlog, []
        # As a loop does, which looks at its timers behind what has arrived; a deadline that is over may have set one.
        for event in sorted(backlog, key=lambda event: isinstance(event, Tick)):
            self._shell.feed(process, event)

    def submit(self, process: Process, request: Request) -> PendingCall:
        """Makes a call of a process that runs no program."""
        return self._runner.submit(process, request)

    # ── looking in ──

    def server(self, rank: int) -> ServerMachine:
        """The server's machine of the latest run; before there is one, that of the cluster."""
        router = self.processes[f"server {rank}"].machine
        assert isinstance(router, ServerRouter)
        return router.latest()

    def servers(self) -> list[ServerMachine]:
        return [self.server(rank) for rank in range(self.cluster.servers)]

    def worker(self, number: int) -> WorkerMachine:
        machine = self.processes[f"worker {number}"].machine
        assert isinstance(machine, WorkerMachine)
        return machine

    def value(self, key: str, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """The committed value of a key, put together from the servers that lead it by the newest view."""
        servers = self.servers()
        newest = max((server.session.view for server in servers), key=lambda view: view.epoch)
        slices = [
            slice_
            for rank, server in enumerate(servers)
            for slice_ in slices_of(server)
            if slice_.key == key and newest.leader_of(newest.partition_of(key, slice_.index)) == rank
        ]
        slices.sort(key=lambda slice_: slice_.index)
        parts = [view(slice_.span(slice_.log.current), np.dtype(np.uint8)) for slice_ in slices]
        return np.concatenate(parts).view(dtype)

    def is_replicated(self) -> bool:
        """Whether every partition of the latest run has a living backup, saved or not yet, and the scheduler has heard
        all servers: else one that lives may be declared dead next, and a death would be a second fault."""
        process = self.processes["scheduler"]
        router = process.machine
        assert isinstance(router, SchedulerRouter)
        machines = [slot.machine for slot in router.runs if slot.machine is not None]
        if not process.alive or not machines:
            return False
        report = machines[-1].explain(self.clock.now)
        saved, newest, members = machines[-1].told_to("server"), report["partitions"], report["members"]
        there = {member.rank: member.incarnation for member in saved.members if member.role == "server"}
        processes = {rank: self.processes[f"server {rank}"] for rank in there}
        living = {rank for rank, at in processes.items() if at.alive and at.machine.incarnation == there[rank]}
        assert isinstance(newest, list)
        assert isinstance(members, list)
        heard_s = [member["last_heard_s"] for member in members if member["role"] == "server"]
        return (
            bool(saved.partitions)
            and all(seconds is not None and seconds < 2 * HEARTBEATS_S for seconds in heard_s)
            and all(entry.leader in living and entry.backup in living for entry in saved.partitions)
            and all(entry["backup"] is not None for entry in newest)
        )

    def workers_finished(self) -> bool:
        """Every worker's latest incarnation has run its program to the end."""
        return all(
            process.finished and process.alive
            for process in self.processes.values()
            if isinstance(process.machine, WorkerMachine) and process.program is not None
        )


def slices_of(server: ServerMachine) -> list[Slice]:
    """The slices that a server leads."""
    return list(server.table.slices.values())
