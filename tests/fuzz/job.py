"""A worker of the job that attacks must not disturb: it trains the same thing again and again.

Each epoch makes its keys, trains them for some steps with momentum on the servers, notes what has become of them, and
deletes them. So the digest of every epoch is the same, and one push too many or too few shows in it.

Run as a program: STATE_FILE STOP_FILE STEPS. Each line of the first file is an epoch: its digest, and the seconds that
its steps took. The job ends after an epoch in which a worker has seen the second file.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

import kvd
from kvd.optimizer import SGD

SIZES = (5_000, 300, 1)  # of the keys: above and below what needs credit
QUIET_KEY = "quiet"  # is there all the time, 60 KB of it, and nobody pushes to it
PAUSE_S = 0.06  # between steps, so that the job leaves a small machine some time for its attackers


def train(kv: kvd.KVStore, epoch: int, steps: int) -> tuple[str, list[float]]:
    """The digest of what the keys have become, and the time of each step."""
    keys = [f"w{size}.{epoch}" for size in SIZES]
    random = np.random.default_rng(kv.rank)
    values = [np.zeros(size, np.float32) for size in SIZES]
    for key, value in zip(keys, values, strict=True):
        kv.init(key, value)
    times = []
    for _ in range(steps):
        gradients = [random.standard_normal(size).astype(np.float32) for size in SIZES]
        start = time.perf_counter()
        kv.pushpull(keys, gradients, out=values)
        times.append(time.perf_counter() - start)
        time.sleep(PAUSE_S)  # time itself: the pace of the steps
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    kv.delete(keys)
    return digest, times


def main(state: Path, stop: Path, steps: int) -> None:
    with kvd.create("dist_sync") as kv, state.open("w", buffering=1) as file:
        kv.set_optimizer(SGD(learning_rate=0.25, momentum=0.5))
        kv.init("stop", np.zeros(1, np.float32))
        kv.init(QUIET_KEY, np.zeros(15_000, np.float32))
        epoch, goes_on = 0, True
        while goes_on:
            digest, times = train(kv, epoch, steps)
            print(digest, *(f"{seconds:.6f}" for seconds in times), file=file)
            seen = np.full(1, stop.exists(), np.float32)
            goes_on = not kv.pushpull("stop", seen, out=np.zeros(1, np.float32)).any()
            epoch += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
