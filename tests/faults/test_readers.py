"""Four processes read a training. One is killed, one is stopped: the training and the other readers go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

KEYS = [f"layer {number}" for number in range(8)]
FLOATS = 1 << 18  # 1 MiB: two slices
CUT_BYTES = len(KEYS) * FLOATS * 4
READERS = 4  # a server keeps one cut of its keys for each at most
SPARE_BYTES = 1 << 20  # of the allocator; 60 steps of which nothing is given back take far more
SETTINGS: dict[str, Any] = {"server_timeout_s": 60.0, "worker_timeout_s": 60.0, "request_timeout_s": 100.0}

READS = """
import json, sys
import numpy as np
import kvd

keys = json.loads(sys.argv[1])
with kvd.Observer() as observer:
    outs = [np.empty(int(sys.argv[2]), np.float32) for _ in keys]
    while True:
        version, versions, values = observer.read(keys, out=outs)
        found = sorted({float(value.min()) for value in values} | {float(value.max()) for value in values})
        print(json.dumps([version, sorted(set(versions.values())), found]), flush=True)
"""


class Reader:
    """A process that reads, and what it has read so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen: list[Any] = []
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"["):
                self.seen.append(json.loads(line))
            else:
                self.errors.append(line.decode())

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def readers(cluster: LocalCluster) -> Iterator[list[Reader]]:
    started: list[Reader] = []
    try:
        for number in range(READERS):
            process = cluster.script(READS, 100 + number, json.dumps(KEYS), str(FLOATS))
            started.append(Reader(process))
        yield started
    finally:
        for reader in started:
            reader.end()


class Training:
    """Two workers that make step after step; the keys become the number of the step."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.steps = 0
        self._over = threading.Event()
        self._last = False
        self._agree = threading.Barrier(cluster.num_workers, action=self._step_made)
        self._thread = threading.Thread(target=lambda: cluster.run(self._program))
        self._thread.start()
        self.make(1)

    def _step_made(self) -> None:
        self.steps += 1
        self._last = self._over.is_set()

    def _program(self, store: kvd.KVStore) -> None:
        store.init(KEYS, [np.zeros(FLOATS, np.float32)] * len(KEYS))
        outs = [np.empty(FLOATS, np.float32) for _ in KEYS]
        while not self._last:
            share = np.full(FLOATS, (self.steps + 1) / 2, np.float32)
            store.pushpull(KEYS, [share] * len(KEYS), outs)
            assert float(outs[-1][-1]) == self.steps + 1
            self._agree.wait(60)

    def make(self, count: int) -> None:
        """Returns after so many more steps."""
        goal = self.steps + count
        wait_until(lambda: self.steps >= goal, f"{count} more steps", timeout_s=90.0)

    def end(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def resident_bytes(node: Any) -> int:
    """The memory of a daemon, shared memory included."""
    assert isinstance(node, ProcessNode)
    with open(f"/proc/{node.process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_readers_that_die_or_stop_do_no_harm(path: Any) -> None:
    with LocalCluster(2, 2, processes=True, path=path, **SETTINGS) as cluster:
        training = Training(cluster)
        try:
            with readers(cluster) as all_readers:
                killed, stopped, *others = all_readers
                wait_until(lambda: all(len(reader.seen) >= 3 for reader in all_readers), "all read", timeout_s=90.0)
                killed.send(signal.SIGKILL)
                stopped.send(signal.SIGSTOP)
                training.make(10)
                before = [resident_bytes(node) for node in cluster.servers]
                read = [len(reader.seen) for reader in others]
                training.make(60)
                after = [resident_bytes(node) for node in cluster.servers]
                wait_until(
                    lambda: all(len(r.seen) > count + 3 for r, count in zip(others, read, strict=True)),
                    "the other readers go on",
                    timeout_s=90.0,
                )
                for small, large in zip(before, after, strict=True):
                    assert large < small + 2 * CUT_BYTES + SPARE_BYTES
                count = len(stopped.seen)
                stopped.send(signal.SIGCONT)
                wait_until(lambda: len(stopped.seen) > count + 3, "the stopped reader goes on", timeout_s=90.0)
                assert [reader.errors for reader in all_readers] == [[]] * READERS
                seen = [entry for reader in all_readers for entry in reader.seen]
        finally:
            training.end()
    assert all(versions == [version] and found == [version] for version, versions, found in seen)
    assert len({version for version, _, _ in seen}) > 10
