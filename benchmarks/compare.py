"""kvd compared with MXNet, Gloo and Redis, in turn, on this machine: ``python -m benchmarks.compare``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import Console

from benchmarks import distance, figures, floor, limits, machine, report
from benchmarks.arguments import checkout, new_file, positive, some_of, works
from benchmarks.systems import (
    KVD_WAYS,
    PEER_ENVIRONMENTS,
    PEERS_DIR,
    Effort,
    Outcome,
    System,
    earlier_systems,
    kvd_systems,
    peer_is_ready,
    peer_systems,
    peer_version,
)
from kvd_cli.bench_plot import counted, is_plotted, throughput_chart
from kvd_cli.bench_work import MODES, WORK

DEFAULT_WAYS: Final = ("auto", "tcp", "bound")
PEERS: Final = tuple(PEER_ENVIRONMENTS)
FAILED: Final = 1

Started: TypeAlias = tuple[System, str, int, Outcome]
"""A system, its optimizer, the number of the round, and what came of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, draw and write. The exit code is 0 if every start of kvd gave figures."""
    options = _options(arguments)
    effort = Effort(options.only, options.workers, options.servers, options.seconds, options.repetitions, options.limit)
    ours, advice = kvd_systems(options.kvd, options.modes)
    earlier = [] if options.earlier is None else earlier_systems(options.earlier, ours)
    peers, advice_on_peers = peer_systems(options.peers, options.peers_dir, options.modes)
    for warning in filter(None, [*advice, *advice_on_peers, machine.load_warning()]):
        say(warning)
    say("measuring the limits of this machine")
    limits_found = limits.measure(effort.workers)
    outcomes = [
        (system, mode, number, start(system, effort, mode, number))
        for system, mode, number in turns([*ours, *earlier, *peers], effort, options.modes, options.rounds)
    ]
    found = _findings(effort, limits_found, outcomes)
    report.show(found, Console())
    if options.plot is not None:
        _draw(options.plot, effort, found.summaries)
    if options.json is not None:
        document = _document(effort, found, outcomes) | {"rounds": options.rounds}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    of_kvd = [outcome for system, _, _, outcome in outcomes if system.is_ours]
    return 0 if of_kvd and not any(outcome.failure for outcome in of_kvd) else FAILED


def _findings(effort: Effort, limits_found: dict[str, float], started: Sequence[Started]) -> report.Findings:
    outcomes = [outcome for *_, outcome in started]
    summaries = figures.summaries(row for outcome in outcomes for row in outcome.rows)
    floors = {
        (summary.mode, summary.name): floor.least_us(summary.bytes, effort.workers, limits_found)
        for summary in summaries
        if summary.mode == "none" and effort.servers == 1  # the limit is defined for these
    }
    return report.Findings(
        limits=limits_found,
        summaries=summaries,
        ratios=figures.ratios(summaries),
        floors_us={key: least_us for key, least_us in floors.items() if least_us is not None},
        peaks=figures.peaks(role for outcome in outcomes for role in outcome.roles),
        cores_gb_s=_distances(started),
    )


def _distances(started: Sequence[Started]) -> dict[str, list[float]]:
    """How far apart the cores were at the starts of each system."""
    found: dict[str, list[float]] = {}
    for system, _, _, outcome in started:
        if outcome.cores_gb_s:
            found.setdefault(system.name, []).extend(outcome.cores_gb_s)
    return found


def _draw(file: Path, effort: Effort, summaries: Sequence[figures.Summary]) -> None:
    """The curves of all systems, without an optimizer."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for summary in summaries:
        if summary.mode == "none" and is_plotted(summary.name):
            curves.setdefault(summary.system, []).append((summary.bytes, summary.mb_s))
    if not curves:
        say(f"{file} is not drawn: no work of one value from 4KiB to 64MiB gave figures without an optimizer")
        return
    how = f"{counted(effort.workers, 'worker')}, {counted(effort.servers, 'server')}, no optimizer"
    file.write_text(throughput_chart(curves, how), encoding="utf-8")


