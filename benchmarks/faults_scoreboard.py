"""The same faults against kvd with two replicas, MXNet and Gloo: who goes on, restarts, hangs, fails or loses data.

``python -m benchmarks.faults_scoreboard [--systems kvd,mxnet,gloo] [--only "server killed"] [--steps N] [--limit S]``
prints a Markdown table, and says on standard error what each job said. Every job trains the same: see
`benchmarks.faulted_systems`. A supervisor starts what was killed again after a second; what was paused goes on after
30 seconds. One job runs at a time.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.faulted_job import Fault, Means, Outcome, Verdict, run
from benchmarks.faulted_systems import ENTRANTS, Size, entrants

ROLES: Final = ("worker", "server", "scheduler")
FAULTS: Final = (
    Fault("worker", Means.NOTHING),
    *(Fault(role, means) for means in (Means.KILLED, Means.PAUSED) for role in ROLES),
)


def cell(outcome: Outcome | None) -> str:
    """An outcome in a table."""
    if outcome is None:
        return "has none"
    match outcome.verdict:
        case Verdict.GOES_ON | Verdict.RESTARTS:
            return f"{outcome.verdict.value}, pause {outcome.pause_s:.1f} s"
        case Verdict.FAILS:
            return f"fails after {outcome.pause_s:.1f} s"
        case Verdict.LOSES_DATA:
            return f"loses data: {outcome.note}"
        case _:
            return str(outcome.verdict.value)


def table(names: Sequence[str], rows: Sequence[tuple[Fault, Sequence[Outcome | None]]]) -> str:
    """The scoreboard in Markdown."""
    lines = [f"| fault | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| {fault} | {' | '.join(cell(outcome) for outcome in outcomes)} |" for fault, outcomes in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(ENTRANTS), help="which take part")
    parser.add_argument("--only", default="", metavar="WORDS", help="only faults whose description has these words")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05, help="how long a worker computes in each step")
    parser.add_argument("--at-step", type=int, default=50, help="the step in which the fault happens")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds, after which a job counts as hanging")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the processes of a job end with us
    chosen, notes = entrants(arguments.systems.split(","))
    for note in notes:
        print(note, file=sys.stderr)
    size = Size(arguments.workers, arguments.servers, arguments.steps, arguments.step_s)
    rows = []
    for fault in (fault for fault in FAULTS if arguments.only in str(fault)):
        outcomes = []
        for entrant in chosen:
            outcome = run(entrant, fault, size, arguments.at_step, arguments.limit)
            outcomes.append(outcome)
            said = f" ({outcome.note})" if outcome is not None and outcome.note else ""
            print(f"{fault}: {entrant.name}: {cell(outcome)}{said}", file=sys.stderr, flush=True)
        rows.append((fault, outcomes))
    print(table([entrant.name for entrant in chosen], rows))


if __name__ == "__main__":
    main()
