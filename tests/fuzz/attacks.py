"""The table of attacks: what was tried on the daemons of a running job, how often, and what it did to them.

``python -m tests.fuzz.attacks [--rounds N] [--insecure] [NAME ...]`` prints it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from tests.fuzz import handshakes, insiders, sealed_frames, wire_frames
from tests.fuzz.assault import ATTACKS, Assault, Force, attacks
from tests.fuzz.descriptors import with_many_descriptors
from tests.fuzz.target import MOST_GROWN_BYTES, Target, under_attack

__all__ = [
    "ATTACKS",
    "FULL",
    "Row",
    "attack_with",
    "attacks",
    "handshakes",
    "insiders",
    "sealed_frames",
    "table",
    "wire_frames",
]

FULL = Force(rounds=3, peers=2000, seconds=20.0, nbytes=256 << 20)


class Row(NamedTuple):
    """What one kind of attack did.

    Attributes:
        times: how often it was made.
        ended: daemons that did not survive it.
        disturbed: what happened to the job, "" if nothing.
        grown_bytes: by which a daemon's memory rose meanwhile, at most.
        kept: what a daemon did not give back, "" if nothing.
    """

    name: str
    times: int
    ended: list[str]
    disturbed: str
    grown_bytes: int
    kept: str
    seconds: float

    @property
    def holds(self) -> bool:
        return not (self.ended or self.disturbed or self.kept) and self.grown_bytes <= MOST_GROWN_BYTES


def attack_with(target: Target, name: str, force: Force, seed: int = 1) -> Row:
    """Makes one kind of attack while the job trains, and looks what has become of daemons and job."""
    before = target.usage()
    target.forget_peaks()
    start = time.monotonic()
    times = ATTACKS[name](Assault(target, Random(seed), force))
    seconds = time.monotonic() - start
    ended = target.ended()
    if ended:
        return Row(name, times, ended, "the daemons are gone", 0, "", seconds)
    disturbed = _disturbance(target)
    kept = "; ".join(f"{which}: {was} became {now}" for which, was, now in target.settles_at(before))
    grown = max(peak - was.resident_bytes for peak, was in zip(target.peaks(), before, strict=True))
    return Row(name, times, target.ended(), disturbed, grown, kept, seconds)


def _disturbance(target: Target) -> str:
    try:
        target.job.trains_on(1)
    except AssertionError as error:
        return str(error)
    if not target.answers():
        return "a daemon does not answer"
    return "" if len(target.job.digests()) == 1 else "its results differ"


def table(rows: Iterable[Row]) -> str:
    lines = ["| attack | times | daemons ended | jobs disturbed | memory, at most |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        grown = f"+{row.grown_bytes / 1e6:.0f} MB" + (" and kept" if row.kept else "")
        lines.append(f"| {row.name} | {row.times} | {len(row.ended)} | {int(bool(row.disturbed))} | {grown} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="attacks; all if there are none")
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--seconds", type=float, default=FULL.seconds)
    parser.add_argument("--peers", type=int, default=FULL.peers)
    parser.add_argument("--nbytes", type=int, default=FULL.nbytes)
    parser.add_argument("--insecure", action="store_true", help="daemons without keys")
    arguments = parser.parse_args()
    force = Force(arguments.rounds, arguments.peers, arguments.seconds, arguments.nbytes)
    rows = []
    with with_many_descriptors():
        for name in arguments.names or attacks(insecure=arguments.insecure):
            with under_attack(
                insecure=arguments.insecure
            ) as target:  # a new one for each, so that one fault does not hide another
                row = attack_with(target, name, force)
                if row.holds:
                    digests = target.job.end()
                    row = row if len(digests) == 1 else row._replace(disturbed="its results differ")
            rows.append(row)
            print(
                f"{row.name}: {row.times} times in {row.seconds:.1f} s {row.ended} {row.disturbed} {row.kept}",
                flush=True,
            )
    print(table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
