"""Runs the programs of simulated workers: coroutines that yield requests and are given results or errors."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import LocalCall
from kvd.core.requests import Request
from kvd.errors import KvdError
from tests.simulator.clock import VirtualClock
from tests.simulator.process import Coroutine, PendingCall, Process, RunningProgram, Sleep, Start
from tests.simulator.settings import Timeouts
from tests.simulator.shell import Shell

SUSPENDED_S = 0.1  # how long a program that should go on, in a suspended process, waits before it looks again


class ProgramRunner:
    """Resumes each program when what it waits for has happened."""

    def __init__(self, clock: VirtualClock, shell: Shell, timeouts: Timeouts) -> None:
        self._clock = clock
        self._shell = shell
        self._timeouts = timeouts

    def start(self, process: Process, coroutine: Coroutine) -> None:
        """Runs a program in a process."""
        process.program = RunningProgram(coroutine)
        self._clock.after(0.0, lambda: self._resume(process, None))

    def submit(self, process: Process, request: Request, timeout_s: float | None = None) -> PendingCall:
        """Makes a local call, as a thread of the program does."""
        deadline = self._clock.now + (self._timeouts.call_timeout_s if timeout_s is None else timeout_s)
        answer_s = self._timeouts.answer_timeout_s if timeout_s is None else None
        call = process.calls.open(request, deadline)
        self._shell.feed(process, LocalCall(call.number, process.calls.lists.told(request), deadline, answer_s))
        return call

    def _resume(self, process: Process, value: Any, error: KvdError | None = None) -> None:
        """Runs the program up to its next yield that makes it wait."""
        program = process.program
        if program is None or not process.alive:
            return
        if process.suspension.active:
            self._clock.after(SUSPENDED_S, lambda: self._resume(process, value, error))
            return
        process.calls.waiting.leave()
        coroutine = program.coroutine
        try:
            step = coroutine.send(value) if error is None else coroutine.throw(error)
            while isinstance(step, Start):
                step = coroutine.send(self.submit(process, step.request, step.timeout_s))
        except StopIteration:
            program.finished = True
            return
        except KvdError as failure:
            program.finished, program.error = True, failure
            return
        if isinstance(step, Sleep):
            self._clock.after(step.seconds, lambda: self._resume(process, None))
            return
        call = step if isinstance(step, PendingCall) else self.submit(process, step)
        process.calls.waiting.enter(call)
        call.waiter = lambda: self._resume(process, call.result, call.error)
        if call.done:
            self._clock.after(0.0, call.waiter)
