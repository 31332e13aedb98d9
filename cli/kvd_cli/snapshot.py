"""Commands that write a snapshot of a job, and make one again: ``snapshot save``, ``snapshot restore``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kvd_cli.connect import observer
from kvd_cli.flags import common_options
from kvd_cli.options import current
from kvd_cli.output import print_json, print_table, size

_FOLDER = click.Path(path_type=Path)


@click.group()
def snapshot() -> None:
    """Save the values of a job with the state of its optimizer, or make them again."""


@snapshot.command()
@click.argument("path", type=_FOLDER)
@common_options()
def save(path: Path) -> None:
    """Write a snapshot to the new folder PATH while the job trains.

    With dist_sync all keys are of one step of the training. No worker takes part: the servers keep the step until it is
    written. It takes an operator's key.
    """
    begun = time.monotonic()
    with observer(f"saving to {path}") as cluster:
        saved = cluster.save(path)
    seconds = time.monotonic() - begun
    if current().output == "json":
        facts = saved._asdict()
        del facts["nbytes"]
        print_json({"path": str(path), **facts, "bytes": saved.nbytes, "seconds": round(seconds, 3)})
        return
    versions = str(saved.newest) if saved.oldest == saved.newest else f"{saved.oldest} to {saved.newest}"
    print_table(
        ["PATH", "KEYS", "BYTES", "STEPS", "VERSION", "SECONDS"],
        [[str(path), saved.keys, size(saved.nbytes), saved.steps, versions, f"{seconds:.2f}"]],
    )
    if not saved.is_one_step:
        click.echo("note: the keys are not all of one step of the training", err=True)
