"""The shell around one machine: the only place where events come from and effects go to.

Everything here runs on one event loop, except the jobs that are worth a thread of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from kvd.core.machine import (
    SCHEDULER,
    Apply,
    Complete,
    Connect,
    Copy,
    Create,
    Disconnect,
    Effect,
    Event,
    Export,
    Halt,
    InvalidFrame,
    JobDone,
    Load,
    LocalCall,
    LogEntry,
    Machine,
    Persist,
    Persisted,
    Received,
    ResetState,
    Run,
    Send,
    Span,
    Tick,
)
from kvd.errors import ConnectError, KvdError, NotAllowed, ProtocolError
from kvd.node.jobs import JobRunner
from kvd.node.reassembly import ReassemblyBuffer
from kvd.observe.log import Throttle, event
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import MAX_TEXT_CHARS, Attach, ErrorCode, Message, Refused, StatusReport
from kvd.transport.base import MAX_PAYLOAD_BYTES, NOTHING, Transport

GARBAGE_INTERVAL_S = 10.0
FAILED_TICK_PAUSE_S = 1.0

_FOR_THE_LOOP = frozenset({Connect, Disconnect, Persist, Halt, Create, Apply, Export, Load, Run})

LONG_COPY_BYTES = 64 << 10

logger = logging.getLogger("kvd.node")


class Driver:
    """Runs a machine on the loop that it is started from.

    Args:
        machine: the role.
        transport: its connections.
        jobs: for a server.
        executor: where commands run, and records are saved.
        on_complete: takes the answers of local calls.
        on_halt: told once when the machine cannot go on.
        persist: puts a record on stable storage; called in the executor.
    """

    def __init__(
        self,
        machine: Machine,
        transport: Transport,
        *,
        jobs: JobRunner | None = None,
        executor: Executor | None = None,
        on_complete: Callable[[Complete], None] | None = None,
        on_halt: Callable[[KvdError], None] | None = None,
        persist: Callable[[Mapping[str, object]], None] | None = None,
    ) -> None:
        self.machine = machine
        self._transport = transport
        self._jobs = jobs
        self._executor = executor
        self._on_complete = on_complete
        self._on_halt = on_halt
        self._persist = persist
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._timer_floor = 0.0
        self._events: deque[Event] = deque()
        self._deferred: deque[list[Effect]] = deque()  # of steps on other threads, for the loop to carry out
        self._stepping = threading.Lock()  # held by the thread that steps the machine
        self._loop_thread = 0
        self._stopped = False
        self._throttle = Throttle(GARBAGE_INTERVAL_S)
        self._act: dict[type[Any], Callable[[Any], None]] = {
            Send: self._send,
            Connect: self._connect,
            Disconnect: lambda effect: self._transport.disconnect(effect.peer),
            Create: self._job,
            Apply: self._job,
            Export: self._job,
            Load: self._job,
            Run: self._job,
            ResetState: lambda effect: self._runner().reset(),
            Persist: self._persist_record,
            Copy: copy_rows,
            Complete: self._complete,
            Halt: self._halt,
            LogEntry: self._note,
        }

    # ── life ──

    def start(self) -> None:
        """Begins, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._transport.start(self._on_message, self._on_garbage)
        self.feed(Tick())

    def stop(self, linger_s: float = 0.5) -> None:
        """Ends; what is queued for the network gets so long."""
        if self._stopped:
            return
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        with self._stepping:  # another thread may be sending
            self._transport.close(linger_s)

    def now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    # ── events in ──

    def feed(self, happened: Event) -> None:
        """Gives the machine an event, and carries out what it wants; the ends of its jobs are events in turn.

        May be called from any thread: a program's call then goes out on the thread of the program, which saves the
        hand-over to the loop. One thread at a time steps the machine; it takes along what others bring meanwhile.
        """
        self._events.append(happened)
        self._pump()

    def _pump(self) -> None:
        on_loop = threading.get_ident() == self._loop_thread
        while not self._stopped and (self._events or (on_loop and self._deferred)):
            if not self._stepping.acquire(blocking=False):
                return
            try:
                while on_loop and self._deferred:
                    self._carry_out(self._deferred.popleft())
                while self._events and not self._stopped:
                    self._step(self._events.popleft(), on_loop)
                self._check_timer(on_loop)
            finally:
                self._stepping.release()
            if self._deferred and not on_loop:
                self._on_loop(self._pump)

    def _step(self, happened: Event, on_loop: bool) -> None:
        try:
            effects = self.machine.step(happened, self.now())
        except Exception as error:  # noqa: BLE001  nothing that arrives may end a node, see _not_handled
            self._not_handled(happened, error)
        else:
            if on_loop or not (self._deferred or any(type(effect) in _FOR_THE_LOOP for effect in effects)):
                self._carry_out(effects)
            else:
                self._deferred.append(effects)

    def _not_handled(self, happened: Event, error: Exception) -> None:
        """A mistake of ours: the node goes on. What a program called is told to that program."""
        event(logger, logging.ERROR, f"a {type(happened).__name__} could not be handled", error=repr(error))
        logger.debug("the traceback of the error before", exc_info=error)
        if isinstance(happened, LocalCall):
            text = f"{type(happened.request).__name__} failed inside kvd, please report it: {error!r}"
            self._complete(Complete(happened.call, None, KvdError(text)))
        elif isinstance(happened, Tick):
            self._timer_floor = self.now() + FAILED_TICK_PAUSE_S

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            try:
                self._act[type(effect)](effect)
            except Exception as error:
                event(logger, logging.ERROR, f"a {type(effect).__name__} could not be carried out", error=repr(error))
                logger.debug("the traceback of the error before", exc_info=True)

    def _check_timer(self, on_loop: bool) -> None:
        """Sees to it that the machine gets a Tick at its deadline."""
        deadline = self.machine.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if on_loop:
            self._set_timer(deadline)
        else:
            self._on_loop(self._set_timer, deadline)

    def _set_timer(self, deadline: float) -> None:
        if self._stopped or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        self._timer_at = max(deadline, self._timer_floor)
        self._timer = self._loop.call_at(self._timer_at, self._tick)

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: there is nothing to be done any more
            self._loop.call_soon_threadsafe(call, *arguments)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    def _on_message(self, peer: Hashable, header: bytes, payload: memoryview | None) -> None:
        try:
            decoded = decode(header)
        except ProtocolError as error:
            self._on_garbage(peer, str(error))
            return
        nbytes = 0 if payload is None else payload.nbytes
        self.feed(Received(peer, decoded.sender, decoded.epoch, decoded.message, payload, nbytes))

    def _on_garbage(self, peer: Hashable, text: str) -> None:
        """Says so to the one who sent it, and to the log, not too often."""
        if self._throttle.allow(self.now(), "garbage"):
            swallowed = self._throttle.swallowed("garbage")
            event(logger, logging.WARNING, "received what is no message", error=text, not_logged=swallowed)
        if isinstance(peer, bytes):
            self._send(Send(peer, Refused(0, ErrorCode.PROTOCOL_ERROR, text[:1000])))
        self.feed(InvalidFrame(peer, text))

    # ── effects out ──

    def _send(self, effect: Send) -> None:
        payload = effect.payload
        if payload and sum(span.nbytes for span in payload) > MAX_PAYLOAD_BYTES:
            text = f"a message carries at most {MAX_PAYLOAD_BYTES >> 20} MiB: ask for less at a time"
            self._send(Send(effect.peer, Refused(getattr(effect.message, "request", 0), ErrorCode.NOT_ALLOWED, text)))
            return
        message = effect.message
        if isinstance(message, StatusReport):
            report = json.dumps(self._report()).encode()
            payload = (Span(report, 0, len(report)),)
        elif isinstance(message, Attach):
            message = replace(message, path=self._paths().get(effect.peer, ""))
        try:
            header = encode(message, self.machine.incarnation, self.machine.epoch)
        except (ProtocolError, ValueError, TypeError, OverflowError) as error:
            event(logger, logging.ERROR, "a message could not be sent", error=str(error))
            self._refuse_ourselves(effect.peer, message, error)
            return
        if not self._transport.send(effect.peer, header, payload):
            logger.debug("not sent: %s to %r", type(effect.message).__name__, effect.peer)

    def _refuse_ourselves(self, peer: Hashable, message: Message, error: Exception) -> None:
        """Whoever asked for what cannot be written is told so now, and not by its deadline."""
        request = getattr(message, "request", 0)
        if request:
            refused = Refused(request, ErrorCode.NOT_ALLOWED, f"this cannot be sent: {error}"[:1000])
            self._events.append(Received(peer, self.machine.incarnation, self.machine.epoch, refused))

    def _report(self) -> dict[str, object]:
        """What the machine says and, if there are links to this node, how what it sends travels over them."""
        report = self.machine.explain(self.now())
        links = [path for peer, path in self._paths().items() if isinstance(peer, tuple)]
        return {**report, "links": links[0]} if links else report

    def _paths(self) -> dict[Hashable, str]:
        """How messages travel to each peer, and why not in a quicker way, in words."""
        paths: Mapping[Hashable, Sequence[str]] = getattr(self._transport, "paths", dict)()
        return {peer: ": ".join(filter(None, path))[:MAX_TEXT_CHARS] for peer, path in paths.items()}

    def _connect(self, effect: Connect) -> None:
        try:
            self._transport.connect(effect.peer, effect.address)
        except ConnectError as error:
            if effect.peer == SCHEDULER:
                self._halt(Halt(error))
            else:
                event(logger, logging.ERROR, "cannot connect", error=str(error))

    def _runner(self) -> JobRunner:
        assert self._jobs is not None
        return self._jobs

    def _job(self, job: Any) -> None:
        runner = self._runner()
        if self._executor is None or not isinstance(job, Run):  # numbers: a hand-over would cost more than they do
            self._events.append(runner.run(job))
            return
        assert self._loop is not None
        future = self._loop.run_in_executor(self._executor, runner.run, job)
        future.add_done_callback(lambda done: self._job_done(job, done))

    def _job_done(self, job: Any, done: asyncio.Future[JobDone]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.feed(done.result())
        else:  # not an Exception: a command that tried to end the process
            self.feed(JobDone(job.job, None, NotAllowed(f"it raised {type(error).__name__}({error})")))

    def _persist_record(self, effect: Persist) -> None:
        if self._persist is None or self._executor is None:
            self._events.append(Persisted(effect.token))
            return
        assert self._loop is not None
        future = self._loop.run_in_executor(self._executor, self._persist, effect.record)
        future.add_done_callback(lambda done: self._persisted(effect.token, done))

    def _persisted(self, token: int, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.feed(Persisted(token))
        else:
            text = f"the state cannot be saved ({error}): free space in state_dir, or give another"
            self._halt(Halt(KvdError(text)))

    def _complete(self, effect: Complete) -> None:
        if self._on_complete is not None:
            self._on_complete(effect)

    def _halt(self, effect: Halt) -> None:
        if self._on_halt is not None:
            self._on_halt(effect.error)

    def _note(self, effect: LogEntry) -> None:
        event(logger, getattr(logging, effect.level.upper()), effect.text, **effect.fields)


def copy_rows(effect: Copy) -> None:
    """Copies received bytes to where a call wants them."""
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
