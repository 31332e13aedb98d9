"""``kvd launch``: a whole job."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Final

import click

from kvd.config import Loaded
from kvd.errors import ConfigError
from kvd.node.affinity import MOST_AUTO_SERVERS, auto_servers, usable_cores
from kvd.node.launch import Job, run
from kvd_cli.flags import common_options, setting_options
from kvd_cli.options import OF_ONE_PROCESS, current
from kvd_cli.prefix import Prefixer

_PLACES = ("local", "slurm", "ray", "kubernetes")
AUTO: Final = 0
"""As a number of servers: the number that suits this machine."""


class ServerCount(click.IntRange):
    """A number of servers, or ``auto``."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; `AUTO` for ``auto``."""
        if value == AUTO or str(value).strip().lower() == "auto":
            return AUTO
        return int(super().convert(value, param, ctx))


@click.command()
@click.argument("command", nargs=-1, required=True, metavar="-- CMD…")
@click.option(
    "--on", "place", type=click.Choice(_PLACES), default="local", show_default=True, help="where the job runs"
)
@click.option(
    "--restart", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="restart a failed worker under its old name up to N times",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="SECONDS",
    help="time that a process has to end after SIGTERM",
)  # fmt: skip
@click.option(
    "--job",
    "job_name",
    metavar="NAME",
    help="name of the job; without it the job gets one that no other has  [KVD_JOB]",
)
@click.option(
    "--log-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="write all output of each process to a file of its own in DIR",
)  # fmt: skip
@click.option(
    "-s", "--num-servers", "servers", type=ServerCount(), metavar="INTEGER|auto",
    help="number of servers in the job; auto: one for each core that the workers leave, from 1 to "
    f"{MOST_AUTO_SERVERS}  [KVD_NUM_SERVERS]",
)  # fmt: skip
@setting_options(
    leave_out=(*OF_ONE_PROCESS, "num_servers", "job"), short={"num_workers": "-n", "cpu_affinity": "--affinity"}
)
@common_options()
def launch(
    command: tuple[str, ...],
    servers: int | None,
    place: str,
    restart: int,
    grace: float,
    job_name: str | None,
    log_dir: Path | None,
) -> None:
    """Run a whole job on this machine: CMD in several workers.

    The job has its own scheduler and servers, and ends when all workers are done. A worker that fails ends the job;
    its exit code becomes that of the job. Ctrl-C ends the job in order, a second Ctrl-C kills it. No process is left
    running in any case.

    The first line says where the scheduler is (--scheduler: where it shall listen). After that come the output of CMD,
    warnings and errors; -v or --log-level shows the rest of the daemons' logs too.
    """
    options = current()
    if servers:
        options.settings["num_servers"] = servers
    loaded = options.load_daemon()
    if place != "local":
        raise ConfigError(f"--on {place} is not available yet: run `kvd launch` on one machine, or start the daemons")
    config = loaded.config
    if servers == AUTO and config.num_workers > 0:
        config = dataclasses.replace(config, num_servers=auto_servers(config.num_workers, len(usable_cores())))
    for name, flag in (("num_workers", "-n"), ("num_servers", "-s")):
        if getattr(config, name) < 1:
            option = f"{flag} N (--{name.replace('_', '-')})"
            origin = loaded.origin[name]
            if origin == "default":
                raise click.UsageError(f"give {option}: how many the job has")
            raise click.UsageError(f"{name} = {getattr(config, name)} (from {origin}): give {option}, N is at least 1")
    job = Job(
        command=command,
        workers=config.num_workers,
        servers=config.num_servers,
        environment=job_environment(loaded, restarts=restart) | ({"KVD_JOB": job_name} if job_name else {}),
        restarts=restart,
        grace_s=grace,
        scheduler=config.scheduler if loaded.origin["scheduler"] == "flag" else "",
        announce=True,
        quiet=loaded.origin["log_level"] == "default",
        log_dir=log_dir,
    )
    click.get_current_context().exit(run(job, Prefixer(job.names()).write))


def job_environment(loaded: Loaded, restarts: int = 0) -> dict[str, str]:
    """The variables that pass the given settings on to the processes of a job."""
    variables = loaded.environment()
    if restarts and loaded.origin["on_worker_loss"] == "default":
        variables["KVD_ON_WORKER_LOSS"] = "wait"  # for the worker that will be restarted
    for name in OF_ONE_PROCESS:
        variables.pop(f"KVD_{name.upper()}", None)
    if loaded.config.log_format == "auto" and sys.stderr.isatty():
        variables["KVD_LOG_FORMAT"] = "text"  # a person reads their logs, although they go through a pipe
    return variables
