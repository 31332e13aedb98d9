"""What runs on which thread, and everything that runs without the event loop.

===================  ==================================================================================================
thread               what runs there
===================  ==================================================================================================
program thread       `Stepper.feed` with the program's calls: it steps the machine and sends. While it waits for a call
                     it also reads the links to the servers (`LinkWaiter.wait`), and so steps the machine
                     with what arrives, copies pulled values and completes calls.
engine thread        The event loop of a store or an observer (`kvd-engine`): the timer, ZeroMQ's sockets, the links
                     while no program thread reads them, the coroutines of `Engine.run`, and the effects that only a
                     loop may carry out (`_ONLY_ON_THE_LOOP`).
main thread          The event loop of a scheduler or server. There is no program thread, so each event is stepped, and
of a daemon          each effect is carried out, on the loop, but for the work of the executor.
executor             Commands of a server and the scheduler's writes to disk, one at a time (`kvd-jobs`). Their results
                     come back to the loop as events.
zmq I/O thread       libzmq's own: moves bytes between its queues and the network. It runs no Python.
`kvd-create`         `kvd.aio.create` waits here until the cluster is complete. It ends when the store exists.
`kvd-compile`        Compiles numba's loops, once per process, while NumPy calculates (`kvd.compute.compiled`).
device threads,      Forward and backward, one thread per device of a group, and copies from GPUs to the host
`kvd-downloads`      (`kvd.parallel.device_threads`, `kvd.parallel.group.downloads`). To the store they are programs.
relay threads        `kvd launch` reads the output of each process that it started (`kvd.node.launch.output`).
===================  ==================================================================================================

A small push takes less time on the wire than a thread takes to wake another. So a call does not go through the loop:
the program's thread steps the machine, sends, and reads the answer itself. Three rules make that safe:

1. One thread at a time steps the machine: the one that holds the stepping lock. A thread that finds the lock taken
   leaves its event in the queue and goes on; the holder takes it along. Nobody waits for the lock except `stop`. The
   calls of one store enter the queue one at a time (`Engine.submit`), so the order of the clocks is that of the calls.
2. Effects are carried out in the order of their steps. If a step off the loop gives an effect that belongs to the loop,
   its effects, and those of every later step, are deferred until the loop has carried them out.
3. The links are read by the loop or by one waiting thread, never by both. The waiting thread pauses the loop's reading
   with one system call, and resumes it when it stops waiting, whatever the reason; between small calls
   that follow each other the loop stays paused, until a message leaves that may be answered, or for a moment
   (`kvd.transport.links.loop_pause`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from kvd.core.machine import (
    Complete,
    Connect,
    Disconnect,
    Effect,
    Event,
    Halt,
    InRun,
    LocalCall,
    Machine,
    Persist,
    Stop,
    Tick,
)
from kvd.errors import KvdError
from kvd.observe.log import event
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import ExpectedFrame
from kvd.transport.links.link import Link
from kvd.transport.links.write_coalescing import WriteCoalescing


class DeadlineTimer:
    """The timer behind a machine's deadline. Belongs to the loop's thread, except `due_at`, which any thread may read.

    Args:
        on_due: called on the loop at the earliest deadline that was set.

    Attributes:
        due_at: when it will fire, in seconds of the loop's clock; infinity while it is not set.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self.due_at = math.inf
        self._on_due = on_due
        self._not_before = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def set(self, deadline: float) -> None:
        """Fires at the deadline, unless it fires earlier anyway."""
        if self.due_at <= deadline:
            return
        if self._handle is not None:
            self._handle.cancel()
        assert self._loop is not None
        self.due_at = max(deadline, self._not_before)
        self._handle = self._loop.call_at(self.due_at, self._fire)

    def hold_until(self, time: float) -> None:
        """Deadlines before this time wait until then."""
        self._not_before = time

    def stop(self) -> None:
        """It fires no more, and cannot be set again."""
        self.due_at = -math.inf
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        self._handle = None
        self.due_at = math.inf
        self._on_due()


FAILED_TICK_PAUSE_S = 1.0
LONGEST_POLL_S = 60.0

_ONLY_ON_THE_LOOP = frozenset({Connect, Disconnect, Persist, Halt, Stop, InRun})

logger = logging.getLogger("kvd.node")


