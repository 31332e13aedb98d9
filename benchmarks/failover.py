"""How long training pauses when a server is killed and another takes its place: ``python -m benchmarks.failover``.

Two workers train on two servers with two copies of every value and otherwise default settings, all on this machine.
Servers are killed in turn, at random moments, and started again after a second; the next is killed when every value has
two copies again. With ``--victim scheduler`` that one is killed instead, which pushes and pulls do not need.

The pause is the longest time between the ends of two steps of a worker. Beside the pauses of a kill are those of two
seconds before it, and those while a server that was started again is sent its copies.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import deaths
from benchmarks.printed_numbers import PrintedNumbers
from benchmarks.report import print_spreads
from kvd.testing.cluster import LocalCluster, wait_until

NODES: Final = 2
KEYS: Final = 8
QUIET_S: Final = 2.0
RESTART_S: Final = 1.0
WARM_UP_STEPS: Final = 20
DEFAULTS: Final[dict[str, Any]] = {"heartbeat_interval_s": 1.0}  # a LocalCluster has its own

WORKER: Final = """
import sys, time
import numpy as np
import kvd

keys, floats, computes_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
names = [f"layer {number}" for number in range(keys)]
gradients = [np.full(floats, 1e-6, np.float32) for _ in names]
outs = [np.empty(floats, np.float32) for _ in names]
with kvd.create("dist_sync") as kv:
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    kv.init(names, outs)
    while True:
        time.sleep(computes_s)
        kv.pushpull(names, gradients, outs)
        print(time.monotonic(), flush=True)
"""


def longest_step_s(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Between the ends of two steps, of the steps that ended between these times."""
    steps = pairwise(list(ends_s))
    return max((later - earlier for earlier, later in steps if begin_s <= later <= end_s), default=0.0)


@dataclass(slots=True)
class Pauses:
    """The longest of each kill, in seconds."""

    before_s: list[float] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    restarted_s: list[float] = field(default_factory=list)


def measure(victim: str, kills: int, megabytes: float, computes_s: float, seed: int) -> Pauses:
    """The pauses of so many kills of servers, or of the scheduler."""
    rng = random.Random(seed)
    pauses = Pauses()
    arguments = [str(KEYS), str(int(megabytes * 1e6 / 4 / KEYS)), str(computes_s)]
    with LocalCluster(NODES, NODES, processes=True, replicas=2, **DEFAULTS) as cluster, cluster.observer() as observer:
        workers: list[PrintedNumbers] = []  # when their steps ended

        def have_gone_on(since_s: float) -> bool:
            return all(worker.numbers[-1] > since_s for worker in workers)

        def longest_s(begin_s: float, end_s: float) -> float:
            return max(longest_step_s(worker.numbers, begin_s, end_s) for worker in workers)

        def kill(number: int) -> None:
            if victim == "server":
                cluster.kill_server(number % NODES)
            else:
                cluster.kill_scheduler()

        def restart(number: int) -> None:
            if victim == "server":
                cluster.restart_server(number % NODES)
            else:
                cluster.restart_scheduler()

        def is_in_sync() -> bool:
            partitions = observer.status().get(
                "partitions", ()
            )  # a scheduler that has just begun has yet to learn them
            return bool(partitions) and all(entry["backup"] for entry in partitions)

        try:
            workers += [PrintedNumbers(cluster.script(WORKER, number, *arguments)) for number in range(NODES)]
            wait_until(lambda: all(len(w.numbers) >= WARM_UP_STEPS for w in workers), "the workers train", 60.0)
            wait_until(is_in_sync, "every value has two copies", 60.0)
            for number in range(kills):
                quiet = time.monotonic()
                time.sleep(QUIET_S + rng.uniform(0, 0.5))
                killed = time.monotonic()
                kill(number)
                time.sleep(RESTART_S)
                wait_until(lambda: have_gone_on(killed), "the workers go on", 60.0)  # noqa: B023  it is waited for here
                restarted = time.monotonic()
                restart(number)
                wait_until(is_in_sync, "every value has two copies", 60.0)
                synced = time.monotonic()
                wait_until(lambda: have_gone_on(synced), "the workers go on", 60.0)  # noqa: B023
                ended = time.monotonic()
                pauses.before_s.append(longest_s(quiet, killed))
                pauses.killed_s.append(longest_s(killed, restarted))
                pauses.restarted_s.append(longest_s(restarted, ended))
        finally:
            for worker in workers:
                worker.end()
    return pauses


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement and prints a table."""
    parser = deaths("python -m benchmarks.failover", __doc__)
    parser.add_argument("--victim", choices=("server", "scheduler"), default="server", help="who is killed")
    given = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    pauses = measure(given.victim, int(given.kills), given.megabytes, given.computes, given.seed)
    kinds = {
        "before": pauses.before_s,
        f"the {given.victim} is killed": pauses.killed_s,
        "it is started again": pauses.restarted_s,
    }
    print_spreads(Console(), "longest pause of a worker, s", kinds, digits=3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
