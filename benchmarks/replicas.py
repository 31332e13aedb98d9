"""What a second copy of every value costs: ``python -m benchmarks.replicas``.

Workers push and pull all keys of a model and compute nothing. A cluster with one copy of every value and a cluster with
two run side by side, and make steps in turn: the one that does not is idle. A turn counts once, with its median step.
Shown are the minimum, median and maximum over the turns, of the steps and of their ratio within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import positive, some_of
from benchmarks.report import print_table
from kvd.testing.cluster import PATHS, LocalCluster, PathName, ProcessNode
from kvd_cli.bench_usage import cpu_s_of
from kvd_cli.bench_work import MODES, sizes_of

COPIES: Final = (1, 2)
WARM_UP_STEPS: Final = 30  # until the loops of the optimizer are compiled

WORKER: Final = """
import sys, time
import numpy as np
import kvd
from kvd_cli.bench_work import sizes_of, time_steps

work, mode = sys.argv[1:3]
sizes = sizes_of(work)
names = [f"{work}/{number}" for number in range(len(sizes))]
gradients = [np.full(size, 1e-6, np.float32) for size in sizes]
outs = [np.zeros(size, np.float32) for size in sizes]
with kvd.create("dist_sync") as kv:
    if mode == "sgd":
        kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.0, momentum=0.9))
    elif mode == "adam":
        kv.set_optimizer(kvd.optimizer.Adam(learning_rate=0.0))
    kv.init(names, outs)
    for line in sys.stdin:
        each, _ = time_steps(lambda: kv.pushpull(names, gradients, outs), int(line))
        print(*each, flush=True)
"""


@dataclass(slots=True)
class Figures:
    """Of one cluster: a figure per turn.

    Attributes:
        steps_s: the median step of rank 0.
        servers_cpu_s, workers_cpu_s: processor time for each step.
    """

    steps_s: list[float] = field(default_factory=list)
    servers_cpu_s: list[float] = field(default_factory=list)
    workers_cpu_s: list[float] = field(default_factory=list)


class Side:
    """A cluster whose workers make steps when they are told to."""

    def __init__(self, cluster: LocalCluster, workers: list[subprocess.Popen[bytes]]) -> None:
        self._workers = workers
        self._servers = [node.process.pid for node in cluster.servers if isinstance(node, ProcessNode)]
        self.figures = Figures()

    def steps(self, count: int) -> list[float]:
        """The times of the steps of one worker."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{count}\n".encode())
            worker.stdin.flush()
        lines = [self._line(worker) for worker in self._workers]
        return [float(word) for word in lines[0].split()]

    def _line(self, worker: subprocess.Popen[bytes]) -> bytes:
        assert worker.stdout is not None
        line: bytes = worker.stdout.readline()
        if line[:1].isdigit():
            return line
        raise RuntimeError((line + worker.stdout.read()).decode())

    def turn(self, count: int) -> None:
        """Measures so many steps."""
        workers = [worker.pid for worker in self._workers]
        before = cpu_s_of(self._servers), cpu_s_of(workers)
        self.figures.steps_s.append(statistics.median(self.steps(count)))
        after = cpu_s_of(self._servers), cpu_s_of(workers)
        self.figures.servers_cpu_s.append(((after[0] or 0) - (before[0] or 0)) / count)
        self.figures.workers_cpu_s.append(((after[1] or 0) - (before[1] or 0)) / count)


@contextmanager
def side(copies: int, workers: int, servers: int, path: PathName, work: str, mode: str) -> Iterator[Side]:
    """A cluster with so many copies of every value."""
    settings: dict[str, Any] = {"heartbeat_interval_s": 1.0, "replicas": copies}
    with LocalCluster(workers, servers, processes=True, path=path, **settings) as cluster:
        processes = [
            cluster.script(WORKER, number, work, mode, preferred_rank=number, stdin=subprocess.PIPE)
            for number in range(workers)
        ]
        try:
            yield Side(cluster, processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def measure(
    path: PathName, work: str, mode: str, workers: int, servers: int, turns: int, steps: int
) -> tuple[Figures, Figures]:
    """The figures with one copy and with two."""
    with ExitStack() as stack:
        sides = [stack.enter_context(side(copies, workers, servers, path, work, mode)) for copies in COPIES]
        for one in sides:
            one.steps(WARM_UP_STEPS)
        for turn in range(turns):
            for one in sides[:: 1 if turn % 2 else -1]:
                one.turn(steps)
    return sides[0].figures, sides[1].figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--work", default="resnet50", help="the keys, as kvd bench names them")
    parser.add_argument("--modes", type=some_of(MODES), default=MODES, help="optimizers on the servers")
    parser.add_argument("--paths", type=some_of(PATHS), default=("shm", "tcp"), help="how messages travel")
    parser.add_argument("--workers", type=positive(int), default=2)
    parser.add_argument("--servers", type=positive(int), default=2)
    parser.add_argument("--turns", type=positive(int), default=7, help="how often both are measured")
    parser.add_argument("--steps", type=positive(int), default=5, help="in a turn")
    given = parser.parse_args(arguments)
    sizes_of(given.work)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    rows = []
    for path in given.paths:
        for mode in given.modes:
            one, two = measure(path, given.work, mode, given.workers, given.servers, given.turns, given.steps)
            ratios = [second / first for first, second in zip(one.steps_s, two.steps_s, strict=True)]
            rows.append(
                [
                    path,
                    mode,
                    _spread(one.steps_s, 1e3),
                    _spread(two.steps_s, 1e3),
                    _spread(ratios),
                    _cpu(one),
                    _cpu(two),
                ]
            )
            print(*rows[-1], sep=" | ", file=sys.stderr)
    headings = ("path", "mode", "one copy, ms", "two copies, ms", "ratio", "CPU of one, ms", "CPU of two, ms")
    print_table(Console(), headings, rows)
    print("Times of a step: min / median / max. CPU: of the servers + of the workers, in each step, median.")
    return 0


def _spread(figures: Sequence[float], scale: float = 1.0) -> str:
    digits = 2 if scale == 1.0 else 1
    found = (min(figures), statistics.median(figures), max(figures))
    return " / ".join(f"{value * scale:.{digits}f}" for value in found)


def _cpu(figures: Figures) -> str:
    servers, workers = statistics.median(figures.servers_cpu_s), statistics.median(figures.workers_cpu_s)
    return f"{servers * 1e3:.0f} + {workers * 1e3:.0f}"


if __name__ == "__main__":
    sys.exit(main())
