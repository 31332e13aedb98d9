"""Commands of ``kvd`` and the display of their errors."""

from __future__ import annotations

import importlib
import traceback
from typing import Any, Final, cast

import click

import kvd
from kvd.errors import KvdError
from kvd.node.daemon.exit_codes import exit_code_of
from kvd_cli import interrupts
from kvd_cli.exit_codes import INTERRUPTED
from kvd_cli.flags import common_options
from kvd_cli.options import is_verbose

COMMANDS: Final = {
    "demo": "kvd_cli.demo:demo",
    "scheduler": "kvd_cli.daemons:scheduler",
    "server": "kvd_cli.daemons:server",
    "worker": "kvd_cli.daemons:worker",
    "launch": "kvd_cli.launch:launch",
    "status": "kvd_cli.cluster:status",
    "top": "kvd_cli.top:top",
    "doctor": "kvd_cli.doctor:doctor",
    "jobs": "kvd_cli.jobs:jobs",
    "shutdown": "kvd_cli.jobs:shutdown",
    "keys": "kvd_cli.cluster:keys",
    "init": "kvd_cli.values:init",
    "push": "kvd_cli.values:push",
    "pull": "kvd_cli.values:pull",
    "pushpull": "kvd_cli.values:pushpull",
    "snapshot": "kvd_cli.snapshot:snapshot",
    "barrier": "kvd_cli.cluster:barrier",
    "command": "kvd_cli.cluster:command",
    "dead-nodes": "kvd_cli.cluster:dead_nodes",
    "key": "kvd_cli.key:key",
    "keypair": "kvd_cli.keypair:keypair",
    "bench": "kvd_cli.bench:bench",
    "config": "kvd_cli.config:config",
    "completion": "kvd_cli.completion:completion",
}
"""Name → module and attribute, in the order of the help. A command's module is imported when it is used."""


class Kvd(click.Group):
    """Group of all commands: loads each on first use, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        return cast(click.Command, getattr(importlib.import_module(module), attribute))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is about to run, and import its module."""
        found = super().resolve_command(ctx, args)
        interrupts.command_begins()
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error becomes one line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except KvdError as error:
            if is_verbose(ctx):
                traceback.print_exc()
            else:
                click.echo(f"error: {error}", err=True)
                for note in getattr(error, "__notes__", ()):
                    click.echo(f"  {note}", err=True)
            ctx.exit(exit_code_of(error))


@click.group(cls=Kvd, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(kvd.__version__, prog_name="kvd")
@common_options()
def cli() -> None:
    """A parameter server: keeps the weights of a model while workers on many machines train it.

    `kvd demo` shows a whole cluster at work. Exit codes: 0 success, 1 failure or an unhealthy cluster, 2 wrong usage
    or settings, 3 no connection, 4 timeout.
    """


def run() -> int:
    """Run the command line with the arguments of this process, and return the exit code."""
    try:
        # not standalone: click would print "Aborted!" for an interrupt, and exit with 1
        code = cli.main(prog_name="kvd", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code if isinstance(code, int) else 0
