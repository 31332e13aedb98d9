"""What makes a daemon a scheduler: its machine, its saved state, and the processes of this host that it watches."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from kvd.config import Loaded, Role
from kvd.core.machine import PeerLost
from kvd.core.scheduler.machine import SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.errors import ConfigError, KvdError
from kvd.node.daemon.facts import ProcessFacts
from kvd.node.daemon.identity import host_id, host_name, new_incarnation, reachable
from kvd.node.daemon.listening import when_known
from kvd.node.daemon.watch import ProcessWatch
from kvd.node.keys.keyring import Keyring
from kvd.node.shell.counters import Counters
from kvd.node.shell.driver import Driver
from kvd.node.storage.state_file import SchedulerStateFile
from kvd.observe.log import event
from kvd.protocol.messages import Settings
from kvd.transport.host import HostTransport

logger = logging.getLogger("kvd.node")


class SchedulerRole:
    """A scheduler. With a ``state_dir``, its view survives a restart."""

    name: Role = "scheduler"

    def __init__(self, loaded: Loaded) -> None:
        self._config = loaded.config
        self._origin = loaded.origin
        self._machine: SchedulerRouter | None = None
        self._driver: Driver | None = None
        self._state: SchedulerStateFile | None = None

    async def prepare(self) -> tuple[Keyring, Sequence[str]]:
        """The keys, which the first scheduler of a user makes, and the addresses behind the name to listen at."""
        config = self._config
        keyring = Keyring(config, self.name)
        return keyring, await when_known(config.bind or config.scheduler, config.join_timeout_s)

    def make_driver(
        self,
        address: str,
        transport: HostTransport,
        executor: Executor,
        on_halt: Callable[[KvdError], None],
        on_stop: Callable[[str], None],
    ) -> Driver:
        """The driver of the scheduler's machine.

        Raises:
            ConfigError: its state cannot be read or saved.
        """
        config = self._config
        settings = SchedulerSettings(
            self._cluster_settings(),
            config.heartbeat_interval_s,
            config.server_timeout_s,
            config.worker_timeout_s,
            break_on_loss=config.on_worker_loss == "fail",
            shrink_on_loss=config.on_worker_loss == "shrink",
            insecure=config.insecure,
        )
        holder = f"the scheduler at {reachable(address)} (host {host_name()}, pid {os.getpid()})"
        state = self._state = SchedulerStateFile(Path(config.state_dir), holder) if config.state_dir else None
        try:
            self._machine = continued_machine(settings, state)
        except ConfigError:
            self.close()
            raise
        if state is not None:
            state.save_first(self._machine.record())
        event(
            logger,
            logging.INFO,
            f"scheduler at {address}; join it with KVD_SCHEDULER={reachable(address)}",
            servers=config.num_servers,
            workers=config.num_workers,
            generation=self._machine.epoch.generation,
        )
        if config.quorum and not settings.cluster.quorum:
            text = (
                f"quorum = {config.quorum} is the number of workers: rounds wait for all of them, as without a quorum"
            )
            event(logger, logging.WARNING, text)
        persist = None if state is None else state.save
        self._driver = Driver(
            self._machine,
            transport,
            executor=executor,
            on_halt=on_halt,
            on_stop=on_stop,
            persist=persist,
            counters=Counters(),
            facts=ProcessFacts(time.monotonic, config.common_settings(self.name)),
        )
        return self._driver

    async def until_ready(self) -> None:
        """A scheduler is ready once it listens."""

    def is_needed(self) -> bool:
        """Its record is on disk."""
        return False

    def say_goodbye(self) -> None:
        """Nobody to tell: the nodes continue without a scheduler, and join the next one."""

    def jobs(self) -> dict[str, int]:
        """The runs that are under way, by the name of their job."""
        return {} if self._machine is None else {slot.job: slot.run for slot in self._machine.runs if not slot.is_over}

    def close(self) -> None:
        """Close the state file."""
        if self._state is not None:
            self._state.close()

    def tasks(self, watch: ProcessWatch) -> list[asyncio.Task[None]]:
        """Watch the processes of this host."""
        return [asyncio.get_running_loop().create_task(self._watch_nodes(watch))]

    async def _watch_nodes(self, watch: ProcessWatch) -> None:
        """Nodes on this host need no timeout: the kernel reports the end of their processes."""
        assert self._machine is not None, "make_driver makes it"
        here = host_id()
        before: set[int] = set()
        while True:
            watched = self._machine.watched()
            present = {incarnation for incarnation, _, _ in watched}
            for gone in before - present:  # it has left, and its process may live for long
                watch.forget(gone)
            before = present
            for incarnation, host, pid in watched:
                if host == here:
                    lost = PeerLost(incarnation, f"its process {pid} ended")
                    watch.watch(pid, partial(self._feed, lost), token=incarnation)
            await asyncio.sleep(self._config.heartbeat_interval_s)

    def _feed(self, lost: PeerLost) -> None:
        if self._driver is not None:
            self._driver.feed(lost)

    def _cluster_settings(self) -> Settings:
        """What the scheduler announces. Merge and slice size are the workers' to choose if they were not given here."""
        config = self._config
        slices_given = self._was_given("slice_bytes")
        quorum = config.quorum if config.quorum < config.num_workers else 0
        return Settings(
            "" if config.staleness is None else "async",
            config.merge if self._was_given("merge") else "",
            -1 if config.staleness is None else config.staleness,
            config.rounds_ahead,
            config.slice_bytes_for(config.num_servers, given=slices_given),
            config.num_workers,
            config.num_servers,
            config.num_shards,
            config.replicas,
            quorum,
            config.quorum_grace_s if quorum else 0.0,
            config.max_workers,
        )

    def _was_given(self, setting: str) -> bool:
        return self._origin.get(setting, "default") != "default"


def continued_machine(settings: SchedulerSettings, state: SchedulerStateFile | None) -> SchedulerRouter:
    """A machine that continues from the saved state.

    Raises:
        ConfigError: that is not the state of a scheduler.
    """
    now = asyncio.get_running_loop().time()
    if state is None:
        return SchedulerRouter(settings, new_incarnation(), 1, now, None)
    state.prepare()
    saved = state.load()
    try:
        generation = 1 if saved is None else saved["generation"] + 1
        machine = SchedulerRouter(settings, new_incarnation(), generation, now, saved)
        machine.validate()
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise state.unusable(error) from None
    return machine
