"""What snapshots cost: ``python -m benchmarks.snapshots``.

One worker trains with momentum on servers of this machine, and takes snapshots while it goes on: half of their bytes
are values, half is momentum. The step while a snapshot is written stands beside the steps before it; the time to read
the state, in which the program waits, has a row of its own. The disk's own speed is that of one file with as many
bytes, written and synced in the same round. A restore stands beside the time in which its files are read, and as many
bytes are sent to the servers by `init`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import positive
from benchmarks.report import print_table
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster

KEYS: Final = 20
SERVERS: Final = 2
RESTORED_INTO: Final = (1, 4)
STEPS_BEFORE: Final = 20
NAMES: Final = [f"layer {number}" for number in range(KEYS)]

Figures = dict[str, list[float]]


def timed(work: Callable[[], Any]) -> float:
    """How long it takes, in seconds."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def _note_time(times: list[float], _: object) -> None:
    times.append(time.monotonic())


def arrays(nbytes: int) -> list[Any]:
    """Values of so many bytes in all."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal(nbytes // 4 // KEYS).astype(np.float32) for _ in NAMES]


def disk_s(folder: Path, nbytes: int) -> float:
    """How long the disk takes for one file of so many bytes."""
    content = os.urandom(1 << 20) * max(1, nbytes >> 20)

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())

    found = timed(write)
    (folder / "raw").unlink()
    return found


def training(folder: Path, nbytes: int, rounds: int, computes_s: float) -> Figures:
    """Steps with and without a snapshot under way."""
    figures: Figures = {}
    with LocalCluster(1, SERVERS, processes=True) as cluster:
        kv = cluster.store()
        values = arrays(nbytes // 2)
        kv.init(NAMES, values)
        kv.set_optimizer(SGD(0.01, momentum=0.9))
        gradients, outs = [value * 1e-3 for value in values], [np.empty_like(value) for value in values]

        def step() -> None:
            time.sleep(computes_s)
            kv.pushpull(NAMES, gradients, outs)

        for number in range(rounds):
            before = [timed(step) for _ in range(STEPS_BEFORE)]
            raw_s = disk_s(folder, nbytes)
            begun = time.monotonic()
            written = kv.snapshot_async(folder / f"{number}")
            read = time.monotonic()
            ended: list[float] = []
            written.on_end(partial(_note_time, ended))
            during = [timed(step)]
            while not written.done():
                during.append(timed(step))
            written.wait()
            figures.setdefault("step meanwhile / step", []).append(statistics.mean(during) / statistics.mean(before))
            figures.setdefault("state is read, s", []).append(read - begun)
            figures.setdefault("written, MB/s", []).append(nbytes / 1e6 / (ended[0] - read))
            figures.setdefault("disk, MB/s", []).append(nbytes / 1e6 / raw_s)
            figures.setdefault("speed / disk's own", []).append(raw_s / (ended[0] - read))
    return figures


def restores(folder: Path, nbytes: int, rounds: int) -> Figures:
    """A restore beside the time that its bytes take."""
    figures: Figures = {}
    path = folder / "large"
    with LocalCluster(1, SERVERS, processes=True) as cluster:
        kv = cluster.store()
        kv.init(NAMES, arrays(nbytes))
        kv.snapshot(path)
    for servers in RESTORED_INTO:
        for _ in range(rounds):
            with LocalCluster(1, servers, processes=True) as cluster:
                restored_s = timed(partial(cluster.store().restore, path))
            read_s = timed(lambda: [file.read_bytes() for file in path.iterdir()])
            values = arrays(nbytes)
            with LocalCluster(1, servers, processes=True) as cluster:
                sent_s = timed(partial(cluster.store().init, NAMES, values))
            title = f"restore into {servers}"
            figures.setdefault(f"{title}, s", []).append(restored_s)
            figures.setdefault(f"{title} / read and send", []).append(restored_s / (read_s + sent_s))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.snapshots", description=__doc__)
    parser.add_argument("--rounds", type=positive(int), default=5)
    parser.add_argument("--megabytes", type=positive(float), default=100.0, help="size of the snapshots that are taken")
    parser.add_argument("--restored", type=positive(float), default=1000.0, metavar="MEGABYTES", help="of the restore")
    parser.add_argument("--computes", type=positive(float), default=0.1, metavar="SECONDS", help="in each step")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one if not given")
    given = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvd-snapshots-", dir=given.folder) as name:
        folder, rounds = Path(name), int(given.rounds)
        figures = training(folder, int(given.megabytes * 1e6), rounds, given.computes)
        figures |= restores(folder, int(given.restored * 1e6), rounds)
    rows = [
        [title, *[f"{value:.3g}" for value in (min(found), statistics.median(found), max(found))]]
        for title, found in figures.items()
    ]
    print_table(Console(), ["snapshots", "min", "median", "max"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
