"""Processes that share memory are killed, stopped or cannot share any: the others go on, and no memory leaks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvd.testing.cluster import LocalCluster, ProcessNode, wait_until

SETTINGS: dict[str, Any] = {
    "heartbeat_interval_s": 0.1,
    "server_timeout_s": 20.0,
    "worker_timeout_s": 40.0,
    "slice_bytes": "1MiB",
}
STEPS = 16
LONGEST_STEP_S = 0.03  # about: a random moment of a step is within it

TRAINS = """
import hashlib, json, pathlib, sys, time
import numpy as np
import kvd
from kvd.core.machine import PeerKind
from kvd.errors import NodeLost
from kvd.testing.cluster import engine_of, wait_until

def wait_for_permission():
    print("done", flush=True)
    wait_until(go.exists, "it may end", 100.0)

steps, go = int(sys.argv[1]), pathlib.Path(sys.argv[2])
keys, shapes = ["large", "small", "medium"], [(3, 1 << 18), (5,), (150, 350)]
result = {}
try:
    with kvd.create("dist_sync") as kv:
        kv.set_optimizer(kvd.optimizer.SGD(0.01, momentum=0.9))
        kv.init(keys, [np.full(shape, 0.5, np.float32) for shape in shapes])
        step = min(kv.clock(key) for key in keys)
        kv.rewind(step)
        gradients, weights = kv.bind(keys)
        try:
            while step < steps:
                rng = np.random.default_rng([step, kv.rank])
                for gradient in gradients:
                    gradient[...] = rng.standard_normal(gradient.shape, np.float32)
                print("step", step, flush=True)
                kv.pushpull(keys, gradients, weights)
                step += 1
        finally:
            wait_for_permission()
        result["digest"] = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
        paths = engine_of(kv).transport.paths()
        texts = {path.describe() for peer, path in paths.items() if peer.kind is PeerKind.SERVER}
        result["paths"] = sorted(texts)
except NodeLost as error:
    result["lost"] = error.node
