"""A training in processes of their own with two copies of every value, for tests that kill any of them.

The gradients depend on the weights, so a push that is lost, or counts twice, changes all bits that come after it. What
the training must end with is computed here, without kvd.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

NODES: Final = 2  # servers, and workers
RATE: Final = 0.05
MOMENTUM: Final = 0.9
SHAPES: Final = {"a": (90, 70), "b": (5,), "c": (40, 40), "d": (60, 60)}
TABLE: Final = (40, 3)  # rows, and their width
DEADLINE_S: Final = 60.0
SETTINGS: Final[dict[str, Any]] = {
    "replicas": 2,
    "slice_bytes": 8 << 10,
    "server_timeout_s": 2.0,
    "on_worker_loss": "wait",
}

TRAINS: Final = """
import hashlib, json, os, sys, time
import numpy as np
import kvd
from tests.faults.replicated_job import MOMENTUM, RATE, TABLE, first_weights, gradients, row_gradients, row_ids
last = sys.argv[1]
with kvd.create("dist_sync") as kv:
    names, weights = list(first_weights()), list(first_weights().values())
    kv.set_optimizer(kvd.optimizer.SGD(RATE, momentum=MOMENTUM))
    kv.init(names, weights)
    kv.init("table", kvd.RowSparse(TABLE, initializer=kvd.initializer.Constant(0.5), admit_after=2, ttl_updates=4))
    for step in kv.steps(1_000_000):
        if os.path.exists(last) and step >= int(open(last).read()):
            break
        kv.pull(names, out=weights)
        ids = row_ids(kv.rank, step)
        rows = kv.row_sparse_pull("table", ids)
        kv.push("table", kvd.RowSparseArray(ids, row_gradients(rows, kv.rank, step)))
        kv.pushpull(names, gradients(weights, kv.rank, step), out=weights)
        print("step", step, flush=True)
        time.sleep(0.002)  # time itself: the pace of the steps
    weights.append(kv.row_sparse_pull("table", np.arange(TABLE[0])))
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
    kv.barrier()
print(json.dumps({"steps": step, "digest": digest}), flush=True)
"""

Floats = np.ndarray[Any, np.dtype[np.float32]]


def first_weights() -> dict[str, Floats]:
    """What the training begins with."""
    return {key: np.full(shape, 0.5, np.float32) for key, shape in SHAPES.items()}


def gradients(weights: list[Floats], rank: int, step: int) -> list[Floats]:
    """What a worker pushes in a step."""
    rng = np.random.default_rng([step, rank])
    return [weight * np.float32(0.1) + rng.standard_normal(weight.shape, np.float32) for weight in weights]


def row_ids(rank: int, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rows of the table that a worker pulls and pushes in a step; in some there are none."""
    rng = np.random.default_rng([step, rank, 1])
    return np.flatnonzero(rng.random(TABLE[0]) < (0.0, 0.2, 0.5)[step % 3])


def row_gradients(rows: Floats, rank: int, step: int) -> Floats:
    """What it pushes for them."""
    rng = np.random.default_rng([step, rank, 2])
    return rows * np.float32(0.1) + rng.standard_normal(rows.shape, np.float32)


def table_after(steps: int) -> Floats:
    """The rows of the table after so many steps: rows that no worker names rest. A row is made in the second step that
    names it, and goes when four have not."""
    table, velocities = np.full(TABLE, 0.5, np.float32), np.zeros(TABLE, np.float32)
    named, last = np.zeros(TABLE[0], int), np.full(TABLE[0], -1)
    for step in range(steps):
        merged: dict[int, Floats] = {}
        for rank in range(2):
            ids = row_ids(rank, step)
            for row, gradient in zip(ids.tolist(), row_gradients(table[ids], rank, step), strict=True):
                merged[row] = merged[row] + gradient if row in merged else gradient
        for row, gradient in merged.items():
            named[row] += 1
            if named[row] < 2:
                continue
            last[row] = step
            velocities[row] = np.float32(MOMENTUM) * velocities[row] + gradient
            table[row] -= np.float32(RATE) * velocities[row]
        gone = (named >= 2) & (last <= step - 4)
        table[gone], velocities[gone], named[gone] = 0.5, 0.0, 0
    return table


def digest_after(steps: int) -> str:
    """Of the weights after so many steps: the gradients of the workers added in their order, and SGD with momentum.
    The table comes last."""
    weights = list(first_weights().values())
    velocities = [np.zeros_like(weight) for weight in weights]
    for step in range(steps):
        merged = [
            first + second for first, second in zip(*[gradients(weights, r, step) for r in range(2)], strict=True)
        ]
        velocities = [np.float32(MOMENTUM) * v + g for v, g in zip(velocities, merged, strict=True)]
        weights = [w - np.float32(RATE) * v for w, v in zip(weights, velocities, strict=True)]
    weights.append(table_after(steps))
    return hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()


