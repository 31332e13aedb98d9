"""`kvd bench`: how fast a cluster on this machine moves values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from kvd.client.facades.blocking import KVStore
from kvd.node.launch import Job, Launch, Stream
from kvd_cli.bench_plot import counted, is_plotted, throughput_chart
from kvd_cli.bench_usage import Watch
from kvd_cli.bench_work import MODES, ROLES_FILE, ROWS_FILE, SERVERS_FILE, WORK, Row, Task, names_of
from kvd_cli.launch import job_environment
from kvd_cli.options import OF_ONE_PROCESS, common_options, current, setting_options
from kvd_cli.output import print_json, print_table

KEPT_LINES: Final = 30
HEADINGS: Final = ("work", "keys", "bytes", "p50 µs", "p99 µs", "steps/s", "MB/s")

TRANSPORTS: Final = ("auto", "tcp", "ipc")
"""As the settings have it, shared memory between processes of this host included; or one kind of socket alone."""

FIXED: Final = {"KVD_MERGE": "sum", "KVD_STALENESS": "none"}
"""The first step is checked against a sum."""

SOCKETS_ONLY: Final = {"KVD_SHARED_MEMORY": "off"}

LISTEN_ON_IPC: Final = 'KVD_BIND="ipc://$KVD_BENCH_FOLDER/$KVD_NODE_ID" exec "$@"'
"""For a shell: a launch has its daemons listen on TCP; this gives each a socket file, named after its node."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run gave.

    Attributes:
        rows: as the workers wrote them, one per work, rank and repetition.
        roles: for each process its role, rank, peak memory in bytes and processor seconds; of a server
            the bytes of values that it led at the end, too.
    """

    rows: list[Row]
    roles: list[dict[str, Any]]


class JobFailed(Exception):
    """The job ended with another exit code than 0; the text is the end of its log."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(log)
        self.code = code


@click.command()
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--servers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--only", default=",".join(WORK), show_default=True, help="the works to do, with commas between them")
@click.option("--mode", type=click.Choice(MODES), default="none", show_default=True, help="optimizer on the servers")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True, help="a repetition")
@click.option("--repetitions", type=click.IntRange(1), default=3, show_default=True, help="of each work")
@click.option(
    "--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True,
    help="auto: the settings', shared memory where it can be had; tcp, ipc: sockets only",
)  # fmt: skip
@click.option("--bound", is_flag=True, help="push and pull the arrays of kv.bind, written and read in place")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE.svg",
    help="draw MB/s by size: of the works of one value from 4KiB to 64MiB",
)  # fmt: skip
@setting_options(leave_out=[*OF_ONE_PROCESS, "num_workers", "num_servers", "merge", "staleness", "shared_memory"])
@common_options()
def bench(
    workers: int,
    servers: int,
    only: str,
    mode: str,
    seconds: float,
    repetitions: int,
    transport: str,
    bound: bool,
    plot: Path | None,
) -> None:
    """Measure pushpull in a cluster that is started for it on this machine.

    In a step of a work every worker pushes all keys of it and pulls them back, in one call. Bytes and MB are those
    that one worker pushes; as many come back. Times are medians over workers and repetitions.

    A work is one of those that are the default of --only, or a SIZE or SIZExCOUNT, such as 16KiB or 4MiBx64.
    """
    works = _checked_works(only, plot)
    if bound and not KVStore.is_capable("bind"):
        raise click.UsageError("--bound: kv.bind is not available in this version of kvd; measure without it")
    options = current()
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        task = Task(works, mode, seconds, repetitions, folder, bound)
        job = make_job(task, workers, servers, transport, job_environment(options.load_daemon(), restarts=0))
        try:
            report = asyncio.run(measure(job, task))
        except JobFailed as failure:
            click.echo(f"{failure}\nerror: the benchmark ended with exit code {failure.code}", err=True)
            raise click.exceptions.Exit(failure.code) from None
    if plot is not None:
        how = f"{counted(workers, 'worker')}, {counted(servers, 'server')}, transport {transport}, optimizer {mode}"
        plot.write_text(throughput_chart({"kvd": curve(report.rows)}, how), encoding="utf-8")
    if options.output == "json":
        print_json({"rows": report.rows, "roles": report.roles})
    else:
        print_table(HEADINGS, table_lines(report.rows))


