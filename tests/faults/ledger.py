"""Every push counts exactly once, whoever is killed: two workers count what was acknowledged, and look what is there.

``python -m tests.faults.ledger [--seconds S] [--seed N] [--insecure]`` kills random processes of a job every few
seconds and prints the counts: pushes acknowledged, kills, lost and doubled ones. A push is of one key. With
``--spare``, the scheduler and the first server live on, and their memory is printed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvd.testing.cluster import LocalCluster, ProcessNode
from tests.faults.replicated_job import NODES, ReplicatedJob

KEYS: Final = 6  # of each worker, besides the one that they share
PAUSE_S: Final = (0.2, 2.0)  # between two faults, at random; and until a supervisor starts a process again
DOWN_S: Final = (0.0, 1.0)
Victims = tuple[tuple[str, int], ...]
VICTIMS: Final[tuple[Victims, ...]] = (
    (("server", 0),),
    (("server", 1),),
    (("worker", 0),),
    (("worker", 1),),
    (("scheduler", 0),),
    (("server", 0), ("worker", 1)),
    (("server", 1), ("worker", 0)),
    (("server", 0), ("scheduler", 0)),
    (("server", 1), ("scheduler", 0)),
    (("worker", 0), ("scheduler", 0)),
)
SPARING: Final[tuple[Victims, ...]] = (
    (("server", 1),),
    (("worker", 0),),
    (("worker", 1),),
    (("server", 1), ("worker", 0)),
)
"""Who is killed while the memory of the others is watched."""

COUNTS: Final = f"""
import json, os, sys
from collections import deque
import numpy as np
import kvd
folder, KEYS = sys.argv[1], {KEYS}
with kvd.create("dist_async") as kv:
    # In a file, what is written there outlives this process: the steps that were pushed, and acknowledged.
    issued, acknowledged = np.memmap(f"{{folder}}/worker-{{kv.rank}}", np.int64, "r+", shape=(2, 1))
    sizes = {{f"{{rank}}.{{number}}": 4 + 900 * (number % 4) for rank in range(2) for number in range(KEYS)}}
    sizes["both"] = 3000
    kv.init(list(sizes), [np.zeros(size, np.float32) for size in sizes.values()])
    mine = [key for key in sizes if key.startswith(f"{{kv.rank}}.")]
    names = [*mine, "both"]
    gradients = [np.full(sizes[key], -1, np.float32) for key in names]
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0))
    def look():
        return [np.unique(value) for value in kv.pull(mine)], [kv.clock(key) for key in mine]
    def check(at_least, at_most, what):
        for key, value, clock in zip(mine, *look()):
            lost, doubled = max(0, at_least - int(value.min())), max(0, int(value.max()) - at_most)
            if lost or doubled:  # between the two, some slices of a key may have more than others
                found = [what, key, value.tolist(), clock, at_least, at_most, lost, doubled]
                print("WRONG", json.dumps(found), flush=True)
    check(int(acknowledged[0]), int(issued[0]), "restarted")
    step = min(kv.clock(key) for key in names)
    kv.rewind(step)
    open_ = deque()
    while not os.path.exists(f"{{folder}}/stop"):
        step += 1
        issued[0] = max(issued[0], step)
        open_.append((step, kv.push_async(names, gradients)))
        while len(open_) > 8:
            number, handle = open_.popleft()
            handle.wait()
            acknowledged[0] = max(acknowledged[0], number)
        if step % 50 == 0:
            print("step", step, flush=True)
    for number, handle in open_:
        handle.wait()
        acknowledged[0] = number
    kv.barrier()
    check(step, step, "end")
    print(json.dumps({{"steps": step, "both": np.unique(kv.pull("both")).tolist()}}), flush=True)