class Worker:
    """A process, and what it has printed: its last lines, and how many of them began with "step"."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.count = 0
        self.lines = deque[str](maxlen=40)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())
            self.count += line.startswith(b"step")

    def newest_step(self) -> int:
        return max((int(line.split()[1]) for line in list(self.lines) if line.startswith("step")), default=0)

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        return code


class Crew:
    """The workers of a job, each of which can be replaced by its successor."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self.workers: list[Worker] = []

    def wait_for_steps(self, count: int) -> None:
        """Each worker says so often that it has made steps."""
        targets = [(worker, worker.count + count) for worker in self.workers]
        self.wait_until(lambda: all(worker.count >= target for worker, target in targets), "the workers go on")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Fails at once if a worker ends meanwhile."""

        def ended() -> list[list[str]]:
            return [list(worker.lines) for worker in self.workers if worker.process.poll() is not None]

        wait_until(lambda: holds() or ended(), what, self._deadline_s)
        assert not ended(), ended()

    def results(self) -> list[dict[str, Any]]:
        """The last line of each worker, once all have ended well."""
        codes = [worker.end() for worker in self.workers]
        assert codes == [0] * len(codes), [list(worker.lines) for worker in self.workers]
        return [json.loads(worker.lines[-1]) for worker in self.workers]

    def finish(self, last: Path) -> None:
        """The workers of TRAINS end some steps later, as the file `last` tells them, with the bits that they must
        have."""
        steps = max(worker.newest_step() for worker in self.workers) + 100
        part = last.with_suffix(".part")
        part.write_text(str(steps))
        part.rename(last)
        assert self.results() == [{"steps": steps, "digest": digest_after(steps)}] * len(self.workers)


class ReplicatedJob:
    """A scheduler that keeps its record, two servers, and two workers with a program; a context manager.

    Args:
        program: code that prints lines with "step" as it goes on.
        arguments: of the program.
    """

    def __init__(self, folder: Path, program: str, *arguments: str, **settings: Any) -> None:
        given = {**SETTINGS, "state_dir": str(folder / "state"), **settings}
        self.cluster = LocalCluster(NODES, NODES, processes=True, **given)
        self._program = program
        self._arguments = arguments
        self.crew = Crew()
        self.crew.workers += [self._begin(number) for number in range(NODES)]

    def _begin(self, number: int) -> Worker:
        return Worker(self.cluster.script(self._program, number, *self._arguments, preferred_rank=number))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.crew.workers:
            worker.kill()
        if error is not None:
            for log in sorted(self.cluster.folder.glob("*.log")):
                print(f"── {log.name}\n{log.read_text()[-8000:]}")
        self.cluster.close()

    def server(self, rank: int) -> ProcessNode:
        node = self.cluster.servers[rank]
        assert isinstance(node, ProcessNode)
        return node

    # ── faults ──

    def kill(self, role: str, number: int = 0) -> None:
        """SIGKILL."""
        if role == "scheduler":
            self.cluster.kill_scheduler()
        elif role == "server":
            self.cluster.kill_server(number)
        else:
            self.crew.workers[number].kill()

    def restart(self, role: str, number: int = 0) -> None:
        """What a supervisor does."""
        if role == "scheduler":
            self.cluster.restart_scheduler()
        elif role == "server":
            self.cluster.restart_server(number)
        else:
            self.crew.workers[number] = self._begin(number)

    # ── how it goes on ──

    def partitions(self) -> list[dict[str, Any]]:
        """As ``kvd status`` has them."""
        with self.cluster.observer() as observer:
            found: list[dict[str, Any]] = observer.status()["partitions"]
            return found

    def leaders(self) -> set[str]:
        return {entry["leader"] for entry in self.partitions()}

    def wait_until_in_sync(self) -> None:
        """Every partition has a backup."""
        self.crew.wait_until(self.is_in_sync, "every partition has a backup")

    def is_in_sync(self) -> bool:
        found = self.partitions()
        return bool(found) and all(entry["backup"] for entry in found)

    def wait_until_even(self) -> None:
        """And each server leads a part again."""
        self.crew.wait_until(self.is_even, "each server leads a part, and backs another one up")

    def is_even(self) -> bool:
        found = self.partitions()
        is_at_rest = all(entry["backup"] and not (entry["syncing"] or entry["successor"]) for entry in found)
        return is_at_rest and {entry["leader"] for entry in found} == {f"server {rank}" for rank in range(NODES)}


class Training(ReplicatedJob):
    """The job of the training."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._last = folder / "last"
        super().__init__(folder, TRAINS, str(self._last), **settings)

    def finish(self) -> None:
        """The workers end some steps later, with the bits that they must have."""
        self.crew.finish(self._last)
