"""Output on stdout: a table for a person, columns for a pipe, JSON for a program."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvd.config import terminal_colour

STYLES = {
    "active": "green",
    "ready": "green",
    "idle": "cyan",
    "done": "cyan",
    "left": "dim",
    "dead": "bold red",
    "lost": "bold red",
    "back": "yellow",
    "returning": "yellow",
    "missing": "yellow",
    "silent": "yellow",
    "failing": "bold red",
}
"""The style of a cell that consists of this word."""


def console() -> Console:
    """Return a console on stdout, with colours if it is a terminal that shows them and ``NO_COLOR`` is unset."""
    # None turns bold off too, which rich's no_color does not
    system: Literal["auto"] | None = "auto" if terminal_colour(None, sys.stdout) else None
    return Console(file=sys.stdout, color_system=system, highlight=False, soft_wrap=not sys.stdout.isatty())


def print_json(value: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headings. In a pipe, each row is one line, with nothing cut."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(len(line[index]) for line in (columns, *cells)) for index in range(len(columns))]
        for line in (columns, *cells):
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in cells:
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in line))
    console().print(table)


def print_advice(lines: Sequence[str], *, err: bool = False) -> None:
    """Print one piece of advice per line, wrapped between words on a terminal only."""
    stream = sys.stderr if err else sys.stdout
    for line in lines:
        text = printable(line)
        if stream.isatty():
            width = Console(file=stream).width
            text = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        click.echo(text, err=err)


def printable(text: str) -> str:
    """Escape control characters: names come from the network, and must not move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def lasting(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 0.001:
        return "less than 1 ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def ago(seconds: float) -> str:
    """Return a duration in the past for people, such as ``3 min ago``."""
    if seconds < 1:
        return "now"
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"
