"""A worker that compresses is killed with SIGKILL, again and again: its successors finish with the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvd.testing.cluster import LocalCluster
from tests.faults.programs import WITHOUT_NOTICES, finish, line

SETTINGS: dict[str, Any] = {
    **WITHOUT_NOTICES,
    "heartbeat_interval_s": 0.1,
    "worker_timeout_s": 30.0,
    "request_timeout_s": 60.0,
    "slice_bytes": 64 << 10,
}
STEPS, KILLS = 60, 6

PROGRAM = """
import sys, json, hashlib, time, numpy as np, kvd
way, loop, folder, steps = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
kv = kvd.create("dist_sync")
if folder:
    way["state_dir"] = folder
keys, shapes = ["a", "b", "c"], [(300, 700), (5,), (40, 40)]
kv.set_optimizer(kvd.optimizer.SGD(0.01, momentum=0.9))
kv.set_gradient_compression({"min_bytes": 1000, **way})
kv.init(keys, [np.full(shape, 0.5, np.float32) for shape in shapes])
weights = kv.pull(keys)

def make(step):
    rng = np.random.default_rng([step, kv.rank])
    gradients = [rng.standard_normal(shape, np.float32) + weight for shape, weight in zip(shapes, weights)]
    print("step", step, flush=True)
    kv.push(keys[2], gradients[2])
    time.sleep(0.02)  # time itself: a moment in which it may be killed
    kv.pushpull(keys[:2], gradients[:2], weights[:2])
    kv.pull(keys[2], weights[2])

if loop == "steps":
    for step in kv.steps(steps):
        make(step)
else:
    step = min(kv.clock(key) for key in keys)
    kv.rewind(step)
    kv.pull(keys, weights)
    for step in range(step, steps):
        make(step)
weights = kv.pull(keys)
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
kv.close()
print(json.dumps({"digest": digest}), flush=True)
"""

WAYS = ['{"type": "2bit", "momentum": "nesterov"}', '{"type": "powersgd"}', '{"type": "randomk", "k": 0.1}']


@pytest.mark.soak
@pytest.mark.parametrize("loop", ["steps", "rewind"])
@pytest.mark.parametrize("way", WAYS)
def test_the_successors_of_killed_workers_finish_with_the_same_bits(way: str, loop: str, tmp_path: Path) -> None:
    chosen = random.Random(way + loop)
    with LocalCluster(2, 2, **SETTINGS) as cluster:
        started = [cluster.script(PROGRAM, n, way, loop, "", str(STEPS)) for n in (0, 1)]
        expected = [finish(process) for process in started]
    with LocalCluster(2, 2, **SETTINGS) as cluster:
        workers = [cluster.script(PROGRAM, n, way, loop, str(tmp_path), str(STEPS)) for n in (0, 1)]
        for _ in range(KILLS):
            number = chosen.randrange(2)
            said = [line(workers[number]) for _ in range(chosen.randrange(1, 7))]
            assert all(text.startswith("step ") for text in said), said
            time.sleep(chosen.uniform(0, 0.04))  # time itself: any moment of a step
            workers[number].kill()
            workers[number].communicate()
            workers[number] = cluster.script(PROGRAM, number, way, loop, str(tmp_path), str(STEPS))
        results = [finish(worker) for worker in workers]
    assert results == expected
