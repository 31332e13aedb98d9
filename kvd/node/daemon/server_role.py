"""What makes a daemon a server: its machine, its jobs, and the way into the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from kvd.config import Loaded, Role
from kvd.core.machine import SCHEDULER, HandshakeFailed, LocalCall
from kvd.core.membership import EMPTY_SETTINGS
from kvd.core.requests import Depart
from kvd.core.server.router import ServerRouter, ServerSettings
from kvd.core.session import Identity, SchedulerSession
from kvd.errors import ConnectError, KvdError
from kvd.node.daemon.facts import ProcessFacts
from kvd.node.daemon.identity import host_id, host_name, new_incarnation, reachable
from kvd.node.daemon.listening import LOOK_UP_EVERY_S, listen_address, when_known
from kvd.node.daemon.process_limits import keep_freed_memory
from kvd.node.daemon.scheduler_search import (
    HandshakeWatch,
    KeyWait,
    Notices,
    finding_of,
    in_daemon_thread,
    no_answer,
    problem_of,
    remedy,
)
from kvd.node.daemon.watch import ProcessWatch
from kvd.node.jobs.runner import JobRunner
from kvd.node.keys.keyring import Keyring
from kvd.node.shell.counters import Counters
from kvd.node.shell.driver import Driver
from kvd.node.shell.push_frames import SmallPushes
from kvd.observe.log import event
from kvd.protocol.messages import NO_RANK, Departure, Settings
from kvd.transport.finding import Finding
from kvd.transport.host import HostTransport
from kvd.transport.links.frames import INLINE_BELOW_BYTES
from kvd.transport.reaching import UnknownNameError, with_zone
from kvd.transport.zmq.curve import Curve

Array: TypeAlias = np.ndarray[Any, Any]

logger = logging.getLogger("kvd.node")

JOIN_POLL_S = 0.02


class ServerRole:
    """A server."""

    name: Role = "server"

    def __init__(self, loaded: Loaded) -> None:
        self._config = loaded.config
        self._origin = loaded.origin
        self._begun = time.monotonic()  # it waits for its key and its scheduler since then
        self._notices = Notices()
        self._curve: Curve | None = None
        self._session: SchedulerSession | None = None
        self._driver: Driver | None = None
        self._handshakes: HandshakeWatch | None = None

    async def prepare(self) -> tuple[Keyring, Sequence[str]]:
        """The keys and where to listen, once the scheduler has made the user's key and its host's name is known."""
        config = self._config
        keyring = await self._when_there_is_a_key()
        self._curve = keyring.curve
        if config.bind:
            return keyring, await when_known(config.bind, config.join_timeout_s)
        while True:
            try:
                return keyring, [await in_daemon_thread(partial(listen_address, config, self.name))]
            except (UnknownNameError, ConnectionRefusedError, TimeoutError):
                finding = await finding_of(config.scheduler, self._curve)
            problem = problem_of(finding, config.scheduler, self._curve)
            if problem:
                raise ConnectError(problem, address=config.scheduler)
            self._waited(finding)
            await asyncio.sleep(LOOK_UP_EVERY_S)

    async def _when_there_is_a_key(self) -> Keyring:
        config = self._config

        def tell() -> None:
            event(logger, logging.WARNING, f"{wait.describe()}; trying for {config.join_timeout_s:g} s")

        wait = KeyWait(config, self.name, tell)
        try:
            await in_daemon_thread(partial(wait.run, self._begun + config.join_timeout_s))
        finally:
            wait.stop()
        return Keyring(config, self.name)

    def _waited(self, finding: Finding | None) -> None:
        """Report at times that the scheduler does not answer.

        Raises:
            ConnectError: it has not within `join_timeout_s`.
        """
        where, limit_s = self._config.scheduler, self._config.join_timeout_s
        text = f"{no_answer(finding, where)}: {remedy(finding, where)}"
        if time.monotonic() > self._begun + limit_s:
            raise ConnectError(f"{text}; tried for {limit_s:g} s (join_timeout_s)", address=where)
        if self._notices.is_due(finding):
            event(logger, logging.WARNING, f"still waiting for the scheduler: {text}; trying for {limit_s:g} s")

    def make_driver(
        self,
        address: str,
        transport: HostTransport,
        executor: Executor,
        on_halt: Callable[[KvdError], None],
        on_stop: Callable[[str], None],
    ) -> Driver:
        """The driver of the server's machine, which joins the scheduler once it runs."""
        config = self._config
        keep_freed_memory()
        identity = Identity(
            "server",
            config.node_id or f"server-{secrets.token_hex(6)}",
            new_incarnation(),
            with_zone(reachable(address), ""),  # interfaces have other names on other hosts
            host_id(),
            os.getpid(),
            NO_RANK if config.preferred_rank is None else config.preferred_rank,
            host_name(),
            "" if self._curve is None else self._curve.announced,
        )
        self._session = SchedulerSession(identity, self._wanted(), config.scheduler, config.heartbeat_interval_s)
        settings = ServerSettings(config.memory_bound_bytes(), config.on_worker_loss == "fail")
        event(logger, logging.INFO, f"server at {address}; joining the scheduler at {config.scheduler}")
        transport.listen_links(identity.incarnation)
        counters = Counters()
        machine = ServerRouter(settings, self._session, config.scheduler, config.heartbeat_interval_s)
        self._driver = Driver(
            machine,
            transport,
            new_runner=partial(JobRunner, allocate=partial(_memory_of_version, transport), counters=counters),
            executor=executor,
            on_halt=on_halt,
            on_stop=on_stop,
            counters=counters,
            facts=ProcessFacts(time.monotonic, config.common_settings(self.name)),
            holding=transport.holding,
        )
        driver = self._driver
        pushes = SmallPushes(
            machine,
            transport,
            driver.stepper,
            driver.sender,
            driver.background.runner,
            driver.carry_out,
            driver.receiver.receive,
            counters,
        )
        driver.receiver.take_push = pushes.take
        driver.receiver.take_pull = pushes.take_pull
        return self._driver

    def _wanted(self) -> Settings:
        """What this server insists on: what it was given. The cluster decides the rest."""
        config = self._config
        replicas = config.replicas if self._origin.get("replicas", "default") != "default" else 0
        return EMPTY_SETTINGS._replace(
            num_workers=config.num_workers, num_servers=config.num_servers, replicas=replicas
        )

    async def until_ready(self) -> None:
        """Return once the server has joined.

        Raises:
            ConnectError: no scheduler answered within ``join_timeout_s``.
        """
        session, handshakes = self._session, self._handshakes
        assert session is not None, "make_driver makes it"
        while not session.joined:
            if not session.heard:
                self._waited(None if handshakes is None else handshakes.finding)
            elif self._notices.is_due():
                reason = session.why_not_joined or "it has yet to let this node in"
                text = f"still waiting for the scheduler at {self._config.scheduler}: {reason}"
                event(logger, logging.WARNING, text)
            await asyncio.sleep(JOIN_POLL_S)

    def is_needed(self) -> bool:
        """Whether it alone has values that another server is to hold too."""
        machine = None if self._driver is None else self._driver.machine
        return isinstance(machine, ServerRouter) and machine.is_needed()

    def say_goodbye(self) -> None:
        """Leave the rounds of the cluster."""
        if self._driver is not None:
            self._driver.feed(LocalCall(1, Depart(Departure.LEFT), 0.0))

    def jobs(self) -> dict[str, int]:
        """The runs that are under way, by the name of their job."""
        machine = None if self._driver is None else self._driver.machine
        return machine.live_runs() if isinstance(machine, ServerRouter) else {}

    def close(self) -> None:
        """Nothing of its own is open."""

    def tasks(self, watch: ProcessWatch) -> list[asyncio.Task[None]]:
        """Find out why the scheduler does not answer, if it does not."""
        session = self._session
        assert session is not None, "make_driver makes it"
        self._handshakes = HandshakeWatch(self._config.scheduler, self._curve, session, self._handshake_failed)
        return [asyncio.get_running_loop().create_task(self._handshakes.run())]

    def _handshake_failed(self, error: KvdError) -> None:
        if self._driver is not None:
            self._driver.feed(HandshakeFailed(SCHEDULER, error))


def _memory_of_version(transport: HostTransport, nbytes: int) -> Array:
    """Memory for a version, as a uint8 array: shared with the workers of this host, if there are any."""
    if nbytes > INLINE_BELOW_BYTES and transport.has_links:
        block = transport.arena.allocate(nbytes)
        if block is not None:
            return block
    return np.empty(nbytes, np.uint8)
