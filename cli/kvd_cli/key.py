"""``kvd key``: show, make and copy the key of a cluster or of one node."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvd.errors import ConfigError
from kvd_cli import interrupts
from kvd_cli.flags import NO_CLUSTER, common_options
from kvd_cli.options import current
from kvd_cli.output import print_json, print_table

if TYPE_CHECKING:  # `kvd --help` needs no keys
    from kvd.node.keys.keyfiles import NodeKey

STDIN: Final = "on stdin"
"""What errors call a key file that comes through stdin."""

_ELSEWHERE: Final = "kvd key export | ssh HOST kvd key import"

_OUT: Final = click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="the file to write  [default: this user's own cluster key]",
)  # fmt: skip


@click.group()
@common_options(leave_out=NO_CLUSTER)
def key() -> None:
    """Make, show and copy the key that opens a cluster.

    The first scheduler of a user makes the user's key automatically. The key permits everything in the cluster.
    """


@key.command()
@common_options(leave_out=NO_CLUSTER)
def show() -> None:
    """Show the key of this user's processes (--keyfile: another key). The secret part is not shown."""
    with interrupts.nothing_begun():
        from kvd.node.keys.keyring import key_source

    source = key_source(current().load().config.keyfile)
    _print(source.path, source.read())


@key.command()
@_OUT
@common_options(leave_out=NO_CLUSTER)
def new(out: Path | None) -> None:
    """Make the key of a cluster, in a file that only this user can read."""
    with interrupts.nothing_begun():
        from kvd.node.keys.keyfiles import new_cluster_key, write_key
        from kvd.node.keys.keyring import user_key_path

    path, made = user_key_path() if out is None else out, new_cluster_key()
    write_key(path, made)
    _print(path, made)
    click.echo(f"other hosts need the same key: {_ELSEWHERE}", err=True)


@key.command()
@click.option("--force", is_flag=True, help="even to a terminal")
@common_options(output_flags=(), leave_out=NO_CLUSTER)
def export(force: bool) -> None:
    """Write the key file to stdout, for a pipe: kvd key export | ssh HOST kvd key import"""
    with interrupts.nothing_begun():
        from kvd.node.keys.keyfiles import key_text
        from kvd.node.keys.keyring import key_source

    if sys.stdout.isatty() and not force:
        raise ConfigError(
            f"stdout is a terminal, and the key is secret: pipe it, as in {_ELSEWHERE}; --force shows it all the same"
        )
    click.echo(key_text(key_source(current().load().config.keyfile).read()), nl=False)


@key.command("import")
@_OUT
@common_options(leave_out=NO_CLUSTER)
def import_(out: Path | None) -> None:
    """Read a key file from stdin, and keep it as this user's key: kvd key export | ssh HOST kvd key import"""
    with interrupts.nothing_begun():
        from kvd.node.keys.keyfiles import parse_key, write_key
        from kvd.node.keys.keyring import user_key_path

    path = user_key_path() if out is None else out
    imported = parse_key(_read_stdin(), STDIN)
    if os.path.lexists(path):
        _check_same(path, imported)
    else:
        write_key(path, imported)
    _print(path, imported)


def _check_same(path: Path, imported: NodeKey) -> None:
    """Check that an existing file contains the same key.

    Raises:
        ConfigError: it contains another one, or cannot be used.
    """
    from kvd.node.keys.keyfiles import read_key
    from kvd.transport.zmq.curve import fingerprint

    there = read_key(path)
    if there.keypair != imported.keypair:
        raise ConfigError(
            f"the key file {path} has another key (public key {fingerprint(there.keypair.public)}) than the one "
            f"{STDIN} ({fingerprint(imported.keypair.public)}), and a key that is in use must not be lost: move the "
            "file away, or give --out FILE",
            setting="keyfile",
        )


def _read_stdin() -> str:
    """Read a key file from stdin.

    Raises:
        ConfigError: it is no key file.
    """
    from kvd.node.keys.keyfiles import MAX_FILE_BYTES

    if sys.stdin is not None and sys.stdin.isatty():
        raise ConfigError(f"stdin is a terminal: pipe a key into this command, as in {_ELSEWHERE}")
    content = b""
    with contextlib.suppress(OSError):  # a folder, or closed: nothing comes
        content = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if not content.strip():
        raise ConfigError(f"nothing came through stdin: look for the error of the other command in {_ELSEWHERE}")
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"what came through stdin is not a key file: it has more than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError("what came through stdin is not a key file: it is not text") from None


def _print(path: Path, of: NodeKey) -> None:
    """Print the public part of a key."""
    parts = {"file": str(path.absolute()), "kind": str(of.kind), "public": of.keypair.public}
    if of.name:
        parts["name"] = of.name
    if of.scheduler != of.keypair.public:
        parts["scheduler"] = of.scheduler
    if current().output == "json":
        print_json(parts)
    else:
        print_table(["PART", "VALUE"], list(parts.items()))
