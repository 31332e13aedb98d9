"""`on_worker_loss = "shrink"`: one of three workers is killed or stopped, the others go on, and it takes part again."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest

from kvd.testing.cluster import LocalCluster, wait_until
from tests.faults.programs import WITHOUT_NOTICES, finish, line, states

STEPS = 40
DIES_AFTER, WAITS_IN = 5, 20  # steps
SETTINGS: dict[str, Any] = {
    **WITHOUT_NOTICES,
    "on_worker_loss": "shrink",
    "heartbeat_interval_s": 0.1,
    "server_timeout_s": 10.0,
    "worker_timeout_s": 8.0,
    "request_timeout_s": 60.0,
    "round_timeout_s": 100.0,
    "slice_bytes": 64 << 10,
}

# Each push of a step puts a one into its own place, which says at the end how much of it counted.
TRAINS = """
import sys, json, numpy as np, kvd
from kvd.testing.cluster import wait_until
steps, is_victim = int(sys.argv[1]), sys.argv[2] == "victim"
kv = kvd.create("dist_sync")
shapes = {"a": (steps, 3, 1024), "b": (steps, 3)}
kv.set_optimizer(kvd.optimizer.SGD(1.0))
for key, shape in shapes.items():
    kv.init(key, np.zeros(shape, np.float32))
made = []
for step in kv.steps(steps):
    handles = []
    for key, shape in shapes.items():
        gradient = np.zeros(shape, np.float32)
        gradient[step, kv.rank] = -1.0
        handles.append(kv.push(key, gradient))
    for handle in handles:
        handle.wait()
    made.append([step, all(handle.counted for handle in handles), kv.num_workers])
    if step == 5 and is_victim:
        print("at step 5", flush=True)
        sys.stdin.readline()
    wait_until(lambda: step != 20 or kv.num_workers == 3, "the successor is there")
values = {key: kv.pull(key) for key in shapes}
even = bool((values["a"] == values["a"][:, :, :1]).all())
kv.close()
print(json.dumps({"rank": kv.rank, "made": made, "even": even, "b": values["b"].tolist(),
                  "a": values["a"][:, :, 0].tolist()}), flush=True)
"""


def check(results: list[dict[str, Any]], victim: int, merge: str) -> None:
    """What the servers have is what NumPy makes of the pushes of which the workers were told that they count."""
    by_rank = {result["rank"]: result for result in results}
    counted = np.zeros((STEPS, 3), np.float32)
    for rank, result in by_rank.items():
        for step, counts, _ in result["made"]:
            counted[step, rank] = counts
        if rank != victim:
            assert [step for step, _, _ in result["made"]] == list(range(STEPS))
            assert counted[:, rank].all()
    first_life = DIES_AFTER + 1
    expected = counted / counted.sum(axis=1, keepdims=True) if merge == "mean" else counted
    for result in by_rank.values():
        assert result["even"]
        for key in "ab":
            there = np.array(result[key], np.float32)
            np.testing.assert_array_equal(there[first_life:], expected[first_life:])
            assert (there[:first_life] > 0).all()
    assert not counted[first_life, victim], "the others waited for it"
    assert counted[-1, victim], "it never came back"
    survivor = by_rank[(victim + 1) % 3]
    assert {number for _, _, number in survivor["made"]} == {2, 3}


@pytest.mark.parametrize("merge", ["mean", pytest.param("sum", marks=pytest.mark.soak)])
def test_a_worker_that_is_killed_is_left_out_and_its_successor_comes_in_at_the_step_of_the_others(merge: str) -> None:
    with LocalCluster(3, 2, merge=merge, **SETTINGS) as cluster:
        others = [cluster.script(TRAINS, number, str(STEPS), "") for number in range(2)]
        victim = cluster.script(TRAINS, 2, str(STEPS), "victim", stdin=subprocess.PIPE)
        assert line(victim) == "at step 5"
        victim.kill()
        victim.wait()
        assert victim.stdout is not None
        assert victim.stdin is not None
        victim.stdout.close()
        victim.stdin.close()
        with cluster.observer() as observer:
            wait_until(lambda: "lost" in states(observer), "the worker is lost")
        successor = cluster.script(TRAINS, 2, str(STEPS), "")
        results = [finish(process) for process in (*others, successor)]
    assert {result["rank"] for result in results} == {0, 1, 2}
    check(results, results[2]["rank"], merge)
    assert results[2]["made"][0][0] > WAITS_IN  # it made no step again


def test_a_worker_that_is_stopped_for_a_while_goes_on_in_the_step_of_the_others() -> None:
    with LocalCluster(3, 2, **SETTINGS) as cluster:
        others = [cluster.script(TRAINS, number, str(STEPS), "") for number in range(2)]
        victim = cluster.script(TRAINS, 2, str(STEPS), "victim", stdin=subprocess.PIPE)
        assert line(victim) == "at step 5"
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            with cluster.observer() as observer:
                wait_until(lambda: "lost" in states(observer), "the worker is lost")
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        assert victim.stdin is not None
        victim.stdin.write(b"\n")
        victim.stdin.flush()
        results = [finish(process) for process in (*others, victim)]
    check(results, results[2]["rank"], "sum")