def _checked_works(only: str, plot: Path | None) -> tuple[str, ...]:
    """The works that were asked for. What cannot be drawn or written is refused before anything is measured."""
    try:
        works = tuple(names_of(only))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    if plot is not None:
        if not plot.parent.is_dir():
            raise click.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
        if not any(is_plotted(name) for name in works):
            raise click.BadParameter("--only has no work of one value from 4KiB to 64MiB", param_hint="--plot")
    return works


async def measure(job: Job, task: Task) -> Report:
    """Run a cluster whose workers do the task; nothing of it runs when this returns.

    Raises:
        JobFailed: it did not end well.
    """
    lines: deque[str] = deque(maxlen=KEPT_LINES)

    def keep(node: str, _stream: Stream, line: bytes) -> None:
        lines.append(f"{node} | {line.decode(errors='replace')}")

    launch = Launch(job, keep)
    daemons = [name for name in job.names() if not name.startswith("worker")]

    def tell_servers(pids: dict[str, int]) -> None:
        unfinished = Path(task.folder) / f"{SERVERS_FILE}.tmp"
        unfinished.write_text(json.dumps([pid for name, pid in pids.items() if name.startswith("server")]))
        unfinished.rename(unfinished.with_suffix(""))

    watch = Watch(daemons, launch.pid_of, tell_servers)
    watching = asyncio.create_task(watch.follow())
    try:
        code = await launch.run(handle_signals=threading.current_thread() is threading.main_thread())
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    if code != 0:
        raise JobFailed(code, "\n".join(lines))
    return Report(_read(task, ROWS_FILE), roles_of(watch, _read(task, ROLES_FILE)))


def make_job(task: Task, workers: int, servers: int, transport: str, settings: Mapping[str, str]) -> Job:
    """The cluster whose workers do the task."""
    # The children must find the packages that run here, whether or not they are installed.
    roots = [Path(__file__).parents[1], Path(sys.modules["kvd"].__path__[0]).parent]
    paths = [*map(str, dict.fromkeys(roots)), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "KVD_BENCH_FOLDER": task.folder}
    daemon = [sys.executable, "-m", "kvd_cli.main"]
    if transport == "ipc":
        daemon = ["/bin/sh", "-c", LISTEN_ON_IPC, "sh", *daemon]
    command = [sys.executable, "-m", "kvd_cli.bench_worker", task.to_json()]
    fixed = FIXED if transport == "auto" else FIXED | SOCKETS_ONLY
    environment = {**settings, **fixed, **own}
    return Job(command=command, workers=workers, servers=servers, environment=environment, daemon=daemon)


def roles_of(watch: Watch, told: Iterable[Row]) -> list[dict[str, Any]]:
    """What is known of each process: what was seen of the daemons, and what the workers told of themselves and them."""
    roles: dict[tuple[str, int], dict[str, Any]] = {}
    for name, usage in watch.last.items():
        role, _, rank = name.partition("-")
        roles[role, int(rank or 0)] = usage._asdict()
    for line in told:
        fields = {name: value for name, value in line.items() if name not in ("role", "rank")}
        roles.setdefault((line["role"], line["rank"]), {}).update(fields)
    return [{"role": role, "rank": rank, **fields} for (role, rank), fields in sorted(roles.items())]


def _read(task: Task, file: str) -> list[Row]:
    return [json.loads(line) for line in (Path(task.folder) / file).read_text().splitlines()]


def table_lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """For each work a line of medians over ranks and repetitions, as text."""
    return [_line(name, same) for name, same in _by_name(rows).items()]


def curve(rows: Iterable[Row]) -> list[tuple[int, float]]:
    """Bytes and MB/s of each work that is a point of the picture."""
    return [(same[0]["bytes"], _mb_s(same)) for name, same in _by_name(rows).items() if is_plotted(name)]


def _by_name(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    return by_name


def _steps_per_s(rows: Sequence[Row]) -> float:
    return float(statistics.median(row["iterations"] / row["seconds"] for row in rows))


def _mb_s(rows: Sequence[Row]) -> float:
    """Of one worker, in one direction."""
    nbytes: int = rows[0]["bytes"]
    return nbytes * _steps_per_s(rows) / 1e6


def _line(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    return (
        name,
        str(rows[0]["keys"]),
        str(rows[0]["bytes"]),
        f"{statistics.median(row['p50_us'] for row in rows):.0f}",
        f"{statistics.median(row['p99_us'] for row in rows):.0f}",
        f"{_steps_per_s(rows):.1f}",
        f"{_mb_s(rows):.1f}",
    )
