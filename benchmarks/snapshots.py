"""What snapshots cost: ``python -m benchmarks.snapshots``.

One worker trains with momentum on servers of this machine, and takes snapshots while it goes on: half of their bytes
are values, half is momentum. The step while a snapshot is written stands beside the steps before it; the time to read
the state, in which the program waits, has a row of its own. The disk's own speed is that of one file with as many
bytes, written and synced before and after the snapshot. A restore stands beside the time in which its files are read,
and as many bytes are sent to the servers by `init`, of which one comes first by turns; and so does the processor time
of the worker, which says more where other work runs. Rounds that would begin too late are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

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
READ_BYTES: Final = 16 << 20
NAMES: Final = [f"layer {number}" for number in range(KEYS)]

Figures = dict[str, list[float]]


class Cost(NamedTuple):
    """What some work took, in seconds.

    Attributes:
        cpu_s: processor time of this process.
    """

    wall_s: float
    cpu_s: float

    def __add__(self, other: object) -> Cost:
        assert isinstance(other, Cost)
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class Rounds:
    """So many rounds, and no more once the time is over; at least one."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._ends = time.monotonic() + seconds

    def __iter__(self) -> Iterator[int]:
        for number in range(self._most):
            if number and time.monotonic() > self._ends:
                return
            yield number


def cost_of(work: Callable[[], Any]) -> Cost:
    """Does the work."""
    begun, used = time.monotonic(), time.process_time()
    work()
    return Cost(time.monotonic() - begun, time.process_time() - used)


def timed(work: Callable[[], Any]) -> float:
    """How long it takes, in seconds."""
    return cost_of(work).wall_s


def _note_time(times: list[float], _: object) -> None:
    times.append(time.monotonic())


def arrays(nbytes: int) -> list[Any]:
    """Values of so many bytes in all."""
    rng = np.random.default_rng(1)
    return [rng.random(nbytes // 4 // KEYS, np.float32) for _ in NAMES]


def disk_s(folder: Path, nbytes: int) -> float:
    """How long the disk takes for one file of so many bytes."""
    content = os.urandom(1 << 20) * max(1, nbytes >> 20)

    def write() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    found = timed(write)
    (folder / "raw").unlink()
    return found


def read(folder: Path) -> None:
    """Reads the files of a folder into memory that is there."""
    memory = np.empty(READ_BYTES, np.uint8)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory.data):
                pass


def training(folder: Path, nbytes: int, rounds: Rounds, computes_s: float) -> Figures:
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

        for number in rounds:
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
            raw_s = statistics.mean([raw_s, disk_s(folder, nbytes)])
            figures.setdefault("step meanwhile / step", []).append(statistics.mean(during) / statistics.mean(before))
            figures.setdefault("state is read, s", []).append(read - begun)
            figures.setdefault("written, MB/s", []).append(nbytes / 1e6 / (ended[0] - read))
            figures.setdefault("disk, MB/s", []).append(nbytes / 1e6 / raw_s)
            figures.setdefault("speed / disk's own", []).append(raw_s / (ended[0] - read))
    return figures


def restores(folder: Path, nbytes: int, rounds: Rounds) -> Figures:
    """A restore beside the time that its bytes take."""
    figures: Figures = {}
    path, values = folder / "large", arrays(nbytes)
    with LocalCluster(1, SERVERS, processes=True) as cluster:
        kv = cluster.store()
        kv.init(NAMES, values)
        kv.snapshot(path)
    for number in rounds:
        for servers in RESTORED_INTO:
            costs = {}
            for what in ("restore", "send")[:: 1 if number % 2 else -1]:
                with LocalCluster(1, servers, processes=True) as cluster:
                    kv = cluster.store()
                    work = partial(kv.restore, path) if what == "restore" else partial(kv.init, NAMES, values)
                    costs[what] = cost_of(work)
            reading = cost_of(partial(read, path))
            restored, least = costs["restore"], reading + costs["send"]
            for title, figure in {
                f"restore into {servers}, s": restored.wall_s,
                f"restore into {servers}: its files are read, s": reading.wall_s,
                f"restore into {servers}: its bytes are sent, s": costs["send"].wall_s,
                f"restore into {servers} / read and send": restored.wall_s / least.wall_s,
                f"restore into {servers} / read and send, processor time": restored.cpu_s / least.cpu_s,
            }.items():
                figures.setdefault(title, []).append(figure)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.snapshots", description=__doc__)
    parser.add_argument("--rounds", type=positive(int), default=5)
    parser.add_argument("--megabytes", type=positive(float), default=100.0, help="size of the snapshots that are taken")
    parser.add_argument("--restored", type=positive(float), default=1000.0, metavar="MEGABYTES", help="of the restore")
    parser.add_argument("--seconds", type=positive(float), default=240.0, help="no round begins later, in each half")
    parser.add_argument("--computes", type=positive(float), default=0.1, metavar="SECONDS", help="in each step")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one if not given")
    given = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvd-snapshots-", dir=given.folder) as name:
        folder, rounds = Path(name), int(given.rounds)
        figures = training(folder, int(given.megabytes * 1e6), Rounds(rounds, given.seconds), given.computes)
        figures |= restores(folder, int(given.restored * 1e6), Rounds(rounds, given.seconds))
    rows = [
        [title, *[f"{value:.3g}" for value in (min(found), statistics.median(found), max(found))], f"{len(found)}"]
        for title, found in figures.items()
    ]
    print_table(Console(), ["snapshots", "min", "median", "max", "rounds"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
