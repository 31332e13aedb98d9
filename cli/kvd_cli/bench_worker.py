"""One worker of `kvd bench`: runs each work through the public API and writes rows.

Started as ``python -m kvd_cli.bench_worker TASK`` with the task as JSON; ``KVD_*`` says where the cluster is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvd
import kvd.optimizer
from kvd.client.cluster.observer import Observer
from kvd.config import load
from kvd_cli.bench_counting import CountFailed, allow_tracing
from kvd_cli.bench_counts import Counts, Neighbours
from kvd_cli.bench_usage import cpu_s_of, share_bytes_of, usage_of
from kvd_cli.bench_work import (
    COUNTS_FILE,
    IN_FLIGHT,
    IN_FLIGHT_NAME,
    ROLES_FILE,
    ROWS_FILE,
    SERVERS_FILE,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    Row,
    Task,
    iterations_for,
    make_row,
    sizes_of,
    time_steps,
)


class Values(NamedTuple):
    """Arrays that a worker pushes and pulls in one work."""

    keys: list[str]
    gradients: list[NDArray[np.float32]]
    outs: list[NDArray[np.float32]]


class Bench:
    """Works of one worker, run one after the other."""

    def __init__(self, kv: kvd.KVStore, task: Task) -> None:
        self._kv = kv
        self._task = task
        self._folder = Path(task.folder)
        self._shares: dict[tuple[str, int], int] = {}  # the most memory of a role and rank, shared memory in parts

    def run(self) -> None:
        """Do all works."""
        self._set_optimizer()
        for name in self._task.works:
            self._work(name)

    def tell_roles(self) -> None:
        """Write the usage of this process. Rank 0 also writes how many bytes each server led."""
        usage = usage_of("self")
        if usage is not None:
            self._write(ROLES_FILE, {"role": "worker", "rank": self._kv.rank, **usage._asdict()})
        for (role, rank), share_bytes in self._shares.items():
            self._write(ROLES_FILE, {"role": role, "rank": rank, "share_bytes": share_bytes})
        if self._kv.rank != 0:
            return
        visitor = dataclasses.replace(load().config, node_id="", preferred_rank=None)
        with Observer(visitor) as cluster:
            for server in cluster.status()["servers"]:
                # Of a server that did not answer, we do not know it.
                led = {"bytes_led": server["bytes_led"]} if "bytes_led" in server else {}
                self._write(ROLES_FILE, {"role": "server", "rank": server["rank"], **led})

    def _set_optimizer(self) -> None:
        # A rate of 0 does all the arithmetic and keeps the weights, so that every step can be checked.
        if self._task.mode == "sgd":
            self._kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.0, momentum=0.9))
        elif self._task.mode == "adam":
            self._kv.set_optimizer(kvd.optimizer.Adam(learning_rate=0.0))

    def _work(self, name: str) -> None:
        mine = self._values(name)

        def fill() -> None:
            self._kv.pushpull(mine.keys, mine.gradients, mine.outs)

        def take() -> None:
            mine.outs[:] = self._kv.pushpull(mine.keys, mine.gradients, copy=False)

        step = take if self._task.copy_free else fill
        self._kv.barrier()
        step()
        self._check(name, mine.outs)
        for gradient in mine.gradients:
            gradient[:] = 0
        if name == IN_FLIGHT_NAME:
            self._measure(name, step, lambda count: self._in_flight(mine, count), IN_FLIGHT)
        else:
            self._measure(name, step, lambda count: time_steps(step, count))

    def _values(self, name: str) -> Values:
        """Create the keys of a work with ones, and return arrays for them: the store's own if the task says so."""
        sizes = sizes_of(name)
        keys = [f"{name}/{number}" for number in range(len(sizes))]
        self._kv.init(keys, [np.ones(size, np.float32) for size in sizes])
        if not self._task.bound:
            outs = [np.zeros(size, np.float32) for size in sizes]
            return Values(keys, [np.full(size, self._kv.rank + 1, np.float32) for size in sizes], outs)
        gradients, weights = self._kv.bind(keys)
        for gradient in gradients:
            gradient[:] = self._kv.rank + 1
        return Values(keys, gradients, weights)

    def _check(self, name: str, outs: list[NDArray[np.float32]]) -> None:
        """Raise if the sums are wrong: the speed of a wrong result is worthless."""
        workers = self._kv.num_workers
        wanted = workers * (workers + 1) / 2 if self._task.mode == "none" else 1.0
        if not all(np.all(out == wanted) for out in outs):
            sys.exit(f"{name}: the values after the first step are wrong: expected {wanted} everywhere")

    def _measure(
        self,
        name: str,
        step: Callable[[], None],
        iterate: Callable[[int], tuple[list[float], float]],
        calls_per_step: int = 1,
    ) -> None:
        for _ in range(WARM_UP_STEPS):
            step()
        trial_s, _ = time_steps(step, TRIAL_STEPS)
        count = self._agree(name, iterations_for(trial_s, self._task.seconds, calls_per_step))
        for repetition in range(self._task.repetitions):
            self._kv.barrier()
            servers_s, own_s = self._servers_cpu_s(), time.process_time()
            each, total_s = iterate(count)
            row = make_row(name, self._kv.rank, repetition, each, total_s)
            row["cpu_s"] = time.process_time() - own_s
            if servers_s is not None and (servers_end_s := self._servers_cpu_s()) is not None:
                row["servers_cpu_s"] = servers_end_s - servers_s
            self._write(ROWS_FILE, row)
        self._kv.barrier()
        self._look_at_memory()
        if self._task.counts:
            neighbours = Neighbours(self._kv.rank, self._servers(), self._folder, self._kv.barrier)
            for line in Counts(neighbours, iterate, count).take():
                self._write(COUNTS_FILE, {"name": name, **line})

    def _look_at_memory(self) -> None:
        """Record the memory of this process with the values of a work; on rank 0, that of the servers, too."""
        processes: list[tuple[str, int, int | str]] = [("worker", self._kv.rank, "self")]
        processes += [("server", number, pid) for number, pid in enumerate(self._servers())]
        for role, rank, pid in processes:
            share_bytes = share_bytes_of(pid)
            if share_bytes is not None:
                self._shares[role, rank] = max(share_bytes, self._shares.get((role, rank), 0))

    def _servers_cpu_s(self) -> float | None:
        """Return on rank 0 the processor time of all servers so far; None on other ranks, or if unknown."""
        pids = self._servers()
        return cpu_s_of(pids) if pids else None

    def _servers(self) -> list[int]:
        """Return on rank 0 the process ids of all servers; none on other ranks, or if unknown."""
        file = self._folder / SERVERS_FILE
        if self._kv.rank != 0 or not file.exists():
            return []
        pids: list[int] = json.loads(file.read_text())
        return pids

    def _in_flight(self, mine: Values, count: int) -> tuple[list[float], float]:
        """Make `count` calls of one key each, with `IN_FLIGHT` in flight. Return times as `time_steps` does."""
        each: list[float] = []
        flying: deque[tuple[float, kvd.Handle]] = deque()

        def land() -> None:
            start, handle = flying.popleft()
            handle.wait()
            each.append(time.perf_counter() - start)

        begin = time.perf_counter()
        for number in range(count):
            if len(flying) == IN_FLIGHT:
                land()
            slot = number % IN_FLIGHT
            key, gradient = mine.keys[slot], mine.gradients[slot]
            out = None if self._task.copy_free else mine.outs[slot]
            begun = time.perf_counter()
            flying.append((begun, self._kv.pushpull_async(key, gradient, out, copy=not self._task.copy_free)))
        while flying:
            land()
        return each, time.perf_counter() - begin

    def _agree(self, name: str, count: int) -> int:
        """Return rank 0's count on all ranks: a synchronous step needs all of them."""
        file = self._folder / f"{name}.count"
        if self._kv.rank == 0:
            unfinished = file.with_suffix(".tmp")
            unfinished.write_text(str(count))
            unfinished.rename(file)
        self._kv.barrier()
        return int(file.read_text())

    def _write(self, file: str, line: Row) -> None:
        # One write to a file opened for appending does not mix with the lines of other workers.
        descriptor = os.open(self._folder / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
        finally:
            os.close(descriptor)


def main() -> None:
    """Join the cluster, do the task in ``argv[1]``, and leave."""
    task = Task.from_json(sys.argv[1])
    if task.counts:
        allow_tracing()
    with kvd.create("dist_sync") as kv:
        bench = Bench(kv, task)
        try:
            bench.run()
        except CountFailed as failure:
            sys.exit(f"error: {failure}")
        bench.tell_roles()


if __name__ == "__main__":
    main()