"""


@dataclass
class Counts:
    """What happened to a job.

    Attributes:
        faults: how often a set of processes was killed at once.
        kills: processes, by role.
        lost: pushes that were acknowledged and are not there.
        doubled: what is there more often than it was pushed.
        wrong: what workers said of that.
        memory: of daemons that live, in MiB.
    """

    faults: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} of a {role}" for role, count in sorted(self.kills.items()))
        return (
            f"{self.acknowledged} pushes acknowledged; {self.faults} faults with {self.kills.total()} kills ({kills}): "
            f"{self.lost} lost, {self.doubled} doubled, {len(self.wrong)} values wrong"
            + "".join(f"; {name} {mebibytes} MiB" for name, mebibytes in self.memory.items())
        )


def victims_of(seed: int) -> Victims:
    """Whom a fault kills."""
    return random.Random(seed).choice(VICTIMS)


def run(folder: Path, seed: int, seconds: float, victims: Sequence[Victims] = VICTIMS, **settings: Any) -> Counts:
    """Kills processes of a job for so long, one of these sets after the other, each when there are two copies again."""
    rng = random.Random(seed)
    counts = Counts()
    for number in range(NODES):
        (folder / f"worker-{number}").write_bytes(bytes(16))
    patient = {"server_timeout_s": 10.0}  # nothing is paused here, and a loaded machine is no death
    with ReplicatedJob(folder, COUNTS, str(folder), **{"staleness": None, **patient, **settings}) as job:
        job.crew.wait_for_steps(2)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(rng.uniform(*PAUSE_S))  # time itself
            chosen = rng.choice(victims)
            for role, number in chosen:
                job.kill(role, number)
                counts.kills[role] += 1
            counts.faults += 1
            if rng.random() < 0.5:
                time.sleep(rng.uniform(*DOWN_S))  # time itself
            for role, number in sorted(chosen):  # the scheduler first: without it no server comes
                job.restart(role, number)
            _collect(job, counts)
            job.wait_until_in_sync()
            job.crew.wait_for_steps(1)
            counts.acknowledged = _acknowledged_steps(folder) * (KEYS + 1)
            counts.memory = _memory(job) if victims is SPARING else {}
            if counts.faults % 10 == 0:
                print(f"{time.monotonic() - ends + seconds:.0f} s: {counts}", flush=True)
        (folder / "stop").touch()
        results = job.crew.results()
        _collect(job, counts)
        steps = [result["steps"] for result in results]
        counts.acknowledged = _acknowledged_steps(folder) * (KEYS + 1)
        for result in results:
            [*values] = result["both"]
            if values != [float(sum(steps))]:
                counts.wrong.append(f"both workers pushed {steps}, and the sum is {values}")
                counts.lost += max(0, int(sum(steps) - min(values)))
                counts.doubled += max(0, int(max(values) - sum(steps)))
    return counts


def _acknowledged_steps(folder: Path) -> int:
    """Of all workers."""
    files = [folder / f"worker-{number}" for number in range(NODES)]
    return sum(int.from_bytes(file.read_bytes()[8:], sys.byteorder) for file in files)


def _memory(job: ReplicatedJob) -> dict[str, int]:
    """Of the daemons that are spared: what is resident, in MiB."""
    found = {}
    for name, node in (("scheduler", job.cluster.scheduler), ("server 0", job.server(0))):
        assert isinstance(node, ProcessNode)
        pages = int(Path(f"/proc/{node.process.pid}/statm").read_text().split()[1])
        found[name] = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return found


def _collect(job: ReplicatedJob, counts: Counts) -> None:
    for worker in job.crew.workers:
        for line in list(worker.lines):
            if line.startswith("WRONG") and line not in counts.wrong:
                counts.wrong.append(line)
                *_, lost, doubled = json.loads(line.removeprefix("WRONG "))
                counts.lost += lost
                counts.doubled += doubled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--spare", action="store_true", help="the scheduler and server 0 live on: what memory they take"
    )
    parser.add_argument("--insecure", action="store_true", help="without keys")
    arguments = parser.parse_args()
    LocalCluster.default_insecure = arguments.insecure
    with tempfile.TemporaryDirectory(prefix="kvd-ledger-") as folder:
        counts = run(Path(folder), arguments.seed, arguments.seconds, SPARING if arguments.spare else VICTIMS)
    print(counts)
    for line in counts.wrong:
        print(line)
    return int(bool(counts.wrong))


if __name__ == "__main__":
    sys.exit(main())
