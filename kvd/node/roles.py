"""The daemons: a scheduler or a server in the foreground, from its settings to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvd.config import Config, Loaded, Role, parse_address, systemd_environment
from kvd.core.machine import LocalCall, PeerLost
from kvd.core.requests import LeaveRounds
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.core.session import Identity, SchedulerSession
from kvd.errors import ConfigError, ConnectError, KvdError
from kvd.node.driver import Driver
from kvd.node.identity import host_id, new_incarnation
from kvd.node.jobs import JobRunner
from kvd.node.memory import keep_freed_memory
from kvd.node.readyfile import ReadyFile
from kvd.node.statefile import StateFile
from kvd.node.watch import ProcessWatch
from kvd.observe.log import configure, event
from kvd.observe.systemd import Notifier
from kvd.protocol.messages import NO_RANK, Departure, Settings
from kvd.transport.frames import INLINE_BELOW_BYTES
from kvd.transport.host import HostTransport

Array: TypeAlias = np.ndarray[Any, Any]

logger = logging.getLogger("kvd.node")

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NO_CONNECTION = 0, 1, 2, 3
WATCH_INTERVAL_S = 1.0


def run_daemon(loaded: Loaded, role: Role, *, ready_file: Path | None = None) -> int:
    """Runs until SIGTERM, SIGINT, the end of the parent, or an error; gives the exit code of the process."""
    config = loaded.config
    configure(config.log_format, config.log_level, role)
    for note in loaded.notes:
        event(logger, logging.WARNING, note)
    ready = None if ready_file is None else ReadyFile(ready_file)
    try:
        if ready is not None:
            ready.check()
        daemon: Daemon = SchedulerDaemon(loaded) if role == "scheduler" else ServerDaemon(loaded)
        return asyncio.run(daemon.run(ready))
    except KvdError as error:
        event(logger, logging.ERROR, str(error))
        return _exit_code(error)
    finally:
        if ready is not None:
            ready.remove()


def _exit_code(error: KvdError) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_NO_CONNECTION if isinstance(error, ConnectError) else EXIT_FAILED


class Daemon(ABC):
    """What both have in common: listen, say that it is ready, feed the watchdog, notice signals and a dead parent."""

    role: Role

    def __init__(self, loaded: Loaded) -> None:
        self.config: Config = loaded.config
        self.loaded = loaded
        self.config.check_role(self.role)
        self.listen = self.config.listen_address(self.role)
        self.config.check_exposure(self.listen)
        self.executor = ThreadPoolExecutor(1, "kvd-jobs")
        self.transport = HostTransport(
            shared_memory=self.config.shared_memory == "auto" and self.role == "server",
            arena_limit_bytes=self.config.memory_bound_bytes(),
        )
        systemd = systemd_environment()
        self.notifier = Notifier(systemd.notify_socket, systemd.watchdog_usec)
        self.driver: Driver | None = None
        self.address = ""  # where it listens, once it does
        self._ended: asyncio.Future[int] | None = None

    async def run(self, ready: ReadyFile | None = None, *, signals: bool = True) -> int:
        """Runs until `end` is called. Without `signals` it can run in any thread."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.end, EXIT_OK, f"received {number.name}")
        watch = ProcessWatch(loop)
        if self.config.parent_pid:
            watch.watch(self.config.parent_pid, lambda: self.end(EXIT_OK, "the parent process is gone"))
        background: list[asyncio.Task[None]] = []
        try:
            address = self.transport.listen(self.listen)
            self.driver = self.make_driver(address)
            self.driver.start()
            self.address = address
            background += [loop.create_task(self.watchdog()), loop.create_task(self.announce(address, ready))]
            background += self.tasks(watch)
            for task in background:
                task.add_done_callback(self._background_ended)
            return await self._ended
        finally:
            self.notifier.stopping("stopping")
            for task in background:
                task.cancel()
            watch.close()
            if self.driver is not None:
                self.driver.stop()
            else:
                self.transport.close(0)
            self.executor.shutdown(wait=False, cancel_futures=True)
            self.notifier.close()

    def end(self, code: int, why: str) -> None:
        """Ends the daemon with this exit code."""
        if self._ended is not None and not self._ended.done():
            if code == EXIT_OK:
                self.say_goodbye()
            event(logger, logging.INFO if code == EXIT_OK else logging.ERROR, f"stopping: {why}")
            self._ended.set_result(code)

    @abstractmethod
    def say_goodbye(self) -> None:
        """Tells the cluster that this node goes."""

    def halted(self, error: KvdError) -> None:
        self.end(_exit_code(error), str(error))

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """A daemon without one of its tasks only looks alive: nobody would be told that it is ready, or not."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, KvdError):
            logger.error("a part of this daemon failed, which is a defect", exc_info=error)
            error = KvdError(f"{type(error).__name__}: {error}")
        self.say_goodbye()
        self.halted(error)

    async def announce(self, address: str, ready: ReadyFile | None) -> None:
        """Tells those who wait for it that the daemon is ready, with the address that it listens at."""
        await self.until_ready()
        if ready is not None:
            ready.write(address)
        self.notifier.ready(f"{self.role} at {address}")

    async def watchdog(self) -> None:
        """Feeds systemd's watchdog from the driver's loop: a loop that hangs starves it."""
        interval_s = self.notifier.watchdog_interval_s
        while interval_s is not None:
            self.notifier.watchdog()
            await asyncio.sleep(interval_s)

    @abstractmethod
    def make_driver(self, address: str) -> Driver: ...

    @abstractmethod
    async def until_ready(self) -> None: ...

    def tasks(self, watch: ProcessWatch) -> list[asyncio.Task[None]]:
        return []


class SchedulerDaemon(Daemon):
    """A scheduler. With a state_dir its view survives it."""

    role = "scheduler"

    def make_driver(self, address: str) -> Driver:
        config = self.config
        settings = SchedulerSettings(
            self._cluster(),
            config.heartbeat_interval_s,
            config.server_timeout_s,
            config.worker_timeout_s,
            break_on_loss=config.on_worker_loss == "fail",
        )
        state = StateFile(Path(config.state_dir)) if config.state_dir else None
        self.machine = self._make_machine(settings, state)
        generation = self.machine.epoch.generation
        if state is not None:
            state.save_first(self.machine.record())
        event(
            logger,
            logging.INFO,
            f"scheduler at {address}; join it with KVD_SCHEDULER={_reachable(address)}",
            servers=config.num_servers,
            workers=config.num_workers,
            generation=generation,
        )
        return Driver(
            self.machine,
            self.transport,
            executor=self.executor,
            on_halt=self.halted,
            persist=None if state is None else state.save,
        )

    def _cluster(self) -> Settings:
        config = self.config
        merge_given = self.loaded.origin.get("merge", "default") != "default"
        staleness = -1 if config.staleness is None else config.staleness
        slices_given = self.loaded.origin.get("slice_bytes", "default") != "default"
        return Settings(
            "" if config.staleness is None else "async",
            config.merge if merge_given else "",
            staleness,
            config.rounds_ahead,
            config.slice_bytes_for(config.num_servers, given=slices_given),
            config.num_workers,
            config.num_servers,
            config.num_shards,
        )

    def say_goodbye(self) -> None:
        """Nobody to tell: the nodes go on without a scheduler, and join the next one."""

    def _make_machine(self, settings: SchedulerSettings, state: StateFile | None) -> SchedulerMachine:
        """A machine that goes on where the saved one was."""
        now = asyncio.get_running_loop().time()
        if state is None:
            return SchedulerMachine(settings, new_incarnation(), 1, now, None)
        state.prepare()
        saved = state.load()
        try:
            generation = 1 if saved is None else int(saved["generation"]) + 1
            return SchedulerMachine(settings, new_incarnation(), generation, now, saved)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise state.unusable(error) from None

    async def until_ready(self) -> None:
        return None

    def tasks(self, watch: ProcessWatch) -> list[asyncio.Task[None]]:
        return [asyncio.get_running_loop().create_task(self._watch_nodes(watch))]

    async def _watch_nodes(self, watch: ProcessWatch) -> None:
        """Nodes of this host need no timeout: the kernel tells when their processes end."""
        here = host_id()
        while True:
            for incarnation, host, pid in self.machine.watched():
                if host == here and self.driver is not None:
                    lost = PeerLost(incarnation, f"its process {pid} ended")
                    watch.watch(pid, lambda lost=lost: self._lost(lost), token=incarnation)  # type: ignore[misc]
            await asyncio.sleep(self.config.heartbeat_interval_s)

    def _lost(self, lost: PeerLost) -> None:
        if self.driver is not None:
            self.driver.feed(lost)


class ServerDaemon(Daemon):
    """A server."""

    role = "server"

    def make_driver(self, address: str) -> Driver:
        config = self.config
        keep_freed_memory()
        identity = Identity(
            "server",
            config.node_id or f"server-{secrets.token_hex(6)}",
            new_incarnation(),
            _reachable(address),
            host_id(),
            os.getpid(),
            NO_RANK if config.preferred_rank is None else config.preferred_rank,
        )
        nothing = Settings("", "", -1, 0, 0, config.num_workers, config.num_servers, 0)
        self.session = SchedulerSession(identity, nothing, config.scheduler, config.heartbeat_interval_s)
        settings = ServerSettings(config.memory_bound_bytes(), config.on_worker_loss == "fail")
        event(logger, logging.INFO, f"server at {address}; joining the scheduler at {config.scheduler}")
        self.transport.listen_links(identity.incarnation)
        return Driver(
            ServerMachine(settings, self.session),
            self.transport,
            jobs=JobRunner(allocate=self._memory),
            executor=self.executor,
            on_halt=self.halted,
        )

    def _memory(self, nbytes: int) -> Array:
        """Memory for a version: such that workers of this host can read it, if there are any."""
        if nbytes > INLINE_BELOW_BYTES and self.transport.has_links:
            block = self.transport.arena.allocate(nbytes)
            if block is not None:
                return block
        return np.empty(nbytes, np.uint8)

    def say_goodbye(self) -> None:
        if self.driver is not None:
            self.driver.feed(LocalCall(1, LeaveRounds(Departure.LEFT), 0.0))

    async def until_ready(self) -> None:
        """Ready when it has joined; gives up when no scheduler answers before the deadline."""
        deadline = asyncio.get_running_loop().time() + self.config.request_timeout_s
        while not self.session.joined:
            if asyncio.get_running_loop().time() > deadline and not self.session.heard:
                where = self.config.scheduler
                text = (
                    f"no scheduler answers at {where} after {self.config.request_timeout_s:g} s: start one there "
                    f"(kvd scheduler --scheduler {where}), or set KVD_SCHEDULER to where it is"
                )
                raise ConnectError(text, address=where)
            await asyncio.sleep(0.02)


def _reachable(address: str) -> str:
    """The address as other hosts can use it: a wildcard is replaced by this host's name."""
    parsed = parse_address(address)
    if not parsed.is_wildcard:
        return address
    with suppress(OSError):
        return f"tcp://{socket.gethostbyname(socket.gethostname())}:{parsed.port}"
    return address
