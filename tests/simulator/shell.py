"""The simulated shell: it plays `kvd.node.shell.driver` for the real machines.

It gives a machine its events, checks the machine's invariants, and carries the effects out, late: messages go through
the codec and the virtual network, jobs run in the real kernels. A process can die between any two effects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeAlias

import numpy as np

from kvd.core.machine import (
    Apply,
    Census,
    Complete,
    Connect,
    Copy,
    Disconnect,
    DropRun,
    Effect,
    Event,
    ForgetState,
    Gathered,
    Halt,
    InRun,
    Job,
    JobDone,
    LogEntry,
    Machine,
    OfOneRun,
    Peer,
    Persist,
    Persisted,
    ReadRows,
    Received,
    ResetState,
    Scatter,
    Send,
    Stop,
    Tick,
)
from kvd.core.principals import HOLDER
from kvd.core.requests import InitKeys, Request, Transfer
from kvd.errors import NotAllowed
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.driver import copy_rows
from kvd.node.shell.payloads import CodedSlice, arrived, joined, scatter
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import Epoch, StatusReport, Values
from kvd.protocol.specs import padded
from tests.simulator.clock import VirtualClock
from tests.simulator.network import Network
from tests.simulator.process import Doom, PendingCall, Process
from tests.simulator.settings import ShellSettings
from tests.simulator.trace import Trace

POISON = 0xAB
SLACK_S = 0.01  # between a deadline and the Tick that notices it
UPDATE_FAILS = "the simulator lets this update fail"

OnStep: TypeAlias = Callable[[Process], None]
OnEnd: TypeAlias = Callable[[Process, PendingCall], None]


class RecordFile:
    """The scheduler's record on its disk, replaced as a whole. Without a state directory nothing is kept."""

    def __init__(self, keep: bool) -> None:
        self.record: dict[str, Any] | None = None
        self._keep = keep
        self._earlier: list[str] = []  # the records before, the oldest first
        self._writing: list[str] = []  # what is to replace it, one after the other

    def begin(self, text: str) -> None:
        """This JSON is to replace the record."""
        self._writing.append(text)

    def save(self, text: str) -> None:
        """This JSON has replaced the record."""
        if text in self._writing:
            self._writing.remove(text)
        if self._keep:
            self.record = json.loads(text)
            self._earlier.append(text)

    def put_back(self, random: Random) -> None:
        """Somebody replaces the record by an earlier one."""
        if self._earlier:
            self.record = json.loads(random.choice(self._earlier))

    def recover(self, random: Random) -> None:
        """A scheduler starts. Its predecessor may have died in a write: the new record is there, or the old one."""
        writing, self._writing = self._writing, []
        if writing and random.random() < 0.5:
            self.save(writing[0])


@dataclass(slots=True, eq=False)
class _StartedJob:
    """A job that has not ended, and its result once it is calculated."""

    process: Process
    job: Job
    run: int
    done: JobDone | None = None


