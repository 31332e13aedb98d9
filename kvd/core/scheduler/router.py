"""The scheduler of a cluster: one machine per run, one for the cluster itself, and the way between them and the nodes.

A message belongs to the run that its header names. A Join that names none goes where `runs.Runs.choose` says. The view
of the cluster lists the runs: that is how servers learn of their beginning and their end.

The way of a run:

1. The first worker's Join begins it: `SchedulerRouter._begin` gives it a machine and a number, the pseudonym of that
   worker, which is random.
2. The view of the cluster names it, once saved. Each server makes a machine for it, which joins the run.
3. Its phase follows from what happens to its workers: `phase.RunLife.observe`.
4. `SchedulerRouter._give_up` forgets its machine: on request, or when too many runs that are over are kept. Servers
   see in the view that it is gone.

All records are saved as one: `SchedulerRouter._flush` puts the changes of one step into one Persist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvd.core.access import Doorkeeper
from kvd.core.machine import (
    Effect,
    Event,
    InRun,
    LogEntry,
    OfOneRun,
    Persisted,
    PersistFailed,
    Received,
    Send,
    Stop,
    Unsaved,
)
from kvd.core.principals import HOLDER, KeyRole
from kvd.core.pseudonyms import pseudonym
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.core.scheduler.membership.agreement import malformation, size_problem
from kvd.core.scheduler.runs.record import Saving, check_cluster
from kvd.core.scheduler.runs.table import MAX_LIVE, Choice, Runs, RunSlot
from kvd.protocol.messages import (
    NO_RUN,
    NO_VIEW,
    Done,
    EndRun,
    Epoch,
    ErrorCode,
    Join,
    Leave,
    NotYet,
    NotYetReason,
    Refused,
    RunEntry,
    RunPhase,
    Shutdown,
    StatusQuery,
    StatusReport,
)


class Authorization:
    """Check of each message before it reaches a machine: its key must allow it, and its incarnation be the sender's.

    Args:
        cluster: the machine in which the servers have their seats.
        runs: those with the seats of workers.
    """

    def __init__(self, cluster: SchedulerMachine, runs: Runs) -> None:
        self._cluster = cluster
        self._runs = runs
        self._doorkeeper = Doorkeeper(KeyRole.SCHEDULER)

    def objection(self, event: Received, slot: RunSlot | None) -> str:
        """Why the message, which names the run of `slot`, goes no further; "" if it does."""
        message = event.message
        if event.principal is not HOLDER:
            jobs = [None if slot is None else slot.job]
            if isinstance(message, Join):
                jobs.append(message.job.partition("@")[0])
            text = next(filter(None, (self._doorkeeper.objection(event, job) for job in jobs)), "")
            if text:
                return text
        if isinstance(message, Join) and self._is_of_another(event, message):
            return "another node has this incarnation: start this one again"
        return ""

    def line(self, event: Received, text: str, now: float) -> list[LogEntry]:
        """What the log says of a message that goes no further: not every one has a line."""
        entry = self._doorkeeper.log_entry(event, text, now)
        return [] if entry is None else [entry]

    def _is_of_another(self, event: Received, join: Join) -> bool:
        """Whether a node with another role or key has the sender's incarnation in any run: what the shell finds out of
        the process of an incarnation concerns all runs."""
        machines = [self._cluster, *(slot.machine for slot in self._runs if slot.machine is not None)]
        seats = [seat for machine in machines if (seat := machine.roster.seat_of(event.sender)) is not None]
        return any((seat.member.role, seat.member.principal) != (join.role, event.principal.name) for seat in seats)


class SchedulerRouter:
    """The state machine of a scheduler. `generation` must be larger than that of any earlier start."""

    def __init__(
        self,
        settings: SchedulerSettings,
        incarnation: int,
        generation: int,
        now: float,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self._settings = settings
        self._generation = generation
        cluster = None if saved is None else saved["cluster"]
        self._cluster = SchedulerMachine(settings, incarnation, generation, now, cluster, with_workers=False)
        self._runs = Runs([] if saved is None else [self._restored(entry, now) for entry in saved["runs"]])
        self._cluster.restore_runs(self._runs.entries())
        self._unconfirmed = {slot.run for slot in self._runs if slot.machine is not None}  # only the record has them
        self._out: list[Effect] = []
        self._saving = Saving()
        self._authorization = Authorization(self._cluster, self._runs)
        self._handlers: dict[type[Any], Callable[[Received, Any, float], None]] = {
            EndRun: self._end_run,
            Shutdown: self._shut_down,
            StatusQuery: lambda event, query, _now: self._send(event, StatusReport(query.request)),
        }

    def _restored(self, saved: Mapping[str, Any], now: float) -> RunSlot:
        slot = RunSlot(saved["run"], saved["job"], saved["token"], None, saved.get("begun_by", ""))
        if saved["record"] is not None:
            settings = self._settings_of(saved["num_workers"])
            slot.machine = SchedulerMachine(settings, self.incarnation, self._generation, now, saved["record"])
        return slot

    # ── the machine's interface ──

    @property
    def run(self) -> int:
        return NO_RUN

    @property
    def epoch(self) -> Epoch:
        return self._cluster.epoch

    def step(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        if isinstance(event, Received):
            self._receive(event, now)
        elif isinstance(event, Persisted):
            for run, token in self._saving.saved(event.token).items():
                machine = self.machine_of(run)
                if machine is not None:
                    self._step(run, machine, Persisted(token), now)
        elif isinstance(event, PersistFailed):
            self._saving.failed(event.text)
        else:
            self._step(NO_RUN, self._cluster, event, now)
            for slot in self._runs:
                if slot.machine is not None:
                    self._step(slot.run, slot.machine, event, now)
        self._follow_phases()
        self._flush()
        return self._out

    def next_deadline(self) -> float | None:
        return min((at for machine in self._machines() if (at := machine.next_deadline()) is not None), default=None)

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        machine = self.machine_of(run) or self._cluster
        whole = {"cannot_save": self._saving.problem, "insecure": self._settings.insecure}
        return {**machine.explain(now), "jobs": [slot.describe() for slot in self._runs], **whole}

    def watched(self) -> list[tuple[int, str, int]]:
        """(incarnation, host, pid) of the living members, for a shell that can watch their processes."""
        return list(dict.fromkeys(watched for machine in self._machines() for watched in machine.watched()))

    def record(self) -> dict[str, object]:
        """All that a successor needs, as plain data."""
        return {
            "generation": max(machine.generation for machine in self._machines()),
            "cluster": self._cluster.record(),
            "runs": [
                {
                    "run": slot.run,
                    "job": slot.job,
                    "token": slot.token,
                    "num_workers": slot.num_workers,
                    "begun_by": slot.begun_by,
                    "record": None if slot.machine is None else slot.machine.record(),
                }
                for slot in self._runs
            ],
        }

    @staticmethod
    def check_record(saved: Mapping[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError if this is no record of a scheduler."""
        check_cluster(saved)

    def machine_of(self, run: int) -> SchedulerMachine | None:
        """The machine of a run; for NO_RUN, that of the cluster."""
        if run == NO_RUN:
            return self._cluster
        slot = self._runs.find(run)
        return None if slot is None else slot.machine

    @property
    def runs(self) -> Runs:
        """For reading."""
        return self._runs

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken. For simulators and tests."""
        for machine in self._machines():
            machine.validate()
        assert sum(not slot.is_over for slot in self._runs) <= MAX_LIVE, "too many runs are alive"

    # ── messages ──

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        handler = self._handlers.get(type(message))
        slot = self._runs.find(event.run)
        objection = self._authorization.objection(event, slot)
        if objection:
            self._refuse(event, ErrorCode.NOT_ALLOWED, objection)
            self._out += self._authorization.line(event, objection, now)
        elif handler is not None:
            handler(event, message, now)
        elif event.run == NO_RUN:
            self._receive_without_run(event, now)
        elif slot is None and isinstance(message, Join):
            self._begin(event.run, event, message, now)
        elif slot is None:
            request, text = getattr(message, "request", 0), "the scheduler does not know this node"
            self._send(event, NotYet(request, NotYetReason.NOT_JOINED, text))
        elif slot.machine is None or self._has_lost_its_turn(slot, event):
            self._refuse(event, ErrorCode.JOB_ENDED, slot.ended_text(), slot.job)
        else:
            self._step(slot.run, slot.machine, event, now)

    def _receive_without_run(self, event: Received, now: float) -> None:
        message = event.message
        if isinstance(message, Join) and message.role == "worker":
            self._join_worker(event, message, now)
        elif isinstance(message, Join) and message.role == "observer":
            self._join_observer(event, message, now)
        elif isinstance(message, Leave):
            self._leave_unwelcomed(event, message, now)
        else:
            if isinstance(message, Join) and message.role == "server":
                self._take_over(message.runs, now)
            self._step(NO_RUN, self._cluster, event, now)

    def _join_observer(self, event: Received, join: Join, now: float) -> None:
        slot = self._runs.readable(join.job)
        if slot is None:
            self._step(NO_RUN, self._cluster, event, now)
        else:
            event = event._replace(epoch=NO_VIEW)  # it may know the view of the cluster, which is not that of a run
            self._step(slot.run, slot.machine or self._cluster, event, now)

    def _leave_unwelcomed(self, event: Received, leave: Leave, now: float) -> None:
        """A server, or a worker that gives up before it was welcomed: it may have a place all the same."""
        for slot in self._runs:
            machine = slot.machine
            if machine is not None and machine.roster.worker_seat_of(event.sender) is not None:
                self._step(slot.run, machine, event, now)
                return
        if self._cluster.roster.seat_of(event.sender) is not None:
            self._step(NO_RUN, self._cluster, event, now)
        else:
            self._send(event, Done(leave.request))

    def _join_worker(self, event: Received, join: Join, now: float) -> None:
        event = event._replace(epoch=NO_VIEW)  # as that of an observer
        malformed = malformation(join)
        if malformed is not None:
            self._send(event, malformed)
            return
        checking = self._checking(join)
        if checking is not None:
            self._send(event, checking)
            return
        choice, slot = self._runs.choose(join, event.principal.name)
        if choice is Choice.BEGIN:
            self._begin(pseudonym(event.sender), event, join, now)
        elif slot is None:
            self._refuse(event, ErrorCode.JOB_BUSY, self._runs.full_text(event.principal.name), join.job)
        elif choice is Choice.ENTER and slot.machine is not None:
            if slot.bind(join):
                self._announce()
            self._step(slot.run, slot.machine, event, now)
        elif choice is Choice.WAIT:
            self._send(event, NotYet(join.request, NotYetReason.BUSY, slot.closing_text()))
        elif choice is Choice.JOB_BUSY:
            self._refuse(event, ErrorCode.JOB_BUSY, slot.busy_text(), slot.job)
        else:
            self._refuse(event, ErrorCode.JOB_ENDED, slot.ended_text(), slot.job)

    def _checking(self, join: Join) -> NotYet | None:
        """What a worker that names no run is answered while the record may be too old: it may not know the run."""
        newest = self._runs.newest(join.job)
        machines = [self._cluster] if newest is None or newest.machine is None else [self._cluster, newest.machine]
        texts = (machine.checking_text() for machine in machines)
        return next((NotYet(join.request, NotYetReason.BUSY, text) for text in texts if text), None)

    def _has_lost_its_turn(self, slot: RunSlot, event: Received) -> bool:
        """A worker of a run that is over, and whose job has a later one, cannot bring it back to life."""
        machine = slot.machine
        if machine is None or not slot.is_over or not self._runs.is_superseded(slot):
            return False
        seat = machine.roster.seat_of(event.sender)
        joins_as_worker = isinstance(event.message, Join) and event.message.role == "worker"
        return joins_as_worker or (seat is not None and seat.member.role == "worker")

    # ── runs begin and end ──

    def _begin(self, run: int, event: Received, join: Join, now: float) -> None:
        """Begins a run with its first worker, once all servers are there: until then, one of them may know a run that a
        scheduler without its record does not. A reader begins none."""
        missing = ", ".join(self._cluster.roster.missing())
        waiting = self._cluster.checking_text() or (missing and f"waiting for {missing}")
        if waiting:
            self._send(event, NotYet(join.request, NotYetReason.BUSY, waiting))
            self._out.append(InRun(event.run, self._cluster.epoch, self._cluster.shown(event.peer, join.role)))
            return
        if join.role == "observer":
            self._refuse(event, ErrorCode.JOB_ENDED, f"the run of job {join.job!r} has ended: read another", join.job)
            return
        key = event.principal.name
        if not self._runs.has_room(RunPhase.FORMING, key):
            self._send(event, NotYet(join.request, NotYetReason.BUSY, self._runs.full_text(key)))
            return
        num_workers = join.settings.num_workers if join.role == "worker" else 0
        slot = self._new_slot(RunEntry(run, join.job, join.token, RunPhase.FORMING, num_workers), now)
        assert slot.machine is not None
        slot.begun_by = key
        objection = slot.machine.objection(join)
        if objection is not None:
            self._send(event, objection)
            return
        self._add(slot)
        self._announce()
        slot.machine.seat_servers(self._cluster.roster.seats(), now)
        self._step(run, slot.machine, event, now)

    def _take_over(self, entries: Sequence[RunEntry], now: float) -> None:
        """A server brings the runs that it knows: a scheduler whose record is lost has no other source."""
        self._unconfirmed -= {entry.run for entry in entries if entry.phase is not RunPhase.GONE}
        for entry in entries:
            is_new = self._runs.find(entry.run) is None and entry.phase is not RunPhase.GONE
            fits = size_problem(self._settings_of(entry.num_workers).cluster) is None  # else no record could have it
            if is_new and entry.run > 0 and fits and self._runs.has_room(entry.phase):
                self._add(self._new_slot(entry, now))

    def _new_slot(self, entry: RunEntry, now: float) -> RunSlot:
        settings = self._settings_of(entry.num_workers)
        machine = SchedulerMachine(settings, self.incarnation, self._generation, now, phase=entry.phase)
        return RunSlot(entry.run, entry.job, entry.token, machine)

    def _add(self, slot: RunSlot) -> None:
        self._runs.add(slot)
        self._log(f"run {slot.run:x} of job {slot.job!r} is {slot.phase}")

    def _settings_of(self, num_workers: int) -> SchedulerSettings:
        """Of a run with this many workers; 0: as many as the scheduler was told."""
        if not num_workers:
            return self._settings
        return replace(self._settings, cluster=self._settings.cluster._replace(num_workers=num_workers))

    def _follow_phases(self) -> None:
        """Tells the servers of phases that have changed, and gives up what is too old to be kept."""
        if self._cluster.was_refuted and self._unconfirmed and not self._cluster.roster.missing():
            self._give_up_unconfirmed()
        while (excess := self._runs.excess()) is not None:
            self._give_up(excess)
        if self._cluster.announced_runs != self._runs.entries():
            self._announce()

    def _give_up_unconfirmed(self) -> None:
        """The record was too old, and all servers have said which runs there are: others of the record have ended."""
        unconfirmed, self._unconfirmed = self._unconfirmed, set()
        for slot in self._runs:
            if slot.run in unconfirmed and slot.machine is not None:
                self._give_up(slot)

    def _give_up(self, slot: RunSlot, answers: Sequence[Send] = ()) -> None:
        """Forgets the run, and tells its workers."""
        machine, slot.machine = slot.machine, None
        assert machine is not None
        ended = Refused(0, ErrorCode.JOB_ENDED, slot.ended_text(), slot.job)
        told = [
            Send(seat.peer, ended)
            for seat in machine.roster.living()
            if seat.member.role == "worker" and seat.peer is not None
        ]
        self._out.append(InRun(slot.run, machine.epoch, told))
        self._runs.forget_oldest_gone()
        self._log(f"run {slot.run:x} of job {slot.job!r} is given up")
        self._announce(answers)

    def _end_run(self, event: Received, end: EndRun, _now: float) -> None:
        slot = self._runs.readable(end.job)
        if slot is None:
            text = f"no run of job {end.job!r} is here: kvd jobs lists all"
            self._refuse(event, ErrorCode.NOT_ALLOWED, text, end.job)
        else:
            self._give_up(slot, [Send(event.peer, Done(end.request))])

    def _shut_down(self, event: Received, shutdown: Shutdown, _now: float) -> None:
        live = ", ".join(repr(slot.job) for slot in self._runs if not slot.is_over)
        if live and not shutdown.force:
            text = f"job {live} is running: wait for its end, end it with kvd jobs end, or use kvd shutdown --force"
            self._refuse(event, ErrorCode.NOT_ALLOWED, text)
            return
        servers = [seat.peer for seat in self._cluster.roster.living() if seat.peer is not None]
        sends: list[OfOneRun] = [Send(peer, Shutdown(0, force=True)) for peer in servers]
        sends.append(Send(event.peer, Done(shutdown.request)))
        self._out.append(InRun(NO_RUN, self.epoch, sends))
        self._out.append(Stop("kvd shutdown"))

    # ── effects ──

    def _step(self, run: int, machine: SchedulerMachine, event: Event, now: float) -> None:
        self._emit(run, machine, machine.step(event, now))

    def _announce(self, answers: Sequence[Send] = ()) -> None:
        self._emit(NO_RUN, self._cluster, self._cluster.announce_runs(self._runs.entries(), answers))

    def _emit(self, run: int, machine: SchedulerMachine, effects: Sequence[Effect]) -> None:
        """The effects of a machine; its record is saved with those of the others."""
        own: list[OfOneRun] = []
        slot = self._runs.find(run)
        for effect in effects:
            assert not isinstance(effect, InRun)
            if isinstance(effect, Unsaved):
                self._saving.changed(run, effect.token)
            elif isinstance(effect, LogEntry) and slot is not None:
                own.append(effect._replace(fields={**effect.fields, "job": slot.job}))
            else:
                own.append(effect)
        if own:
            self._out.append(InRun(run, machine.epoch, own))

    def _flush(self) -> None:
        if self._saving.is_due:
            self._out.append(self._saving.begin(self.record()))

    def _machines(self) -> list[SchedulerMachine]:
        return [self._cluster, *(slot.machine for slot in self._runs if slot.machine is not None)]

    def _send(self, event: Received, message: Any) -> None:
        machine = self.machine_of(event.run)
        epoch = NO_VIEW if machine is None else machine.epoch
        self._out.append(InRun(event.run, epoch, [Send(event.peer, message)]))

    def _refuse(self, event: Received, error: ErrorCode, text: str, job: str = "") -> None:
        self._send(event, Refused(getattr(event.message, "request", 0), error, text, job))

    def _log(self, text: str) -> None:
        self._out.append(LogEntry("info", text))
