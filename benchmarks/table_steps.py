"""Steps of several workers on one table, beside MXNet and torch: ``python -m benchmarks.table_steps``.

In a step every worker pushes the rows of a batch of random ids, and pulls those of another; the servers update with
Adagrad. MXNet does the same with its ``row_sparse`` arrays. torch has the whole table in every worker, as an
``nn.Embedding`` with sparse gradients that DistributedDataParallel adds up with Gloo; each worker looks its rows up and
updates its copy. The systems run side by side and make steps in turn: those that do not are idle. A turn counts once,
with its median step. The works:

- ``large``: 1 000 000 rows of 64 float32, batches of 100 000 ids.
- ``unbounded``: the same batches of random 62-bit ids, so that every row is new (kvd only).
- ``embedding``: 200 000 rows, batches that touch 500 of them.

Bytes are those that pass the loopback device in a step, all workers together: 0 in shared memory. `of the rows` is
their ratio to those of the rows that are pushed and pulled.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import positive, some_of
from benchmarks.report import print_table
from kvd.config import child_environment
from kvd.testing.cluster import PATHS, LocalCluster, PathName

WARM_UP_STEPS: Final = 5
WARM_UP_ROWS: Final = 2_500_000  # that a worker of kvd pushes before: its loops are compiled when they are worth it
DTYPE_BYTES: Final = 4
MXNET_PYTHON: Final = Path(os.environ.get("KVD_PEERS", Path.home() / ".cache/kvd-peers")) / "mxnet/bin/python"
HEADINGS: Final = ("work", "system", "step, ms", "rows/s", "of kvd's step", "bytes of a step", "of the rows")


class Work(NamedTuple):
    """`rows` 0: any id may come."""

    rows: int
    width: int
    batch: int
    systems: tuple[str, ...]

    def arguments(self) -> list[str]:
        """For the program of a worker."""
        return [str(number) for number in self[:3]]


WORKS: Final = {
    "large": Work(1_000_000, 64, 100_000, ("kvd", "mxnet")),
    "unbounded": Work(0, 64, 100_000, ("kvd",)),
    "embedding": Work(200_000, 64, 500, ("kvd", "torch")),
}
SYSTEMS: Final = ("kvd", "mxnet", "torch")

# Each program reads numbers of steps, and answers with the seconds of each.
LOOP: Final = """
for line in sys.stdin:
    times = []
    for _ in range(int(line)):
        pushed, pulled = batches(), batches()
        begun = time.perf_counter()
        step(pushed, pulled)
        times.append(time.perf_counter() - begun)
    print(*times, flush=True)
"""
HEAD: Final = """
import os, sys, time
import numpy as np

rows, width, batch = map(int, sys.argv[1:4])

def ids_of(seed):
    random = np.random.default_rng(seed)
    while True:
        yield random.integers(0, rows or 1 << 62, batch)
"""
KVD: Final = (
    HEAD
    + """
import kvd

gradients = np.full((batch, width), 1e-6, np.float32)
out = np.empty((batch, width), np.float32)
with kvd.create("dist_sync") as kv:
    kv.init("table", kvd.RowSparse(shape=(rows, width)) if rows else kvd.RowSparse(row_shape=(width,)))
    kv.set_optimizer(kvd.optimizer.Adagrad(0.1))
    ids = ids_of(kv.rank)
    batches = lambda: next(ids)

    def step(pushed, pulled):
        kv.push("table", (pushed, gradients))
        kv.row_sparse_pull("table", pulled, out)
"""
    + "".join(f"    {line}\n" for line in LOOP.strip().splitlines())
)
MXNET: Final = (
    HEAD
    + """
if not hasattr(np, "bool"):
    np.bool = bool
import mxnet as mx

kv = mx.kv.create("dist_sync")
kv.set_optimizer(mx.optimizer.AdaGrad(learning_rate=0.1))
kv.init(0, mx.nd.sparse.zeros("row_sparse", (rows, width)))
ids = ids_of(kv.rank)
out = mx.nd.sparse.zeros("row_sparse", (rows, width))

def batches():
    distinct = np.unique(next(ids))  # not counted: it takes no others
    values = mx.nd.full((len(distinct), width), 1e-6)
    return mx.nd.sparse.row_sparse_array((values, distinct), shape=(rows, width)), mx.nd.array(distinct, dtype="int64")

def step(pushed, pulled):
    kv.push(0, pushed[0])
    kv.row_sparse_pull(0, out=out, row_ids=pulled[1])
    out.wait_to_read()
"""
    + LOOP
)
TORCH: Final = (
    HEAD
    + """
import torch
import torch.distributed as dist

rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=workers)
torch.set_num_threads(1)
embedding = torch.nn.Embedding(rows, width, sparse=True)
model = torch.nn.parallel.DistributedDataParallel(embedding)
optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
gradients = torch.full((batch, width), 1e-6)
ids = ids_of(rank)
batches = lambda: torch.from_numpy(next(ids))

def step(pushed, pulled):
    optimizer.zero_grad(set_to_none=True)
    model(pushed).backward(gradients)
    optimizer.step()
