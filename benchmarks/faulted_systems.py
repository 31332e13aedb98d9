"""The same small training on kvd, MXNet and Gloo, as the processes that a supervisor would start.

Each worker adds 1 to every element of every key in each step, so the values at the end say how many contributions
counted. It prints its number of the step after each step, and at the end the smallest and the largest of its values.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.systems import PEER_ENVIRONMENTS, PEERS_DIR, ROOT, peer_is_ready
from kvd.config import child_environment
from kvd.node.keys.keyfiles import new_cluster_key, write_key

KEYS: Final = 8
ELEMENTS: Final = 1 << 16

KVD_PROGRAM: Final = """
import sys, time
import numpy as np
import kvd
steps, step_s, keys, elements = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
names = [f"w{i}" for i in range(keys)]
values = [np.zeros(elements, np.float32) for _ in names]
with kvd.create("dist_sync") as kv:
    kv.init(names, values)
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=1.0))
    for step in kv.steps(steps):
        kv.pushpull(names, [np.full(elements, -1, np.float32) for _ in names], out=values)
        print("step", step, flush=True)
        time.sleep(step_s)
    print("values", min(v.min() for v in values), max(v.max() for v in values), flush=True)
"""

MXNET_PROGRAM: Final = """
import sys, time
import numpy as np
if not hasattr(np, "bool"):
    np.bool = bool
import mxnet as mx  # a scheduler or server serves inside this import and exits there
steps, step_s, keys, elements = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
names = list(range(keys))
kv = mx.kv.create("dist_sync")
kv.init(names, [mx.nd.zeros((elements,)) for _ in names])
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, wd=0.0))
values = [mx.nd.zeros((elements,)) for _ in names]
for step in range(steps):
    kv.push(names, [mx.nd.full((elements,), -1) for _ in names])  # new ones: a pull is received into what was pushed
    kv.pull(names, out=values)
    mx.nd.waitall()
    print("step", step, flush=True)
    time.sleep(step_s)
print("values", min(v.min().asscalar() for v in values), max(v.max().asscalar() for v in values), flush=True)
"""

GLOO_PROGRAM: Final = """
import os, sys, time
import torch
import torch.distributed as dist
steps, step_s, keys, elements = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=int(os.environ["RANK"]),
                        world_size=int(os.environ["WORLD_SIZE"]))
values = [torch.zeros(elements) for _ in range(keys)]
for step in range(steps):
    for value in values:
        gradient = torch.ones(elements)
        dist.all_reduce(gradient)
        value += gradient
    print("step", step, flush=True)
    time.sleep(step_s)
print("values", min(float(v.min()) for v in values), max(float(v.max()) for v in values), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a job is, and how long it trains."""

    workers: int
    servers: int
    steps: int
    step_s: float

    def arguments(self) -> list[str]:
        """Of the programs."""
        return [str(self.steps), str(self.step_s), str(KEYS), str(ELEMENTS)]


@dataclass(frozen=True, slots=True)
class Part:
    """A process of a job: `role` is "scheduler", "server" or "worker"."""

    role: str
    rank: int
    command: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Entrant:
    """A system that takes part.

    Attributes:
        parts: gives the processes of a job whose files lie in a folder, in the order in which they start.
    """

    name: str
    parts: Callable[[Size, Path], list[Part]]


def kvd_parts(size: Size, folder: Path) -> list[Part]:
    """A job of kvd with two copies of every value, with the settings of ``kvd launch --restart``."""
    key = folder / "cluster.key"
    write_key(key, new_cluster_key())
    common = {
        "KVD_SCHEDULER": f"tcp://127.0.0.1:{_free_port()}",
        "KVD_KEYFILE": str(key),
        "KVD_ON_WORKER_LOSS": "wait",
        "KVD_NUM_WORKERS": str(size.workers),
        "KVD_NUM_SERVERS": str(size.servers),
        "KVD_REPLICAS": "2",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")]),
    }

    def part(role: str, rank: int, command: list[str], **more: str) -> Part:
        return Part(role, rank, [sys.executable, *command], child_environment({**common, **more}))

    def daemon(role: str, rank: int) -> Part:
        node_id = f"{role}-{rank}"
        own = {"KVD_NODE_ID": node_id, "KVD_STATE_DIR": str(folder / node_id), "KVD_PREFERRED_RANK": str(rank)}
        return part(role, rank, ["-m", "kvd_cli.main", role], **own)

    program = ["-c", KVD_PROGRAM, *size.arguments()]
    return [
        daemon("scheduler", 0),
        *(daemon("server", rank) for rank in range(size.servers)),
        *(
            part("worker", rank, program, KVD_NODE_ID=f"worker-{rank}", KVD_PREFERRED_RANK=str(rank), KVD_RUN="program")
            for rank in range(size.workers)
        ),
    ]


def mxnet_parts(size: Size, folder: Path) -> list[Part]:
    """A job of MXNet, with the heartbeats that ps-lite needs to take a restarted node back."""
    common = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": str(size.servers),
        "DMLC_NUM_WORKER": str(size.workers),
        "PS_HEARTBEAT_INTERVAL": "1",
        "PS_HEARTBEAT_TIMEOUT": "5",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(_python("mxnet")), "-W", "ignore", "-c", MXNET_PROGRAM, *size.arguments()]
    roles = [("scheduler", 1), ("server", size.servers), ("worker", size.workers)]
    return [Part(role, rank, command, {**common, "DMLC_ROLE": role}) for role, count in roles for rank in range(count)]


def gloo_parts(size: Size, folder: Path) -> list[Part]:
    """A job of Gloo, which has workers only."""
    common = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "STORE": str(folder / "store"),
        "WORLD_SIZE": str(size.workers),
    }
    command = [str(_python("gloo")), "-c", GLOO_PROGRAM, *size.arguments()]
    return [Part("worker", rank, command, {**common, "RANK": str(rank)}) for rank in range(size.workers)]


ENTRANTS: Final = {
    "kvd": Entrant("kvd", kvd_parts),
    "mxnet": Entrant("MXNet", mxnet_parts),
    "gloo": Entrant("Gloo", gloo_parts),
}


def entrants(names: list[str]) -> tuple[list[Entrant], list[str]]:
    """Those that can be run here, and a note about how to get each of the others."""
    ready = [name for name in names if name == "kvd" or peer_is_ready(name)]
    notes = [
        f"{ENTRANTS[name].name} is left out: it is not installed; {PEERS_DIR / 'setup.sh'} does that"
        for name in names
        if name not in ready
    ]
    return [ENTRANTS[name] for name in ready], notes


def _python(name: str) -> Path:
    home = Path(os.environ.get("KVD_PEERS", Path.home() / ".cache" / "kvd-peers"))
    return home / PEER_ENVIRONMENTS[name] / "bin" / "python"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
