"""A worker (or observer) at work: its machine, transport and event loop, in a thread of their own.

The thread keeps the heartbeats and transfers going whatever the program does: it may block its own event loop, or hold
a lock for minutes. Calls go in through `submit`; their results come back as futures.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from kvd.config import Config
from kvd.core.calls import JoinCluster, LeaveRounds, Request
from kvd.core.machine import Complete, LocalCall
from kvd.core.session import Identity, SchedulerLink
from kvd.core.worker import WorkerMachine, WorkerSettings
from kvd.errors import ConnectError, KvdError, RequestTimeout, StoreClosed
from kvd.node.driver import Driver
from kvd.node.identity import host_id, new_incarnation
from kvd.protocol.messages import NO_RANK, Settings
from kvd.transport.zmq import ZmqTransport

STOP_TIMEOUT_S = 5.0


class Engine:
    """Starts at once; `join` waits until the cluster is there."""

    def __init__(self, config: Config, role: str, settings: Settings) -> None:
        self.config = config
        self._pid = os.getpid()
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = count(1)
        self._order = threading.RLock()  # calls reach the machine in the order of their submits
        self._closed = False
        identity = Identity(
            role,
            config.node_id or f"{role}-{secrets.token_hex(6)}",
            new_incarnation(),
            "",
            host_id(),
            os.getpid(),
            NO_RANK if config.preferred_rank is None else config.preferred_rank,
        )
        self.link = SchedulerLink(identity, settings, config.scheduler, config.heartbeat_interval_s)
        self.machine = WorkerMachine(WorkerSettings(config.credit_bytes), self.link)
        self._loop = asyncio.new_event_loop()
        self._driver = Driver(self.machine, ZmqTransport(), on_complete=self._completed)
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kvd-engine", daemon=True)
        self._thread.start()
        started.wait()

    # ── calls ──

    def submit(self, request: Request, timeout: float | None = None) -> Future[Any]:
        """Hands a call to the machine. Calls reach it in the order of their submits."""
        self.check_usable()
        future: Future[Any] = Future()
        seconds = self.config.request_timeout_s if timeout is None else timeout
        with self._order:
            number = next(self._numbers)
            self._futures[number] = future
            self._driver.feed(LocalCall(number, request, time.monotonic() + seconds))
        return future

    async def call(self, request: Request, timeout: float | None = None) -> Any:
        """For coroutines on the engine's own loop, see `run`."""
        return await asyncio.wrap_future(self.submit(request, timeout))

    def run(self, coroutine: Any) -> Future[Any]:
        """Runs a coroutine of several calls on the engine's loop."""
        try:
            self.check_usable()
        except KvdError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def check_usable(self) -> None:
        """Raises StoreClosed after close, and in a child process."""
        if self._pid != os.getpid():
            raise StoreClosed("this store belongs to the parent process: create one after the fork, in the child")
        if self._closed:
            raise StoreClosed("this store is closed: create another")

    # ── life ──

    def join(self, timeout: float | None = None) -> int:
        """Waits until the cluster is there, and gives the rank.

        Raises:
            ConnectError: nobody answers at the scheduler's address.
            RequestTimeout: the scheduler is there, but not all servers.
            ConfigError, NotAllowed: the cluster does not take this node.
        """
        seconds = self.config.request_timeout_s if timeout is None else timeout
        try:
            rank: int = self.submit(JoinCluster(), timeout).result()
            return rank
        except RequestTimeout as error:
            if not self.link.heard:
                where = self.config.scheduler
                raise ConnectError(
                    f"no scheduler answers at {where} after {seconds:g} s: start one there (kvd scheduler "
                    f"--scheduler {where} --num-workers N --num-servers N), or set KVD_SCHEDULER to where it is",
                    address=where,
                ) from None
            missing = ", ".join(error.waiting_for)
            raise RequestTimeout(
                f"the cluster at {self.config.scheduler} was not complete after {seconds:g} s; missing: {missing}",
                outcome="not_sent",
                waiting_for=error.waiting_for,
            ) from None

    def scheduler_silence_s(self) -> float:
        """Seconds since the scheduler was last heard."""
        return time.monotonic() - self.link.heard_at

    def stop(self, leave: bool = True) -> None:
        """Ends the thread. With `leave`, the scheduler is told first, so that nobody takes it for a death."""
        if self._closed or self._pid != os.getpid():
            return
        if leave and self.link.joined and self.link.failure is None:
            with suppress(KvdError, TimeoutError):  # an unreachable scheduler finds out by itself
                self.submit(LeaveRounds("left"), STOP_TIMEOUT_S).result(STOP_TIMEOUT_S + 1)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._driver.start)
        self._loop.call_soon(started.set)
        try:
            self._loop.run_forever()
        finally:
            self._driver.stop(linger_s=0.5)
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()
            for future in self._futures.values():
                future.set_exception(StoreClosed("the store was closed before this call was done"))
            self._futures = {}

    def _completed(self, complete: Complete) -> None:
        future = self._futures.pop(complete.call, None)
        if future is None or future.cancelled():
            return
        if complete.error is not None:
            future.set_exception(complete.error)
        else:
            future.set_result(complete.result)
