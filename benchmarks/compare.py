"""kvd beside MXNet, Gloo and Redis, in turn, on this machine: ``python -m benchmarks.compare``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import figures, limits, machine, report
from benchmarks.systems import (
    PEER_ENVIRONMENTS,
    PEERS_DIR,
    Effort,
    Outcome,
    System,
    kvd_system,
    peer_is_ready,
    peer_systems,
    peer_version,
)
from kvd_cli.bench_work import MODES, WORK, names_of

TRANSPORTS: Final = ("tcp", "ipc")
PEERS: Final = tuple(PEER_ENVIRONMENTS)
FAILED: Final = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. The exit code is 0 if every start of kvd gave figures."""
    options = _options(arguments)
    effort = Effort(options.only, options.workers, options.servers, options.seconds, options.repetitions, options.limit)
    peers, advice = peer_systems(options.peers, options.peers_dir, options.modes)
    for warning in filter(None, [*advice, machine.load_warning()]):
        _say(warning)
    systems = [*(kvd_system(transport, options.modes) for transport in options.transports), *peers]
    _say("measuring the limits of this machine")
    limits_found = limits.measure()
    outcomes = [
        (system, mode, number, _start(system, effort, mode, number))
        for system, mode, number in turns(systems, effort, options.modes, options.rounds)
    ]
    rows = [row for *_, outcome in outcomes for row in outcome.rows]
    summaries = figures.summaries(rows)
    report.show(limits_found, summaries, figures.ratios(summaries), Console())
    if options.json is not None:
        failures = [
            {"system": system.name, "mode": mode, "round": number, "failure": outcome.failure}
            for system, mode, number, outcome in outcomes
            if outcome.failure
        ]
        roles = [role for *_, outcome in outcomes for role in outcome.roles]
        document = _document(effort, limits_found, summaries) | {
            "rounds": options.rounds,
            "rows": [dataclasses.asdict(row) for row in rows],
            "roles": roles,
            "failures": failures,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    ours = [outcome for system, _, _, outcome in outcomes if system.is_ours]
    return 0 if ours and not any(outcome.failure for outcome in ours) else FAILED


def turns(
    systems: Sequence[System], effort: Effort, modes: Sequence[str], rounds: int
) -> Iterator[tuple[System, str, int]]:
    """Who is started when: in every round everyone once per mode, and another one first each time."""
    for number in range(rounds):
        first = number % max(len(systems), 1)
        for mode in modes:
            for system in (*systems[first:], *systems[:first]):
                if system.does(effort, mode):
                    yield system, mode, number


def _start(system: System, effort: Effort, mode: str, number: int) -> Outcome:
    _say(f"round {number + 1}: {system.name}, optimizer {mode}")
    outcome = system.start(effort, mode, number)
    if outcome.failure:
        _say(f"{system.name} failed: {outcome.failure}\n{outcome.complaints}".rstrip())
    return outcome


def _document(effort: Effort, limits_found: dict[str, float], summaries: Sequence[figures.Summary]) -> dict[str, Any]:
    """What goes into the file besides rows. It names no host, user or folder: it is there to be passed on."""
    description = machine.describe()
    ready = [name for name in PEERS if peer_is_ready(name)]
    description["versions"]["peers"] = {name: peer_version(name) for name in ready}
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": description,
        "limits": limits_found,
        "effort": dataclasses.asdict(effort),
        "summaries": [dataclasses.asdict(summary) for summary in summaries],
        "ratios": [dataclasses.asdict(ratio) for ratio in figures.ratios(summaries)],
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--rounds", type=_positive(int), default=5, help="how often each system is started")
    parser.add_argument("--only", type=_works, default=tuple(WORK), help=f"works, of {','.join(WORK)}")
    parser.add_argument("--modes", type=_some_of(MODES), default=MODES, help="optimizers on the servers")
    parser.add_argument("--peers", type=_some_of(PEERS, none_too=True), default=PEERS, help="an empty list: none")
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help="the folder of the peers' run.py")
    parser.add_argument("--transports", type=_some_of(TRANSPORTS), default=TRANSPORTS[:1], help="of kvd: tcp,ipc")
    parser.add_argument("--workers", type=_positive(int), default=2)
    parser.add_argument("--servers", type=_positive(int), default=1)
    parser.add_argument("--seconds", type=_positive(float), default=0.5, help="per repetition")
    parser.add_argument("--repetitions", type=_positive(int), default=3, help="of a work in one start")
    parser.add_argument("--limit", type=_positive(float), default=300.0, help="seconds that one start may take")
    parser.add_argument("--json", type=_new_file, help="write everything to this file, too")
    return parser.parse_args(arguments)


def _works(text: str) -> tuple[str, ...]:
    try:
        return tuple(names_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _some_of(choices: tuple[str, ...], *, none_too: bool = False) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(choices)}")
        if not names and not none_too:
            raise argparse.ArgumentTypeError(f"name at least one of {', '.join(choices)}")
        return tuple(dict.fromkeys(names))

    return read


def _new_file(text: str) -> Path:
    """Checked before anything is measured: a comparison takes many minutes."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or lies in none")
    return path


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return number

    read.__name__ = "whole number" if kind is int else "number"  # argparse names it in its error
    return read


def _say(text: str) -> None:
    """Progress and advice: not part of the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
