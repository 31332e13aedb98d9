"""`max_workers`: a third worker joins two others when they train, one leaves, and another one takes its seat."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from kvd.testing.cluster import LocalCluster, wait_until
from tests.faults.programs import WITHOUT_NOTICES, finish, line, states

STEPS, RANKS = 30, 4
JOINS_IN, LEAVES_IN, AGAIN_IN = 8, 16, 22  # steps in which those who train wait for what is to happen
SETTINGS: dict[str, Any] = {
    **WITHOUT_NOTICES,
    "max_workers": RANKS,
    "round_timeout_s": 100.0,
    "slice_bytes": 64 << 10,
}

# Each push of a step puts a one into its own place, which says at the end how much of it counted.
TRAINS = """
import json, signal, sys, threading, numpy as np, kvd
from kvd.testing.cluster import wait_until
steps, ranks = int(sys.argv[1]), int(sys.argv[2])
leaving = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: leaving.set())
kv = kvd.create("dist_sync")
shapes = {"a": (steps, ranks, 1024), "b": (steps, ranks)}
kv.set_optimizer(kvd.optimizer.SGD(1.0))
for key, shape in shapes.items():
    kv.init(key, np.zeros(shape, np.float32))
fixed = np.zeros(3, np.float32)
kv.broadcast("fixed", np.full(3, 7.0, np.float32), out=fixed)
kv.barrier()
made = []
wanted = {8: (0, 1, 2), 22: (0, 1, 2)}
for step in kv.steps(steps):
    handles = []
    for key, shape in shapes.items():
        gradient = np.zeros(shape, np.float32)
        gradient[step, kv.rank] = -1.0
        handles.append(kv.push(key, gradient, samples=1 + kv.rank))
    for handle in handles:
        handle.wait()
    made.append([step, all(handle.counted for handle in handles), kv.ranks])
    if step % 4 == 0:
        kv.barrier("tested")
    if step == 0 or step == 16:
        print(f"at step {step}", flush=True)
    wait_until(lambda: kv.rank == 1 or kv.ranks == wanted.get(step, kv.ranks), "the ranks are those of this step")
    wait_until(lambda: step != 16 or kv.rank != 1 or leaving.is_set(), "it is told to leave")
    if leaving.is_set():
        kv.set_barrier_before_exit(False)
        break
values = {key: kv.pull(key) for key in shapes}
kv.close()
print(json.dumps({"rank": kv.rank, "made": made, "fixed": fixed.tolist(), "restarted": kv.restarted,
                  "even": bool((values["a"] == values["a"][:, :, :1]).all()),
                  "a": values["a"][:, :, 0].tolist(), "b": values["b"].tolist()}), flush=True)
"""


@pytest.mark.parametrize("merge", ["weighted", pytest.param("mean", marks=pytest.mark.soak)])
def test_workers_come_in_and_leave_between_steps_and_the_scale_stays_right(merge: str) -> None:
    with LocalCluster(2, 2, merge=merge, **SETTINGS) as cluster:
        first, leaver = [cluster.script(TRAINS, rank, str(STEPS), str(RANKS), preferred_rank=rank) for rank in range(2)]
        assert line(first) == line(leaver) == "at step 0"
        third = cluster.script(TRAINS, 2, str(STEPS), str(RANKS))
        assert line(leaver) == "at step 16"
        leaver.send_signal(signal.SIGTERM)
        left = finish(leaver)
        with cluster.observer() as observer:
            wait_until(lambda: "left" in states(observer), "worker 1 has left")
        fourth = cluster.script(TRAINS, 3, str(STEPS), str(RANKS))
        stayed = [finish(process) for process in (first, third, fourth)]
    check([left, *stayed], merge)


def check(results: list[dict[str, Any]], merge: str) -> None:
    """What the servers have is what NumPy makes of the steps that the workers have made."""
    assert [result["rank"] for result in results] == [1, 0, 2, 1]
    assert not any(result["restarted"] for result in results)
    steps = [[step for step, _, _ in result["made"]] for result in results]
    assert steps[0] == list(range(LEAVES_IN + 1))
    assert steps[1] == list(range(STEPS))
    for made, earliest in ((steps[2], 2), (steps[3], LEAVES_IN + 1)):  # they made no step that was made without them
        assert made == list(range(made[0], STEPS))
        assert earliest <= made[0]
    assert steps[2][0] <= JOINS_IN + 2  # one of the others is a step ahead of the one that waits
    assert steps[3][0] <= AGAIN_IN + 2
    weights = np.zeros((STEPS, RANKS))
    for result in results:
        for step, counted, _ in result["made"]:
            assert counted
            weights[step, result["rank"]] = 1 + result["rank"] if merge == "weighted" else 1
    expected = weights / weights.sum(axis=1, keepdims=True)
    for result in results[1:]:
        assert result["fixed"] == [7.0] * 3
        assert result["even"]
        for key in "ab":
            np.testing.assert_allclose(np.array(result[key]), expected, rtol=1e-6)
    seen = {tuple(ranks) for _, _, ranks in results[1]["made"]}
    assert {(0, 1), (0, 1, 2), (0, 2)} <= seen
