"""A picture of a training through two deaths: ``python -m benchmarks.picture_of_deaths OUT.svg``.

`kvd launch --restart` runs a training with two workers, two servers and two copies of every value on this machine.
A worker is killed with SIGKILL, later a server, and the launcher restarts both. The picture shows the steps that each
worker has completed over time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.goodput import WARM_UP_STEPS, LaunchedTraining
from kvd.testing.cluster import wait_until
from kvd_cli.bench_svg import Event, Series, chart, linear

TITLE: Final = "Training continues when a worker and a server are killed"
POLL_S: Final = 0.02
MEGABYTES: Final = 4.0
COMPUTES_S: Final = 0.1


def watch(training: LaunchedTraining, stretch_s: float) -> tuple[list[Series], list[Event]]:
    """Kill a worker after one stretch and a server after two; return the curves and the deaths of three stretches."""
    wait_until(lambda: training.steps() >= WARM_UP_STEPS, "the workers train", 120.0)
    first, begun = training.steps_by_rank(), time.monotonic()
    curves: list[list[tuple[float, float]]] = [[] for _ in first]
    deaths: list[Event] = []
    victims = ["worker", "server"]
    while (now := time.monotonic() - begun) < 3 * stretch_s:
        for curve, steps, before in zip(curves, training.steps_by_rank(), first, strict=True):
            curve.append((now, steps - before))
        if victims and now >= (len(deaths) + 1) * stretch_s:
            role = victims.pop(0)
            os.kill(max(pid for pid, kind in training.processes().items() if kind == role), signal.SIGKILL)
            deaths.append(Event(now, f"{role} killed"))
        time.sleep(POLL_S)
    return [Series(f"worker {rank}", tuple(curve), marked=False) for rank, curve in enumerate(curves)], deaths


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training and write the picture."""
    parser = argparse.ArgumentParser("python -m benchmarks.picture_of_deaths", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.add_argument("--stretch", type=float, default=8.0, help="seconds before, between and after the deaths")
    given = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-picture-") as folder,
        LaunchedTraining(Path(folder), MEGABYTES, COMPUTES_S) as training,
    ):
        curves, deaths = watch(training, given.stretch)
    seconds = linear("seconds", 3 * given.stretch)
    steps = linear("steps completed", max(y for curve in curves for _, y in curve.points))
    subtitle = "kvd launch -n 2 -s 2 --replicas 2 --restart 2; python -m benchmarks.picture_of_deaths"
    given.out.write_text(chart(TITLE, subtitle, seconds, steps, curves, deaths), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
