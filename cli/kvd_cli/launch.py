"""``kvd launch``: a whole job."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from kvd.config import Config, Loaded, parse_address
from kvd.errors import ConfigError
from kvd.node.affinity import MOST_AUTO_SERVERS, auto_servers, usable_cores
from kvd.node.launch import Host, Job, RestartRule, parse_hosts, run
from kvd_cli.flags import common_options, setting_options
from kvd_cli.options import OF_ONE_PROCESS, current
from kvd_cli.prefix import Prefixer

AUTO: Final = 0
"""As a number of servers: the number that suits this machine."""


class ServerCount(click.IntRange):
    """Parameter type of a number of servers, or ``auto``."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or `AUTO` for ``auto``."""
        if value == AUTO or str(value).strip().lower() == "auto":
            return AUTO
        return int(super().convert(value, param, ctx))


@click.command()
@click.argument("command", nargs=-1, required=True, metavar="-- CMD…")
@click.option(
    "--restart", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="restart each process that failed under its old name, up to N times: workers, the scheduler, and with "
    "--replicas 2 servers; with --restore auto also the whole job, if keys are lost; at once, then after 1 s, 2 s, "
    "4 s … up to 30 s",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="SECONDS",
    help="time that a process has to end after SIGTERM",
)  # fmt: skip
@click.option(
    "--hosts", metavar="HOST[:SLOTS],…",
    help="run on these hosts through ssh, with SLOTS workers (default: 1) on each, and one server on each unless -s "
    "says otherwise; they need the same checkout and environment as this host, at the same paths",
)  # fmt: skip
@click.option(
    "--ssh", metavar="COMMAND", help="with --hosts: how they are reached, such as 'ssh -p 2222'  [default: ssh]"
)  # fmt: skip
@click.option(
    "--log-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="write all output of each process to a file of its own in DIR",
)  # fmt: skip
@click.option(
    "-s", "--num-servers", "servers", type=ServerCount(), metavar="INTEGER|auto",
    help="number of servers in the job; auto: one for each core that the workers leave, at least as many as replicas "
    f"and at most {MOST_AUTO_SERVERS}  [KVD_NUM_SERVERS; default: auto, or one on each host]",
)  # fmt: skip
@setting_options(leave_out=(*OF_ONE_PROCESS, "num_servers"), short={"num_workers": "-n", "cpu_affinity": "--affinity"})
@common_options(output_flags=())
def launch(
    command: tuple[str, ...],
    servers: int | None,
    restart: int,
    grace: float,
    hosts: str | None,
    ssh: str | None,
    log_dir: Path | None,
) -> None:
    """Run a whole job: CMD in several workers, on this machine or on several hosts.

    The job has its own scheduler, servers and key, and ends when all workers are done. A worker that fails ends the
    job, and its exit code becomes that of the job, unless --restart, --on-worker-loss shrink or --quorum says
    otherwise. Ctrl-C ends the job in order, a second Ctrl-C kills it. No process and no key is left behind in any case.

    The first line has the address of the scheduler (--scheduler sets it). After that come the output of CMD, warnings
    and errors; -v or --log-level shows the rest of the daemons' logs, too. Each worker gets a copy of stdin.
    """
    options = current()
    if servers:
        options.settings["num_servers"] = servers
    loaded = options.load_daemon()
    if ssh is not None and hosts is None:
        raise click.UsageError("--ssh says how the --hosts are reached: give --hosts, too")
    if loaded.config.metrics_bind and parse_address(f"tcp://{loaded.config.metrics_bind}").port:
        raise ConfigError(
            f"metrics_bind = {loaded.config.metrics_bind!r}: the scheduler and the servers of a job need ports of "
            "their own: give port 0, and with -v their logs say which they have",
            setting="metrics_bind",
        )
    parsed = () if hosts is None else _hosts(hosts, loaded.config, servers)
    workers, servers = _sizes(loaded, servers, parsed)
    job = Job(
        command=command,
        workers=workers,
        servers=servers,
        environment=job_environment(loaded, restarts=restart),
        replicas=loaded.config.replicas,
        restarts=RestartRule(restart),
        grace_s=grace,
        scheduler=loaded.config.scheduler if loaded.origin["scheduler"] == "flag" else "",
        hosts=parsed,
        ssh=_ssh(ssh or "ssh"),
        stdin=0,
        shows_unfinished=True,
        announce=True,
        quiet=loaded.origin["log_level"] == "default",
        log_dir=log_dir,
    )
    click.get_current_context().exit(run(job, Prefixer(job.names()).write))


def _hosts(text: str, config: Config, servers: int | None) -> tuple[Host, ...]:
    """Return the hosts of the job, if the settings suit a job on several hosts."""
    hosts = parse_hosts(text)
    if servers == AUTO:
        raise click.UsageError("-s auto counts the cores of this machine only: with --hosts, give -s N or leave it out")
    if config.cpu_affinity == "auto":
        raise click.UsageError("--affinity auto plans the cores of this machine only: leave it out with --hosts")
    return hosts


def _sizes(loaded: Loaded, servers: int | None, hosts: Sequence[Host]) -> tuple[int, int]:
    """Return the numbers of workers and servers."""
    config = loaded.config
    sizes = {"num_workers": config.num_workers, "num_servers": config.num_servers}
    if hosts and loaded.origin["num_workers"] == "default":
        sizes["num_workers"] = sum(host.slots for host in hosts)
    if servers == AUTO or loaded.origin["num_servers"] == "default":
        suitable = len(hosts) or auto_servers(sizes["num_workers"], len(usable_cores()))
        sizes["num_servers"] = max(suitable, config.replicas)
    for name, flag in (("num_workers", "-n"), ("num_servers", "-s")):
        if sizes[name] < 1:
            option = f"{flag} N (--{name.replace('_', '-')})"
            origin = loaded.origin[name]
            if origin == "default":
                raise click.UsageError(f"give {option}: how many the job has")
            raise click.UsageError(f"{name} = {sizes[name]} (from {origin}): give {option}, N is at least 1")
    workers, found = sizes["num_workers"], sizes["num_servers"]
    dataclasses.replace(config, num_workers=workers, num_servers=found)  # with which the other settings must agree
    return workers, found


def _ssh(text: str) -> list[str]:
    """Split a command into words as a shell does."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--ssh {text!r}: {error}") from None
    if not words:
        raise click.UsageError("--ssh: give a command, such as 'ssh -p 2222'")
    return words


def job_environment(loaded: Loaded, restarts: int = 0) -> dict[str, str]:
    """Return the variables that pass the given settings to the processes of a job."""
    variables = loaded.environment()
    if restarts and loaded.origin["on_worker_loss"] == "default":
        variables["KVD_ON_WORKER_LOSS"] = "wait"  # for the worker that will be restarted
    for name in OF_ONE_PROCESS:
        variables.pop(f"KVD_{name.upper()}", None)
    if loaded.config.log_format == "auto":
        variables["KVD_LOG_FORMAT"] = "text"  # a person reads their logs, although they go through pipes
    return variables
