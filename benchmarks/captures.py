"""How far a snapshot from the command line holds training up: ``python -m benchmarks.captures``.

Workers push and pull all keys of a model and compute nothing. In turn they train undisturbed, and while a snapshot is
taken as `kvd snapshot save` takes it. The step in which the servers keep their copies is the longest; the others run
beside a process that reads from the servers and writes to the disk. Shown are the median step of both, their ratio
within a turn, and how much longer than that median the longest step was; and the rate of the snapshot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import positive
from benchmarks.report import print_table
from kvd.testing.cluster import LocalCluster
from kvd_cli.bench_work import sizes_of

WARM_UP_STEPS: Final = 30  # until the loops of the optimizer are compiled

WORKER: Final = """
import sys, time
import numpy as np
import kvd
from kvd_cli.bench_work import sizes_of

sizes = sizes_of(sys.argv[1])
names = [f"key/{number}" for number in range(len(sizes))]
gradients = [np.full(size, 1e-6, np.float32) for size in sizes]
outs = [np.zeros(size, np.float32) for size in sizes]
with kvd.create("dist_sync") as kv:
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.0, momentum=0.9))
    kv.init(names, outs)
    while True:
        begun = time.monotonic()
        kv.pushpull(names, gradients, outs)
        print(begun, time.monotonic(), flush=True)
"""


SAVE: Final = """
import sys
from kvd_cli.main import main

sys.argv[:] = ["kvd", "snapshot", "save", sys.argv[1], "-o", "json"]
main()
"""


class Step(NamedTuple):
    """One step of worker 0, by the clock of this machine."""

    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


class Turn(NamedTuple):
    """One snapshot."""

    before_s: float
    meanwhile_s: float
    longest_s: float
    nbytes: int
    saved_s: float


class Training:
    """The steps of worker 0, as they come."""

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        self._worker = worker
        self._steps: list[Step] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._worker.stdout is not None
        for line in self._worker.stdout:
            begun, ended = line.split()
            self._steps.append(Step(float(begun), float(ended)))

    def wait_for(self, count: int) -> None:
        """Until so many more steps are made."""
        wanted = len(self._steps) + count
        while len(self._steps) < wanted:
            if self._worker.poll() is not None:
                raise RuntimeError("a worker has ended")
            time.sleep(0.01)

    def between(self, begin: float, end: float) -> list[float]:
        """The times of the steps that overlap."""
        return [step.seconds for step in self._steps if step.ended > begin and step.begun < end]


def measure(cluster: LocalCluster, training: Training, turns: int, steps: int, folder: Path) -> list[Turn]:
    """A turn for each snapshot."""
    found = []
    training.wait_for(WARM_UP_STEPS)
    for turn in range(turns):
        begun = time.monotonic()
        training.wait_for(steps)
        between = time.monotonic()
        command = cluster.script(SAVE, turn, str(folder / str(turn)), node_id="")
        said, _ = command.communicate()
        ended = time.monotonic()
        training.wait_for(1)
        nbytes = sum(file.stat().st_size for file in (folder / str(turn)).iterdir())
        before, meanwhile = training.between(begun, between), training.between(between, ended)
        if command.returncode:
            raise RuntimeError(said.decode())
        saved = json.loads(said[said.index(b"{") :])
        assert saved["is_one_step"]
        medians = statistics.median(before), statistics.median(meanwhile)
        found.append(Turn(*medians, max(meanwhile), nbytes, saved["seconds"]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captures", description=__doc__)
    parser.add_argument("--work", default="resnet50", help="the keys, as kvd bench names them")
    parser.add_argument("--workers", type=positive(int), default=2)
    parser.add_argument("--servers", type=positive(int), default=1)
    parser.add_argument("--turns", type=positive(int), default=7, help="how many snapshots")
    parser.add_argument("--steps", type=positive(int), default=20, help="between two of them")
    given = parser.parse_args(arguments)
    sizes_of(given.work)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-captures-") as folder,
        LocalCluster(given.workers, given.servers, processes=True, heartbeat_interval_s=1.0) as cluster,
    ):
        processes = [
            cluster.script(WORKER, number, given.work, preferred_rank=number, stdin=subprocess.DEVNULL)
            for number in range(given.workers)
        ]
        try:
            turns = measure(cluster, Training(processes[0]), given.turns, given.steps, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    columns = {
        "step, ms": [turn.before_s * 1e3 for turn in turns],
        "step meanwhile, ms": [turn.meanwhile_s * 1e3 for turn in turns],
        "ratio": [turn.meanwhile_s / turn.before_s for turn in turns],
        "longest step, ms longer": [(turn.longest_s - turn.meanwhile_s) * 1e3 for turn in turns],
        "written, MB/s": [turn.nbytes / turn.saved_s / 1e6 for turn in turns],
    }
    rows = [
        (name, *(f"{figure(values):.2f}" for figure in (min, statistics.median, max)))
        for name, values in columns.items()
    ]
    print_table(Console(), ("", "minimum", "median", "maximum"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
