"""What readers cost a training: ``python -m benchmarks.readers``.

Two workers push and pull all keys of a model again and again, with SGD and momentum, and compute nothing. Observers in
processes of their own read all keys at a fixed rate. Times with readers and times without are taken in turn, in one
run; while the readers do not read, their processes are stopped. On a machine that does other things too, the processor
time says more than the time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console

from benchmarks.arguments import positive
from benchmarks.printed_numbers import PrintedNumbers
from benchmarks.report import print_table, time_text
from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until
from kvd_cli.bench_usage import cpu_s_of

KEYS: Final = tuple(f"layer {number}" for number in range(8))
WARM_UP_STEPS: Final = 10

READER: Final = """
import json, sys, time
import numpy as np
import kvd

names, floats, interval_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
outs = [np.empty(floats, np.float32) for _ in names]
with kvd.Observer() as observer:
    while True:
        begun = time.monotonic()
        reading = observer.read(names, out=outs)
        assert set(reading.versions.values()) == {reading.version}
        print(reading.version, flush=True)
        time.sleep(max(0.0, interval_s - (time.monotonic() - begun)))
"""

WORKER: Final = """
import json, sys, time
import numpy as np
import kvd

names, floats = json.loads(sys.argv[1]), int(sys.argv[2])
gradients = [np.full(floats, 1e-6, np.float32) for _ in names]
outs = [np.empty(floats, np.float32) for _ in names]
with kvd.create("dist_sync") as kv:
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    kv.init(names, outs)
    while True:
        begun = time.perf_counter()
        kv.pushpull(names, gradients, outs)
        print(time.perf_counter() - begun, flush=True)
"""


@dataclass(slots=True)
class Figures:
    """What was measured in all turns of one kind.

    Attributes:
        times_s: of the steps.
        cpu_s: processor time of the workers, the server and the readers.
    """

    times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def row(self, name: str) -> list[str]:
        """A row of the table."""
        middle, mean = statistics.median(self.times_s), statistics.mean(self.times_s)
        each = [middle, mean, self.cpu_s / len(self.times_s)]
        return [name, str(len(self.times_s)), *[time_text(1e6 * seconds) for seconds in each]]


def measure(megabytes: float, readers: int, interval_s: float, turns: int, turn_s: float) -> dict[str, Figures]:
    """The figures without readers and with them."""
    floats = int(megabytes * 1e6 / 4 / len(KEYS))
    names = json.dumps(KEYS)
    figures = {"without": Figures(), "with": Figures()}
    with LocalCluster(2, 1, processes=True) as cluster:
        processes: list[PrintedNumbers] = []
        try:
            processes += [PrintedNumbers(cluster.script(WORKER, number, names, str(floats))) for number in range(2)]
            worker = processes[0]
            wait_until(lambda: len(worker.numbers) >= WARM_UP_STEPS, "the workers train", 60.0)
            watching = [
                PrintedNumbers(cluster.script(READER, 100 + number, names, str(floats), str(interval_s)))
                for number in range(readers)
            ]
            processes += watching
            wait_until(lambda: all(len(reader.numbers) >= 2 for reader in watching), "the readers read", 60.0)
            (server,) = cluster.servers
            assert isinstance(server, ProcessNode)
            pids = [server.process.pid, *[process.process.pid for process in processes]]
            for _ in range(turns):
                for kind, number in (("without", signal.SIGSTOP), ("with", signal.SIGCONT)):
                    for reader in watching:
                        os.kill(reader.process.pid, number)
                    first, cpu_s = len(worker.numbers), cpu_s_of(pids)
                    threading.Event().wait(turn_s)
                    figures[kind].times_s += worker.numbers[first + 1 :]
                    figures[kind].cpu_s += (cpu_s_of(pids) or 0.0) - (cpu_s or 0.0)
        finally:
            for process in processes:
                process.end()
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.readers", description=__doc__)
    parser.add_argument("--megabytes", type=positive(float), default=25.0, help="size of the model")
    parser.add_argument("--readers", type=positive(int), default=4, help="how many processes read it")
    parser.add_argument("--interval", type=positive(float), default=1.0, metavar="SECONDS", help="between two reads")
    parser.add_argument("--turns", type=positive(int), default=8, help="how often both are measured")
    parser.add_argument("--turn", type=positive(float), default=3.0, metavar="SECONDS", help="how long one takes")
    given = parser.parse_args(arguments)
    figures = measure(given.megabytes, given.readers, given.interval, given.turns, given.turn)
    rows = [found.row(f"{kind} readers") for kind, found in figures.items()]
    print_table(Console(), ["", "steps", "median", "mean", "processor time per step"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
