"""What random deaths cost a training: ``python -m benchmarks.goodput``.

``kvd launch --restart`` runs a training with two copies of every value: a scheduler, two servers and two workers on
this machine. Every 15 seconds a random one of these processes is killed with SIGKILL, and the launcher starts it again,
with its back-off. Goodput is the number of steps that the training gets ahead per second; a step that a restarted
worker makes again does not count. It is compared with that of the same job before the first kill and after the last.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import deaths
from benchmarks.report import print_spreads
from kvd.testing.cluster import wait_until

NODES: Final = 2  # servers, and workers
KEYS: Final = 8
WARM_UP_STEPS: Final = 20
ENDS_S: Final = 30.0
RESTARTS: Final = 1_000_000
SECONDS_BETWEEN_KILLS: Final = 15.0

WORKER: Final = """
import sys, time
import numpy as np
import kvd

folder, keys, floats, computes_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
names = [f"layer {number}" for number in range(keys)]
gradients = [np.full(floats, 1e-6, np.float32) for _ in names]
outs = [np.zeros(floats, np.float32) for _ in names]
with kvd.create("dist_sync") as kv:
    made = np.memmap(f"{folder}/{kv.rank}", np.int64, "r+", shape=(1,))
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    kv.init(names, outs)
    for step in kv.steps(1 << 40):
        time.sleep(computes_s)
        kv.pushpull(names, gradients, outs)
        made[0] = max(made[0], step + 1)
"""


@dataclass(slots=True)
class Rates:
    """Steps per second of each stretch of time, by what happened in it, and who was killed."""

    undisturbed: list[float] = field(default_factory=list)
    with_kills: list[float] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)


class LaunchedTraining:
    """The job under its launcher; a context manager."""

    def __init__(self, folder: Path, megabytes: float, computes_s: float) -> None:
        self._steps = [folder / str(rank) for rank in range(NODES)]
        for file in self._steps:
            file.write_bytes(bytes(8))
        program = [sys.executable, "-c", WORKER, str(folder), str(KEYS), str(int(megabytes * 1e6 / 4 / KEYS))]
        command = [
            *(sys.executable, "-m", "kvd_cli.main", "launch", "-n", str(NODES), "-s", str(NODES), "--replicas", "2"),
            *("--restart", str(RESTARTS), "--state-dir", str(folder / "state"), "--", *program, str(computes_s)),
        ]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> LaunchedTraining:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)  # SIGINT is ignored in a background job of a script
        try:
            self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def steps_by_rank(self) -> list[int]:
        """Return the number of steps that each worker has completed."""
        assert self._process.poll() is None, "the job has ended"
        return [int.from_bytes(file.read_bytes(), sys.byteorder) for file in self._steps]

    def steps(self) -> int:
        """Return the number of steps that all workers have completed."""
        return min(self.steps_by_rank())

    def processes(self) -> dict[int, str]:
        """The processes of the job: pid and role."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        found = {}
        for pid in map(int, children):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            role = next((role for role in ("scheduler", "server") if role in arguments), "worker")
            found[pid] = role
        return found


def measure(training: LaunchedTraining, kills: int, seed: int) -> Rates:
    """Between two stretches without kills, one with so many."""
    rng = random.Random(seed)
    rates = Rates()

    def rate() -> float:
        begun, before = time.monotonic(), training.steps()
        time.sleep(SECONDS_BETWEEN_KILLS)
        return (training.steps() - before) / (time.monotonic() - begun)

    wait_until(lambda: training.steps() >= WARM_UP_STEPS, "the workers train", 120.0)
    rates.undisturbed += [rate() for _ in range(2)]
    for _ in range(kills):
        pid, role = rng.choice(sorted(training.processes().items()))
        os.kill(pid, signal.SIGKILL)
        rates.kills[role] += 1
        rates.with_kills.append(rate())
    rates.undisturbed += [rate() for _ in range(2)]
    return rates


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = deaths("python -m benchmarks.goodput", __doc__)
    given = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-goodput-") as folder,
        LaunchedTraining(Path(folder), given.megabytes, given.computes) as training,
    ):
        rates = measure(training, int(given.kills), given.seed)
    kinds = {"undisturbed": rates.undisturbed, "with kills": rates.with_kills}
    print_spreads(Console(), f"steps/s in {SECONDS_BETWEEN_KILLS:g} s", kinds, digits=1)
    killed = ", ".join(f"{count} × {role}" for role, count in sorted(rates.kills.items()))
    goodput = statistics.mean(rates.with_kills) / statistics.mean(rates.undisturbed)
    print(f"killed: {killed}; goodput: {goodput:.2f} of the undisturbed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