print(json.dumps(result), flush=True)
"""


class Job:
    """A cluster in processes of its own, whose workers train with bound arrays."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.go = cluster.folder / "go"
        self.workers: list[subprocess.Popen[bytes]] = []

    def begin(self, number: int, steps: int = STEPS, prelude: str = "") -> subprocess.Popen[bytes]:
        """Starts worker `number`, or its successor."""
        worker = self.cluster.script(prelude + TRAINS, number, str(steps), str(self.go))
        self.workers.append(worker)
        return worker

    @property
    def server_pids(self) -> list[int]:
        return [server.process.pid for server in self.cluster.servers if isinstance(server, ProcessNode)]

    def end(self, *workers: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        """Lets the workers close, and returns their results."""
        self.go.touch()
        results = []
        for worker in workers:
            output, _ = worker.communicate(timeout=60)
            assert worker.returncode == 0, output.decode()
            results.append(json.loads(output.decode().splitlines()[-1]))
        return results


@contextmanager
def job(workers: int, servers: int, **how: Any) -> Iterator[Job]:
    with LocalCluster(workers, servers, processes=True, **{"path": "shm", **SETTINGS, **how}) as cluster:
        started = Job(cluster)
        try:
            yield started
            assert not [name for name in os.listdir("/dev/shm") if "kvd" in name]  # others have files there, too
        finally:
            for worker in started.workers:
                worker.kill()
                worker.wait()
                if worker.stdout is not None:
                    worker.stdout.close()


def await_line(worker: subprocess.Popen[bytes], wanted: str, times: int = 1) -> None:
    """Reads the output of a worker until `times` lines have begun with `wanted`."""
    assert worker.stdout is not None
    said: list[str] = []
    while times:
        line = worker.stdout.readline().decode()
        assert line, f"it ended after {said[-20:]}"
        assert wanted == "done" or line != "done\n", f"it has made all steps: {said[-20:]}"
        said.append(line)
        times -= line.startswith(wanted)


def kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


# ── the memory of processes ──


def maps(pid: int) -> list[tuple[str, int]]:
    """Permissions and inode of each piece of shared memory that this process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "/memfd:kvd" in line]
    return [(field[1], int(field[4])) for field in fields]


def owned(pid: int) -> set[int]:
    """The memory that this process shares with others: it alone may write there."""
    return {inode for permissions, inode in maps(pid) if permissions.startswith("rw")}


def descriptors(pid: int) -> tuple[set[int], int]:
    """The inodes of the shared memory that this process has descriptors of, and how many others it has."""
    inodes, others = set(), 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(entry).startswith("/memfd:kvd"):
                inodes.add(entry.stat().st_ino)
            else:
                others += 1
    return inodes, others


def held(pid: int) -> set[int]:
    """All shared memory that this process keeps from being freed, by a map or by a descriptor."""
    return descriptors(pid)[0].union(inode for _, inode in maps(pid))


def none_holds(inodes: set[int], pids: Iterable[int]) -> bool:
    return all(inodes.isdisjoint(held(pid)) for pid in pids)


@cache
def undisturbed(steps: int) -> str:
    """The digest of a training in which nothing happens, without shared memory."""
    with job(2, 2, path="tcp") as calm:
        one, other = calm.end(calm.begin(0, steps), calm.begin(1, steps))
    assert one["digest"] == other["digest"]
    assert [path.partition(":")[0] for path in one["paths"]] == ["zmq"]
    return str(one["digest"])


# ── deaths ──


def kill_workers(seed: int, kills: int, steps: int) -> None:
    expected = undisturbed(steps)
    rng = random.Random(seed)
    with job(2, 2) as disturbed:
        steady, victim = disturbed.begin(0, steps), disturbed.begin(1, steps)
        survivors = [steady.pid, *disturbed.server_pids]
        sockets: dict[int, int] = {}
        for _ in range(kills):
            await_line(victim, "step", 2)  # in the second step, the first has been answered
            memory = owned(victim.pid)
            assert memory
            assert all(memory & held(pid) for pid in disturbed.server_pids)
            time.sleep(rng.uniform(0, LONGEST_STEP_S))  # time itself: any moment of a step
            kill(victim)
            victim = disturbed.begin(1, steps)
            await_line(victim, "step")
            wait_until(lambda memory=memory: none_holds(memory, survivors), "the memory of the dead is freed")  # type: ignore[misc]
            sockets = sockets or {pid: descriptors(pid)[1] for pid in survivors}
        await_line(victim, "done")
        await_line(steady, "done")
        wait_until(lambda: all(descriptors(pid)[1] <= sockets[pid] for pid in survivors), "no descriptor is left")
        results = disturbed.end(steady, victim)
        assert [result["digest"] for result in results] == [expected] * 2
        assert [result["paths"] for result in results] == [["shared memory"]] * 2
        servers = disturbed.server_pids
        wait_until(lambda: all(held(pid) == owned(pid) for pid in servers), "the servers have only their own memory")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_worker_is_killed_while_servers_read_its_memory(seed: int) -> None:
    kill_workers(seed, kills=3, steps=STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_workers_are_killed_again_and_again(seed: int) -> None:
    kill_workers(seed, kills=5, steps=2 * STEPS)


def kill_a_server(seed: int) -> None:
    rng = random.Random(seed)
    with job(2, 2) as disturbed:
        workers = [disturbed.begin(number, 10_000) for number in range(2)]
        for worker in workers:
            await_line(worker, "step", 2)
        rank = rng.randrange(2)
        victim = disturbed.cluster.servers[rank]
        assert isinstance(victim, ProcessNode)
        memory = owned(victim.process.pid)
        assert memory
        assert all(memory & held(worker.pid) for worker in workers)
        time.sleep(rng.uniform(0, 3 * LONGEST_STEP_S))  # time itself: any moment of some steps
        victim.kill()
        for worker in workers:
            await_line(worker, "done")
        survivors = [worker.pid for worker in workers] + [
            pid for pid in disturbed.server_pids if pid != victim.process.pid
        ]
        wait_until(lambda: none_holds(memory, survivors), "the memory of the dead is freed")
        assert disturbed.end(*workers) == [{"lost": f"server {rank}"}] * 2


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_server_is_killed_while_workers_read_its_memory(seed: int) -> None:
    kill_a_server(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_servers_are_killed_at_many_moments(seed: int) -> None:
    kill_a_server(seed)


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_stopped_process_changes_nothing(who: str) -> None:
    rng = random.Random(1)
    with job(2, 2) as disturbed:
        workers = [disturbed.begin(number) for number in range(2)]
        pid = workers[1].pid if who == "worker" else disturbed.server_pids[1]
        for _ in range(3):
            await_line(workers[1], "step", 2)
            time.sleep(rng.uniform(0, LONGEST_STEP_S))  # time itself: any moment of a step
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.7)  # time itself: it is stopped
            os.kill(pid, signal.SIGCONT)
        results = disturbed.end(*workers)
        assert results == [{"digest": undisturbed(STEPS), "paths": ["shared memory"]}] * 2


# ── systems that cannot share memory ──

NAMESPACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
"""
OWN_NETWORK = NAMESPACE + "call('unshare', 0x40000000)\n"
FULL_DEV_SHM = (
    NAMESPACE
    + """
call('unshare', 0x00020000)
call('mount', b'none', b'/', None, ctypes.c_ulong(0x44000), None)  # private, with all that is below
call('mount', b'tmpfs', b'/dev/shm', b'tmpfs', ctypes.c_ulong(0), b'size=4096')
with open('/dev/shm/full', 'wb') as file:
    file.write(bytes(4096))
"""
)
NO_MEMFD = "import os\ndel os.memfd_create\n"
NO_SPACE = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))\n"


