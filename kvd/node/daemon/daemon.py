"""A daemon in the foreground, from its settings to its exit code. What its role adds is a `DaemonRole`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from kvd.config import Config, Role, systemd_environment
from kvd.core.machine import Machine
from kvd.errors import ConfigError, KvdError
from kvd.node.daemon.exit_codes import ExitCode, exit_code_of
from kvd.node.daemon.metrics_page import MetricsPage
from kvd.node.daemon.ready_file import ReadyFile
from kvd.node.daemon.watch import ProcessWatch
from kvd.node.keys.keyring import Keyring
from kvd.node.parent import without_ignored
from kvd.node.shell.driver import Driver
from kvd.observe.log import event
from kvd.observe.systemd import Notifier
from kvd.protocol.messages import NO_RUN
from kvd.transport.host import HostTransport
from kvd.transport.links.listener import TcpLinks

READY_RETRY_S = 0.2  # while no descriptor is left
LEAVE_LIMIT_S = 8.0  # less than kvd launch and systemd give a process to end
LEAVE_POLL_S = 0.02

logger = logging.getLogger("kvd.node")


class DaemonRole(Protocol):
    """What a scheduler and a server do differently."""

    @property
    def name(self) -> Role:
        """The role."""

    async def prepare(self) -> tuple[Keyring, Sequence[str]]:
        """Return the keys of this node, and where it listens. Waits for what others have to provide first.

        Raises:
            ConfigError: there is no key, none that can be used, or no address to listen at.
            ConnectError: the scheduler cannot be found.
        """

    def make_driver(
        self,
        address: str,
        transport: HostTransport,
        executor: Executor,
        on_halt: Callable[[KvdError], None],
        on_stop: Callable[[str], None],
    ) -> Driver:
        """The driver of the role's machine. The transport listens at `address` already."""

    async def until_ready(self) -> None:
        """Return once the node can do its work.

        Raises:
            KvdError: it never will.
        """

    def is_needed(self) -> bool:
        """Whether something would be lost if this node left now, and not if it stayed a while."""

    def say_goodbye(self) -> None:
        """Tell the cluster that this node is leaving."""

    def jobs(self) -> dict[str, int]:
        """The runs that are under way, by the name of their job."""

    def close(self) -> None:
        """Give back what the role has opened. Its machine has stopped."""

    def tasks(self, watch: ProcessWatch) -> list[asyncio.Task[None]]:
        """Start what the role does beside its machine. The daemon cancels these tasks at its end."""


