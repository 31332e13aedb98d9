"""A worker is killed with SIGKILL: the others learn its name in time, and its successor finishes with the same bits."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import BarrierBroken, NodeLost
from kvd.testing.cluster import LocalCluster, wait_until

WORKER_TIMEOUT_S = 2.0
SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 0.1,
    "server_timeout_s": 2.0,
    "worker_timeout_s": WORKER_TIMEOUT_S,
    "request_timeout_s": 30.0,
}

PUSHES_ONE_AND_SLEEPS = """
import time, numpy as np, kvd
kv = kvd.create("dist_sync")
kv.init("w", np.zeros(8, np.float32))
kv.pushpull("w", np.ones(8, np.float32))
print("pushed", flush=True)
time.sleep(600)  # until it is killed
"""

TRAINS = """
import sys, json, hashlib, numpy as np, kvd
kv = kvd.create("dist_sync")
steps, die_at = int(sys.argv[1]), int(sys.argv[2])
keys = ["a", "b", "c"]
shapes = [(300, 700), (5,), (40, 40)]
kv.set_optimizer(kvd.optimizer.SGD(0.01, momentum=0.9))
kv.init(keys, [np.full(shape, 0.5, np.float32) for shape in shapes])
step = min(kv.clock(key) for key in keys)
kv.rewind(step)
weights = kv.pull(keys)
while step < steps:
    if step == die_at:
        rng = np.random.default_rng([step, kv.rank])
        gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
        kv.push("b", gradients[1])
        kv.push("a", gradients[0])
        print("dying", flush=True)
        import time; time.sleep(600)  # until it is killed
    rng = np.random.default_rng([step, kv.rank])
    gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
    kv.pushpull(keys, gradients, weights)
    step += 1
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
kv.close()
print(json.dumps({"rank": kv.rank, "digest": digest}), flush=True)
"""


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output.decode()
    result: dict[str, Any] = json.loads(output.decode().strip().splitlines()[-1])
    return result


def test_the_others_learn_of_a_death_in_time_and_no_call_hangs() -> None:
    with LocalCluster(3, 2, **SETTINGS) as cluster:
        victim = cluster.script(PUSHES_ONE_AND_SLEEPS, 2)
        stores = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in range(2)])
        init = [store.init_async("w", np.zeros(8, np.float32)) for store in stores]
        for handle in init:
            handle.wait()
        first = [store.pushpull_async("w", np.ones(8, np.float32)) for store in stores]
        assert [float(handle.wait()[0]) for handle in first] == [3.0, 3.0]
        assert first_line(victim) == "pushed"
        rank = 3 - sum(store.rank for store in stores)

        second = [store.pushpull_async("w", np.ones(8, np.float32)) for store in stores]
        victim.kill()
        victim.wait()
        killed_at = time.monotonic()
        for handle in second:
            with pytest.raises(NodeLost, match=f"worker {rank}") as caught:
                handle.wait(WORKER_TIMEOUT_S + 3)
            assert caught.value.node == f"worker {rank}"
        assert time.monotonic() - killed_at < WORKER_TIMEOUT_S + 1
        with pytest.raises(BarrierBroken) as broken:
            stores[0].barrier("after", timeout=5)
        assert broken.value.missing == (f"worker {rank}",)

        for store in stores:
            wait_until(lambda store=store: store.num_dead_node(4) == 1, "the store knows the death")  # type: ignore[misc]
            assert store.num_dead_node(9 + 2 * rank) == 1
            assert store.num_dead_node(2) == 0
            assert [node.node_id for node in store.dead_nodes()] == ["worker-2"]
        with cluster.observer() as observer:
            states = {member["node_id"]: member["state"] for member in observer.status()["members"]}
            assert states["worker-2"] == "dead"
            assert [node.rank for node in observer.dead_nodes()] == [rank]
        assert victim.stdout is not None
        victim.stdout.close()


@pytest.mark.parametrize("die_at", [0, 3, 7])
def test_a_worker_restarted_under_its_node_id_finishes_with_the_bits_of_an_undisturbed_run(die_at: int) -> None:
    steps = 8
    settings = {**SETTINGS, "worker_timeout_s": 20.0, "slice_bytes": 64 << 10}
    with LocalCluster(2, 2, **settings) as cluster:
        undisturbed = [finish(process) for process in [cluster.script(TRAINS, n, str(steps), "-1") for n in (0, 1)]]
    assert undisturbed[0]["digest"] == undisturbed[1]["digest"]

    with LocalCluster(2, 2, **settings) as cluster:
        other = cluster.script(TRAINS, 0, str(steps), "-1")
        victim = cluster.script(TRAINS, 1, str(steps), str(die_at))
        assert first_line(victim) == "dying"
        victim.kill()
        victim.wait()
        assert victim.stdout is not None
        victim.stdout.close()
        restarted = cluster.script(TRAINS, 1, str(steps), "-1")
        results = [finish(other), finish(restarted)]
    assert {result["rank"] for result in results} == {0, 1}
    assert [result["digest"] for result in results] == [undisturbed[0]["digest"]] * 2


def test_a_store_that_is_left_by_an_error_does_not_stop_the_others() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(2, np.float32))
        kv.pushpull("w", np.ones(2, np.float32))
        if kv.rank == 1:
            return None
        return float(kv.pushpull("w", np.ones(2, np.float32))[0])

    with LocalCluster(2, 1, **SETTINGS) as cluster:
        assert cluster.run(program) == [1.0, None]


FAILS_ONCE = """
import sys, pathlib, numpy as np, kvd
marker = pathlib.Path(sys.argv[1])
with kvd.create("dist_sync") as kv:
    kv.init("w", np.zeros(3, np.float32))
    step = kv.clock("w")
    kv.rewind(step)
    while step < 5:
        if step == 3 and not marker.exists():
            marker.touch()
            raise ValueError("the third step is too much")
        value = kv.pushpull("w", np.full(3, step + 1, np.float32))
        step += 1
print('{"value": %s}' % value[0], flush=True)
"""


def test_a_program_that_raises_is_waited_for_like_one_that_was_killed(tmp_path: Path) -> None:
    with LocalCluster(2, 1, **{**SETTINGS, "worker_timeout_s": 20.0}) as cluster:
        steady = cluster.script(FAILS_ONCE, 0, str(tmp_path))  # the folder exists: it does not fail
        failing = cluster.script(FAILS_ONCE, 1, str(tmp_path / "failed"))
        output, _ = failing.communicate(timeout=30)
        assert failing.returncode == 1
        assert b"the third step is too much" in output
        again = cluster.script(FAILS_ONCE, 1, str(tmp_path / "failed"))
        assert [finish(steady)["value"], finish(again)["value"]] == [10.0, 10.0]
