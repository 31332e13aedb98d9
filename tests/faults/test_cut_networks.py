"""A training on three hosts of which one is cut off from the network, for longer than every limit, and joined again.

The hosts are network namespaces. Everything on them lives on and sees only that nobody answers any more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from kvd.config import child_environment
from kvd.node.keys.keyfiles import new_cluster_key, write_key
from kvd.testing.cluster import ROOT, wait_until
from tests.faults.replicated_job import NODES, TRAINS, Crew, Worker
from tests.node.launch.lan_harness import Lan, lan_or_skip

SCHEDULER_HOST: Final = 1
SERVER_HOSTS: Final = (2, 3)  # by rank
WORKER_HOSTS: Final = (1, 3)
SCHEDULER: Final = "tcp://10.0.0.1:9191"
SETTINGS: Final = {
    "KVD_SCHEDULER": SCHEDULER,
    "KVD_NUM_WORKERS": str(NODES),
    "KVD_NUM_SERVERS": str(NODES),
    "KVD_REPLICAS": "2",
    "KVD_SLICE_BYTES": "8192",
    "KVD_HEARTBEAT_INTERVAL_S": "0.2",
    "KVD_SERVER_TIMEOUT_S": "3",
    "KVD_WORKER_TIMEOUT_S": "3",
    "KVD_REQUEST_TIMEOUT_S": "120",
    "KVD_ROUND_TIMEOUT_S": "240",
    "KVD_ON_WORKER_LOSS": "wait",
    "KVD_RUN": "a training on three hosts",
}
DEADLINE_S: Final = 120.0
STEPS: Final = 10


class SpreadTraining:
    """The training of `replicated_job` with its nodes on several hosts; a context manager."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self._lan = lan
        self._folder = folder
        self._last = folder / "last"
        write_key(folder / "key", new_cluster_key())
        self._settings = {**SETTINGS, "KVD_KEYFILE": str(folder / "key"), "KVD_STATE_DIR": str(folder / "state")}
        self._stack = ExitStack()
        self.crew = Crew(DEADLINE_S)

    def __enter__(self) -> SpreadTraining:
        ready = self._folder / "ready"
        self._daemon(SCHEDULER_HOST, "scheduler", "--bind", SCHEDULER, "--ready-file", str(ready))
        wait_until(ready.exists, "the scheduler is ready", DEADLINE_S)
        for rank, host in enumerate(SERVER_HOSTS):
            self._daemon(host, "server", KVD_NODE_ID=f"server-{rank}", KVD_PREFERRED_RANK=str(rank))
        for rank, host in enumerate(WORKER_HOSTS):
            own = {"KVD_NODE_ID": f"worker-{rank}", "KVD_PREFERRED_RANK": str(rank)}
            command = self._lan.on(host, sys.executable, "-c", TRAINS, str(self._last))
            process = subprocess.Popen(
                command, env=self._environment(own), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            worker = Worker(process)
            self._stack.callback(worker.kill)
            self.crew.workers.append(worker)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _environment(self, own: dict[str, str]) -> dict[str, str]:
        return child_environment({**self._settings, **own, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"})

    def _daemon(self, host: int, *arguments: str, **own: str) -> None:
        command = self._lan.on(host, sys.executable, "-m", "kvd_cli.main", *arguments)
        with (self._folder / f"host-{host}-{arguments[0]}.log").open("wb") as log:
            process = subprocess.Popen(command, env=self._environment(own), stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def partitions(self) -> list[dict[str, Any]]:
        """As ``kvd status`` has them on the host of the scheduler; empty if it cannot tell."""
        command = self._lan.on(SCHEDULER_HOST, sys.executable, "-m", "kvd_cli.main", "status", "-o", "json")
        said = subprocess.run(command, env=self._environment({}), capture_output=True, check=False).stdout
        found: list[dict[str, Any]] = json.loads(said).get("partitions", []) if said else []
        return found

    def is_even(self) -> bool:
        """Each server leads a part, and has a copy of the other one."""
        found = self.partitions()
        return all(entry["backup"] for entry in found) and len({entry["leader"] for entry in found}) == NODES

    def wait_until_only_leader(self, rank: int) -> None:
        self.crew.wait_until(
            lambda: {entry["leader"] for entry in self.partitions()} == {f"server {rank}"},
            f"server {rank} leads everything",
        )

    def finish(self) -> None:
        """The workers end some steps later, with the bits that they must have."""
        self.crew.finish(self._last)


@pytest.fixture
def lan() -> Iterator[Lan]:
    with lan_or_skip(3) as net:
        yield net


@pytest.mark.soak
def test_hosts_that_are_cut_off_change_nothing(lan: Lan, tmp_path: Path) -> None:
    """First the host of a server, then that of the other server and of a worker, twice."""
    with SpreadTraining(lan, tmp_path) as job:
        job.crew.wait_until(job.is_even, "every server leads a part")
        for _ in range(2):
            lan.cut_off(2)
            job.wait_until_only_leader(1)
            job.crew.wait_for_steps(STEPS)
            lan.join(2)
            job.crew.wait_until(job.is_even, "server 0 leads its part again")
            job.crew.wait_for_steps(STEPS)
            lan.cut_off(3)
            job.wait_until_only_leader(0)
            lan.join(3)
            job.crew.wait_until(job.is_even, "server 1 leads its part again")
            job.crew.wait_for_steps(STEPS)
        job.finish()
