"""Commands that save and restore snapshots: ``snapshot save``, ``snapshot restore``."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import click

from kvd.config import Loaded
from kvd_cli import interrupts
from kvd_cli.connect import at_prompt, observer
from kvd_cli.flags import common_options
from kvd_cli.options import current
from kvd_cli.output import print_json, print_table, size
from kvd_cli.patience import told_when_slow

_FOLDER = click.Path(path_type=Path)
_NICENESS = 10  # a snapshot may take longer; a step of the training that shares the processors may not


@click.group()
def snapshot() -> None:
    """Save or restore the values of a job with the state of its optimizer."""


@snapshot.command()
@click.argument("path", type=_FOLDER)
@common_options()
def save(path: Path) -> None:
    """Write a snapshot to the new folder PATH while the job trains.

    With dist_sync all keys are of one step of the training. No worker takes part: the servers keep the step until it is
    written. It takes an operator's key. The process lowers its own priority, so that training goes first.
    """
    begun = time.monotonic()
    os.nice(_NICENESS)
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


@snapshot.command()
@click.argument("path", type=_FOLDER)
@click.option(
    "--type",
    "type_",
    type=click.Choice(["dist_sync", "dist_async"]),
    help="mode of the training that continues; default: that of the snapshot",
)
@common_options()
def restore(path: Path, type_: str | None) -> None:
    """Restore the keys of the snapshot PATH for the next program of a job that is not running.

    That program calls kv.restore, and continues after the step of the snapshot. A damaged snapshot is refused, and so
    is a job that has keys.
    """
    with interrupts.nothing_begun():
        from kvd.client.cluster.preparing import Preparation

    begun = time.monotonic()
    preparation = Preparation(path)
    loaded = current().load_client()
    loaded = Loaded(
        dataclasses.replace(
            loaded.config,
            join_timeout_s=loaded.config.request_timeout_s,  # nobody waits at a prompt as long as a job does
        ),
        loaded.origin,
        loaded.notes,
    )
    with told_when_slow(f"restoring {path}", loaded.config) as patience:
        made = preparation.make(loaded, type_ or preparation.type_name, at_prompt(loaded, patience))
    seconds = time.monotonic() - begun
    if current().output == "json":
        facts = {name: getattr(made, name) for name in ("keys", "steps", "num_workers", "num_servers")}
        print_json({"path": str(path), **facts, "bytes": made.nbytes, "seconds": round(seconds, 3)})
        return
    print_table(
        ["PATH", "KEYS", "BYTES", "STEPS", "WORKERS", "SERVERS", "SECONDS"],
        [[str(path), made.keys, size(made.nbytes), made.steps, made.num_workers, made.num_servers, f"{seconds:.2f}"]],
    )
