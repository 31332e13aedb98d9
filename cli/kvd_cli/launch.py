"""``kvd launch``: a whole job."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Final

import click

from kvd.config import Loaded
from kvd.errors import ConfigError
from kvd.node.affinity import MOST_AUTO_SERVERS, auto_servers, usable_cores
from kvd.node.launch import Job, run
from kvd_cli.options import OF_ONE_PROCESS, common_options, current, setting_options
from kvd_cli.prefix import Prefixer

_PLACES = ("local", "slurm", "ray", "kubernetes")
AUTO: Final = 0
"""As a number of servers: whatever suits this machine."""


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
@click.option("--on", "place", type=click.Choice(_PLACES), default="local", show_default=True, help="where to run it")
@click.option(
    "--restart", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="start a worker that failed again, under its old name, up to N times",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="SECONDS",
    help="what a process may take to end after SIGTERM",
)  # fmt: skip
@click.option(
    "-s", "--num-servers", "servers", type=ServerCount(), metavar="INTEGER|auto",
    help="servers in the job; auto: as many as the workers leave cores, at least 1, at most "
    f"{MOST_AUTO_SERVERS}  [KVD_NUM_SERVERS]",
)  # fmt: skip
@setting_options(leave_out=(*OF_ONE_PROCESS, "num_servers"), short={"num_workers": "-n", "cpu_affinity": "--affinity"})
@common_options()
def launch(command: tuple[str, ...], servers: int | None, place: str, restart: int, grace: float) -> None:
    """Run a whole job: CMD in several workers.

    They get a scheduler and servers of their own, and the job ends when the workers are done. The exit code is that
    of the job: of the first worker that failed, which ends the rest. Ctrl-C ends the job in good order, a second one
    at once; nothing is left running in any case.
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
            raise click.UsageError(f"give {flag} N (--{name.replace('_', '-')}): how many there are to be")
    job = Job(
        command=command,
        workers=config.num_workers,
        servers=config.num_servers,
        environment=job_environment(loaded, restarts=restart),
        restarts=restart,
        grace_s=grace,
    )
    click.get_current_context().exit(run(job, Prefixer(job.names()).write))


def job_environment(loaded: Loaded, restarts: int = 0) -> dict[str, str]:
    """The variables that give the processes of a job the settings that were given here."""
    variables = loaded.environment()
    if restarts and loaded.origin["on_worker_loss"] == "default":
        variables["KVD_ON_WORKER_LOSS"] = "wait"  # for the one that will be started again
    for name in OF_ONE_PROCESS:
        variables.pop(f"KVD_{name.upper()}", None)
    if loaded.config.log_format == "auto" and sys.stderr.isatty():
        variables["KVD_LOG_FORMAT"] = "text"  # their logs go through a pipe, but a person reads them
    return variables