"""
    + LOOP
)


@dataclass(slots=True)
class Side:
    """A system whose workers make steps when they are told to.

    Attributes:
        steps_s, nbytes: a figure per turn: the median step of a worker, and the bytes of a step.
    """

    workers: list[subprocess.Popen[bytes]]
    steps_s: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)

    def steps(self, count: int) -> list[float]:
        """The times of the steps of one worker."""
        for worker in self.workers:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # what it has said tells why
                worker.stdin.write(f"{count}\n".encode())
                worker.stdin.flush()
        lines = [self._line(worker) for worker in self.workers]
        return [float(word) for word in lines[0].split()]

    def turn(self, count: int) -> None:
        """Measures so many steps."""
        before = loopback_bytes()
        self.steps_s.append(statistics.median(self.steps(count)))
        self.nbytes.append((loopback_bytes() - before) / count)

    def _line(self, worker: subprocess.Popen[bytes]) -> bytes:
        assert worker.stdout is not None
        said = []
        for line in worker.stdout:
            if line[:1].isdigit():
                return line
            said.append(line)
        raise RuntimeError(b"".join(said).decode())


def loopback_bytes() -> int:
    """What has passed the loopback device."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


@contextmanager
def kvd_side(work: Work, workers: int, servers: int, path: PathName) -> Iterator[Side]:
    """A cluster of kvd."""
    with (
        LocalCluster(workers, servers, processes=True, path=path, heartbeat_interval_s=1.0) as cluster,
        ending() as begun,
    ):
        for number in range(workers):
            begun.append(cluster.script(KVD, number, *work.arguments(), preferred_rank=number, stdin=subprocess.PIPE))
        yield Side(begun)


@contextmanager
def torch_side(work: Work, workers: int, servers: int, path: PathName) -> Iterator[Side]:
    """Workers of torch, each with the whole table."""
    with tempfile.TemporaryDirectory() as folder, ending() as begun:
        for rank in range(workers):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(workers), "STORE": f"{folder}/store"}
            begun.append(_start([sys.executable, "-c", TORCH, *work.arguments()], environment))
        yield Side(begun)


@contextmanager
def mxnet_side(work: Work, workers: int, servers: int, path: PathName) -> Iterator[Side]:
    """A cluster of MXNet, whose servers serve within the import."""
    environment = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NUM_WORKER": str(workers),
        "OMP_NUM_THREADS": "1",
    }
    command = [str(MXNET_PYTHON), "-W", "ignore", "-c", MXNET, *work.arguments()]
    with ending() as others, ending() as begun:
        for role in ("scheduler", *["server"] * servers):
            others.append(_start(command, {**environment, "DMLC_ROLE": role}))
        begun += [_start(command, {**environment, "DMLC_ROLE": "worker"}) for _ in range(workers)]
        yield Side(begun)


@contextmanager
def ending() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are gone afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=child_environment(dict(environment)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


SIDES: Final = {"kvd": kvd_side, "mxnet": mxnet_side, "torch": torch_side}


def measure(work: Work, systems: Sequence[str], options: argparse.Namespace) -> dict[str, Side]:
    """The figures of each system."""
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(SIDES[name](work, options.workers, options.servers, options.path))
            for name in systems
        }
        for name, side in sides.items():
            side.steps(WARM_UP_ROWS // work.batch if name == "kvd" else WARM_UP_STEPS)
        for turn in range(options.turns):
            for side in list(sides.values())[:: 1 if turn % 2 else -1]:
                side.turn(options.steps)
    return sides


def lines(name: str, work: Work, sides: Mapping[str, Side], workers: int) -> list[list[str]]:
    """The cells of a work."""
    rows_nbytes = 2 * workers * work.batch * work.width * DTYPE_BYTES
    found = []
    for system, side in sides.items():
        step_s, nbytes = statistics.median(side.steps_s), statistics.median(side.nbytes)
        ratios = [mine / other for mine, other in zip(sides["kvd"].steps_s, side.steps_s, strict=True)]
        found.append(
            [
                name,
                system,
                f"{min(side.steps_s) * 1e3:.2f} / {step_s * 1e3:.2f} / {max(side.steps_s) * 1e3:.2f}",
                f"{workers * work.batch / step_s / 1e6:.2f} M",
                f"{statistics.median(ratios):.2f}",
                f"{nbytes:,.0f}",
                f"{nbytes / rows_nbytes:.2f}",
            ]
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_steps", description=__doc__)
    parser.add_argument("--works", type=some_of(tuple(WORKS)), default=tuple(WORKS))
    parser.add_argument("--systems", type=some_of(SYSTEMS), default=SYSTEMS)
    parser.add_argument("--path", choices=PATHS, default="shm", help="of kvd's messages (default: %(default)s)")
    parser.add_argument("--workers", type=positive(int), default=2)
    parser.add_argument("--servers", type=positive(int), default=1)
    parser.add_argument("--turns", type=positive(int), default=7, help="how often each system is measured")
    parser.add_argument("--steps", type=positive(int), default=5, help="in a turn")
    options = parser.parse_args(arguments)
    warning = machine.load_warning()
    if warning:
        print(warning, file=sys.stderr)
    systems = [name for name in SYSTEMS if name == "kvd" or name in options.systems]
    if "mxnet" in systems and not MXNET_PYTHON.exists():
        print(f"MXNet is left out: there is no {MXNET_PYTHON}", file=sys.stderr)
        systems.remove("mxnet")
    rows = []
    for name in options.works:
        work = WORKS[name]
        sides = measure(work, [system for system in systems if system in work.systems], options)
        rows += lines(name, work, sides, options.workers)
    print_table(Console(), HEADINGS, rows)
    print("Times of a step: min / median / max over the turns. Rows: those of the batches of all workers.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
