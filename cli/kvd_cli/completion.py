"""``kvd completion``: shell completion of commands, flags and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    For bash: eval "$(kvd completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click has all three"
    program = click.get_current_context().find_root().command
    click.echo(kind(program, {}, "kvd", "_KVD_COMPLETE").source())
