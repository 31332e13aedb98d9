"""The shell around one machine: it starts the parts that bring events, and says which part carries out which effect.

Which thread does what is written in `kvd.node.shell.threads`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np

from kvd.core.machine import (
    SCHEDULER,
    Apply,
    Census,
    CensusTaken,
    Checksums,
    Complete,
    Connect,
    Copy,
    Create,
    Disconnect,
    DropRun,
    Event,
    Export,
    ForgetState,
    Halt,
    InRun,
    KeepRows,
    ListRows,
    Load,
    LoadRows,
    LogEntry,
    Machine,
    Persist,
    ReadPart,
    ReadRows,
    ReadStored,
    ResetState,
    Run,
    Scatter,
    Send,
    Span,
    Stop,
)
from kvd.errors import ConnectError, KvdError
from kvd.node.daemon.facts import ProcessFacts
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.background import Background
from kvd.node.shell.counters import Counters
from kvd.node.shell.payloads import CodedSlice, ReassemblyBuffer, scatter
from kvd.node.shell.receiving import MessageReceiver
from kvd.node.shell.sending import MessageSender
from kvd.node.shell.threads import Stepper, report_failed_effect
from kvd.observe.log import event
from kvd.transport.base import NOTHING, Transport
from kvd.transport.links.write_coalescing import WriteCoalescing

_JOBS = frozenset(
    {Create, Apply, ReadRows, ListRows, ReadPart, KeepRows, ReadStored, LoadRows, Export, Checksums, Load, Run}
)
LONG_COPY_BYTES = 64 << 10

logger = logging.getLogger("kvd.node")


class Driver:
    """Runs a machine on the loop on which it is started.

    Args:
        machine: the role.
        transport: its connections.
        new_runner: makes what runs a server's jobs, for one run.
        executor: where commands run and records are saved.
        on_complete: takes the results of local calls, on any thread.
        on_census: looks which threads of the program wait, on any thread; a worker needs it.
        on_halt: called on the loop's thread when the machine cannot go on.
        on_stop: called on the loop's thread when the node was asked to end.
        persist: puts a record on stable storage; called in the executor.
        counters: of this process; None: they are read by nobody.
        facts: of this process, for its status report; None: it is asked for none.
        holding: lets messages of a daemon wait for the next one to the same peer; None: they do not wait.

    Attributes:
        machine: the role.
        stepper: steps the machine, and says when another part may look into it.
        sender, receiver: of messages.
        background: runs jobs.
        feed: gives the machine an event, from any thread, and carries out its effects: `Stepper.feed`.
    """

    def __init__(
        self,
        machine: Machine,
        transport: Transport,
        *,
        new_runner: Callable[[], JobRunner] | None = None,
        executor: Executor | None = None,
        on_complete: Callable[[Complete], None] | None = None,
        on_census: Callable[[], CensusTaken] | None = None,
        on_halt: Callable[[KvdError], None] | None = None,
        on_stop: Callable[[str], None] | None = None,
        persist: Callable[[Mapping[str, object]], None] | None = None,
        counters: Counters | None = None,
        facts: ProcessFacts | None = None,
        holding: WriteCoalescing | None = None,
    ) -> None:
        self.machine = machine
        self._transport = transport
        self._on_complete = on_complete
        self._on_census = on_census
        self._on_halt = on_halt
        self._on_stop = on_stop
        counters = counters or Counters()
        self.stepper = Stepper(machine, holding)
        self.feed: Callable[[Event], None] = self.stepper.feed
        self.sender = MessageSender(machine, transport, self.stepper, counters, facts)
        self.receiver = MessageReceiver(self.stepper, self.sender, counters)
        self.background = Background(self.stepper, new_runner, executor, persist, holding)

        self._actions = self._table_of_actions()

    def start(self) -> None:
        """Starts on the running loop."""
        self._transport.start(self.receiver.receive, self.receiver.reject)
        self.stepper.start(self._actions)

    def stop(self, linger_s: float = 0.5) -> None:
        """Stops. Messages still queued get `linger_s` to leave."""
        self.background.stop()
        self.stepper.stop(lambda: self._transport.close(linger_s))

    def _table_of_actions(self) -> dict[type[Any], Callable[[Any], None]]:
        """Which part carries out which effect."""
        return {
            InRun: self.carry_out,
            Send: self.sender.send_own,
            Connect: self._connect,
            Disconnect: lambda effect: self._transport.disconnect(effect.peer),
            DropRun: self.background.drop_run,
            Persist: self.background.save_record,
            Copy: copy_rows,
            Scatter: scatter,
            Census: self._census,
            Complete: self._complete,
            Halt: self._halt,
            Stop: self._stop_asked,
            LogEntry: _log,
        }

    def carry_out(self, batch: InRun) -> None:
        """Carry out the effects of a scheduler or server for one of its runs."""
        run, epoch, effects = batch
        for effect in effects:
            try:
                if type(effect) is Send:
                    self.sender.send(effect, run, epoch)
                else:
                    self._of_a_run(effect, run)
            except Exception as error:  # noqa: BLE001  the next ones are carried out all the same
                report_failed_effect(effect, error)

    def _of_a_run(self, effect: Any, run: int) -> None:
        kind = type(effect)
        if kind in _JOBS:
            self.background.run_job(effect, run)
        elif kind is ResetState:
            self.background.reset_state(effect, run)
        elif kind is ForgetState:
            self.background.forget_state(effect, run)
        else:
            self._actions[kind](effect)

    def _connect(self, effect: Connect) -> None:
        try:
            self._transport.connect(effect.peer, effect.address, effect.key)
        except ConnectError as error:
            if effect.peer == SCHEDULER:
                self._halt(Halt(error))
            else:
                event(logger, logging.ERROR, "cannot connect", error=str(error))

    def _census(self, effect: Census) -> None:
        if self._on_census is not None:
            self.stepper.queue(self._on_census())

    def _complete(self, effect: Complete) -> None:
        if self._on_complete is not None:
            self._on_complete(effect)

    def _stop_asked(self, effect: Stop) -> None:
        if self._on_stop is not None:
            self._on_stop(effect.reason)

    def _halt(self, effect: Halt) -> None:
        if self._on_halt is not None:
            self._on_halt(effect.error)


def copy_rows(effect: Copy) -> None:
    """Copies received bytes to the memory that a call named."""
    if isinstance(effect.source, CodedSlice):
        _decode_row(effect.source, effect)
        return
    source = memoryview(effect.source) if effect.source is not None else NOTHING
    for target, (start, offset, nbytes) in zip(effect.targets, effect.rows, strict=True):
        if target is None or not nbytes:
            continue
        if type(target) is ReassemblyBuffer:
            target.add(start, Span(effect.source, offset, nbytes))
        elif nbytes < LONG_COPY_BYTES:
            memoryview(target)[start : start + nbytes] = source[offset : offset + nbytes]
        else:  # NumPy lets other threads run meanwhile, which costs more than a short copy
            np.frombuffer(target, np.uint8)[start : start + nbytes] = np.frombuffer(source, np.uint8, nbytes, offset)


def _decode_row(coded: CodedSlice, effect: Copy) -> None:
    """The one row of a copy is a slice that travelled encoded."""
    ((start, _, nbytes),), (target,) = effect.rows, effect.targets
    if type(target) is ReassemblyBuffer:
        target.add(start, Span(coded, 0, nbytes))
    elif target is not None:
        coded.decode_into(target, start)


def _log(effect: LogEntry) -> None:
    event(logger, getattr(logging, effect.level.upper()), effect.text, **effect.fields)
