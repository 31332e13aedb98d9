"""The simulator: a whole cluster in one thread, on a virtual clock, deterministic by seed.

It plays the shell (`kvd.node.driver`) for the real machines: it carries their effects out, late, and reports what came
of them. Every message passes the codec. Jobs run in the real kernels. Processes are paused, killed between any two
effects, and started again; their programs are coroutines that yield requests and are given results or errors.

The same seed gives the same run: `digest()` is a hash over everything that happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvd.core.machine import (
    Apply,
    Complete,
    Connect,
    Copy,
    Disconnect,
    Event,
    Halt,
    JobDone,
    LocalCall,
    LogEntry,
    Peer,
    PeerLost,
    Persist,
    Persisted,
    Received,
    ResetState,
    Send,
    Tick,
)
from kvd.core.requests import InitKeys, Request, Transfer
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.core.server.groups import Slice
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.core.session import Identity, SchedulerSession
from kvd.core.worker.machine import WorkerMachine, WorkerSettings
from kvd.errors import KvdError, NotAllowed
from kvd.node.driver import copy_rows
from kvd.node.jobs import JobRunner, view
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import Settings, StatusReport, Values
from kvd.protocol.specs import padded
from kvd.testing.network import CALM, Faults, Network
from kvd.testing.process import Coroutine, Process, Sleep, Start, Ticket
from kvd.testing.settings import Cluster

SCHEDULER_ADDRESS = "sim://scheduler"
POISON = 0xAB
SLACK_S = 0.01  # between a deadline and the Tick that notices it
UPDATE_FAILS = "the simulator lets this update fail"

Program = Callable[["Me"], Coroutine]


class Violation(AssertionError):
    """A promise was broken. The text names the seed."""


class Me(NamedTuple):
    """What a program knows of the process that it runs in."""

    world: World
    process: Process
    number: int  # of the worker's node id, which is its rank if it got the one that it asked for

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
    """A cluster under simulation."""

    def __init__(self, seed: int, cluster: Cluster | None = None, faults: Faults = CALM) -> None:
        self.seed = seed
        self.cluster = cluster or Cluster()
        self.now = 0.0
        self.random = Random(seed)
        self.network = Network(Random(seed + 1), faults, lambda: self.now, self.at, self._deliver)
        self.processes: dict[str, Process] = {}  # the newest of each node
        self.programs: dict[str, Program] = {}
        self.worker_settings: dict[str, Settings] = {}  # of workers that insist on others than the cluster's
        self.watchers: list[Callable[[World, Process], None]] = []  # called after each step of a process
        self.on_end: list[Callable[[World, Process, Ticket], None]] = []  # called when a call ends
        self.notes: list[str] = []
        self.saved: dict[str, Any] | None = None  # the scheduler's record, as it is on its disk
        self.steps = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._hash = blake2b(digest_size=16)
        self._lives: dict[str, int] = {}
        self._act: dict[type[Any], Callable[[Process, Any], None]] = {
            Send: self._send,
            Connect: lambda process, effect: self.network.connect(process, effect.peer, effect.address),
            Disconnect: lambda process, effect: self.network.disconnect(process, effect.peer),
            ResetState: lambda process, effect: self._runner(process).reset(),
            Persist: self._persist,
            Copy: self._copy,
            Complete: self._complete,
            Halt: self._halt,
            LogEntry: lambda process, effect: self.notes.append(f"{self.now:.3f} {process.name}: {effect.text}"),
        }

    # ── time ──

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Has something happen."""
        self._order += 1
        heappush(self._heap, (max(time, self.now), self._order, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Lets so much virtual time pass, or less if `until` comes true before."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            if until is not None and until():
                return
            self.now, _, act = heappop(self._heap)
            act()
        self.now = end

    def digest(self) -> str:
        """A hash over every event so far."""
        return self._hash.hexdigest()

    def fail(self, text: str) -> None:
        raise Violation(f"seed {self.seed}, {self.now:.3f} s: {text}")

    # ── processes ──

    def start_all(self, program: Program | None = None) -> None:
        """The scheduler, all servers and all workers, the workers with this program."""
        self.start_scheduler()
        for rank in range(self.cluster.servers):
            self.start_server(rank)
        for number in range(self.cluster.workers):
            self.start_worker(number, program)

    def start_scheduler(self, keep_record: bool = True) -> Process:
        """A new scheduler, from the record of the one before if there was one that saved it."""
        cluster = self.cluster
        saved = self.saved if keep_record else None
        settings = SchedulerSettings(
            cluster.settings(),
            cluster.heartbeat_interval_s,
            cluster.server_timeout_s,
            cluster.worker_timeout_s,
            break_on_loss=cluster.fail_on_worker_loss,
        )
        generation = 1 if saved is None else int(saved["generation"]) + 1
        machine = SchedulerMachine(settings, self._incarnation(), generation, self.now, saved)
        if cluster.state_dir:
            self.saved = json.loads(json.dumps(machine.record()))
        return self._start(Process("scheduler", self._life("scheduler"), machine, SCHEDULER_ADDRESS))

    def start_server(self, rank: int) -> Process:
        name, cluster = f"server {rank}", self.cluster
        life = self._life(name)
        address = f"sim://{name}/{life}".replace(" ", "")
        link = self._session("server", rank, address, Settings("", "", -1, 0, 0, cluster.workers, cluster.servers, 0))
        settings = ServerSettings(
            cluster.memory_limit_bytes, cluster.fail_on_worker_loss, small_push_bytes=cluster.small_push_bytes
        )
        return self._start(Process(name, life, ServerMachine(settings, link), address, JobRunner()))

    def start_worker(self, number: int, program: Program | None = None) -> Process:
        """A worker under its node id. Without a program it runs the one that its node ran before, if there is one."""
        name = f"worker {number}"
        if program is not None:
            self.programs[name] = program
        wanted = self.worker_settings.get(name, self.cluster.settings())
        settings = WorkerSettings(self.cluster.credit_bytes, self.cluster.small_push_bytes)
        machine = WorkerMachine(settings, self._session("worker", number, "", wanted))
        process = self._start(Process(name, self._life(name), machine))
        if name in self.programs:
            process.program = self.programs[name](Me(self, process, number))
            self.after(0.0, lambda: self._resume(process, None))
        return process

    def kill(self, name: str, noticed: bool = False) -> None:
        """SIGKILL. `noticed`: the kernel tells the scheduler."""
        process = self.processes[name]
        process.alive = False
        self._trace(f"kill {name}")
        scheduler = self.processes.get("scheduler")
        if noticed and scheduler is not None and scheduler.alive:
            self.feed(scheduler, PeerLost(process.machine.incarnation, "its process ended"))

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so much later."""
        process = self.processes[name]
        if process.paused or not process.alive:
            return
        process.paused = True
        self._trace(f"pause {name}")
        self.after(seconds, lambda: self._wake(process))

    def _wake(self, process: Process) -> None:
        process.paused = False
        process.woke_at = self.now
        backlog, process.backlog = process.backlog, []
        for event in backlog:
            self.feed(process, event)

    def _start(self, process: Process) -> Process:
        self.processes[process.name] = process
        if process.address:
            self.network.listen(process)
        self._trace(f"start {process.name}")
        self.after(0.0, lambda: self.feed(process, Tick()))
        return process

    def _life(self, name: str) -> int:
        life = self._lives.get(name, 0)
        self._lives[name] = life + 1
        return life

    def _incarnation(self) -> int:
        return self.random.getrandbits(61) + 1

    def _session(self, role: str, number: int, address: str, wanted: Settings) -> SchedulerSession:
        identity = Identity(role, f"{role}-{number}", self._incarnation(), address, "sim", 1000 + number, number)
        return SchedulerSession(identity, wanted, SCHEDULER_ADDRESS, self.cluster.heartbeat_interval_s)

    # ── events in ──

    def feed(self, process: Process, event: Event) -> None:
        """Gives a process an event, unless it is dead; a paused one finds it when it wakes."""
        if not process.alive:
            return
        if process.paused:
            process.backlog.append(event)
            return
        self.steps += 1
        self._trace(f"{process.name} {type(event).__name__}")
        for effect in process.machine.step(event, self.now):
            if process.doom is not None:
                if process.doom == 0:
                    process.alive = False
                    self._trace(f"{process.name} dies")
                    return
                process.doom -= 1
            act = self._act.get(type(effect), self._job)
            act(process, effect)
        for watcher in self.watchers:
            watcher(self, process)
        if isinstance(event, Received) and isinstance(event.message, Values) and event.nbytes:
            event.payload[:] = bytes([POISON]) * event.nbytes
        self._set_timer(process)

    def _set_timer(self, process: Process) -> None:
        deadline = process.machine.next_deadline()
        if deadline is None or (process.tick_at is not None and process.tick_at <= deadline):
            return
        process.timer += 1
        process.tick_at = max(deadline, self.now + 0.001)
        self.at(process.tick_at, partial(self._tick, process, process.timer))

    def _tick(self, process: Process, timer: int) -> None:
        if process.timer == timer:
            process.tick_at = None
            self.feed(process, Tick())

    def _deliver(self, process: Process, peer: Peer, header: bytes, payload: bytes | None) -> None:
        decoded = decode(header)
        self._hash.update(header)
        buffer = None if payload is None else bytearray(payload)
        nbytes = 0 if payload is None else len(payload)
        self.feed(process, Received(peer, decoded.sender, decoded.epoch, decoded.message, buffer, nbytes))

    def _trace(self, text: str) -> None:
        self._hash.update(f"{self.now:.9f} {text}\n".encode())

    # ── effects out ──

    def _send(self, process: Process, effect: Send) -> None:
        payload: bytearray | None = None
        for buffer, offset, nbytes in effect.payload:
            if payload is None:
                payload = bytearray()
            payload.extend(bytes(padded(len(payload)) - len(payload)))
            if nbytes:
                payload.extend(memoryview(buffer).cast("B")[offset : offset + nbytes])
        if isinstance(effect.message, StatusReport):
            payload = bytearray(json.dumps(process.machine.explain(self.now)).encode())
        header = encode(effect.message, process.machine.incarnation, process.machine.epoch)
        self.network.send(process, effect.peer, header, None if payload is None else bytes(payload))

    def _runner(self, process: Process) -> JobRunner:
        assert process.jobs is not None
        return process.jobs

    def _job(self, process: Process, job: Any) -> None:
        """Jobs end in any order; the kernel runs when they end."""
        self.after(self.random.uniform(*self.cluster.job_s), lambda: self._job_ends(process, job))

    def _job_ends(self, process: Process, job: Any) -> None:
        if not process.alive:
            return
        if isinstance(job, Apply) and self.cluster.failing_updates > self.random.random():
            self.feed(process, JobDone(job.job, None, NotAllowed(UPDATE_FAILS)))
            return
        done = self._runner(process).run(job)
        assert isinstance(done, JobDone)
        self.feed(process, done)

    def _persist(self, process: Process, effect: Persist) -> None:
        """One write after the other, as in the shell."""
        record = json.dumps(effect.record)
        start = max(self.now, process.last_persist_at)
        process.last_persist_at = start + self.random.uniform(*self.cluster.persist_s)
        self.at(process.last_persist_at, lambda: self._persisted(process, effect.token, record))

    def _persisted(self, process: Process, token: int, record: str) -> None:
        if process.alive:
            if self.cluster.state_dir:
                self.saved = json.loads(record)
            self.feed(process, Persisted(token))

    def _copy(self, process: Process, effect: Copy) -> None:
        if not all(process.targets.get(id(target)) for target in effect.targets if target is not None):
            self.fail(f"{process.name}: a Copy into memory that no open call named")
        copy_rows(effect)

    def _halt(self, process: Process, effect: Halt) -> None:
        process.halted = effect.error
        self._trace(f"{process.name} halts: {effect.error}")

    def _complete(self, process: Process, effect: Complete) -> None:
        ticket = process.tickets.pop(effect.call, None)
        if ticket is None:
            self.fail(f"{process.name}: call {effect.call} is answered twice")
            return
        ticket.done, ticket.result, ticket.error = True, effect.result, effect.error
        self._trace(f"{process.name} call {effect.call}: {type(effect.error).__name__} {effect.error}")
        request = ticket.request
        if isinstance(request, Transfer):
            for item in request.items:
                if item.target is not None:
                    process.targets[id(item.target)] -= 1
        if effect.error is None:
            poison(request)
        if self.now > max(ticket.deadline, process.woke_at) + SLACK_S:
            self.fail(f"{process.name}: {type(request).__name__} ended {self.now - ticket.deadline:.3f} s late")
        for watcher in self.on_end:
            watcher(self, process, ticket)
        if ticket.waiter is not None:
            self.after(0.0, ticket.waiter)

    # ── programs ──

    def submit(self, process: Process, request: Request, timeout_s: float | None = None) -> Ticket:
        """A local call, as a thread of the program makes it."""
        process.last_call += 1
        deadline = self.now + (self.cluster.call_timeout_s if timeout_s is None else timeout_s)
        ticket = Ticket(process.last_call, request, deadline)
        process.tickets[ticket.call] = ticket
        if isinstance(request, Transfer):
            for item in request.items:
                if item.target is not None:
                    process.targets[id(item.target)] = process.targets.get(id(item.target), 0) + 1
        self.feed(process, LocalCall(ticket.call, request, deadline))
        return ticket

    def _resume(self, process: Process, value: Any, error: KvdError | None = None) -> None:
        """Runs the program up to its next yield that makes it wait."""
        program = process.program
        if program is None or not process.alive:
            return
        if process.paused:
            self.after(0.1, lambda: self._resume(process, value, error))
            return
        try:
            step = program.send(value) if error is None else program.throw(error)
            while isinstance(step, Start):
                step = program.send(self.submit(process, step.request, step.timeout_s))
        except StopIteration:
            process.finished = True
            return
        except KvdError as failure:
            process.finished, process.error = True, failure
            return
        if isinstance(step, Sleep):
            self.after(step.seconds, lambda: self._resume(process, None))
            return
        ticket = step if isinstance(step, Ticket) else self.submit(process, step)
        ticket.waiter = lambda: self._resume(process, ticket.result, ticket.error)
        if ticket.done:
            self.after(0.0, ticket.waiter)

    # ── looking in ──

    def server(self, rank: int) -> ServerMachine:
        machine = self.processes[f"server {rank}"].machine
        assert isinstance(machine, ServerMachine)
        return machine

    def servers(self) -> list[ServerMachine]:
        return [self.server(rank) for rank in range(self.cluster.servers)]

    def value(self, key: str, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """The committed value of a key, put together from its servers."""
        slices = [slice_ for server in self.servers() for slice_ in slices_of(server) if slice_.key == key]
        slices.sort(key=lambda slice_: slice_.index)
        parts = [view(slice_.span(slice_.log.current), np.dtype(np.uint8)) for slice_ in slices]
        return np.concatenate(parts).view(dtype)

    def workers_finished(self) -> bool:
        """Every worker's newest incarnation has run its program to the end."""
        return all(
            process.finished and process.alive
            for process in self.processes.values()
            if isinstance(process.machine, WorkerMachine) and process.program is not None
        )


def slices_of(server: ServerMachine) -> list[Slice]:
    """The slices that a server leads."""
    return list(server.table.slices.values())


def poison(request: Request) -> None:
    """The call has ended well: its sources are the program's again, which writes something else there."""
    if not isinstance(request, Transfer | InitKeys):
        return
    targets = {id(item.target) for item in request.items}
    for item in request.items:
        if item.source is not None and id(item.source) not in targets:
            memoryview(item.source).cast("B")[:] = bytes([POISON]) * memoryview(item.source).nbytes