def is_permitted(prelude: str) -> bool:
    return subprocess.run([sys.executable, "-c", prelude], check=False, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not (is_permitted(OWN_NETWORK) and is_permitted(FULL_DEV_SHM)), reason="namespaces are not permitted here"
)


def train(server: str, worker: str, **how: Any) -> tuple[set[str], set[str], set[str]]:
    """A training whose processes run these preludes: its digests, how the messages of workers travel according to
    them and the servers, and how the answers of servers travel according to those."""
    with job(2, 2, server_prelude=server, **how) as changed:
        workers = [changed.begin(number, prelude=worker) for number in range(2)]
        for each in workers:
            await_line(each, "done")
        with changed.cluster.observer() as observer:
            reports = observer.status()["servers"]
        results = changed.end(*workers)
    paths = {path for result in results for path in result["paths"]}
    assert {path for report in reports for path in report["paths"].values()} == paths
    return {result["digest"] for result in results}, paths, {report.get("links", "") for report in reports}


SHARED = "shared memory"
WITHOUT_MEMFD = "unix socket: no shared memory: this system has no memfd_create"
WITHOUT_SPACE = "unix socket: no shared memory: File too large"


@pytest.mark.parametrize(
    ("server", "worker", "path", "answers"),
    [
        pytest.param("", "", SHARED, SHARED, id="nothing missing"),
        pytest.param(NO_MEMFD, "", SHARED, WITHOUT_MEMFD, id="no memfd in servers"),
        pytest.param("", NO_MEMFD, WITHOUT_MEMFD, SHARED, id="no memfd in workers"),
        pytest.param("", NO_SPACE, WITHOUT_SPACE, SHARED, id="no space in workers"),
        pytest.param(NO_SPACE, NO_SPACE, WITHOUT_SPACE, WITHOUT_SPACE, id="no space anywhere"),
        pytest.param(FULL_DEV_SHM, FULL_DEV_SHM, SHARED, SHARED, id="full /dev/shm", marks=needs_namespaces),
    ],
)
def test_what_cannot_be_shared_goes_through_the_socket(server: str, worker: str, path: str, answers: str) -> None:
    assert train(server, worker) == ({undisturbed(STEPS)}, {path}, {answers})


@needs_namespaces
def test_a_worker_in_another_network_namespace_goes_over_zmq() -> None:
    digests, paths, _ = train("", OWN_NETWORK, path="ipc", shared_memory="auto")
    assert digests == {undisturbed(STEPS)}
    (path,) = paths
    assert path.startswith("zmq: no link at this host")
    assert "in another network namespace" in path
