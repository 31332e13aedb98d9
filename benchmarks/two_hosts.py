"""What encryption costs between hosts: ``python -m benchmarks.two_hosts``, as root, with iproute2.

Two network namespaces stand for two hosts, joined by a pair of virtual interfaces. The scheduler and two workers run in
one, a server in the other. The workers push and pull all tensors of ResNet-50, or of another work of `kvd bench`, again
and again, and compute nothing. Each round measures every kind of connection in turn, so that all see the same machine:

- ``insecure``: links over TCP, not encrypted
- ``zmq``: ZeroMQ over TCP, not encrypted
- ``sealed``: encrypted links over TCP
- ``curve``: ZeroMQ's own encryption, without such links
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.arguments import positive
from benchmarks.report import print_table, time_text
from kvd.config import child_environment
from kvd.node.keys.keyfiles import new_cluster_key, write_key
from kvd.testing.cluster import wait_until
from kvd_cli.bench_work import WORK

KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "insecure": {"KVD_INSECURE": "1"},
    "zmq": {"KVD_INSECURE": "1", "KVD_TCP_LINKS": "off"},
    "sealed": {"KVD_TCP_LINKS": "auto"},
    "curve": {"KVD_TCP_LINKS": "off"},
}
WORKERS: Final = 2
WARM_UP_STEPS: Final = 3
DEADLINE_S: Final = 300.0

WORKER: Final = """
import sys, time
import numpy as np
import kvd
from kvd_cli.bench_work import sizes_of

sizes = sizes_of(sys.argv[2])
names = [f"tensor {number}" for number in range(len(sizes))]
gradients = [np.full(size, 1e-6, np.float32) for size in sizes]
outs = [np.empty(size, np.float32) for size in sizes]
with kvd.create("dist_sync") as kv:
    kv.init(names, outs)
    for step in range(int(sys.argv[1])):
        kv.barrier()
        begun = time.perf_counter()
        kv.pushpull(names, gradients, outs)
        print(time.perf_counter() - begun, flush=True)
"""


class Hosts:
    """This host, and a namespace that stands for another one."""

    def __init__(self, ip: str, name: str, network: str) -> None:
        self.here, self.there = f"{network}.1", f"{network}.2"
        self._enter = [ip, "netns", "exec", name]

    def on(self, *, other: bool, command: Sequence[str]) -> list[str]:
        """A command that runs `command` here or there."""
        return [*(self._enter if other else []), *command]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Raises SystemExit if this user cannot make a network namespace."""
    ip, name = shutil.which("ip"), f"kvd-bench-{os.getpid()}"
    if ip is None or subprocess.run([ip, "netns", "add", name], capture_output=True, check=False).returncode:
        raise SystemExit("this needs root, and ip(8) of iproute2, to make a network namespace")
    hosts = Hosts(ip, name, f"10.214.{os.getpid() % 250}")
    ours, theirs = f"kvb{os.getpid()}", f"kvt{os.getpid()}"
    try:
        for arguments in (
            ["link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name],
            ["addr", "add", f"{hosts.here}/30", "dev", ours],
            ["link", "set", ours, "up"],
        ):
            subprocess.run([ip, *arguments], check=True)
        for arguments in (["addr", "add", f"{hosts.there}/30", "dev", theirs], ["link", "set", theirs, "up"]):
            subprocess.run(hosts.on(other=True, command=[ip, *arguments]), check=True)
        yield hosts
    finally:
        subprocess.run([ip, "netns", "delete", name], check=False)


def times_s(hosts: Hosts, kind: str, work: str, steps: int, folder: Path) -> list[float]:
    """The times of rank 0's steps, in seconds, in a cluster of its own."""
    scheduler = f"tcp://{hosts.here}:9191"
    settings = {"KVD_SCHEDULER": scheduler, "KVD_NUM_WORKERS": str(WORKERS), "KVD_NUM_SERVERS": "1", **KINDS[kind]}
    if "KVD_INSECURE" not in settings:
        settings["KVD_KEYFILE"] = str(folder / "key")
    environment = child_environment(
        {**settings, "KVD_LOG_LEVEL": "warning", "KVD_RUN": f"{kind} {os.urandom(8).hex()}"}
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, other: bool = False, rank: int = 0) -> subprocess.Popen[bytes]:
        given = {**environment, "KVD_PREFERRED_RANK": str(rank)}
        started.append(
            subprocess.Popen(
                hosts.on(other=other, command=[sys.executable, *command]), env=given, stdout=subprocess.PIPE
            )
        )
        return started[-1]

    try:
        ready = folder / f"ready {os.urandom(4).hex()}"
        start("-m", "kvd_cli.main", "scheduler", "--ready-file", str(ready))
        wait_until(ready.exists, "the scheduler is ready")
        start("-m", "kvd_cli.main", "server", other=True)
        workers = [start("-c", WORKER, str(WARM_UP_STEPS + steps), work, rank=rank) for rank in range(WORKERS)]
        said = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [float(line) for line in said[0].split()][WARM_UP_STEPS:]


def measure(work: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """For each kind, the median time of a step in each round, in seconds."""
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_key(folder / "key", new_cluster_key())
        for _ in range(rounds):
            for kind, found in medians.items():
                found.append(statistics.median(times_s(hosts, kind, work, steps, folder)))
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_hosts", description=__doc__)
    parser.add_argument("--work", choices=WORK, default="resnet50", help="what the workers push and pull")
    parser.add_argument("--rounds", type=positive(int), default=5, help="how often each kind is measured")
    parser.add_argument("--steps", type=positive(int), default=8, help="steps in each of them")
    options = parser.parse_args(arguments)
    medians = measure(options.work, options.rounds, options.steps)
    plain = statistics.median(medians["insecure"])
    rows = []
    for kind, found in medians.items():
        middle = statistics.median(found)
        spread = [time_text(1e6 * seconds) for seconds in (min(found), middle, max(found))]
        rows.append([kind, *spread, f"{middle / plain:.2f}"])
    print_table(Console(), ["connection", "min", "median", "max", "÷ insecure"], rows)


if __name__ == "__main__":
    main()
