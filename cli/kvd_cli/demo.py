"""``kvd demo``: a whole cluster on this machine, shown live as it learns to read handwritten digits."""

from __future__ import annotations

import sys
import time
from typing import Final

import click

from kvd.config import Loaded
from kvd.node.launch import Job, RestartRule, run
from kvd_cli.demo_view import DemoView, LiveView, PlainView
from kvd_cli.flags import common_options, setting_options
from kvd_cli.launch import job_environment
from kvd_cli.options import OF_METRICS, OF_ONE_PROCESS, OF_SNAPSHOTS, current
from kvd_cli.output import print_json

ENOUGH: Final = 0.96
"""The test accuracy that the demo must reach."""

_RESTARTS: Final = 3


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="same seed, same bits")
@click.option("--epochs", type=click.IntRange(min=1), default=20, show_default=True, help="passes over the images")
@click.option("--batch", type=click.IntRange(1, 1024), default=64, show_default=True, help="images per step")
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="worker processes")
@click.option("--servers", type=click.IntRange(1, 64), default=2, show_default=True, help="server processes")
@setting_options(
    leave_out=(*OF_ONE_PROCESS, *OF_SNAPSHOTS, *OF_METRICS, "num_workers", "num_servers", "merge", "staleness")
)
@common_options()
def demo(seed: int, epochs: int, batch: int, workers: int, servers: int) -> None:
    """Train a small network with a whole cluster on this machine.

    This starts a scheduler, servers and workers, which train on handwritten digits. Each worker computes the gradients
    of its part of every batch; the servers add them up and update the weights. The exit code is 0 if at least 96 % of
    the test images are read correctly.
    """
    if workers > batch:
        raise click.UsageError(f"{workers} workers cannot share {batch} images: give --batch {workers} or more")
    options = current()
    loaded = options.load_daemon()
    command = [sys.executable, "-m", "kvd_cli.demo_worker"]
    for name, value in (("seed", seed), ("epochs", epochs), ("batch", batch)):
        command += [f"--{name}", str(value)]
    job = Job(
        command=command,
        workers=workers,
        servers=servers,
        environment=_environment(loaded),
        replicas=loaded.config.replicas,
        restarts=RestartRule(_RESTARTS),
        grace_s=3.0,
    )
    as_json = options.output == "json"
    view: DemoView = LiveView(workers, servers) if sys.stdout.isatty() and not as_json else PlainView(workers, servers)
    if as_json:
        view.out = sys.stderr
    if options.verbose:
        view.log_to = sys.stderr
    started = time.monotonic()
    with view:
        code = run(job, view.take)
    _finish(view, code, time.monotonic() - started, as_json)


def _environment(loaded: Loaded) -> dict[str, str]:
    """Return the variables of the job's processes.

    Each process has one thread: two workers fit on two cores, and every machine adds in the same order. Gradients are
    weighted by samples, because the parts of a batch need not be equal.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return job_environment(loaded, _RESTARTS) | threads | {"KVD_MERGE": "weighted"}


def _finish(view: DemoView, code: int, seconds: float, as_json: bool) -> None:
    """Print the result, and exit."""
    if code:
        if code < 128:  # not ended by a signal
            view.print_last_words()
        click.get_current_context().exit(code)
    accuracy, digests = view.final_accuracy(), view.digests()
    is_same = len(digests) == 1
    if as_json:
        print_json(
            {
                "accuracy": accuracy,
                "seconds": round(seconds, 3),
                "digest": digests[0] if is_same else digests,
                "learned": accuracy >= ENOUGH and is_same,
            }
        )
    else:
        click.echo(f"test accuracy  {accuracy:.2%}  ({'learned' if accuracy >= ENOUGH else f'less than {ENOUGH:.0%}'})")
        click.echo(f"time           {seconds:.1f} s")
        click.echo(f"digest         {' '.join(digests)}  (the same for the same seed)")
    if not is_same:
        click.echo("error: the workers ended with different weights", err=True)
    click.get_current_context().exit(0 if accuracy >= ENOUGH and is_same else 1)