class Shell:
    """Steps the machines of all processes.

    Args:
        settings: how long effects take and which fail.
        random: draws those times.
        on_step: called after each step of a process.
        on_end: called when a call of a program ends.

    Attributes:
        record_file: the scheduler's.
    """

    def __init__(
        self,
        settings: ShellSettings,
        clock: VirtualClock,
        random: Random,
        network: Network,
        trace: Trace,
        on_step: OnStep,
        on_end: OnEnd,
    ) -> None:
        self.record_file = RecordFile(settings.state_dir)
        self._settings = settings
        self._clock = clock
        self._random = random
        self._network = network
        self._trace = trace
        self._on_step = on_step
        self._on_end = on_end
        self._started: list[_StartedJob] = []
        self._carry_out: dict[type[Any], Callable[[Process, Any], None]] = {
            Connect: lambda process, effect: network.connect(process, effect.peer, effect.address),
            Disconnect: lambda process, effect: network.disconnect(process, effect.peer),
            DropRun: _drop_run,
            Persist: self._persist,
            Copy: self._copy,
            Scatter: self._scatter,
            Census: lambda process, effect: clock.after(
                0.0, lambda: self.feed(process, process.calls.waiting.census())
            ),
            Complete: self._complete,
            Halt: self._halt,
            Stop: self._stop,
            LogEntry: lambda process, effect: trace.note(f"{process.name}: {effect.text}"),
        }
        network.start(self._deliver)

    # ── events in ──

    def feed(self, process: Process, event: Event) -> None:
        """Gives a process an event, unless it is dead; a suspended one finds it when it wakes up."""
        if not process.alive:
            return
        if process.suspension.active:
            process.suspension.backlog.append(event)
            return
        self._trace.record(f"{process.name} {type(event).__name__}")
        effects = process.machine.step(event, self._clock.now + process.timer.ahead_s)
        self._validate(process)
        for effect, run, epoch in by_run(process.machine, effects):
            if process.doom is not None and self._dies_now(process, process.doom):
                return
            if isinstance(effect, Send):
                self._send(process, effect, run, epoch)
            elif isinstance(effect, Job):
                self._start_job(process, effect, run)
            elif isinstance(effect, ResetState):
                self._reset_state(process, effect, run)
            elif isinstance(effect, ForgetState):
                self._forget_state(process, effect, run)
            else:
                self._carry_out[type(effect)](process, effect)
        self._on_step(process)
        if isinstance(event, Received) and isinstance(event.message, Values) and not _is_kept(event, effects):
            event.payload[:] = bytes([POISON]) * event.nbytes
        self._set_timer(process)

    def _validate(self, process: Process) -> None:
        try:
            process.machine.validate()
        except AssertionError as error:
            self._trace.fail(f"{process.name}: {error}")

    def _set_timer(self, process: Process) -> None:
        deadline, timer = process.machine.next_deadline(), process.timer
        if deadline is None:
            return
        deadline -= timer.ahead_s
        if timer.tick_at is not None and timer.tick_at <= deadline:
            return
        timer.number += 1
        now = self._clock.now
        timer.tick_at = deadline if deadline > now else now + 0.001  # time goes on, whatever a machine says
        # Which of two ticks is set first depends on how each machine notes its deadlines.
        self._clock.at(timer.tick_at, partial(self._tick, process, timer.number), turn=process.machine.incarnation)

    def _tick(self, process: Process, number: int) -> None:
        if process.timer.number == number:
            process.timer.tick_at = None
            self.feed(process, Tick())

    def _deliver(self, process: Process, peer: Peer, header: bytes, payload: bytes | None) -> None:
        decoded = decode(header)
        self._trace.record_header(header)
        values, nbytes, fault = arrived(decoded.message, None if payload is None else memoryview(payload))
        if isinstance(values, CodedSlice):
            values = values.decoded().view(np.uint8)
        buffer = None if values is None else bytearray(values)
        self.feed(
            process,
            Received(peer, decoded.sender, decoded.epoch, decoded.message, buffer, nbytes, decoded.run, HOLDER, fault),
        )

    # ── effects out ──

    def _send(self, process: Process, effect: Send, run: int, epoch: Epoch) -> None:
        payload: bytearray | None = None
        for span in effect.payload:
            buffer, offset, nbytes = joined(span) if isinstance(span.buffer, Gathered) else span
            if payload is None:
                payload = bytearray()
            payload.extend(bytes(padded(len(payload)) - len(payload)))
            if nbytes:
                payload.extend(memoryview(buffer).cast("B")[offset : offset + nbytes])
        if isinstance(effect.message, StatusReport):
            payload = bytearray(
                json.dumps(process.machine.explain(self._clock.now + process.timer.ahead_s, run)).encode()
            )
        header = encode(effect.message, process.machine.incarnation, epoch, run)
        self._network.send(process, effect.peer, header, None if payload is None else bytes(payload))

    def _start_job(self, process: Process, job: Job, run: int) -> None:
        """Jobs end in any order; the kernel runs when they end."""
        started = _StartedJob(process, job, run)
        self._started.append(started)
        self._clock.after(self._random.uniform(*self._settings.job_s), lambda: self._end_job(started))

    def _end_job(self, started: _StartedJob) -> None:
        self._started.remove(started)
        if started.process.alive:
            self.feed(started.process, self._calculated(started))

    def _dies_now(self, process: Process, doom: Doom) -> bool:
        """Counts an effect that is about to be carried out."""
        if doom.effects_left > 0:
            doom.effects_left -= 1
        elif doom.is_spared():
            process.doom = None
        else:
            process.alive = False
            self._trace.record(f"{process.name} dies")
        return not process.alive

    def _calculated(self, started: _StartedJob) -> JobDone:
        if started.done is None:
            job, run = started.job, started.run
            self._calculate_reads_before(started)
            if isinstance(job, Apply) and not job.is_merged and self._settings.failing_updates > self._random.random():
                started.done = JobDone(job.job, None, NotAllowed(UPDATE_FAILS), run)
            else:
                started.done = _runner(started.process, run).run(job)._replace(run=run)
        return started.done

    def _calculate_reads_before(self, started: _StartedJob) -> None:
        """Rows that were to be read before an update began are read before it: jobs of a part keep their order."""
        if not isinstance(started.job, Apply):
            return
        part = started.job.layout[0][:2]
        for earlier in self._started:
            if earlier is started:
                return
            job = earlier.job
            if isinstance(job, ReadRows) and (job.key, job.slice_index) == part and earlier.process is started.process:
                self._calculated(earlier)

    def _reset_state(self, process: Process, effect: ResetState, run: int) -> None:
        """As in the driver, jobs that were started before use the states before."""
        for started in self._started:
            if started.process is process and started.run == run:
                self._calculated(started)
        _runner(process, run).reset(effect.slices)

    def _forget_state(self, process: Process, effect: ForgetState, run: int) -> None:
        """As in the driver, rows that were to be read before are read before."""
        for started in self._started:
            job = started.job
            is_of_it = isinstance(job, ReadRows) and (job.key, job.slice_index) in effect.slices
            if is_of_it and started.process is process and started.run == run:
                self._calculated(started)
        _runner(process, run).forget(effect.slices)

    def _persist(self, process: Process, effect: Persist) -> None:
        """Writes come one after the other, as in the driver."""
        record = json.dumps(effect.record)
        self.record_file.begin(record)
        start = max(self._clock.now, process.last_persist_at)
        process.last_persist_at = start + self._random.uniform(*self._settings.persist_s)
        self._clock.at(process.last_persist_at, lambda: self._persisted(process, effect.token, record))

    def _persisted(self, process: Process, token: int, record: str) -> None:
        if process.alive:
            self.record_file.save(record)
            self.feed(process, Persisted(token))

    def _copy(self, process: Process, effect: Copy) -> None:
        if not all(process.calls.may_write(target) for target in effect.targets if target is not None):
            self._trace.fail(f"{process.name}: a Copy into memory that no open call named")
        copy_rows(effect)

    def _scatter(self, process: Process, effect: Scatter) -> None:
        if not all(map(process.calls.may_write, effect.targets)):
            self._trace.fail(f"{process.name}: a Scatter into memory that no open call named")
        scatter(effect)

    def _stop(self, process: Process, effect: Stop) -> None:
        process.alive = False
        self._trace.record(f"{process.name} stops: {effect.reason}")

    def _halt(self, process: Process, effect: Halt) -> None:
        process.halted = effect.error
        self._trace.record(f"{process.name} halts: {effect.error}")

    def _complete(self, process: Process, effect: Complete) -> None:
        call = process.calls.close(effect.call)
        if call is None:
            self._trace.fail(f"{process.name}: call {effect.call} is answered twice")
        call.done, call.result, call.error = True, effect.result, effect.error
        self._trace.record(f"{process.name} call {effect.call}: {type(effect.error).__name__} {effect.error}")
        if effect.error is None:
            _poison(call.request)
        if self._clock.now > max(call.deadline, process.suspension.ended_at) + SLACK_S:
            late_s = self._clock.now - call.deadline
            self._trace.fail(f"{process.name}: {type(call.request).__name__} ended {late_s:.3f} s late")
        self._on_end(process, call)
        if call.waiter is not None:
            self._clock.after(0.0, call.waiter)


