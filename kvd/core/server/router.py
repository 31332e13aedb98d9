"""The server of a cluster: one machine per run, one for the cluster itself, and the way between them and the nodes.

Runs begin and end here as the view of the cluster says, which the machine of the cluster receives. A run that the view
does not name at all stays: a scheduler without its record has yet to learn of it, from the session of its machine.

A run that is over gives way when the memory is full, the oldest first; its readers learn that its values are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvd.core.access import Doorkeeper
from kvd.core.machine import (
    SCHEDULER,
    Connect,
    Disconnect,
    DropRun,
    Effect,
    Event,
    Halt,
    InRun,
    JobDone,
    LocalCall,
    LogEntry,
    OfOneRun,
    PeerKind,
    Received,
    Send,
    Stop,
)
from kvd.core.membership import EMPTY_SETTINGS
from kvd.core.principals import HOLDER, KeyRole
from kvd.core.server.connections import SharedConnections
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.core.server.memory import ServerMemory
from kvd.core.session import RunKey, SchedulerSession
from kvd.protocol.messages import (
    NO_RUN,
    NO_VIEW,
    Done,
    Epoch,
    ErrorCode,
    NotYet,
    NotYetReason,
    Refused,
    RunEntry,
    RunPhase,
    Shutdown,
)

_APART = frozenset({InRun, Halt, LogEntry, Connect, Disconnect})  # effects that are not carried out as they are
NEVER = float("inf")
MAX_GIVEN_UP = 256  # runs remembered whose values are gone

__all__ = ["ServerRouter", "ServerSettings"]


class ServerRouter:
    """The state machine of a server.

    Args:
        settings: of each run's machine; the memory is one for all.
        session: with the scheduler, for the cluster.
        scheduler_address, heartbeat_interval_s: for the sessions of the runs.
    """

    def __init__(
        self,
        settings: ServerSettings,
        session: SchedulerSession,
        scheduler_address: str,
        heartbeat_interval_s: float,
    ) -> None:
        self.incarnation = session.incarnation
        self._settings = settings
        self._session = session
        self._address = scheduler_address
        self._interval_s = heartbeat_interval_s
        self._memory = ServerMemory(settings.memory_limit_bytes, self._make_room)
        self._machines = {NO_RUN: ServerMachine(settings, session, self._memory)}
        self._deadlines = {NO_RUN: NEVER}  # by run: of its machine
        self._phases: dict[int, RunPhase] = {}  # by run
        self._given_up: OrderedDict[int, str] = OrderedDict()  # run → its job
        self._doorkeeper = Doorkeeper(KeyRole.SERVER)
        self._connections = SharedConnections()  # to other servers
        self._out: list[Effect] = []

    # ── the machine's interface ──

    @property
    def run(self) -> int:
        return NO_RUN

    @property
    def epoch(self) -> Epoch:
        return self._session.view.epoch

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, JobDone):
            machine = self._machines.get(event.run)
            if machine is not None:
                self._step(event.run, machine, event, now)
        elif isinstance(event, LocalCall):
            for run in sorted(self._machines, reverse=True):  # the cluster's last: it answers the call
                self._step(run, self._machines[run], event, now)
        else:
            for run, machine in list(self._machines.items()):
                self._step(run, machine, event, now)
        return self._out

    def next_deadline(self) -> float | None:
        due = min(self._deadlines.values())
        return None if due == NEVER else due

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        needed = [machine.memory_used_nbytes for number, machine in self._machines.items() if not self._is_over(number)]
        report = self._machines.get(run, self._machines[NO_RUN]).explain(now)
        return {**report, "memory_of_live_runs_bytes": sum(needed)}

    def is_needed(self) -> bool:
        """Whether something would be lost if this server left now, and not if it stayed a while."""
        return any(
            not self._is_over(run) and machine.session.joined and machine.session.view.needs(machine.session.rank)
            for run, machine in self._machines.items()
        )

    def _is_over(self, run: int) -> bool:
        """Whether a run has ended, and gives way when memory is needed."""
        return run in self._phases and self._phases[run].is_over

    def live_runs(self) -> dict[str, int]:
        """The runs that are under way, by the name of their job."""
        live = {run: machine for run, machine in self._machines.items() if run != NO_RUN and not self._is_over(run)}
        return {machine.session.job: run for run, machine in live.items()}

    def machine_of(self, run: int) -> ServerMachine | None:
        """The machine of a run; for NO_RUN, that of the cluster."""
        return self._machines.get(run)

    def latest(self) -> ServerMachine:
        """The machine of the run that began last; that of the cluster if there is none."""
        return list(self._machines.values())[-1]

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken. For simulators and tests."""
        for run, machine in self._machines.items():
            assert machine.run == run, f"the machine of run {machine.run} is kept as that of {run}"
            due = machine.next_deadline()
            assert self._deadlines[run] == (NEVER if due is None else due), f"run {run} has another deadline"
            machine.validate()
        assert self._given_up.keys().isdisjoint(self._machines), "a run that is given up has a machine"

    # ── messages ──

    def _receive(self, event: Received, now: float) -> None:
        if event.peer.kind is PeerKind.SERVER:
            self._receive_from_server(event, now)
            return
        if event.principal is not HOLDER and event.peer != SCHEDULER and self._keeps_out(event, now):
            return
        if isinstance(event.message, Shutdown):
            self._shut_down(event, event.message)
            return
        machine = self._machines.get(event.run)
        if machine is not None:
            self._step(event.run, machine, event, now)
            if event.run == NO_RUN and event.peer == SCHEDULER:
                self._follow_view(now)
        elif event.peer == SCHEDULER:
            return  # for a run that is given up
        else:
            self._answer_for_unknown_run(event)

    def _receive_from_server(self, event: Received, now: float) -> None:
        """From a server that this one has connected to come answers. It is not answered itself: that might never end.
        What it asks for, it asks over a connection of its own, where its key counts."""
        machine = self._machines.get(event.run)
        if machine is not None and isinstance(event.message, Done | NotYet | Refused):
            self._step(event.run, machine, event, now)

    def _keeps_out(self, event: Received, now: float) -> bool:
        """Whether its key does not allow the message, which its sender is told."""
        machine = self._machines.get(event.run)
        job = self._given_up.get(event.run) if machine is None or event.run == NO_RUN else machine.session.job
        text = self._doorkeeper.objection(event, job)
        if text:
            self._send(event, Refused(getattr(event.message, "request", 0), ErrorCode.NOT_ALLOWED, text))
            line = self._doorkeeper.log_entry(event, text, now)
            self._out += [] if line is None else [line]
        return bool(text)

    def _answer_for_unknown_run(self, event: Received) -> None:
        request = getattr(event.message, "request", 0)
        job = self._given_up.get(event.run)
        if job is None:  # its view is on the way to us
            self._send(event, NotYet(request, NotYetReason.NOT_ATTACHED, "this server does not know the run"))
        else:
            text = f"the run of job {job!r} that this process belongs to has ended, and its values are given up"
            self._send(event, Refused(request, ErrorCode.JOB_ENDED, text, job))

    def _shut_down(self, event: Received, shutdown: Shutdown) -> None:
        if event.peer == SCHEDULER:
            self._out.append(Stop("kvd shutdown"))
        else:
            text = "only the scheduler ends a server: use kvd shutdown"
            self._send(event, Refused(shutdown.request, ErrorCode.NOT_ALLOWED, text))

    # ── runs begin and end ──

    def _follow_view(self, now: float) -> None:
        if not self._session.joined:
            return
        for entry in self._session.view.runs:
            if entry.phase is RunPhase.GONE:
                self._give_up(entry.run, entry.job)
            elif entry.run not in self._given_up:
                self._phases[entry.run] = entry.phase
                if entry.run not in self._machines:
                    self._begin(entry, now)

    def _begin(self, entry: RunEntry, now: float) -> None:
        key = RunKey(entry.job, entry.token, run=entry.run)
        identity = self._session.identity._replace(preferred_rank=self._session.rank)
        session = SchedulerSession(identity, EMPTY_SETTINGS, self._address, self._interval_s, key)
        machine = self._machines[entry.run] = ServerMachine(self._settings, session, self._memory)
        self._emit(entry.run, machine, session.tick(now))
        self.note_deadline(entry.run, machine)

    def _give_up(self, run: int, job: str) -> None:
        self._given_up[run] = job
        while len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)
        self._phases.pop(run, None)
        self._deadlines.pop(run, None)
        machine = self._machines.pop(run, None)
        if machine is not None:
            machine.drop_values()
            self._memory.release(run)
            self._out += [DropRun(run), *self._connections.leave(run)]
            self._out.append(LogEntry("info", f"the values of job {job!r}, run {run:x}, are given up"))

    def _make_room(self) -> bool:
        """Gives up the oldest run that is over."""
        for run, machine in self._machines.items():
            if run in self._phases and self._phases[run].is_over:
                self._give_up(run, machine.session.job)
                return True
        return False

    # ── effects ──

    def _step(self, run: int, machine: ServerMachine, event: Event, now: float) -> None:
        effects = machine.step(event, now)
        if effects:
            self._emit(run, machine, effects)
        self.note_deadline(run, machine)

    def note_deadline(self, run: int, machine: ServerMachine) -> None:
        """Ask the machine of a run when it must be stepped."""
        due = machine.next_deadline()
        if run in self._machines:  # it was not given up meanwhile
            self._deadlines[run] = NEVER if due is None else due

    def _emit(self, run: int, machine: ServerMachine, effects: Sequence[Effect]) -> None:
        own = self.of_run(run, machine, effects)
        if own:
            self._out.append(InRun(run, machine.epoch, own))

    def of_run(self, run: int, machine: ServerMachine, effects: Sequence[Effect]) -> Sequence[Any]:
        """The effects of a machine as they count for its run. There is one connection to each node, and the end of one
        run ends no server."""
        if _APART.isdisjoint(map(type, effects)):
            return effects
        return [kept for effect in effects if (kept := self._of_run(effect, run, machine)) is not None]

    def _send(self, event: Received, message: Refused | NotYet) -> None:
        machine = self.machine_of(event.run)
        epoch = NO_VIEW if machine is None else machine.epoch
        self._out.append(InRun(event.run, epoch, [Send(event.peer, message)]))

    def _of_run(self, effect: Effect, run: int, machine: ServerMachine) -> OfOneRun | None:
        """An effect as it counts for this run."""
        if isinstance(effect, InRun):
            return None
        if isinstance(effect, Connect) and effect.peer != SCHEDULER:
            return self._connections.connect(run, effect)
        if isinstance(effect, Disconnect) and effect.peer != SCHEDULER:
            return self._connections.disconnect(run, effect)
        if run == NO_RUN:
            return effect
        if isinstance(effect, Halt):
            return LogEntry("error", f"this server cannot take part in a run: {effect.error}")
        if isinstance(effect, LogEntry):
            return effect._replace(fields={**effect.fields, "job": machine.session.job})
        return None if isinstance(effect, Connect | Disconnect) else effect
