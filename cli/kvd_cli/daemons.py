"""``kvd scheduler``, ``kvd server`` and ``kvd worker``: one process of a cluster in the foreground."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import click

from kvd.config import Loaded, Role, child_environment, named_setting, rank_variables, systemd_environment, with_unset
from kvd.node.parent import Guard
from kvd.observe import log
from kvd.observe.systemd import Notifier
from kvd_cli import interrupts
from kvd_cli.flags import common_options, setting_options
from kvd_cli.options import current

_READY_FILE = click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="write the bound address to this file when ready",
)


@click.command()
@_READY_FILE
@setting_options(role="scheduler", leave_out=["role"])
@common_options(output_flags=())
def scheduler(ready_file: Path | None) -> None:
    """Run the scheduler, which tracks the nodes of a cluster."""
    _run_daemon("scheduler", ready_file)


@click.command()
@_READY_FILE
@setting_options(role="server", leave_out=["role"])
@common_options(output_flags=())
def server(ready_file: Path | None) -> None:
    """Run a server, which keeps values and updates them."""
    _run_daemon("server", ready_file)


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, metavar="-- CMD…")
@setting_options(role="worker", leave_out=["role"])
@common_options(output_flags=())
def worker(command: tuple[str, ...]) -> None:
    """Run CMD as a worker of a cluster.

    CMD finds the cluster through its environment. Signals are passed on to CMD. The exit code is that of CMD, or
    128 + n after signal n. No process that CMD started is left behind.
    """
    loaded = current().load_daemon()
    config = loaded.config
    log.configure(config.log_format, config.log_level, "worker")
    systemd = systemd_environment()
    notifier = Notifier(systemd.notify_socket, systemd.watchdog_usec)
    guard = Guard(
        command,
        environment=_worker_environment(loaded),
        parent_pid=config.parent_pid,
        on_start=lambda pid: _tell_ready(notifier, pid, command[0]),
        on_stop=lambda: notifier.stopping("passed the signal on"),
        on_tick=notifier.watchdog,
        tick_s=notifier.watchdog_interval_s,
    )
    code = guard.run()
    notifier.close()
    click.get_current_context().exit(code)


def _tell_ready(notifier: Notifier, pid: int, program: str) -> None:
    notifier.ready(f"runs {program} as process {pid}")


def _worker_environment(loaded: Loaded) -> dict[str, str]:
    """Return the variables of the command: all given settings, and those that make it a worker."""
    config = loaded.config
    own = {
        "KVD_ROLE": "worker",
        "KVD_SCHEDULER": config.scheduler,
        "KVD_NODE_ID": config.node_id or f"{socket.gethostname()}-worker-{secrets.token_hex(6)}",
        "KVD_PARENT_PID": "",  # the guard watches the parent for both
    }
    for name in ("num_workers", "num_servers"):
        setting = named_setting(name)
        own[setting.env] = setting.show(getattr(config, name))
    # the number of workers on this host is known to none of them
    ranks = rank_variables(
        rank=config.preferred_rank, world_size=config.num_workers, local_rank=config.local_rank, local_world_size=None
    )
    return with_unset(child_environment(loaded.environment() | own), ranks)


def _run_daemon(role: Role, ready_file: Path | None) -> None:
    with interrupts.nothing_begun():
        from kvd.node.daemon.roles import run_daemon  # `kvd --help` runs no daemon

    loaded = current().load_silently()
    click.get_current_context().exit(run_daemon(loaded, role, ready_file=ready_file))