def turns(
    systems: Sequence[System], effort: Effort, modes: Sequence[str], rounds: int
) -> Iterator[tuple[System, str, int]]:
    """The order of starts: in every round each system once per mode, with a different one first each time."""
    for number in range(rounds):
        first = number % max(len(systems), 1)
        for mode in modes:
            for system in (*systems[first:], *systems[:first]):
                if system.does(effort, mode):
                    yield system, mode, number


def start(system: System, effort: Effort, mode: str, number: int) -> Outcome:
    """Start a system once. Say so, and say why if it fails."""
    say(f"round {number + 1}: {system.name}, optimizer {mode}")
    before = distance.gb_s()
    outcome = system.start(effort, mode, number)
    if outcome.failure:
        say(f"{system.name} failed: {outcome.failure}\n{outcome.complaints}".rstrip())
    around = before, distance.gb_s()
    return dataclasses.replace(outcome, cores_gb_s=tuple(gb_s for gb_s in around if gb_s is not None))


def _document(effort: Effort, found: report.Findings, outcomes: Sequence[Started]) -> dict[str, Any]:
    """The content of the file. It names no host, user or directory, because it is meant to be shared."""
    failures = [
        {"system": system.name, "mode": mode, "round": number, "failure": outcome.failure}
        for system, mode, number, outcome in outcomes
        if outcome.failure
    ]
    return {
        **heading(),
        "limits": found.limits,
        "effort": dataclasses.asdict(effort),
        "summaries": [dataclasses.asdict(summary) for summary in found.summaries],
        "ratios": [dataclasses.asdict(ratio) for ratio in found.ratios],
        "floors": [{"mode": mode, "name": name, "least_us": us} for (mode, name), us in found.floors_us.items()],
        "rows": [dataclasses.asdict(row) for *_, outcome in outcomes for row in outcome.rows],
        "roles": [role for *_, outcome in outcomes for role in outcome.roles],
        "starts": [
            {"system": system.name, "mode": mode, "round": number, "cores_gb_s": outcome.cores_gb_s}
            for system, mode, number, outcome in outcomes
        ],
        "failures": failures,
    }


def heading() -> dict[str, Any]:
    """When and on which machine it was measured."""
    description = machine.describe()
    ready = [name for name in PEERS if peer_is_ready(name)]
    description["versions"]["peers"] = {name: peer_version(name) for name in ready}
    return {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "machine": description}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--rounds", type=positive(int), default=5, help="how often each system is started")
    parser.add_argument("--only", type=works, default=tuple(WORK), help=f"works, of {','.join(WORK)}")
    parser.add_argument("--modes", type=some_of(MODES), default=MODES, help="optimizers on the servers")
    parser.add_argument("--peers", type=some_of(PEERS, none_too=True), default=PEERS, help="an empty list: none")
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help="the folder of the peers' run.py")
    parser.add_argument("--earlier", type=checkout, help="the folder of an earlier kvd, to measure against as well")
    ways = ",".join(KVD_WAYS)
    parser.add_argument("--kvd", type=some_of(tuple(KVD_WAYS)), default=DEFAULT_WAYS, help=f"ways to run it: {ways}")
    parser.add_argument("--workers", type=positive(int), default=2)
    parser.add_argument("--servers", type=positive(int), default=1)
    parser.add_argument("--seconds", type=positive(float), default=0.5, help="per repetition")
    parser.add_argument("--repetitions", type=positive(int), default=3, help="of a work in one start")
    parser.add_argument("--limit", type=positive(float), default=300.0, help="seconds that one start may take")
    parser.add_argument("--json", type=new_file, help="write everything to this file, too")
    parser.add_argument("--plot", type=new_file, help="draw MB/s by size as SVG: works of one value, no optimizer")
    return parser.parse_args(arguments)


def say(text: str) -> None:
    """Print progress and advice, which are not part of the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
