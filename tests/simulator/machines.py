"""The machines of a simulated cluster, with the settings that the daemons and the client library would give them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from kvd.core.membership import EMPTY_SETTINGS
from kvd.core.scheduler.machine import SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.server.router import ServerRouter, ServerSettings
from kvd.core.session import ANY_RUN, Identity, RunKey, SchedulerSession
from kvd.core.worker.machine import WorkerMachine, WorkerSettings
from kvd.protocol.messages import Settings
from tests.simulator.settings import NUM_SHARDS, ClusterSettings

SCHEDULER_ADDRESS = "sim://scheduler"
PROGRAM = RunKey("default", "program")  # all workers belong to one start of a program


class MachineFactory:
    """Builds machines; each gets an incarnation of its own from `random`."""

    def __init__(self, cluster: ClusterSettings, random: Random, num_shards: int = NUM_SHARDS) -> None:
        self._cluster = cluster
        self._num_shards = num_shards
        self._random = random
        self._lives: dict[tuple[str, int], int] = {}
        self.run_keys: dict[str, RunKey] = {}  # of workers that belong to other jobs, by name

    def scheduler(self, now: float, record: Mapping[str, Any] | None) -> SchedulerRouter:
        """A scheduler that starts from the record of an earlier one, if there is one."""
        cluster, timeouts = self._cluster, self._cluster.timeouts
        settings = SchedulerSettings(
            cluster.wire(self._num_shards),
            timeouts.heartbeat_interval_s,
            timeouts.server_timeout_s,
            timeouts.worker_timeout_s,
            break_on_loss=cluster.on_worker_loss == "fail",
            shrink_on_loss=cluster.on_worker_loss == "shrink",
        )
        generation = 1 if record is None else int(record["generation"]) + 1
        return SchedulerRouter(settings, self._incarnation(), generation, now, record)

    def server(self, rank: int, address: str) -> ServerRouter:
        """A server that listens at `address`."""
        cluster = self._cluster
        wanted = EMPTY_SETTINGS._replace(num_workers=cluster.workers, num_servers=cluster.servers)
        settings = ServerSettings(
            cluster.memory_limit_bytes, cluster.on_worker_loss == "fail", small_push_bytes=cluster.small_push_bytes
        )
        session = self._session("server", rank, address, wanted)
        return ServerRouter(settings, session, SCHEDULER_ADDRESS, cluster.timeouts.heartbeat_interval_s)

    def worker(self, number: int, wanted: Settings) -> WorkerMachine:
        """A worker that insists on the settings `wanted`."""
        cluster = self._cluster
        settings = WorkerSettings(cluster.credit_bytes, cluster.small_push_bytes, notice_s=cluster.timeouts.notice_s)
        run_key = self.run_keys.get(f"worker {number}", PROGRAM)
        return WorkerMachine(settings, self._session("worker", number, "", wanted, run_key))

    def reader(self, number: int) -> WorkerMachine:
        """An observer, which nobody waits for."""
        settings = WorkerSettings(self._cluster.credit_bytes, self._cluster.small_push_bytes)
        return WorkerMachine(settings, self._session("observer", number, "", EMPTY_SETTINGS, PROGRAM))

    def _session(
        self, role: str, number: int, address: str, wanted: Settings, run_key: RunKey = ANY_RUN
    ) -> SchedulerSession:
        life = self._lives[role, number] = self._lives.get((role, number), -1) + 1
        pid = 1000 + number + 100 * life
        identity = Identity(role, f"{role}-{number}", self._incarnation(), address, "sim", pid, number, "simulated")
        interval_s = self._cluster.timeouts.heartbeat_interval_s
        return SchedulerSession(identity, wanted, SCHEDULER_ADDRESS, interval_s, run_key)

    def _incarnation(self) -> int:
        return self._random.getrandbits(61) + 1
