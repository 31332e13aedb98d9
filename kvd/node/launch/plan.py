"""What each process of a job is started with: command, environment, cores."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.config import child_environment, rank_variables, with_unset
from kvd.node.affinity import CorePlan, plan_cores, usable_cores
from kvd.node.launch.job import Job
from kvd.node.listening import LOOPBACK
from kvd.node.parent import guarded, tied

PARENT_GRACE_S: Final = 2.0
"""How long a worker may take to end after its launcher was killed: its cluster is gone already."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process.

    Attributes:
        name: its node id.
        command: program and arguments.
        environment: all of its variables.
        is_guard: whether the process is a guard, which runs the real command below itself.
        cores: where it may run; None: anywhere.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    is_guard: bool = False
    cores: Collection[int] | None = None


class JobPlan:
    """The processes of a job.

    Attributes:
        name: of the job.
        remarks: what a person should know about the plan.
    """

    def __init__(self, job: Job) -> None:
        self.remarks: tuple[str, ...] = ()
        self._job = job
        self.name = job.environment.get("KVD_JOB") or f"launch-{secrets.token_hex(4)}"
        # by this token the workers know each other, and a restarted worker the run that it belongs to
        self._token = job.environment.get("KVD_RUN") or secrets.token_hex(16)
        self._cores: CorePlan | None = None
        if job.environment.get("KVD_CPU_AFFINITY") == "auto":
            self._plan_cores(usable_cores())

    def scheduler(self, ready_file: Path, notify_socket: str) -> ProcessSpec:
        """The scheduler: it listens, writes its address and reports that it is ready."""
        changes = {"KVD_BIND": self._job.scheduler or LOOPBACK, "NOTIFY_SOCKET": notify_socket}
        return self._daemon("scheduler", ("scheduler", "--ready-file", str(ready_file)), "", changes, None)

    def server(self, index: int, scheduler: str) -> ProcessSpec:
        """One of the servers; `scheduler` is the address of the scheduler."""
        changes = {"KVD_PREFERRED_RANK": str(index), "KVD_BIND": ""}
        return self._daemon(f"server-{index}", ("server",), scheduler, changes, index)

    def worker(self, rank: int, scheduler: str) -> ProcessSpec:
        """One of the workers, under a guard; `scheduler` is the address of the scheduler."""
        changes = {
            "KVD_ROLE": "worker",
            "KVD_PREFERRED_RANK": str(rank),
            "KVD_LOCAL_RANK": str(rank),
            "KVD_JOB": self.name,
            "KVD_RUN": self._token,
            "KVD_PARENT_PID": "",  # its guard watches the launcher
            "KVD_BIND": "",
            "PYTHONUNBUFFERED": "1",  # its lines should appear when they are printed, although they go to a pipe
        }
        name = f"worker-{rank}"
        command = guarded(self._job.command, min(PARENT_GRACE_S, self._job.grace_s))
        environment = self._environment(name, scheduler, changes)
        workers = self._job.workers
        ranks = rank_variables(rank=rank, world_size=workers, local_rank=rank, local_world_size=workers)
        environment = with_unset(environment, ranks)
        return ProcessSpec(name, command, environment, is_guard=True, cores=self._cores_of(None))

    def _daemon(
        self, name: str, arguments: Sequence[str], scheduler: str, changes: Mapping[str, str], server: int | None
    ) -> ProcessSpec:
        state = self._job.environment.get("KVD_STATE_DIR", "")
        own = {
            "KVD_ROLE": "",
            "KVD_PARENT_PID": str(os.getpid()),
            "KVD_STATE_DIR": str(Path(state) / name) if state else "",
            **changes,
        }
        environment = self._environment(name, scheduler, own)
        return ProcessSpec(name, tied([*self._job.daemon, *arguments]), environment, cores=self._cores_of(server))

    def _environment(self, name: str, scheduler: str, changes: Mapping[str, str]) -> dict[str, str]:
        cluster = {
            "KVD_SCHEDULER": scheduler,
            "KVD_NUM_WORKERS": str(self._job.workers),
            "KVD_NUM_SERVERS": str(self._job.servers),
            "KVD_NODE_ID": name,
        }
        return child_environment({**self._job.environment, **cluster, **changes})

    def _plan_cores(self, cores: Collection[int]) -> None:
        workers, servers = self._job.workers, self._job.servers
        self._cores = plan_cores(workers, servers, cores)
        if self._cores is None:
            count = workers + servers
            text = f"no server gets a core of its own: {count} workers and servers, {len(cores)} usable cores"
        else:
            text = f"servers run on cores {_listed(self._cores.servers)}, all others on {_listed(self._cores.rest)}"
        self.remarks = (text,)

    def _cores_of(self, server: int | None) -> Collection[int] | None:
        return None if self._cores is None else self._cores.cores_of(server)


def _listed(cores: Collection[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
