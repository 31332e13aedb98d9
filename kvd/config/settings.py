"""Every setting, declared once: the fields of `Config`.

A field gives the keyword, the key in the file, the flag and the ``KVD_*`` variable. `kvd.config.sources` finds
its value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvd.config import checks
from kvd.config.memory import machine_memory_bytes
from kvd.config.setting import ROLES, Role, Setting, declare, setting_of
from kvd.config.values import KiB, MiB
from kvd.errors import ConfigError

MOST_NODES: Final = 4096
"""Servers and workers of one cluster."""
MOST_SERVERS: Final = 200
MOST_REPLICATED_WORKERS: Final = 512
"""With two copies: what a server tells its backup of a slice has an entry for each worker."""

_OF_ONE_NODE: Final = frozenset(
    {
        "scheduler",  # a name here, a number there
        "bind",
        "node_id",
        "keyfile",
        "allowed_keys",
        "state_dir",
        "num_workers",  # a server may leave them open
        "num_servers",
        "replicas",
        "job",
        "run",
        "log_format",
        "log_level",
        "metrics_bind",
        "metrics_token_file",
        "role",
        "parent_pid",
    }
)
"""Settings that may differ between the daemons of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one process, checked. An instance that exists is consistent.

    One field per setting is the purpose of this class, so it has many. Values may be given as text
    (``slice_bytes="1MiB"``); the fields hold numbers.

    Raises:
        ConfigError: a value is wrong, or two disagree; ``.setting`` names the one to change.
    """

    # Addresses and files
    scheduler: str = declare(
        "tcp://127.0.0.1:9191",
        "address of the scheduler: tcp://HOST:PORT or ipc://PATH",
        fallback=("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
    )
    bind: str = declare(
        "",
        "address to listen on; empty: the scheduler's own, or for a server a free port where it reaches the scheduler",
        used_by=("scheduler", "server"),
    )
    node_id: str = declare("", "name of this node, by which it gets its rank back after a restart")
    keyfile: str = declare("", "file with the key of this node; empty: the user's own cluster key")
    allowed_keys: str = declare(
        "", "file with the public keys that may connect, and their roles", used_by=("scheduler", "server")
    )
    state_dir: str = declare("", "directory for state that survives a restart", used_by=("scheduler", "server"))
    insecure: bool = declare(False, "no keys: nothing is encrypted, and everyone may connect")

    # The cluster
    num_workers: int = declare(
        0,
        "number of workers in the job; 0: whatever the cluster has",
        minimum=0,
        fallback=("DMLC_NUM_WORKER", "WORLD_SIZE"),
    )
    num_servers: int = declare(
        0, "number of servers in the job; 0: whatever the cluster has", minimum=0, fallback=("DMLC_NUM_SERVER",)
    )
    max_workers: int = declare(
        0,
        "most workers that may take part at a time; those beyond num_workers join later; 0: num_workers",
        minimum=0,
        used_by=("scheduler",),
    )
    replicas: int = declare(1, "number of copies of every value; with 2, any one server may die", minimum=1, maximum=2)
    num_shards: int = declare(
        840, "number of placement slots", minimum=1, maximum=4096, used_by=("scheduler", "worker")
    )
    merge: str = declare(
        "sum",
        "how pushed values are merged, for keys without a merge of their own",
        choices=("sum", "mean", "weighted"),
        used_by=("scheduler", "worker"),
    )
    staleness: int | None = declare(
        None,
        "clocks by which a worker may lead the slowest one in dist_async; none: no limit",
        minimum=0,
        used_by=("scheduler", "worker"),
    )
    rounds_ahead: int = declare(
        2, "rounds by which a worker may lead the open one in dist_sync", minimum=1, used_by=("scheduler", "worker")
    )

    # The job
    job: str = declare("default", "name of the job; programs under different names share the daemons")
    run: str = declare(
        "",
        "token of one start of a whole program, the same for all of its workers; launchers draw it",
        used_by=("worker",),
    )

    # Snapshots
    snapshot_dir: str = declare(
        "", "folder of worker 0 for the snapshots of the job, to save and to restore", used_by=("worker",)
    )
    snapshot_every: int = declare(
        0, "steps of loops over kv.steps after which a snapshot is taken; 0: never", minimum=0, used_by=("worker",)
    )
    snapshot_keep: int = declare(
        3, "number of snapshots to keep; older ones are deleted", minimum=1, used_by=("worker",)
    )
    restore: str = declare(
        "off",
        "start of a new run; auto: the newest snapshot in snapshot_dir, older: the one before if it is damaged",
        choices=("off", "auto", "older"),
        used_by=("worker",),
    )

    # Data in flight and in memory
    slice_bytes: int = declare(
        4 * MiB,
        "largest slice of a value, a multiple of 64; the default shrinks with several servers",
        unit="bytes",
        minimum=4 * KiB,
        maximum=16 * MiB,
        used_by=("scheduler", "worker"),
    )
    credit_bytes: int = declare(
        32 * MiB, "most bytes in flight to each server", unit="bytes", minimum=4 * KiB, used_by=("worker",)
    )
    memory_limit_bytes: int = declare(
        0,
        "memory that a daemon may use; 0: three quarters of the machine's",
        unit="bytes",
        minimum=0,
        used_by=("server", "worker"),
    )
    shared_memory: str = declare(
        "auto", "shared memory between processes on one host", choices=("auto", "off"), used_by=("server", "worker")
    )
    tcp_links: str = declare(
        "auto",
        "links over TCP, with keys encrypted; auto: between hosts, always: on one host, too",
        choices=("auto", "off", "always"),
        used_by=("server", "worker"),
    )
    check_bound: bool = declare(
        False, "report writes to gradients of kv.bind before their push is done", used_by=("worker",)
    )
    cpu_affinity: str = declare(
        "off",
        "auto: the launcher gives each server a core of its own if each worker still has one",
        choices=("off", "auto"),
        used_by=(),
    )

    # Liveness and deadlines
    heartbeat_interval_s: float = declare(1.0, "time between two heartbeats", unit="s", minimum=0.01)
    server_timeout_s: float = declare(
        5.0, "silence after which a server counts as dead", unit="s", minimum=0.02, used_by=("scheduler",)
    )
    worker_timeout_s: float = declare(
        20.0, "silence after which a worker counts as dead", unit="s", minimum=0.02, used_by=("scheduler",)
    )
    join_timeout_s: float = declare(
        300.0,
        "how long a worker waits until its cluster is complete, and a server for its scheduler",
        unit="s",
        minimum=0.02,
    )
    request_timeout_s: float = declare(
        60.0,
        "how long a call that sets no deadline waits for the answer of a server or the scheduler",
        unit="s",
        minimum=0.02,
        used_by=("server", "worker"),
    )
    round_timeout_s: float = declare(
        1800.0,
        "how long a call that sets no deadline waits for other workers that are alive",
        unit="s",
        minimum=0.02,
        used_by=("worker",),
    )
    notice_s: float = declare(
        10.0,
        "time after which a waiting call logs the nodes that it waits for",
        unit="s",
        minimum=0.02,
        used_by=("worker",),
    )
    on_worker_loss: str = declare(
        "fail",
        "when a worker dies, calls that wait for it fail, wait for its return, or continue without it",
        choices=("wait", "fail", "shrink"),
        used_by=("scheduler", "server"),
    )
    quorum: int = declare(
        0,
        "number of workers after which a round in dist_sync waits quorum_grace_s for the rest; 0: it waits for all",
        minimum=0,
        used_by=("scheduler",),
    )
    quorum_grace_s: float = declare(
        1.0,
        "how long a round that has its quorum waits for the other workers",
        unit="s",
        minimum=0.001,
        used_by=("scheduler",),
    )

    # The log
    log_format: str = declare(
        "auto", "format of the log; auto: text on a terminal, else json", choices=("auto", "text", "json")
    )
    log_level: str = declare("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))

    # Metrics
    metrics_bind: str = declare(
        "",
        "HOST:PORT where Prometheus gets the metrics of this daemon; empty: nowhere",
        used_by=("scheduler", "server"),
    )
    metrics_token_file: str = declare(
        "",
        "file with the token that a scrape has to send; beyond loopback one is needed",
        used_by=("scheduler", "server"),
    )

    # This process
    preferred_rank: int | None = declare(None, "rank to ask for", minimum=0, used_by=("worker",), fallback=("RANK",))
    local_rank: int = declare(
        0, "number of this worker on its host", minimum=0, used_by=("worker",), fallback=("LOCAL_RANK",)
    )
    role: str = declare("", "role of this process", choices=("", *ROLES), fallback=("DMLC_ROLE",))
    parent_pid: int = declare(0, "exit when the process with this pid ends; 0: never", minimum=0)

    def __post_init__(self) -> None:
        for setting in all_settings():
            object.__setattr__(self, setting.name, setting.parse(getattr(self, setting.name)))
        for name, problem in self._problems():
            raise ConfigError(problem, setting=name)

    def _problems(self) -> Iterator[checks.Problem]:
        yield from checks.address_problems(self.scheduler, self.bind)
        yield from checks.size_problems(
            slice_bytes=self.slice_bytes,
            credit_bytes=self.credit_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        yield from checks.time_problems(
            heartbeat_interval_s=self.heartbeat_interval_s,
            server_timeout_s=self.server_timeout_s,
            worker_timeout_s=self.worker_timeout_s,
            request_timeout_s=self.request_timeout_s,
            round_timeout_s=self.round_timeout_s,
        )
        yield from checks.identity_problems(self.node_id)
        yield from checks.job_problems(self.job)
        yield from checks.key_problems(keyfile=self.keyfile, allowed_keys=self.allowed_keys, insecure=self.insecure)
        yield from checks.loss_problems(
            on_worker_loss=self.on_worker_loss, num_workers=max(self.num_workers, self.max_workers)
        )
        yield from checks.elastic_problems(num_workers=self.num_workers, max_workers=self.max_workers)
        yield from checks.quorum_problems(
            quorum=self.quorum,
            quorum_grace_s=self.quorum_grace_s,
            num_workers=self.num_workers,
            staleness=self.staleness,
            round_timeout_s=self.round_timeout_s,
        )
        yield from checks.snapshot_problems(self.snapshot_dir, self.snapshot_every, self.restore)
        yield from checks.metrics_problems(self.metrics_bind, self.metrics_token_file, insecure=self.insecure)
        yield from checks.replica_problems(replicas=self.replicas, num_servers=self.num_servers)

    def check_role(self, role: Role) -> None:
        """Check what only a daemon of this role needs.

        Raises:
            ConfigError: the scheduler does not know the size of the cluster, or cannot announce so large a one.
        """
        if role != "scheduler":
            return
        for name in ("num_workers", "num_servers"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{name} = 0: the scheduler needs the number; give {flag} N, N ≥ 1", setting=name)
        name = "max_workers" if self.max_workers > self.num_workers else "num_workers"
        workers = getattr(self, name)
        if self.num_servers > MOST_SERVERS:
            text = f"num_servers = {self.num_servers}: a cluster has at most {MOST_SERVERS} servers"
            raise ConfigError(text, setting="num_servers")
        if workers + self.num_servers > MOST_NODES:
            raise ConfigError(
                f"{name} = {workers} and num_servers = {self.num_servers}: a cluster has at most "
                f"{MOST_NODES} nodes in all",
                setting=name,
            )
        if self.replicas > 1 and workers > MOST_REPLICATED_WORKERS:
            raise ConfigError(
                f"{name} = {workers} and replicas = {self.replicas}: with two copies of every value a job has at most "
                f"{MOST_REPLICATED_WORKERS} workers; start fewer, or set replicas = 1",
                setting=name,
            )

    def memory_bound_bytes(self) -> int:
        """Return the memory limit of a daemon in bytes: `memory_limit_bytes`, or three quarters of the machine's."""
        return self.memory_limit_bytes or machine_memory_bytes() * 3 // 4

    def slice_bytes_for(self, num_servers: int, *, given: bool) -> int:
        """Return the slice size in bytes in a cluster of `num_servers`.

        It is `slice_bytes` if that was `given`. Else the servers share that size, at least 512 KiB each, so that a
        model spreads evenly over many servers.
        """
        if given:
            return self.slice_bytes
        return max(self.slice_bytes // max(1, num_servers), 512 * KiB) & -64

    def common_settings(self, role: Role) -> dict[str, str]:
        """Return the settings of a role that the nodes of a cluster usually share, as text by name."""
        used = [setting for setting in all_settings() if role in setting.used_by and setting.name not in _OF_ONE_NODE]
        return {setting.name: setting.show(getattr(self, setting.name)) for setting in used}

    def environment(self) -> dict[str, str]:
        """Return the ``KVD_*`` variables that pass all values other than defaults to a child process.

        They include settings of one process (`node_id`, `bind`, `role`, the ranks, `parent_pid`): a caller that starts
        several children sets those for each child.
        """
        changed = [setting for setting in all_settings() if getattr(self, setting.name) != setting.default]
        return {setting.env: setting.show(getattr(self, setting.name)) for setting in changed}


@functools.cache
def all_settings() -> tuple[Setting, ...]:
    """Return all settings in the order of their declaration."""
    return tuple(setting_of(field) for field in dataclasses.fields(Config))


def named_setting(name: str) -> Setting:
    """Return the setting with this name, which must exist."""
    return next(setting for setting in all_settings() if setting.name == name)
