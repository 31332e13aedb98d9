"""What each process of a job is started with: command, environment, cores."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvd.config import child_environment, rank_variables, shared_environment, torch_rendezvous
from kvd.errors import ConfigError
from kvd.node.affinity import CorePlan, plan_cores, usable_cores
from kvd.node.launch.hosts import LOOPBACK_NUMBER, Placement, on_host, order
from kvd.node.launch.job import Job, JobKey
from kvd.node.parent import guarded, tied
from kvd.node.remote import Mode, free_port

READY_FILE: Final = "scheduler"
"""The name of the file with the address of the scheduler."""

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
        host: where it runs, through an ssh; empty: here.
        order: what the other host is told on stdin.
        takes_stdin: whether it gets a copy of the launcher's stdin.
        shows_unfinished: whether the beginning of its line is handed on while the end has yet to come.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    is_guard: bool = False
    cores: Collection[int] | None = None
    host: str = ""
    order: bytes | None = None
    takes_stdin: bool = False
    shows_unfinished: bool = False


class JobPlan:
    """The processes of a job.

    Attributes:
        placement: which process runs on which host.
        name: of the job.
        remarks: what a person should know about the plan.
    """

    def __init__(self, job: Job, key: JobKey) -> None:
        self.remarks: tuple[str, ...] = ()
        self._job = job
        self._key = key
        self.name = job.environment.get("KVD_JOB") or _own_name(job)
        # by this token the workers know each other, and a restarted worker the run that it belongs to
        self._token = job.environment.get("KVD_RUN") or secrets.token_hex(16)
        self._run = 0  # how many runs there were before
        self.placement = Placement(job.hosts, job.workers)
        self._rendezvous = LOOPBACK_NUMBER, free_port()
        self._cores: CorePlan | None = None
        if job.environment.get("KVD_CPU_AFFINITY") == "auto":
            self._plan_cores(usable_cores())

    def begin_run(self) -> None:
        """From now on, processes belong to the next run: they have another token, and no state of the one before."""
        self._token = secrets.token_hex(16)
        self._run += 1

    def meet_at(self, address: str, port: int) -> None:
        """Have the workers meet at a free port of the host of rank 0, for ``torch.distributed``."""
        self._rendezvous = address, port

    def look(self) -> bytes:
        """What the hosts are asked before anything starts: do they have the folder and the program?"""
        return self._order(self._job.command, {}, "")

    def scheduler(self, bind: str, folder: Path, notify_socket: str) -> ProcessSpec:
        """The scheduler: it listens, writes its address and reports that it is ready.

        Args:
            bind: where it listens.
            folder: of this run; the address is in `READY_FILE` there. In a job with restarts that has no folder for
                state, the state is kept there, too, so that a scheduler that is started again knows its nodes.
            notify_socket: where it reports that it is ready; empty: nowhere.
        """
        changes = {"KVD_BIND": bind, "NOTIFY_SOCKET": notify_socket}
        if self._job.restarts.limit and not self._job.environment.get("KVD_STATE_DIR"):
            changes["KVD_STATE_DIR"] = str(folder / self._of_run("state"))
        return self._daemon("scheduler", ("scheduler", "--ready-file", str(folder / READY_FILE)), "", changes, None)

    def server(self, index: int, scheduler: str) -> ProcessSpec:
        """One of the servers; `scheduler` is the address by which it reaches the scheduler."""
        changes = {"KVD_PREFERRED_RANK": str(index), "KVD_BIND": ""}
        return self._daemon(f"server-{index}", ("server",), scheduler, changes, index)

    def worker(self, rank: int, scheduler: str) -> ProcessSpec:
        """One of the workers, under a guard; `scheduler` is the address by which it reaches the scheduler."""
        place = self.placement.worker(rank)
        changes = {
            "KVD_ROLE": "worker",
            "KVD_PREFERRED_RANK": str(rank),
            "KVD_LOCAL_RANK": str(place.local_rank),
            "KVD_JOB": self.name,
            "KVD_RUN": self._token,
            "KVD_PARENT_PID": "",  # its guard watches the launcher
            "KVD_BIND": "",
            "PYTHONUNBUFFERED": "1",  # its lines should appear when they are printed, although they go to a pipe
        }
        name = f"worker-{rank}"
        ranks = rank_variables(
            rank=rank,
            world_size=self._job.workers,
            local_rank=place.local_rank,
            local_world_size=place.local_workers,
        )
        # those of a launcher around this one are about its own processes
        settings = self._settings(name, scheduler, {**ranks, **torch_rendezvous(*self._rendezvous), **changes})
        takes_stdin = self._job.stdin is not None
        if place.host:
            spec = self._on_host(name, place.host, self._job.command, settings, takes_stdin=takes_stdin)
        else:
            command = guarded(self._job.command, self._grace_s())
            spec = ProcessSpec(name, command, child_environment(settings), is_guard=True, cores=self._cores_of(None))
        return replace(spec, takes_stdin=takes_stdin, shows_unfinished=self._job.shows_unfinished)

    def _daemon(
        self, name: str, arguments: Sequence[str], scheduler: str, changes: Mapping[str, str], server: int | None
    ) -> ProcessSpec:
        state = self._job.environment.get("KVD_STATE_DIR", "")
        host = "" if server is None else self.placement.server(server)
        own = {
            "KVD_ROLE": "",
            "KVD_PARENT_PID": "" if host else str(os.getpid()),
            "KVD_STATE_DIR": str(Path(state) / self._of_run(name)) if state else "",
            **changes,
        }
        command, settings = [*self._job.daemon, *arguments], self._settings(name, scheduler, own)
        if host:
            return self._on_host(name, host, command, settings)
        return ProcessSpec(name, tied(command), child_environment(settings), cores=self._cores_of(server))

    def _of_run(self, name: str) -> str:
        return f"{name}-run-{self._run}" if self._run else name

    def _on_host(
        self, name: str, host: str, command: Sequence[str], settings: Mapping[str, str], *, takes_stdin: bool = False
    ) -> ProcessSpec:
        """A process on another host, under a guard there. Its ssh ends with this process."""
        ssh = tied(on_host(self._job.ssh, host, Mode.RUN))
        given = self._order(command, settings, self._key.text, takes_stdin=takes_stdin)
        return ProcessSpec(name, ssh, child_environment({}), host=host, order=given)

    def _order(
        self, command: Sequence[str], settings: Mapping[str, str], key: str, *, takes_stdin: bool = False
    ) -> bytes:
        found = shutil.which(command[0])  # the PATH here has the environment that the hosts have, too
        program = [command[0] if found is None or "/" in command[0] else found]
        variables = {**shared_environment(), **settings}
        return order([*program, *command[1:]], variables, _folder(), self._grace_s(), key, takes_stdin=takes_stdin)

    def _grace_s(self) -> float:
        return min(PARENT_GRACE_S, self._job.grace_s)

    def _settings(self, name: str, scheduler: str, changes: Mapping[str, str]) -> dict[str, str]:
        cluster = {
            "KVD_SCHEDULER": scheduler,
            "KVD_NUM_WORKERS": str(self._job.workers),
            "KVD_NUM_SERVERS": str(self._job.servers),
            "KVD_NODE_ID": name,
        }
        return {**self._job.environment, **cluster, **self._key.settings, **changes}

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


def _own_name(job: Job) -> str:
    """A job whose snapshots are to be found by its next start has the name that every job has that is given none."""
    return "default" if job.environment.get("KVD_SNAPSHOT_DIR") else f"launch-{secrets.token_hex(4)}"


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise ConfigError("the folder in which this runs is gone: change to one that all hosts have") from None


def _listed(cores: Collection[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