def _runner(process: Process, run: int) -> JobRunner:
    return process.runners.setdefault(run, JobRunner())


def _drop_run(process: Process, effect: DropRun) -> None:
    process.runners.pop(effect.run, None)


def by_run(machine: Machine, effects: Iterable[Effect]) -> Iterator[tuple[OfOneRun, int, Epoch]]:
    """Each effect with its run, and the epoch of that run's view."""
    for effect in effects:
        if isinstance(effect, InRun):
            for own in effect.effects:
                yield own, effect.run, effect.epoch
        else:
            yield effect, machine.run, machine.epoch


def _is_kept(event: Received, effects: Sequence[Effect]) -> bool:
    """Whether the program was given the payload itself, with its reference to the memory; or there is none."""
    results = [effect.result for effect in effects if isinstance(effect, Complete)]
    kept = [entry for result in results if isinstance(result, list) for entry in result if isinstance(entry, tuple)]
    return not event.nbytes or any(part is event.payload for entry in kept for part in entry)


def _poison(request: Request) -> None:
    """The call has ended well: its sources belong to the program again, which writes something else there."""
    if not isinstance(request, Transfer | InitKeys):
        return
    targets = {id(item.target) for item in request.items}
    for item in request.items:
        if item.source is not None and id(item.source) not in targets:
            memoryview(item.source).cast("B")[:] = bytes([POISON]) * memoryview(item.source).nbytes
