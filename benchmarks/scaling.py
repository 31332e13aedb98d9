"""What a step costs as workers are added, and as the model grows: ``python -m benchmarks.scaling``.

Workers push and pull the tensors of ResNet-50; models are lists of keys of 4 MiB, from one small key to 2 GiB. A size
that would not fit into the memory that is free now is left out, with a line that says what it would need.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import figures, machine
from benchmarks.arguments import new_file, positive, some_of, whole_numbers, works
from benchmarks.compare import FAILED, PEERS, heading, say, start
from benchmarks.figures import Summary
from benchmarks.report import digits, print_table, time_text
from benchmarks.systems import KVD_WAYS, PEERS_DIR, Effort, Outcome, System, kvd_systems, peer_systems
from kvd.config import machine_memory_bytes
from kvd_cli.bench_plot import counted
from kvd_cli.bench_svg import size_text
from kvd_cli.bench_work import VALUE_NBYTES, sizes_of
from kvd_cli.output import size

WORK: Final = "resnet50"
WORKERS: Final = (1, 2, 4, 8)
MODELS: Final = ("1MiB", "4MiB", *(f"4MiBx{count}" for count in (4, 16, 64, 256, 512)))
MODE: Final = "none"
SPARE: Final = 0.9
"""The part of the free memory that may be used."""

HEADINGS: Final = (
    *("system", "min", "median", "max", "× first", "MB/s", "CPU s/GB"),
    *("worker, MB", "server, MB", "core to core"),
)
EXPLANATION: Final = (
    "Times of one step: of each start its median; then the minimum, median and maximum of these. × first: the median "
    "by the first of the same system. MB/s: pushed by all workers together; as many come back. Memory: the peak. "
    "Core to core: GB/s at which one reads what the other has just written, before and after the starts."
)


@dataclass(frozen=True, slots=True)
class Point:
    """One start to make.

    Attributes:
        at: what its line begins with: a number of workers, or a model.
        work: what is pushed and pulled.
    """

    at: str
    work: str
    workers: int

    @property
    def nbytes(self) -> int:
        """What each worker pushes in a step."""
        return work_bytes(self.work)


@dataclass(frozen=True, slots=True)
class Start:
    """The result of one start of a system at a point."""

    point: Point
    system: System
    round: int
    outcome: Outcome


class Memory:
    """Predicts the memory of a system at a larger size from that at smaller sizes."""

    def __init__(self) -> None:
        self._per_byte: dict[
            tuple[str, int], tuple[int, float]
        ] = {}  # of the largest model so far: its bytes, the ratio

    def learn(self, system: System, point: Point, outcome: Outcome) -> None:
        """Record what all processes of a start took, if it reports it: shared memory once, if it says how much that
        was; otherwise their peaks, in which it counts in every process that has mapped it."""
        taken = sum(role.get("share_bytes", role.get("peak_bytes", 0)) for role in outcome.roles)
        key = (system.name, point.workers)
        if taken and point.nbytes >= self._per_byte.get(key, (0, 0.0))[0]:
            self._per_byte[key] = (point.nbytes, taken / point.nbytes)

    def needed_bytes(self, system: System, point: Point) -> int:
        """At least the workers' gradients and results, and two versions on the servers."""
        _, per_byte = self._per_byte.get((system.name, point.workers), (0, 0.0))
        return int(point.nbytes * max(per_byte, 2 * point.workers + 2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write. The exit code is 0 if every start of kvd gave figures."""
    options = _options(arguments)
    ours, advice = kvd_systems(options.kvd, (MODE,))
    peers, advice_on_peers = peer_systems(options.peers, options.peers_dir, (MODE,))
    for warning in filter(None, [*advice, *advice_on_peers, machine.load_warning()]):
        say(warning)
    by_workers = [Point(str(workers), options.work, workers) for workers in options.workers]
    by_model = [Point(size_text(work_bytes(name)), name, options.model_workers) for name in options.models]
    starts_by_workers = list(_starts(by_workers, [*ours, *peers], options))
    starts_by_model = list(_starts(by_model, [*ours, *peers], options))
    console = Console()
    print_table(console, ("workers", *HEADINGS), lines(by_workers, starts_by_workers))
    print_table(console, ("model", *HEADINGS), lines(by_model, starts_by_model))
    console.print(EXPLANATION, soft_wrap=True)
    if options.json is not None:
        document = {**heading(), "workers": _document(starts_by_workers), "models": _document(starts_by_model)}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    of_kvd = [one.outcome for one in (*starts_by_workers, *starts_by_model) if one.system.is_ours]
    return 0 if of_kvd and not any(outcome.failure for outcome in of_kvd) else FAILED


def work_bytes(name: str) -> int:
    """The bytes of all keys of a work."""
    return VALUE_NBYTES * sum(sizes_of(name))


def _starts(points: Sequence[Point], systems: Sequence[System], options: argparse.Namespace) -> Iterator[Start]:
    """Start every system at every point, in turn, round after round, except those that do not fit or failed before."""
    memory, left_out = Memory(), set[tuple[str, Point]]()
    for number in range(options.rounds):
        for point in points:
            effort = Effort(
                (point.work,), point.workers, options.servers, options.seconds, options.repetitions, options.limit
            )
            for system in systems:
                if (system.name, point) in left_out or not system.does(effort, MODE):
                    continue
                if not _fits(memory, system, point):
                    left_out.add((system.name, point))
                    continue
                say(f"{_in_words(point)}:")
                outcome = start(system, effort, MODE, number)
                memory.learn(system, point, outcome)
                if outcome.failure:
                    left_out.add((system.name, point))
                yield Start(point, system, number, outcome)


def _fits(memory: Memory, system: System, point: Point) -> bool:
    needed, free = memory.needed_bytes(system, point), free_bytes(Path("/proc/meminfo").read_text())
    if needed <= SPARE * free:
        return True
    say(f"{_in_words(point)}: {system.name} is left out: it would take {size(needed)}, and {size(free)} are free")
    return False


def _in_words(point: Point) -> str:
    return f"{size_text(point.nbytes)}, {counted(point.workers, 'worker')}"


def free_bytes(meminfo: str) -> int:
    """The memory for new processes, from the text of /proc/meminfo and the limit of this control group."""
    available = [line.split() for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    free = int(available[0][1]) * 1024 if available else machine_memory_bytes()
    return min(free, machine_memory_bytes())


def lines(points: Sequence[Point], starts: Sequence[Start]) -> list[tuple[str, ...]]:
    """A line for each point and system that gave figures."""
    found: list[tuple[str, ...]] = []
    first_us: dict[str, float] = {}
    for point in points:
        here = [one for one in starts if one.point == point]
        peaks = figures.peaks(role for one in here for role in one.outcome.roles)
        for summary in figures.summaries(row for one in here for row in one.outcome.rows):
            first = first_us.setdefault(summary.system, summary.p50_us.median)
            cores_gb_s = [gb_s for one in here if one.system.name == summary.system for gb_s in one.outcome.cores_gb_s]
            found.append((point.at, *_cells(point, summary, first, peaks), _range_text(cores_gb_s)))
    return found


def _range_text(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else ""


def _cells(point: Point, summary: Summary, first_us: float, peaks: dict[tuple[str, str, str], int]) -> tuple[str, ...]:
    memory = [peaks.get((summary.system, MODE, role)) for role in ("worker", "server")]
    return (
        summary.system,
        time_text(summary.p50_us.minimum),
        time_text(summary.p50_us.median),
        time_text(summary.p50_us.maximum),
        f"{summary.p50_us.median / first_us:.2f}",
        digits(point.workers * summary.mb_s),
        "" if summary.cpu_s_per_gb is None else f"{summary.cpu_s_per_gb:.3g}",
        *("" if nbytes is None else f"{nbytes / 1e6:.0f}" for nbytes in memory),
    )


def _document(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Every start, in order."""
    return [
        {
            **dataclasses.asdict(one.point),
            "bytes": one.point.nbytes,
            "system": one.system.name,
            "round": one.round,
            "failure": one.outcome.failure,
            "cores_gb_s": one.outcome.cores_gb_s,
            "rows": [dataclasses.asdict(row) for row in one.outcome.rows],
            "roles": one.outcome.roles,
        }
        for one in starts
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--rounds", type=positive(int), default=3, help="how often everything is started")
    parser.add_argument("--workers", type=whole_numbers, default=WORKERS, help="numbers of workers, such as 1,2,4")
    parser.add_argument("--work", type=lambda text: works(text)[0], default=WORK, help="what they push")
    parser.add_argument("--models", type=works, default=MODELS, help="sizes, such as 1MiB,4MiBx64; they grow")
    parser.add_argument("--model-workers", type=positive(int), default=2, help="workers of each model")
    parser.add_argument("--servers", type=positive(int), default=1)
    parser.add_argument("--kvd", type=some_of(tuple(KVD_WAYS)), default=("auto",), help=f"of {','.join(KVD_WAYS)}")
    parser.add_argument("--peers", type=some_of(PEERS, none_too=True), default=(), help=f"of {','.join(PEERS)}")
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help="directory of the peers' run.py")
    parser.add_argument("--seconds", type=positive(float), default=0.5, help="per repetition")
    parser.add_argument("--repetitions", type=positive(int), default=3, help="in one start")
    parser.add_argument("--limit", type=positive(float), default=300.0, help="limit of one start, in seconds")
    parser.add_argument("--json", type=new_file, help="also write everything to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