class Stepper:
    """Steps one machine with the events of all threads, and carries out its effects.

    Args:
        machine: only the thread that holds the stepping lock touches it.
        holding: lets answers of a daemon wait until all that belongs to an event is done; None: they do not wait.
    """

    def __init__(self, machine: Machine, holding: WriteCoalescing | None = None) -> None:
        self.now: Callable[[], float] = time.monotonic
        """The clock of the machine, in seconds: the loop's, once it has started."""
        self._machine = machine
        self._holding = holding
        self._actions: Mapping[type[Any], Callable[[Any], None]] = {}
        self._events: deque[Event] = deque()
        self._deferred: deque[list[Effect]] = deque()  # effects of steps off the loop, for the loop
        self._stepping = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._timer = DeadlineTimer(lambda: self.feed(Tick()))
        self._stopped = False

    def start(self, actions: Mapping[type[Any], Callable[[Any], None]]) -> None:
        """Starts on the running loop. `actions` carry the effects out, by type of effect."""
        self._actions = actions
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        if type(self._loop).time is not asyncio.BaseEventLoop.time:  # that is time.monotonic in one call more
            self.now = self._loop.time
        self._timer.start(self._loop)
        self.feed(Tick())

    def stop(self, close: Callable[[], None]) -> None:
        """Takes no more events, and calls `close` once no other thread carries out effects. On the loop."""
        if self._stopped:
            return
        self._stopped = True
        self._timer.stop()
        with self._stepping:
            close()

    # ── any thread ──

    def feed(self, happened: Event) -> None:
        """Gives the machine an event and carries out its effects, unless another thread is stepping: then that thread
        does both."""
        self._events.append(happened)
        self._pump()

    def enter(self) -> bool:
        """Keeps others from stepping the machine until `leave`, which must come soon. False: another thread is stepping
        it, or an event or effect waits."""
        if self._stopped or self._events or self._deferred or not self._stepping.acquire(blocking=False):
            return False
        if self._stopped or self._events or self._deferred:
            self._stepping.release()
            self._pump()
            return False
        return True

    def carry_out(self, effects: list[Effect]) -> None:
        """Carries out the effects of what the machine has done between `enter` and `leave`."""
        self._carry_out_here(effects, on_loop=threading.get_ident() == self._loop_thread)
        if self._deferred:
            self._call_on_loop(self._pump)

    def leave(self, deadline: float) -> None:
        """Undoes `enter`. What came meanwhile is stepped.

        Args:
            deadline: when the machine must be stepped at the latest.
        """
        self._stepping.release()
        if self._events:
            self._pump()
        if deadline < self._timer.due_at:
            self._call_on_loop(self._timer.set, deadline)

    def queue(self, happened: Event) -> None:
        """Adds an event that an effect caused; the step that is being carried out is followed by its step."""
        self._events.append(happened)

    def _pump(self) -> None:
        on_loop = threading.get_ident() == self._loop_thread
        # Looked at again after each release: another thread may have found the lock taken in between.
        while not self._stopped and (self._events or (on_loop and self._deferred)):
            if not self._stepping.acquire(blocking=False):
                return
            try:
                if self._holding is not None and on_loop:
                    self._holding.begin()
                while on_loop and self._deferred:
                    self._carry_out(self._deferred.popleft())
                while self._events and not self._stopped:
                    self._step(self._events.popleft(), on_loop)
                deadline = self._machine.next_deadline()
                if deadline is not None and deadline < self._timer.due_at:
                    if on_loop:
                        self._timer.set(deadline)
                    else:
                        self._call_on_loop(self._timer.set, deadline)
            finally:
                if self._holding is not None and on_loop:
                    self._holding.end()
                self._stepping.release()
            if self._deferred and not on_loop:
                self._call_on_loop(self._pump)

    def _call_on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, and the driver with it
            self._loop.call_soon_threadsafe(call, *arguments)

    # ── the thread that holds the lock ──

    def _step(self, happened: Event, on_loop: bool) -> None:
        try:
            effects = self._machine.step(happened, self.now())
        except Exception as error:  # noqa: BLE001  a bug in the machine must not end the node, see _report_failed_step
            self._report_failed_step(happened, error)
            return
        self._carry_out_here(effects, on_loop=on_loop)

    def _carry_out_here(self, effects: list[Effect], *, on_loop: bool) -> None:
        if on_loop or (not self._deferred and _ONLY_ON_THE_LOOP.isdisjoint(map(type, effects))):
            self._carry_out(effects)
        else:
            self._deferred.append(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            try:
                self._actions[type(effect)](effect)
            except Exception as error:  # noqa: BLE001  the next ones are carried out all the same
                report_failed_effect(effect, error)

    def _report_failed_step(self, happened: Event, error: Exception) -> None:
        """A step that raises is a bug in kvd. The node goes on; if a program made the call, the call fails."""
        event(logger, logging.ERROR, f"a {type(happened).__name__} could not be handled", error=repr(error))
        logger.debug("the traceback of the error above", exc_info=error)
        if isinstance(happened, LocalCall):
            text = f"{type(happened.request).__name__} failed inside kvd, please report it: {error!r}"
            self._carry_out([Complete(happened.call, None, KvdError(text))])
        elif isinstance(happened, Tick):
            self._timer.hold_until(self.now() + FAILED_TICK_PAUSE_S)


def report_failed_effect(effect: Effect, error: Exception) -> None:
    """An effect could not be carried out: the log says so."""
    event(logger, logging.ERROR, f"a {type(effect).__name__} could not be carried out", error=repr(error))
    logger.debug("the traceback of the error above", exc_info=error)


class Awaited(Protocol):
    """What a thread waits for."""

    def done(self) -> bool: ...


class Interrupt(Protocol):
    """What may end the wait early: a signal."""

    @property
    def came(self) -> bool: ...


class LinkWaiter:
    """Lets a thread that waits for a call read the links meanwhile: the answer then takes no hand-over between threads.

    One thread at a time reads. Other threads, and calls whose answers come over ZeroMQ, wait on the promise.
    """

    def __init__(self, transport: HostTransport) -> None:
        self._transport = transport
        self._links = transport.reader
        self._turn = threading.Lock()
        self._reader = 0  # the thread that reads, or is about to
        self._wake_fd = -1  # an eventfd that ends a poll of the reader
        self._is_closed = False

    def wait(self, awaited: Awaited, timeout_s: float | None, interrupt: Interrupt) -> None:
        """Reads until `awaited` is done, the time is up or `interrupt` came. Returns at once if another thread is the
        reader."""
        if not self.begin():
            return
        try:
            self._read_until(awaited, timeout_s, interrupt)
        finally:
            self.end()

    def begin(self) -> bool:
        """This thread is the reader until `end`, and the loop's reading is paused. False: another thread is the
        reader, or the waiter is closed."""
        if self._is_closed or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._wake_fd < 0:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._reader = threading.get_ident()
            self._links.pause.begin()
        except BaseException:  # there are too many open files
            self._reader = 0
            self._turn.release()
            raise
        return True

    def end(self) -> None:
        self._reader = 0
        self._links.pause.end()
        self._turn.release()

    def wait_for(self, link: Link, expected: ExpectedFrame, awaited: Awaited, interrupt: Interrupt) -> bool:
        """Between `begin` and `end`: reads until the expected frame of the link was taken. False: `awaited` is done,
        the link is down, or `interrupt` came."""
        if self._links.wait_briefly(link, expected, self._wake_fd):
            return True
        while not (awaited.done() or interrupt.came) and link.is_up:
            if self._links.wait_for(link, expected, LONGEST_POLL_S, self._wake_fd):
                return True
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        return False

    def _read_until(self, awaited: Awaited, timeout_s: float | None, interrupt: Interrupt) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not (awaited.done() or interrupt.came) and self._transport.has_links:
            left_s = LONGEST_POLL_S if until is None else until - time.monotonic()
            if left_s <= 0:
                return
            if not self._links.wait(min(left_s, LONGEST_POLL_S), self._wake_fd):
                with suppress(BlockingIOError):  # the poll timed out
                    os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """A call has ended on this thread: if another thread is the reader, it must look."""
        reader = self._reader
        if reader and reader != threading.get_ident():
            self.nudge()

    def nudge(self) -> None:
        """Ends the reader's poll. May be called in a signal handler."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Call it after the last call has ended."""
        self._is_closed = True
        with self._turn:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
