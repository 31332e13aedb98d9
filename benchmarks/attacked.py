"""What a stranger without a key costs a running job: the time of its steps, alone and under the attacks of one process.

``python -m benchmarks.attacked [--insecure] [--seconds S] [--rounds N]`` prints minimum, median and maximum of the
steps per attack, and the processors that the attacker and the daemons took meanwhile. Attacker and job share the
machine, so one row is of a process that only spins: up to there, an attack costs what any other program costs. Each
round has all rows, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.descriptors import with_many_descriptors
from tests.fuzz.handshakes import HELLO_ENDS_AT
from tests.fuzz.overhearing import handshake_of
from tests.fuzz.target import Target, under_attack

NOBODY = "none"
SPINS = "none: a process that spins"
HELLOS = "HELLO and nothing more"
WORST = (
    "connect and reset",
    "greetings of other versions, mechanisms and roles",
    "half handshakes",
    "giant sizes",
)
ATTACKER = """
import sys, time
from random import Random
from types import SimpleNamespace
from tests.fuzz.attacks import ATTACKS
from tests.fuzz.assault import Assault, Force
name, closed, addresses = sys.argv[1], sys.argv[2] == "closed", sys.argv[3:]
target = SimpleNamespace(addresses=addresses, is_closed=closed)
while True:
    try:
        ATTACKS[name](Assault(target, Random(1), Force(peers=200, seconds=0.5)))
    except OSError:
        time.sleep(0.01)
"""
FLOODER = """
import sys
from tests.fuzz.flood import flood
from tests.fuzz.descriptors import with_many_descriptors
said = {address: bytes.fromhex(text) for address, text in zip(sys.argv[1::2], sys.argv[2::2])}
with with_many_descriptors():
    flood(said, 200, 1e6)
"""
START_S = 1.5  # of an attacker


@dataclass
class Row:
    """What was measured under one attack, in all rounds."""

    steps_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    attacker_s: float = 0.0  # of processor time
    daemons_s: float = 0.0

    def line(self, name: str, alone_s: float) -> str:
        median = statistics.median(self.steps_s)
        figures = " | ".join(f"{1000 * value:.2f}" for value in (min(self.steps_s), median, max(self.steps_s)))
        shares = f"{self.attacker_s / self.seconds:.2f} | {self.daemons_s / self.seconds:.2f}"
        return f"| {name} | {figures} | {median / alone_s:.2f} | {shares} |"


def processor_s(pid: int) -> float:
    """The processor time that a process has had."""
    schedules = (Path("/proc") / str(pid) / "task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in schedules) / 1e9


@contextmanager
def attacker_of(target: Target, name: str, hellos: list[str]) -> Iterator[subprocess.Popen[bytes] | None]:
    """One process that attacks as fast as it can."""
    mode = "closed" if target.is_closed else "open"
    arguments = {
        NOBODY: [],
        SPINS: ["while True: pass"],
        HELLOS: [FLOODER, *hellos],
    }.get(name, [ATTACKER, name, mode, *target.addresses])
    if not arguments:
        yield None
        return
    process = subprocess.Popen([sys.executable, "-c", *arguments])
    try:
        time.sleep(START_S)
        yield process
    finally:
        process.kill()
        process.wait()


def measure(target: Target, name: str, hellos: list[str], row: Row, seconds: float) -> None:
    """Adds the steps of worker 0 that begin and end within these seconds."""
    with attacker_of(target, name, hellos) as attacker:
        pids = [daemon.pid for daemon in target.daemons]
        first = target.job.count() + 1
        start = time.monotonic()
        before = sum(map(processor_s, pids)), processor_s(attacker.pid) if attacker else 0.0
        time.sleep(seconds)
        row.daemons_s += sum(map(processor_s, pids)) - before[0]
        row.attacker_s += (processor_s(attacker.pid) if attacker else 0.0) - before[1]
        row.seconds += time.monotonic() - start
        row.steps_s += target.job.epochs[0].step_times_s(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--insecure", action="store_true", help="daemons without keys")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    with with_many_descriptors(), under_attack(insecure=arguments.insecure) as target:
        hellos = [word for at in target.addresses for word in (at, handshake_of(target, at)[:HELLO_ENDS_AT].hex())]
        rows = {name: Row() for name in (NOBODY, SPINS, *WORST, HELLOS)}
        for _ in range(arguments.rounds):
            for name, row in rows.items():
                measure(target, name, hellos, row, arguments.seconds)
        alone_s = statistics.median(rows[NOBODY].steps_s)
        print("| attack by one process | min ms | median ms | max ms | × alone | its processors | the daemons' |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, row in rows.items():
            print(row.line(name, alone_s))
        assert not target.ended()
        assert len(target.job.end()) == 1


if __name__ == "__main__":
    main()
