"""What the tests of the client share besides fixtures: values, settings, and the calls of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

import kvd
from kvd.testing.cluster import LocalCluster

Pair: TypeAlias = tuple[kvd.KVStore, kvd.KVStore]

SLOW_TO_JUDGE: dict[str, Any] = {"worker_timeout_s": 40.0, "request_timeout_s": 50.0}
UNREACHABLE: dict[str, Any] = {"scheduler": "tcp://127.0.0.1:1", "join_timeout_s": 0.3}
MEGABYTE = 1 << 20
ONE_PUSH: dict[str, Any] = {"memory_limit_bytes": "1MiB", "credit_bytes": "1MiB"}  # room for one of a megabyte
PATIENT: dict[str, Any] = {
    "server_timeout_s": 1.0,
    "worker_timeout_s": 1.0,
    "heartbeat_interval_s": 0.1,
    "request_timeout_s": 5.0,
    "slice_bytes": "1MiB",
}

CALLS: dict[str, Any] = {
    "init": lambda kv: kv.init("v", ones()),
    "init_async": lambda kv: kv.init_async("v", ones()),
    "push": lambda kv: kv.push("w", ones()),
    "push_async": lambda kv: kv.push_async("w", ones()),
    "pull": lambda kv: kv.pull("w"),
    "pull into": lambda kv: kv.pull("w", out=ones()),
    "pull_async": lambda kv: kv.pull_async("w"),
    "pushpull": lambda kv: kv.pushpull("w", ones()),
    "pushpull_async": lambda kv: kv.pushpull_async("w", ones()),
    "broadcast": lambda kv: kv.broadcast("w", ones()),
    "broadcast_async": lambda kv: kv.broadcast_async("w", ones()),
    "flush": lambda kv: kv.flush(),
    "barrier": lambda kv: kv.barrier(),
    "join": lambda kv: kv.join(),
    "clock": lambda kv: kv.clock("w"),
    "version": lambda kv: kv.version("w"),
    "command": lambda kv: kv.send_command_to_servers("ping", b""),
    "set_optimizer": lambda kv: kv.set_optimizer(None),
    "set_gradient_compression": lambda kv: kv.set_gradient_compression({"type": "fp16"}),
    "update_optimizer": lambda kv: kv.update_optimizer(learning_rate=1.0),
    "save": lambda kv: kv.save_optimizer_states("nowhere"),
    "snapshot": lambda kv: kv.snapshot("nowhere"),
    "restore": lambda kv: kv.restore("nowhere"),
    "num_dead_node": lambda kv: kv.num_dead_node(7),
    "dead_nodes": lambda kv: kv.dead_nodes(),
}

FORKS = """
import os, sys, numpy as np, kvd
kv = kvd.create({type!r})
kv.init("w", np.zeros(4, np.float32))
for _ in range(5):
    kv.pushpull("w", np.ones(4, np.float32))
handle = kv.push("w", np.ones(4, np.float32))
child = os.fork()
if child == 0:
    calls = [lambda: kv.pushpull("w", np.ones(4, np.float32)),
             lambda: kv.push("w", np.ones(4, np.float32)), lambda: kv.pull("w"), lambda: kv.flush(),
             lambda: kv.barrier(), lambda: kv.dead_nodes(), lambda: kv.clock("w"), lambda: kv.close()]
    for call in calls:
        try:
            call()
        except kvd.StoreClosed as error:
            assert "after the fork" in str(error), error
        else:
            print("a call in the child went through")
    with kvd.create("local") as own:
        own.init("w", np.zeros(4, np.float32))
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert kv.pull("w").tolist() == [1] * 4
kv.close()
print("fine")
"""


def ones(count: int = 4) -> Any:
    return np.ones(count, np.float32)


def init_all(stores: Sequence[kvd.KVStore], key: Any = "w", value: Any = None) -> None:
    """Inits the key in all workers of a cluster at once, since init needs them all. The default is four zeros."""
    made = np.zeros(4, np.float32) if value is None else value
    for handle in [store.init_async(key, made) for store in stores]:
        handle.wait()


def failed_workers(cluster: LocalCluster) -> list[int]:
    """The ranks of the workers whose programs ended with an error, from the scheduler."""
    router: Any = cluster.scheduler._daemon.machine  # type: ignore[union-attr]
    members: Any = router.explain(0.0, [slot.run for slot in router.runs][-1])["members"]
    return [member["rank"] for member in members if "ended with an error" in member["reason"]]


def each(
    kv: kvd.KVStore,
    total: int,
    body: Callable[[int], object],
    keys: Any = None,
    *,
    shared: bool = False,
    restored: bool = False,
) -> None:
    """A loop over `kv.steps`, as one statement."""
    for step in kv.steps(total, keys, shared, restored):
        body(step)
