"""A worker (or observer) at work: its machine, its transport, and an event loop in a thread of its own.

`submit` steps the machine on the program's thread, and `wait` may read the answer there. The engine thread runs the
loop for everything else: it keeps heartbeats, timers and transfers going, even if the program blocks its own event
loop. `kvd.node.shell.threads` says what runs on which thread.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.duties import Duty, least
from kvd.client.calls.held_signals import Interrupt, signals
from kvd.client.calls.keys import WrittenKeys
from kvd.client.calls.promise import Promise
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.open_calls import OpenCalls
from kvd.client.cluster.small_calls import SmallCalls
from kvd.client.cluster.users import Coroutines, StoreUsers
from kvd.config import Config
from kvd.core.machine import SCHEDULER, Complete, HandshakeFailed, LocalCall
from kvd.core.requests import Depart, Request, TakeBack
from kvd.core.session import Identity, RunKey, SchedulerSession
from kvd.core.worker.machine import WorkerMachine, WorkerSettings
from kvd.errors import KvdError, StoreClosed
from kvd.node.daemon.identity import host_id, host_name, new_incarnation, token_of
from kvd.node.daemon.process_limits import keep_freed_memory
from kvd.node.daemon.scheduler_search import HandshakeWatch
from kvd.node.keys.keyring import Keyring
from kvd.node.shell.driver import Driver
from kvd.node.shell.threads import LinkWaiter
from kvd.protocol.messages import NO_RANK, Departure, Settings
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE_BELOW_BYTES
from kvd.transport.links.listener import TcpLinks

STOP_TIMEOUT_S = 5.0
UNHEARD_STOP_S = 1.0  # nobody waits for an engine that has nothing to say
LINGER_S = 0.5  # for messages that are queued; those of an observer that never heard anything interest nobody
WITHDRAW_S = 0.5  # to tell the scheduler: the caller has waited long enough

Array: TypeAlias = np.ndarray[Any, Any]


class _Either:
    """What ends a wait early: a signal, or work for the thread."""

    def __init__(self, interrupt: Interrupt, duty: Duty) -> None:
        self._interrupt = interrupt
        self._duty = duty

    @property
    def came(self) -> bool:
        return self._interrupt.came or self._duty.is_due()


class Engine:
    """Starts at once; `kvd.client.cluster.joining` waits until the cluster is there.

    Args:
        operator: a worker for one command, see `Join.operator`.

    Attributes:
        handshakes: why the scheduler does not answer, until it does.
        on_finding: called on the loop when they have found something.

    Raises:
        ConfigError: there is no key, or none that can be used.
    """

    def __init__(self, config: Config, role: str, settings: Settings, *, operator: bool = False) -> None:
        curve = Keyring(config, role).curve
        self.config = config
        self._pid = os.getpid()
        self._calls = OpenCalls()
        self._users = StoreUsers()
        self._coroutines = Coroutines(self._users, self._calls.written)
        self._order = threading.RLock()  # calls reach the machine in the order of their submits
        self._closed = False
        self._failure: KvdError | None = None  # why this node cannot go on
        keep_freed_memory()
        identity = Identity(
            role,
            config.node_id or f"{role}-{secrets.token_hex(6)}",
            new_incarnation(),
            "",
            host_id(),
            os.getpid(),
            NO_RANK if config.preferred_rank is None else config.preferred_rank,
            host_name(),
        )
        run_key = RunKey(config.job, token_of(config.run), operator)
        self.session = SchedulerSession(identity, settings, config.scheduler, config.heartbeat_interval_s, run_key)
        worker_settings = WorkerSettings(config.credit_bytes, notice_s=config.notice_s)
        self.machine = WorkerMachine(worker_settings, self.session)
        self._loop = asyncio.new_event_loop()
        self.transport = HostTransport(
            shared_memory=config.shared_memory == "auto",
            tcp_links=TcpLinks(config.tcp_links),
            arena_limit_bytes=config.memory_bound_bytes(),
            curve=curve,
            warns_of_curve=identity.role != "observer",
        )
        self._driver = Driver(
            self.machine,
            self.transport,
            on_complete=self._completed,
            on_census=lambda: self._calls.census(self._users, self._coroutines),
            on_halt=self._halted,
        )
        self._waiter = LinkWaiter(self.transport)
        self.on_finding: Callable[[], None] = lambda: None
        self.handshakes = HandshakeWatch(
            config.scheduler,
            curve,
            self.session,
            lambda error: self._driver.feed(HandshakeFailed(SCHEDULER, error)),
            lambda: self.on_finding(),
        )
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kvd-engine", daemon=True)
        self._thread.start()
        started.wait()

    # ── calls ──

    @property
    def written(self) -> WrittenKeys:
        """How the program writes its keys."""
        return self._calls.written

    def submit(self, request: Request, timeout: float | None = None, *, within: Deadline | None = None) -> Promise:
        """Gives the machine a call and, unless another thread is stepping it, steps it at once on this thread. Calls
        reach the machine in the order of their submits.

        Args:
            timeout: its deadline, in seconds, as the program chose it; None: `round_timeout_s` for what other workers
                owe it, `request_timeout_s` for what a node owes it.
            within: with the default deadlines, the call ends when this has passed.
        """
        config = self.config
        answer_s = config.request_timeout_s if timeout is None else None
        seconds = config.round_timeout_s if timeout is None else checks.seconds(timeout)
        if within is not None:
            seconds = min(seconds, within.left_s())
        promise = Promise(self._users)
        self._users.this_thread()
        with self._order:
            self.check_usable()
            if self._failure is not None:
                promise.set_exception(self._failure)
                return promise
            number = self._calls.begin(promise)
            self._driver.feed(LocalCall(number, request, time.monotonic() + seconds, answer_s))
        return promise

    async def call(self, request: Request, timeout: float | None = None, *, within: Deadline | None = None) -> Any:
        """The same for coroutines on the engine's loop, see `run`."""
        return await self._coroutines.result_of(self.submit(request, timeout, within=within))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Promise:
        """Runs a coroutine of several calls on the engine's loop."""
        promise = Promise(self._users)
        self._users.this_thread()
        with self._order:
            try:
                self.check_usable()
            except KvdError:
                coroutine.close()
                raise
            self._loop.call_soon_threadsafe(self._coroutines.start, coroutine, promise)
        return promise

    def small_calls(self, bound: BoundKeys, slice_bytes: int) -> SmallCalls:
        """The calls on small values. There is one such object, which takes their answers.

        Args:
            bound: the keys whose arrays are the store's.
            slice_bytes: the size of the slices in this cluster.
        """
        calls = SmallCalls(
            self.machine,
            self._driver,
            self.transport,
            self._waiter,
            self._calls,
            self._users,
            bound,
            self.submit,
            self.wait,
            self.take_back,
            slice_bytes=slice_bytes,
            answer_s=self.config.request_timeout_s,
            round_s=self.config.round_timeout_s,
        )
        self._driver.receiver.takes_answer = calls.take
        return calls

    @property
    def is_well(self) -> bool:
        """Whether calls can be made: it was not stopped, has not failed, and this is not a child process."""
        return self._failure is None and not self._closed and self._pid == os.getpid()

    def wait(self, promise: Promise, timeout_s: float | None) -> None:
        """Reads the links to the servers of this host until the call ends or the time is up. Returns early if there
        are no links, or another thread reads them: the caller then waits on the promise."""
        if threading.get_ident() == self._thread.ident or promise.done() or not self.transport.has_links:
            return
        duty = self._users.duty()
        if duty is None:
            self._read_links(promise, timeout_s)
            return
        duty.begin_wait(self._waiter.nudge)
        try:
            self._read_links_on_duty(promise, timeout_s, duty)
        finally:
            duty.end_wait()

    def _read_links(self, promise: Promise, timeout_s: float | None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            interrupt = signals.begin_wait(self._waiter.nudge)
            try:
                if until is not None:
                    self._waiter.wait(promise, until - time.monotonic(), interrupt)
                else:
                    with self._users.waiting(promise):
                        self._waiter.wait(promise, None, interrupt)
            finally:
                interrupt.end_wait()
            if not interrupt.came:
                return
            signals.handle()

    def _read_links_on_duty(self, promise: Promise, timeout_s: float | None, duty: Duty) -> None:
        """The same for a thread that has something to do meanwhile. That may take longer than the timeout."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            interrupt = signals.begin_wait(self._waiter.nudge)
            try:
                either = _Either(interrupt, duty)
                if until is not None:
                    self._waiter.wait(promise, least(until - time.monotonic(), duty.next_s()), either)
                else:
                    with self._users.waiting(promise):
                        self._waiter.wait(promise, duty.next_s(), either)
            finally:
                interrupt.end_wait()
            if interrupt.came:
                signals.handle()
            elif promise.done() or not duty.is_due():  # it is over, or another thread reads the links
                return
            else:
                duty.run()

    def take_duty(self, duty: Duty | None) -> None:
        """What this thread does from now on while it waits; None: nothing."""
        self._users.this_thread().duty = duty

    def take_back(self, sources: Sequence[Array]) -> None:
        """Returns when the program may write to these arrays again. Bytes of them that have yet to be sent are sent
        from copies; calls that use them end."""

        async def work() -> None:
            with suppress(KvdError):  # the node has failed: nothing more is sent, except what is queued already
                await self.call(TakeBack(tuple((source, source.copy()) for source in sources)))
            await self.transport.detach_buffers()

        with suppress(StoreClosed):  # nothing more is sent
            self.run(work()).result()

    def memory(self, nbytes: int) -> Array:
        """A uint8 array of `nbytes` bytes to send from: in shared memory if servers of this host can read it there."""
        if nbytes > INLINE_BELOW_BYTES and self.transport.has_links:
            block = self.transport.arena.allocate(nbytes)
            if block is not None:
                return block
        return np.empty(nbytes, np.uint8)

    def check_usable(self) -> None:
        """Raises StoreClosed after `stop`, and in a child process."""
        if self._pid != os.getpid():
            raise checks.forked_error()
        if self._closed:
            raise checks.closed_error()

    # ── life ──

    def scheduler_silence_s(self) -> float:
        """Seconds since the scheduler was last heard."""
        return time.monotonic() - self.session.heard_at

    def stop(self, leave_s: float = STOP_TIMEOUT_S, departure: Departure = Departure.LEFT) -> None:
        """Stops the engine thread, after telling the scheduler how this node leaves; an end by FAILED counts as a
        death. Telling takes `leave_s` seconds at most."""
        if self._pid != os.getpid():
            return
        try:
            if self.session.failure is None and (self.session.joined or departure is Departure.WITHDRAWN):
                with suppress(KvdError, TimeoutError):  # an unreachable scheduler will notice the silence
                    left = self.submit(Depart(departure), leave_s)
                    if self.session.heard:
                        left.result(leave_s + 1)
        finally:
            with self._order:
                first, self._closed = not self._closed, True
            if first:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S if self.session.heard else UNHEARD_STOP_S)
            self._waiter.close()

    def withdraw(self) -> None:
        """Stops as one that gave up joining: its place goes back to what it was. The scheduler is told even if it has
        not let this node in, since it may do so at any time."""
        self.stop(WITHDRAW_S, Departure.WITHDRAWN)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._users.exempt_this_thread()
        self._loop.call_soon(self._driver.start)
        watching = self._loop.create_task(self.handshakes.run())
        self._loop.call_soon(started.set)
        try:
            self._loop.run_forever()
        finally:
            with self._order:
                self._closed = True  # `submit` and `run` refuse calls from now on
            watching.cancel()
            self._driver.stop(LINGER_S if self.session.heard or self.session.identity.role != "observer" else 0.0)
            self._fail_all(StoreClosed("the store was closed before this call was done"))
            self._loop.run_until_complete(asyncio.sleep(0))  # coroutines given to `run` start
            self._loop.run_until_complete(self._coroutines.end())  # and end with the error of their next call
            self._loop.close()

    def _halted(self, error: KvdError) -> None:
        """This node cannot go on: its open calls fail, and so does each later one."""
        with self._order:
            self._failure = self._failure or error
        self._fail_all(error)

    def _fail_all(self, error: KvdError) -> None:
        self._calls.fail_all(error)
        self._waiter.wake()

    def _completed(self, complete: Complete) -> None:
        if self._calls.end(complete):
            self._waiter.wake()
