"""`kvd bench`: how fast a cluster on this machine moves values."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click

from kvd_cli import interrupts
from kvd_cli.bench_plot import counted, is_plotted, throughput_chart
from kvd_cli.bench_report import COUNT_HEADINGS, HEADINGS, count_lines, count_notes, curve, table_lines
from kvd_cli.bench_run import TRANSPORTS, JobFailed, make_job, measure
from kvd_cli.bench_work import MODES, WORK, Task, names_of
from kvd_cli.flags import common_options, setting_options
from kvd_cli.launch import job_environment
from kvd_cli.options import OF_METRICS, OF_ONE_PROCESS, OF_SNAPSHOTS, current
from kvd_cli.output import print_json, print_table


@click.command()
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="number of workers")
@click.option("--servers", type=click.IntRange(1), default=1, show_default=True, help="number of servers")
@click.option("--only", default=",".join(WORK), show_default=True, help="works to measure, separated by commas")
@click.option("--mode", type=click.Choice(MODES), default="none", show_default=True, help="optimizer on the servers")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True, help="length of a repetition"
)
@click.option("--repetitions", type=click.IntRange(1), default=3, show_default=True, help="repetitions of each work")
@click.option(
    "--transport", type=click.Choice(TRANSPORTS), default="auto", show_default=True,
    help="auto: as the settings say, with shared memory where possible; tcp, ipc: sockets only",
)  # fmt: skip
@click.option("--bound", is_flag=True, help="push and pull the arrays of kv.bind in place")
@click.option("--copy-free", is_flag=True, help="get the values with copy=False, in new arrays that are read-only")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE.svg",
    help="draw MB/s by size, from the works with one value from 4KiB to 64MiB",
)  # fmt: skip
@setting_options(
    leave_out=[
        *OF_ONE_PROCESS,
        *OF_SNAPSHOTS,
        *OF_METRICS,
        "num_workers",
        "num_servers",
        "merge",
        "staleness",
        "shared_memory",
    ]
)
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
    copy_free: bool,
    plot: Path | None,
) -> None:
    """Measure pushpull on this machine, in a cluster started for it.

    In each step of a work, every worker pushes all keys of the work and pulls them back, in one call. Bytes and MB
    count what one worker pushes; it pulls the same amount. Times are medians over workers and repetitions.

    With -v, a second table says what a step costs a worker, and all servers together: processor time, and, counted in
    further steps, context switches, system calls (where strace is installed) and calls of Python functions.

    A work is one of the names in the default of --only, or SIZE or SIZExCOUNT, such as 16KiB or 4MiBx64.
    """
    with interrupts.nothing_begun():
        from kvd.client.facades.blocking import KVStore  # `kvd --help` needs no client

    works = _checked_works(only, plot)
    if bound and not KVStore.is_capable("bind"):
        raise click.UsageError("--bound: kv.bind is not available in this version of kvd; measure without it")
    options = current()
    if options.verbose:  # a log of everything would be measured, too
        options.settings.setdefault("log_level", "info")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        task = Task(works, mode, seconds, repetitions, folder, bound, copy_free, options.verbose)
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
        counts = {"counts": report.counts} if options.verbose else {}
        print_json({"rows": report.rows, "roles": report.roles, **counts})
        return
    print_table(HEADINGS, table_lines(report.rows))
    if options.verbose:
        print_table(COUNT_HEADINGS, count_lines(report.rows, report.counts))
        for note in count_notes(report.counts):
            click.echo(f"note: {note}", err=True)


def _checked_works(only: str, plot: Path | None) -> tuple[str, ...]:
    """Return the works to measure. A chart that cannot be drawn or written is refused before anything is measured."""
    try:
        works = tuple(names_of(only))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    if plot is not None:
        if not plot.parent.is_dir():
            raise click.BadParameter(f"there is no directory {plot.parent}", param_hint="--plot")
        if not any(is_plotted(name) for name in works):
            raise click.BadParameter("--only names no work with one value from 4KiB to 64MiB", param_hint="--plot")
    return works
