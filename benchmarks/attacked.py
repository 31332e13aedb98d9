"""What a stranger without a key costs a running job: the time of its steps, alone and under the attacks of one process.

``python -m benchmarks.attacked [--insecure] [--seconds S]`` prints minimum, median and maximum per attack.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from tests.fuzz.descriptors import with_many_descriptors
from tests.fuzz.target import Target, under_attack

WORST = ("connect and reset", "greetings of other versions, mechanisms and roles", "half handshakes", "giant sizes")
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


def step_times_s(target: Target, seconds: float) -> list[float]:
    """Those of the steps of worker 0 that begin and end in this time."""
    first = target.job.count() + 1
    time.sleep(seconds)
    return target.job.epochs[0].step_times_s(first)


def under(target: Target, name: str, seconds: float) -> list[float]:
    """The times of the steps while one process attacks as fast as it can."""
    mode = "closed" if target.is_closed else "open"
    attacker = subprocess.Popen([sys.executable, "-c", ATTACKER, name, mode, *target.addresses])
    try:
        time.sleep(1.5)  # it starts
        return step_times_s(target, seconds)
    finally:
        attacker.kill()
        attacker.wait()


def line(name: str, times: list[float], alone_s: float) -> str:
    median = statistics.median(times)
    figures = " | ".join(f"{1000 * value:.2f}" for value in (min(times), median, max(times)))
    return f"| {name} | {figures} | {median / alone_s:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--insecure", action="store_true", help="daemons without keys")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    arguments = parser.parse_args()
    with with_many_descriptors(), under_attack(insecure=arguments.insecure) as target:
        alone = step_times_s(target, arguments.seconds)
        print("| attack by one process | min ms | median ms | max ms | × alone |\n|---|---:|---:|---:|---:|")
        print(line("none", alone, statistics.median(alone)), flush=True)
        for name in WORST:
            print(line(name, under(target, name, arguments.seconds), statistics.median(alone)), flush=True)
        print(line("none, again", step_times_s(target, arguments.seconds), statistics.median(alone)))
        assert not target.ended()
        assert len(target.job.end()) == 1


if __name__ == "__main__":
    main()