class Daemon:
    """What all daemons do: listen, report that they are ready, feed the watchdog, notice signals and a dead parent.

    Attributes:
        address: where it listens, once it does.
        transport: its connections, from then on.
        metrics_url: of its metrics; "" if it has none.

    Raises:
        ConfigError: the settings do not suit the role.
    """

    transport: HostTransport

    def __init__(self, config: Config, role: DaemonRole) -> None:
        self.address = ""
        self.metrics_url = ""
        self._config = config
        self._role = role
        self._keyring: Keyring | None = None  # None while it is waited for
        config.check_role(role.name)
        self._executor = ThreadPoolExecutor(1, "kvd-jobs")
        systemd = systemd_environment()
        self._notifier = Notifier(systemd.notify_socket, systemd.watchdog_usec)
        self._driver: Driver | None = None
        self._ended: asyncio.Future[int] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._is_ready = False
        self._metrics: MetricsPage | None = None

    @property
    def machine(self) -> Machine | None:
        """The machine of the role, once the daemon runs."""
        return None if self._driver is None else self._driver.machine

    async def run(self, ready: ReadyFile | None = None, *, signals: bool = True) -> int:
        """Run until `end` is called, and return the exit code. Without `signals` it can run in any thread.

        Raises:
            ConfigError: there is no key, none that can be used, or no address to listen at.
            ConnectError: the address to listen at is taken, or the scheduler of a server cannot be found.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if signals:
            for number in without_ignored((signal.SIGTERM, signal.SIGINT)):
                loop.add_signal_handler(number, self._leave, f"received {number.name}")
            for number in without_ignored((signal.SIGHUP,)):
                loop.add_signal_handler(number, self._reload)
        watch = ProcessWatch(loop)
        if self._config.parent_pid:
            watch.watch(self._config.parent_pid, lambda: self.end(ExitCode.OK, "the parent process is gone"))
        background: list[asyncio.Task[None]] = []
        preparing = loop.create_task(self._role.prepare())
        try:
            either: list[asyncio.Future[Any]] = [preparing, self._ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                return self._ended.result()
            keyring, addresses = preparing.result()
            self.transport = self._new_transport(keyring)
            self._keyring = keyring
            address = self.transport.listen(*addresses)
            self._driver = self._role.make_driver(
                address, self.transport, self._executor, self._halted, partial(self.end, ExitCode.OK)
            )
            self._driver.start()
            if self._config.metrics_bind:
                background.append(loop.create_task(await self._open_metrics()))
            self.address = address
            background += [loop.create_task(self._feed_watchdog()), loop.create_task(self._announce(address, ready))]
            background += self._role.tasks(watch)
            for task in background:
                task.add_done_callback(self._background_ended)
            return await self._ended
        finally:
            self._notifier.stopping("stopping")
            preparing.cancel()
            for task in (*background, *([] if self._leaving is None else [self._leaving])):
                task.cancel()
            watch.close()
            if self._metrics is not None:
                self._metrics.close()
            if self._driver is not None:
                self._driver.stop()
            elif self._keyring is not None:
                self.transport.close(0)
            self._role.close()
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._notifier.close()

    def _new_transport(self, keyring: Keyring) -> HostTransport:
        config = self._config
        return HostTransport(
            shared_memory=config.shared_memory == "auto" and self._role.name == "server",
            tcp_links=TcpLinks(config.tcp_links),
            arena_limit_bytes=config.memory_bound_bytes(),
            curve=keyring.curve,
            memory_limit_bytes=config.memory_bound_bytes(),
            copies_parts=True,
        )

    async def _open_metrics(self) -> Coroutine[Any, Any, None]:
        """Open the page of the metrics, and return what runs beside it."""
        page = MetricsPage(self._config, self._role.name, self._reports, lambda: self._is_ready)
        self._metrics = page
        self.metrics_url = await page.start()
        event(logger, logging.INFO, f"metrics at {self.metrics_url}")
        return page.run()

    def _reports(self) -> dict[str, bytes]:
        """The status report of each job that is under way, by name, and that of none as ""."""
        assert self._driver is not None
        runs = {"": NO_RUN, **self._role.jobs()}
        return {job: self._driver.sender.status(run) for job, run in runs.items()}

    def end(self, code: int, why: str) -> None:
        """End the daemon with this exit code."""
        if self._ended is not None and not self._ended.done():
            if code == ExitCode.OK:
                self._role.say_goodbye()
            event(logger, logging.INFO if code == ExitCode.OK else logging.ERROR, f"stopping: {why}")
            self._ended.set_result(code)

    def _leave(self, why: str) -> None:
        """End the daemon in good order; at once if it is asked a second time."""
        if self._leaving is not None or not self._role.is_needed():
            self.end(ExitCode.OK, why)
        else:
            text = f"{why}: this node leaves when another one has what it alone holds, within {LEAVE_LIMIT_S:g} s"
            event(logger, logging.WARNING, text)
            self._leaving = asyncio.get_running_loop().create_task(self._leave_when_dispensable(why))

    async def _leave_when_dispensable(self, why: str) -> None:
        for _ in range(int(LEAVE_LIMIT_S / LEAVE_POLL_S)):
            if not self._role.is_needed():
                break
            await asyncio.sleep(LEAVE_POLL_S)
        self.end(ExitCode.OK, why)

    def _reload(self) -> None:
        """Read the list of allowed keys again."""
        if self._keyring is None:
            return  # it is read when the key is there
        try:
            event(logger, logging.INFO, f"received SIGHUP: {self._keyring.reload()}")
            if self._keyring.curve is not None:
                self.transport.end_links_of_others(self._keyring.curve.still_admits)
        except ConfigError as error:
            event(logger, logging.ERROR, "received SIGHUP, and went on with the keys as they were", error=str(error))

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        """End the daemon if one of its tasks failed: it would look alive, but tell nobody whether it is ready."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, KvdError):
            logger.error("a part of this daemon failed; this is a bug in kvd", exc_info=error)
            error = KvdError(f"{type(error).__name__}: {error}")
        self._role.say_goodbye()
        self._halted(error)

    def _halted(self, error: KvdError) -> None:
        self.end(exit_code_of(error), str(error))

    async def _announce(self, address: str, ready: ReadyFile | None) -> None:
        """Tell those who wait for the daemon that it is ready, and where it listens."""
        await self._role.until_ready()
        self._is_ready = True
        while ready is not None:
            if ready.write(address):
                break
            await asyncio.sleep(READY_RETRY_S)
        self._notifier.ready(f"{self._role.name} at {address}")

    async def _feed_watchdog(self) -> None:
        """Feed systemd's watchdog from the driver's loop: a loop that hangs starves it."""
        interval_s = self._notifier.watchdog_interval_s
        while interval_s is not None:
            self._notifier.watchdog()
            await asyncio.sleep(interval_s)
