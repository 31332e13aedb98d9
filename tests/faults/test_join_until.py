"""Uneven data in processes of their own: the bits are those of NumPy, also when workers are killed."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy as np
import pytest

from kvd.testing.cluster import LocalCluster, wait_until

SIZE = 2000
STEPS = (5, 7, 9)  # of an epoch, by rank
EPOCHS = 3
SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 0.2,
    "worker_timeout_s": 30.0,
    "request_timeout_s": 60.0,
    "round_timeout_s": 120.0,
    "slice_bytes": 4096,
}

TRAINS = """
import sys, json, numpy as np, kvd
from kvd.optimizer import SGD
steps, size, epochs, stops = (5, 7, 9), 2000, 3, sys.argv[1]
kv = kvd.create("dist_sync")
kv.set_optimizer(SGD(0.25, momentum=0.5))
kv.init("w", np.zeros(size, np.float32))
for epoch in range(epochs):
    for step in kv.steps(steps[kv.rank]):
        if f"{epoch}.{step}" == stops:
            print("there", flush=True)
            sys.stdin.readline()
        kv.pushpull("w", np.arange(size, dtype=np.float32) % 7 + np.float32(10 * kv.rank + 3 * epoch + step))
    kv.join(until=f"epoch {epoch}")
kv.barrier("end")
value = kv.pull("w")
kv.close()
print(json.dumps(value.tolist()), flush=True)
"""


def expected() -> Any:
    """What NumPy makes of the same pushes, in float32 and in the order of the ranks."""
    weight, momentum = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    rate, share = np.float32(0.25), np.float32(0.5)
    for epoch in range(EPOCHS):
        for step in range(max(STEPS)):
            total = np.zeros(SIZE, np.float32)
            for rank in [rank for rank in range(3) if step < STEPS[rank]]:
                total = total + (np.arange(SIZE, dtype=np.float32) % 7 + np.float32(10 * rank + 3 * epoch + step))
            momentum = share * momentum + total
            weight = weight - rate * momentum
    return weight


def finish(process: subprocess.Popen[bytes]) -> Any:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output.decode()
    return np.array(json.loads(output.decode().strip().splitlines()[-1]), np.float32)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stdin):
        if pipe is not None:
            pipe.close()


def states(observer: Any) -> list[str]:
    return [member["state"] for member in observer.status()["members"] if member["role"] == "worker"]


def start(cluster: LocalCluster, rank: int, stops: str = "") -> subprocess.Popen[bytes]:
    return cluster.script(TRAINS, rank, stops, stdin=subprocess.PIPE, preferred_rank=rank)


def is_there(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == b"there\n"


def test_a_worker_is_killed_at_the_point_and_another_one_in_the_epoch_after_it() -> None:
    with LocalCluster(3, 2, **SETTINGS) as cluster:
        workers = [start(cluster, 0), start(cluster, 1, "2.0"), start(cluster, 2, "1.8")]
        assert is_there(workers[2])
        with cluster.observer() as observer:
            wait_until(lambda: states(observer).count("idle") == 2, "two are at the point")
        kill(workers[0])
        workers[0] = start(cluster, 0)
        with cluster.observer() as observer:
            wait_until(lambda: states(observer).count("idle") == 2, "its successor is there, too")
        assert workers[2].stdin is not None
        workers[2].stdin.write(b"\n")
        workers[2].stdin.flush()
        assert is_there(workers[1])
        kill(workers[1])
        workers[1] = start(cluster, 1)
        for process in workers:
            np.testing.assert_array_equal(finish(process), expected())


@pytest.mark.soak
@pytest.mark.parametrize("stops", ["0.0", "0.4", "1.0", "1.3", "2.0", "2.4"])
@pytest.mark.parametrize("rank", range(3))
def test_a_worker_is_killed_in_a_step(rank: int, stops: str) -> None:
    with LocalCluster(3, 2, **SETTINGS) as cluster:
        workers = [start(cluster, number, stops if number == rank else "") for number in range(3)]
        assert is_there(workers[rank])
        kill(workers[rank])
        workers[rank] = start(cluster, rank)
        for process in workers:
            np.testing.assert_array_equal(finish(process), expected())
