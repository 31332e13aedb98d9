"""What clusters do that are not here: the real machines in virtual time, with costs that are measured on this machine.

    python -m benchmarks.simulate --workers 1,2,4,8,16 --work resnet50,1KiB --check
    python -m benchmarks.simulate --workers 100,1000 --servers 25 --network 10Gb/s,50us

Without a network, all processes share one host like this one, and `--check` starts the same clusters here as well. With
one, each node has a host for itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import new_file, positive, some_of, whole_numbers, works
from benchmarks.compare import say
from benchmarks.report import digits, print_table, time_text
from benchmarks.systems import KVD_WAYS
from benchmarks.virtual.calibration import BY_REFERENCE, Calibration, Case, Measured, measured, plan_of
from benchmarks.virtual.cluster import Plan, Prediction, foretell
from benchmarks.virtual.costs import Costs, read_costs, write_costs
from benchmarks.virtual.network import Rates

BETWEEN_HOSTS: Final = "sealed"  # the way that kvd takes there by itself
HEADINGS: Final = (
    "work", "workers", "servers", "step", "worker, cpu", "server, cpu", "scheduler", "port", "memory", "server, MB",
    "join", "barrier",
)  # fmt: skip
EXPLANATION: Final = (
    "Step: the median of all workers. Cpu: of the busiest node of the role, in a step, and its share of the step. "
    "Scheduler: the share of a core while steps are made. Port: the share of what the busiest server's port can pass. "
    "Memory: the share of the bandwidth of the servers' host. Server, MB: the most that values took on a server. Join: "
    "until all workers are there. Barrier: from the last worker that enters until all are told."
)


@dataclass(frozen=True, slots=True)
class Line:
    """One cluster, what was foretold of it, and what it took here if it was started."""

    work: str
    plan: Plan
    foretold: Prediction
    real: Measured | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what things cost, foretell and print."""
    options = _options(arguments)
    warning = machine.load_warning()
    if warning:
        say(warning)
    costs = _costs(options)
    lines = list(_lines(options, costs))
    console = Console()
    print_table(console, HEADINGS, [cells(line) for line in lines])
    console.print(EXPLANATION, soft_wrap=True)
    if options.check:
        print_table(console, CHECK_HEADINGS, [check_cells(line) for line in lines])
    if options.json is not None:
        document: dict[str, Any] = {"machine": machine.describe(), "costs": dataclasses.asdict(costs)}
        document["clusters"] = [dataclasses.asdict(line) for line in lines]
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _costs(options: argparse.Namespace) -> Costs:
    """Those of the file, or those of this machine, which are written to a file if one is named."""
    known: dict[str, Costs] = options.costs
    if options.way not in known:
        calibration = Calibration(options.seconds, options.rounds)
        known = {**known, options.way: calibration.costs(options.way)}
    if options.save_costs is not None:
        write_costs(options.save_costs, known)
    return known[options.way]


def _lines(options: argparse.Namespace, costs: Costs) -> Iterator[Line]:
    for name in options.work:
        for workers in options.workers:
            plan = dataclasses.replace(
                plan_of(options.way, Case(name, workers), options.steps),
                servers=options.servers, cores=options.cores, network=options.network,
            )  # fmt: skip
            began_s = time.monotonic()
            foretold = foretell(plan, costs)
            say(f"{name}, workers: {workers}: foretold in {time.monotonic() - began_s:.1f} s")
            real = None
            if options.check:
                real = measured(options.way, Case(name, workers), options.seconds, options.rounds)
            yield Line(name, plan, foretold, real)


def cells(line: Line) -> tuple[str, ...]:
    """A line of the table."""
    found = line.foretold
    return (
        line.work,
        str(line.plan.workers),
        str(line.plan.servers),
        time_text(found.step_s * 1e6),
        f"{time_text(found.workers.cpu_s * 1e6)}, {found.workers.cpu_s / found.step_s:.0%}",
        f"{time_text(found.servers.cpu_s * 1e6)}, {found.servers.cpu_s / found.step_s:.0%}",
        f"{found.scheduler_step_share:.1%}",
        f"{found.servers.port_share:.0%}" if line.plan.network else "",
        f"{found.memory_share:.0%}",
        digits(found.servers.memory_nbytes / 1e6),
        time_text(found.joined_s * 1e6),
        time_text(found.barrier_s * 1e6),
    )


CHECK_HEADINGS: Final = (
    "work", "workers", "step: foretold", "real", "ratio", "worker, cpu: foretold", "real", "server, cpu: foretold",
    "real",
)  # fmt: skip


def check_cells(line: Line) -> tuple[str, ...]:
    """What was foretold beside what is."""
    found, real = line.foretold, line.real
    assert real is not None
    return (
        line.work,
        str(line.plan.workers),
        time_text(found.step_s * 1e6),
        time_text(real.step_s * 1e6),
        f"{found.step_s / real.step_s:.2f}",
        time_text(found.workers.cpu_s * 1e6),
        time_text(real.worker_s * 1e6),
        time_text(found.servers.cpu_s * 1e6),
        time_text(real.servers_s * 1e6),
    )


_NETWORK: Final = re.compile(r"([0-9.]+)(M|G)b/s(?:,([0-9.]+)(us|ms))?")


def network(text: str) -> Rates:
    """The speed of a host's port and the time of a packet, such as ``10Gb/s,50us``; 0 us if it is not said."""
    match = _NETWORK.fullmatch(text)
    try:
        assert match is not None
        bits_per_s = float(match[1]) * {"M": 1e6, "G": 1e9}[match[2]]
        latency_s = float(match[3] or 0) * {"us": 1e-6, "ms": 1e-3}[match[4] or "us"]
        assert bits_per_s > 0
    except (AssertionError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no network such as 10Gb/s,50us") from None
    return Rates(bits_per_s / 8, latency_s)


def _costs_file(text: str) -> dict[str, Costs]:
    try:
        return read_costs(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--workers", type=whole_numbers, default=(1, 2, 4, 8, 16), help="numbers of workers")
    parser.add_argument("--servers", type=positive(int), default=1)
    parser.add_argument("--work", type=works, default=("resnet50",), help="what they push and pull")
    parser.add_argument("--network", type=network, help="between the hosts, such as 10Gb/s,50us; without: one host")
    parser.add_argument("--cores", type=positive(int), default=len(os.sched_getaffinity(0)), help="of each host")
    parser.add_argument("--steps", type=positive(int), default=10)
    parser.add_argument("--way", type=some_of(tuple(KVD_WAYS)), help=f"how values travel: of {','.join(KVD_WAYS)}")
    parser.add_argument("--costs", type=_costs_file, default={}, help="a file with costs that were measured before")
    parser.add_argument("--save-costs", type=new_file, help="keep the costs in this file")
    parser.add_argument("--check", action="store_true", help="start the same clusters here, too")
    parser.add_argument("--seconds", type=positive(float), default=0.5, help="of a repetition of real steps")
    parser.add_argument("--rounds", type=positive(int), default=3, help="how often real clusters are started")
    parser.add_argument("--json", type=new_file, help="also write everything to this file")
    options = parser.parse_args(arguments)
    if options.check and (options.network or options.servers != 1):
        parser.error("--check: the clusters that are started here have one host and one server")
    options.way = options.way[0] if options.way else BETWEEN_HOSTS if options.network else BY_REFERENCE
    return options


if __name__ == "__main__":
    sys.exit(main())
