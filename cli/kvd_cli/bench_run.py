"""One run of `kvd bench`: a cluster on this machine with workers that do a task."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvd.config import python_path
from kvd.node.launch import Job, Launch, Stream
from kvd.node.launch.signals import handlers_restored
from kvd_cli.bench_counting import FOLDER
from kvd_cli.bench_usage import Watch
from kvd_cli.bench_work import COUNTS_FILE, ROLES_FILE, ROWS_FILE, SERVERS_FILE, Row, Task

KEPT_LINES: Final = 30

TRANSPORTS: Final = ("auto", "tcp", "ipc")
"""``auto``: what the settings say, including shared memory between processes of this host; else one kind of socket."""

FIXED: Final = {"KVD_MERGE": "sum", "KVD_STALENESS": "none"}
"""The first step is checked against a sum."""

SOCKETS_ONLY: Final = {"KVD_SHARED_MEMORY": "off"}

LISTEN_ON_IPC: Final = 'KVD_BIND="ipc://$KVD_BENCH_FOLDER/$KVD_NODE_ID" exec "$@"'
"""For a shell: the launcher lets its daemons listen on TCP; this gives each a socket file, named after its node."""


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run.

    Attributes:
        rows: as the workers wrote them, one per work, rank and repetition.
        counts: counts of a step, one per work and worker, and one per work for all servers together; empty unless the
            task asks for them.
        roles: for each process its role, rank, peak memory in bytes and processor seconds; for a server also the
            bytes of the values that it led at the end.
    """

    rows: list[Row]
    counts: list[Row]
    roles: list[dict[str, Any]]


class JobFailed(Exception):
    """The job ended with an exit code other than 0; the text is the end of its log."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(log)
        self.code = code


async def measure(job: Job, task: Task) -> Report:
    """Run the task in a cluster. No process is left when this returns.

    Raises:
        JobFailed: it failed.
    """
    lines: deque[str] = deque(maxlen=KEPT_LINES)

    def keep(node: str, _stream: Stream, line: bytes) -> None:
        lines.append(f"{node} | {line.decode(errors='replace').rstrip()}")

    launch = Launch(job, keep)
    daemons = [name for name in job.names() if not name.startswith("worker")]

    def tell_servers(pids: dict[str, int]) -> None:
        unfinished = Path(task.folder) / f"{SERVERS_FILE}.tmp"
        unfinished.write_text(json.dumps([pid for name, pid in pids.items() if name.startswith("server")]))
        unfinished.rename(unfinished.with_suffix(""))

    watch = Watch(daemons, launch.pid_of, tell_servers)
    watching = asyncio.create_task(watch.follow())
    try:
        with handlers_restored():
            code = await launch.run(handle_signals=threading.current_thread() is threading.main_thread())
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    if code != 0:
        raise JobFailed(code, "\n".join(lines))
    return Report(_read(task, ROWS_FILE), _read(task, COUNTS_FILE), roles_of(watch, _read(task, ROLES_FILE)))


def make_job(task: Task, workers: int, servers: int, transport: str, settings: Mapping[str, str]) -> Job:
    """Return the job that runs the task."""
    # The children must find the packages that run here, whether or not they are installed.
    roots = [Path(__file__).parents[1], Path(sys.modules["kvd"].__path__[0]).parent]
    paths = [*map(str, dict.fromkeys(roots)), python_path()]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FOLDER: task.folder}
    daemon = [sys.executable, "-m", "kvd_cli.bench_daemon" if task.counts else "kvd_cli.main"]
    if transport == "ipc":
        daemon = ["/bin/sh", "-c", LISTEN_ON_IPC, "sh", *daemon]
    command = [sys.executable, "-m", "kvd_cli.bench_worker", task.to_json()]
    fixed = FIXED if transport == "auto" else FIXED | SOCKETS_ONLY
    environment = {**settings, **fixed, **own}
    return Job(command=command, workers=workers, servers=servers, environment=environment, daemon=daemon)


def roles_of(watch: Watch, told: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the usage of each process, as observed here and as reported by the workers."""
    roles: dict[tuple[str, int], dict[str, Any]] = {}
    for name, usage in watch.last.items():
        role, _, rank = name.partition("-")
        roles[role, int(rank or 0)] = usage._asdict()
    for line in told:
        fields = {name: value for name, value in line.items() if name not in ("role", "rank")}
        roles.setdefault((line["role"], line["rank"]), {}).update(fields)
    return [{"role": role, "rank": rank, **fields} for (role, rank), fields in sorted(roles.items())]


def _read(task: Task, file: str) -> list[Row]:
    path = Path(task.folder) / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
