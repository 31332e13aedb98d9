"""Commands on runs of jobs and on their shared daemons: ``jobs``, ``jobs end``, ``shutdown``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvd_cli.connect import observer
from kvd_cli.flags import common_options
from kvd_cli.options import current
from kvd_cli.output import print_json, print_table


@click.group(invoke_without_command=True)
@common_options()
@click.pass_context
def jobs(ctx: click.Context) -> None:
    """List the runs of all jobs that are running or can still be read."""
    if ctx.invoked_subcommand is not None:
        return
    with observer("listing the jobs") as cluster:
        runs = cluster.jobs()
    if current().output == "json":
        print_json(runs)
    else:
        print_runs(runs)


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the runs."""
    print_table(["JOB", "RUN", "PHASE", "WORKERS"], [[r["job"], r["run"], r["phase"], _workers(r)] for r in runs])


def _workers(run: Mapping[str, Any]) -> str:
    if not run["num_workers"]:
        return "-"
    most = f" to {run['max_workers']}" if run.get("max_workers", 0) > run["num_workers"] else ""
    return f"{run['workers']} of {run['num_workers']}{most}"


@jobs.command()
@common_options(output_flags=())
@click.argument("name")
def end(name: str) -> None:
    """End the latest run of the job NAME, and free its memory. NAME@RUN ends one that is over."""
    with observer(f"ending job {name!r}") as cluster:
        cluster.end_job(name)


@click.command()
@common_options(output_flags=())
@click.option("--force", is_flag=True, help="even if a job is running")
def shutdown(force: bool) -> None:
    """End the scheduler and all servers."""
    with observer("ending the daemons") as cluster:
        cluster.shut_down(force=force)
