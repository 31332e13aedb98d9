"""The description of a job, and its key: one that its settings name, or one that is made for it and ends with it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvd.config import child_environment, load
from kvd.errors import ConfigError
from kvd.node.launch.hosts import SSH, Host
from kvd.node.launch.restart_policy import RestartRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        command: program and arguments of each worker. On other hosts it runs in the same folder as here.
        workers: how many, at least 1.
        servers: how many, at least 1.
        environment: variables for all processes: the settings of the cluster, and what the workers need. The launcher
            itself acts on some settings: each daemon gets a directory of its own below ``KVD_STATE_DIR``; with
            ``KVD_CPU_AFFINITY=auto`` each server gets a core of its own, if there are enough; a job without ``KVD_JOB``
            gets a name that no other has, or ``default`` if there is a ``KVD_SNAPSHOT_DIR``, and one without
            ``KVD_RUN`` a random token; with ``KVD_ON_WORKER_LOSS=shrink`` it goes on until all workers have failed, and
            with ``KVD_QUORUM`` as long as so many have not.
        replicas: how many copies of each value there are, as the settings in `environment` say. With one, the death of
            a server ends the job; or, with restarts and ``KVD_RESTORE``, it begins again from its newest snapshot.
        restarts: how often and how soon each process that failed is started again, under the same node id: a worker,
            the scheduler, and a server of which there are copies. So often the whole job begins again, too.
        grace_s: how long processes may take to end after SIGTERM.
        startup_s: how long the scheduler may take to be ready.
        scheduler: where its scheduler listens; empty: a free port of the loopback, or of the address by which the hosts
            reach this one.
        hosts: where servers and workers run, each with the same folders as this host; empty: on this host. The
            scheduler runs on this host in any case.
        ssh: program and arguments that reach the hosts.
        announce: whether the first line says where the scheduler is.
        stdin: a descriptor, of which each worker gets a copy of everything that can be read from it; None: the stdin of
            the workers is empty.
        shows_unfinished: whether the beginning of a worker's line goes to the sink while its end has yet to come.
        quiet: whether what the daemons log below a warning is held back until one of them fails.
        log_dir: a folder for the logs of all processes; None: no logs.
        daemon: the command line of kvd, to which ``scheduler`` or ``server`` is added.

    Raises:
        ConfigError: there is no command, no worker or no server, there are fewer servers than replicas, or more workers
            than slots on the hosts.
    """

    command: Sequence[str]
    workers: int
    servers: int
    environment: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    restarts: RestartRule = field(default_factory=RestartRule)
    grace_s: float = 10.0
    startup_s: float = 60.0
    scheduler: str = ""
    hosts: Sequence[Host] = ()
    ssh: Sequence[str] = SSH
    announce: bool = False
    stdin: int | None = None
    shows_unfinished: bool = False
    quiet: bool = False
    log_dir: Path | None = None
    daemon: Sequence[str] = (sys.executable, "-m", "kvd_cli.main")

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("a job needs the command of its workers: … -- python train.py")
        for name in ("workers", "servers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a job needs at least one of its {name}", setting=f"num_{name}")
        if self.replicas > self.servers:
            raise ConfigError(
                f"replicas = {self.replicas}, but num_servers = {self.servers}: each copy of a value needs a server of "
                f"its own; give the job -s {self.replicas} (--num-servers)",
                setting="replicas",
            )

        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.workers > slots:
            raise ConfigError(
                f"num_workers = {self.workers}, but the hosts have {slots} slots in all: give them more, as in "
                f"--hosts {self.hosts[0].name}:{self.hosts[0].slots + self.workers - slots},…",
                setting="num_workers",
            )

    @property
    def restores(self) -> bool:
        """Whether a new run of its programs goes on from a snapshot."""
        return self.environment.get("KVD_RESTORE", "off") != "off"

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join that others start, by the settings in its environment."""
        return int(self.environment.get("KVD_MAX_WORKERS", "0")) > self.workers

    def names(self) -> list[str]:
        """The node ids of all processes, in the order in which they start."""
        servers = [f"server-{index}" for index in range(self.servers)]
        return ["scheduler", *servers, *(f"worker-{rank}" for rank in range(self.workers))]


KEY_FILE: Final = "cluster.key"
"""The name of the file with a key that was made for one job."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """What the processes of a job need to know of its key.

    Attributes:
        settings: the variables that name the key's file on this host, or say that there are no keys. They never
            contain the key: every process of this user can read them.
        text: the content of the file, for other hosts; "": there are no keys.
    """

    settings: Mapping[str, str]
    text: str = field(default="", repr=False)


def job_key(environment: Mapping[str, str], folder: Path) -> JobKey:
    """The key for a job. A new one, if its settings name none and do not say ``insecure``.

    Args:
        environment: the variables of the job, as of `kvd.node.launch.job.Job`.
        folder: of this run. Nobody but this user may enter it.

    Raises:
        ConfigError: the settings name a key that cannot be used, or are wrong.
    """
    from kvd.node.keys.keyfiles import key_text, new_cluster_key, read_key, write_key  # `kvd --help` needs no keys

    config = load({}, environ=child_environment(environment)).config
    if config.insecure:
        return JobKey({"KVD_INSECURE": "1"})
    if config.keyfile:
        path = Path(config.keyfile).absolute()
        key = read_key(path)
    else:
        path, key = folder / KEY_FILE, new_cluster_key()
        write_key(path, key)
    return JobKey({"KVD_KEYFILE": str(path)}, key_text(key))
