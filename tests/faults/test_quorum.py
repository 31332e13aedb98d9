"""`quorum = 2` of three workers: one is late in one step, the rounds of the others go on, and it takes part again."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np

from kvd.testing.cluster import LocalCluster
from tests.faults.programs import WITHOUT_NOTICES, finish, line

STEPS = 30
WAITS_IN = 20  # step
SETTINGS: dict[str, Any] = {
    **WITHOUT_NOTICES,
    "quorum": 2,
    "quorum_grace_s": 1.0,
    "on_worker_loss": "fail",
    "slice_bytes": 64 << 10,
}

# Each push of a step puts a one into its own place, which says at the end how much of it counted. In step 20 the others
# wait outside of the rounds until the late worker is among them again. On a busy machine anyone may skip steps.
TRAINS = """
import sys, json, numpy as np, kvd
from kvd.testing.cluster import wait_until
steps, is_late = int(sys.argv[1]), sys.argv[2] == "late"
kv = kvd.create("dist_sync")
shapes = {"a": (steps, 3, 1024), "b": (steps, 3)}
kv.set_optimizer(kvd.optimizer.SGD(1.0))
for key, shape in shapes.items():
    kv.init(key, np.zeros(shape, np.float32))
kv.barrier("all are there")
made, is_told = [], False
for step in kv.steps(steps):
    if step >= 5 and is_late and not is_told:
        print(step, flush=True)
        sys.stdin.readline()
        is_told = True
    handles = []
    for key, shape in shapes.items():
        gradient = np.zeros(shape, np.float32)
        gradient[step, kv.rank] = -1.0
        handles.append(kv.push(key, gradient))
    for handle in handles:
        handle.wait()
    made.append([step, all(handle.counted for handle in handles), kv.num_workers])
    if step >= 15 and not is_late and not is_told:
        print(step, flush=True)
        is_told = True
    wait_until(lambda: step != 20 or kv.num_workers == 3, "the late worker is back")
values = {key: kv.pull(key) for key in shapes}
kv.close()
print(json.dumps({"rank": kv.rank, "made": made, "b": values["b"].tolist(),
                  "a": values["a"][:, :, 0].tolist()}), flush=True)
"""


def test_a_late_worker_is_not_waited_for_and_goes_on_in_the_step_of_the_others() -> None:
    with LocalCluster(3, 2, **SETTINGS) as cluster:
        others = [cluster.script(TRAINS, number, str(STEPS), "") for number in range(2)]
        late = cluster.script(TRAINS, 2, str(STEPS), "late", stdin=subprocess.PIPE)
        late_in = int(line(late))
        others_are_in = min(int(line(process)) for process in others)
        assert late_in < others_are_in
        with cluster.observer() as observer:
            report = observer.status()
        assert late.stdin is not None
        late.stdin.write(b"\n")
        late.stdin.flush()
        results = [finish(process) for process in (*others, late)]
    member = next(m for m in report["members"] if m["role"] == "worker" and m["rank"] == results[2]["rank"])
    assert (member["state"], member["reason"]) == (
        "back",
        "late: 2 or more others have waited for it for 1 s",
    )
    check(results, range(late_in, others_are_in))


def check(results: list[dict[str, Any]], missed: range) -> None:
    """Every push counted at most once; those of which the workers were told so in all slices; those of the late one in
    none of the steps that it missed."""
    counted = np.zeros((STEPS, 3), bool)
    for result in results:
        for step, counts, _ in result["made"]:
            counted[step, result["rank"]] = counts
    late = results[2]["rank"]
    made = {step: counts for step, counts, _ in results[2]["made"]}
    assert made[missed[0]] is False
    assert made.keys().isdisjoint(missed[1:])  # it makes no step that the others have made without it
    for result in results:
        for key in "ab":
            there = np.array(result[key], np.float32)
            assert set(there.ravel()) == {0.0, 1.0}
            assert (there[counted] == 1.0).all()
            assert (there[missed, late] == 0.0).all()
            assert (there.sum(axis=1) >= 2).all()  # a quorum is in every round
    assert counted[WAITS_IN + 1 :, late].any(), "it never came back"
    assert {number for result in results for _, _, number in result["made"]} >= {2, 3}
