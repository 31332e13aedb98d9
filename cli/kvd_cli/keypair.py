"""``kvd keypair``: keys for single nodes, with roles in a list of allowed keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvd.core.principals import KeyRole
from kvd.errors import ConfigError
from kvd.files import read_file
from kvd_cli import interrupts
from kvd_cli.flags import NO_CLUSTER, common_options
from kvd_cli.options import current
from kvd_cli.output import print_json

if TYPE_CHECKING:  # `kvd --help` needs no keys
    from kvd.node.keys.keyfiles import NodeKey

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
_TABLE: Final = re.compile(r"^\s*\[", re.MULTILINE)
_SECRET: Final = re.compile(r"^\s*secret\s*=", re.MULTILINE)  # stands before any table in a key file, and in no list


@click.group()
@common_options(leave_out=NO_CLUSTER)
def keypair() -> None:
    """Make keys for single nodes, for clusters whose parties do not trust each other."""


@keypair.command()
@click.argument("name")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="the file for the key  [default: NAME.key]",
)  # fmt: skip
@click.option(
    "--scheduler-key", "scheduler", metavar="KEY|FILE",
    help="the public key of the scheduler, or a file that has it: its key file, or a list of allowed keys with one "
    "scheduler  [default: that of this user's own key, or of --keyfile]",
)  # fmt: skip
@click.option(
    "--role", "roles", type=click.Choice([role.value for role in KeyRole]), multiple=True,
    default=[KeyRole.WORKER.value], show_default=True,
    help="role of the key; can be repeated",
)  # fmt: skip
@click.option(
    "--job", "jobs", metavar="PATTERN", multiple=True,
    help="jobs that a worker or observer may join, such as 'vision-*'; can be repeated  [default: all]",
)  # fmt: skip
@common_options(leave_out=NO_CLUSTER)
def new(name: str, out: Path | None, scheduler: str | None, roles: tuple[str, ...], jobs: tuple[str, ...]) -> None:
    """Make a key for the node NAME, in a file that only this user can read.

    Its public part is printed as the list of allowed keys takes it: kvd keypair new trainer-a >> allowed.toml. A
    scheduler or server reads its list again when it receives SIGHUP.
    """
    with interrupts.nothing_begun():
        from kvd.node.keys.keyfiles import new_node_key, public_part, write_key

    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} is no name for a key: use 1 to 64 letters, digits and the characters . _ + -")
    roles = tuple(dict.fromkeys(roles))
    path = Path(f"{name}.key") if out is None else out
    made = new_node_key(name, _scheduler_key(scheduler, roles))
    write_key(path, made)
    if current().output == "json":
        print_json(
            {"file": str(path.absolute()), "name": name, "key": made.keypair.public, "roles": roles, "jobs": jobs}
        )
    else:
        click.echo(public_part(made, roles, jobs), nl=False)
    click.echo(f"the secret part is in {path}: bring it to its node, and remove it here", err=True)


def _scheduler_key(given: str | None, roles: tuple[str, ...]) -> str:
    """Return the public key of the scheduler; "" for the key of the scheduler itself."""
    from kvd.node.keys.keyring import key_source
    from kvd.transport.zmq.curve import is_key

    if given is not None:
        return given if is_key(given) else _in_file(Path(given))
    if roles == (KeyRole.SCHEDULER,):
        return ""
    try:
        return _scheduler_of(key_source(current().load().config.keyfile).read())
    except ConfigError as error:
        raise ConfigError(f"give --scheduler-key, the public key of the scheduler ({error})") from None


def _in_file(path: Path) -> str:
    """Return the scheduler's public key from a key file or a list of allowed keys."""
    from kvd.node.keys.allowed_keys import AllowedKeys
    from kvd.node.keys.keyfiles import read_key

    try:
        content = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"--scheduler-key {path}: neither a public key of 40 characters nor a file ({problem})"
        ) from None
    if _SECRET.search(_TABLE.split(content, maxsplit=1)[0]):
        return _scheduler_of(read_key(path))
    schedulers = AllowedKeys(path).holders_of(KeyRole.SCHEDULER)
    if len(schedulers) != 1:
        raise ConfigError(f"--scheduler-key {path}: the list has {len(schedulers)} keys of a scheduler, not one")
    return schedulers[0].key


def _scheduler_of(key: NodeKey) -> str:
    return key.scheduler or key.keypair.public
