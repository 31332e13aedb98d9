"""Real daemons in processes of their own, and a job that trains on them, for attacks."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import kvd
from kvd.config import child_environment, load
from kvd.node.keys.keyfiles import NodeKey, new_cluster_key, new_node_key, public_part, write_key
from kvd.testing.cluster import ROOT, LocalCluster, ProcessNode, wait_until
from tests.fuzz.curve import keys_of

WORKERS = 2
SERVERS = 2
STEPS = 5  # of an epoch
END_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 180.0  # for what an attack has taken to come back; millions of messages are dropped one by one first
MORE = 1.05  # than before the attack: what a daemon may use after it
SPARE_BYTES = 4 << 20  # that the allocators of a process keep
SPARE_DESCRIPTORS = 2
MEMORY_LIMIT_BYTES = 256 << 20  # `memory_limit_bytes` of the daemons
MOST_GROWN_BYTES = MEMORY_LIMIT_BYTES + (64 << 20)  # by which a daemon's memory may rise, whatever is done to it
NO_NUMBA = "import sys\nsys.modules['numba'] = None\n"  # its import takes 130 MB, at some time


class Usage(NamedTuple):
    """What a process takes of its host."""

    resident_bytes: int
    descriptors: int
    threads: int

    def is_back_at(self, before: Usage) -> bool:
        return (
            self.resident_bytes <= before.resident_bytes * MORE + SPARE_BYTES
            and self.descriptors <= before.descriptors * MORE + SPARE_DESCRIPTORS
            and self.threads <= before.threads
        )


def usage_of(pid: int) -> Usage:
    proc = Path("/proc") / str(pid)
    pages = int((proc / "statm").read_text().split()[1])
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")))


class Epochs:
    """What one worker has noted: a digest, and the times of the steps, per epoch."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def lines(self) -> list[list[str]]:
        if not self._file.exists():
            return []
        text = self._file.read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def digests(self) -> list[str]:
        return [line[0] for line in self.lines()]

    def step_times_s(self, first: int = 0) -> list[float]:
        """Those of all epochs from this one on."""
        return [float(word) for line in self.lines()[first:] for word in line[1:]]


@dataclass(frozen=True)
class Daemon:
    """One daemon under attack."""

    name: str
    address: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


class Job:
    """The workers of a job, as processes. It trains until `end`."""

    def __init__(self, cluster: LocalCluster, steps: int = STEPS) -> None:
        folder = cluster.folder / f"job-{secrets.token_hex(4)}"
        folder.mkdir()
        self._stop = folder / "stop"
        self.epochs = [Epochs(folder / str(rank)) for rank in range(cluster.num_workers)]
        self._errors = [folder / f"{rank}.err" for rank in range(cluster.num_workers)]
        self.processes = [self._start(cluster, folder, rank, steps) for rank in range(cluster.num_workers)]

    def _start(self, cluster: LocalCluster, folder: Path, rank: int, steps: int) -> subprocess.Popen[bytes]:
        settings = {
            **cluster.settings,
            "scheduler": cluster.address,
            "node_id": f"worker-{rank}",
            "preferred_rank": rank,
            "parent_pid": os.getpid(),
        }
        environment = child_environment({**load(settings, environ={}).environment(), "PYTHONPATH": str(ROOT)})
        command = [sys.executable, "-m", "tests.fuzz.job", str(folder / str(rank)), str(self._stop), str(steps)]
        with self._errors[rank].open("wb") as errors:
            return subprocess.Popen(command, env=environment, stderr=errors, cwd=ROOT)

    def count(self) -> int:
        """The epochs that all workers have ended."""
        return min(len(epochs.lines()) for epochs in self.epochs)

    def trains_on(self, epochs: int = 2) -> None:
        """Waits until it has ended so many more epochs: what it does now is no leftover of what it did before."""
        wanted = self.count() + epochs
        wait_until(lambda: self.count() >= wanted or not self._lives(), f"epoch {wanted} of the job", END_TIMEOUT_S)
        assert self._lives(), f"a worker ended: {self.complaints()}"

    def digests(self) -> set[str]:
        return {digest for epochs in self.epochs for digest in epochs.digests()}

    def end(self) -> set[str]:
        """Lets it end; the digests of all its epochs, which are one if nobody has disturbed it."""
        self._stop.touch()
        codes = [process.wait(END_TIMEOUT_S) for process in self.processes]
        assert codes == [0] * len(codes), f"the workers ended with {codes}: {self.complaints()}"
        return self.digests()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def complaints(self) -> str:
        return "\n".join(errors.read_text()[-2000:] for errors in self._errors)

    def _lives(self) -> bool:
        return all(process.poll() is None for process in self.processes)


class Target:
    """A cluster of processes with a running job.

    Attributes:
        cluster: the daemons.
        job: its workers.
        is_closed: whether the daemons speak to holders of its key alone.
        config: with which one may speak to the daemons.
        keys: with which one may speak to them by hand, for ever in turn: that of the cluster, that of a worker. Without
            keys there is none.
    """

    def __init__(self, cluster: LocalCluster, job: Job, observer: kvd.Observer, keys: Sequence[NodeKey] = ()) -> None:
        self.cluster = cluster
        self.job = job
        self.config = load(cluster.settings, environ={}).config
        self.is_closed = not self.config.insecure
        self.keys = cycle(map(keys_of, keys))
        self._observer = observer
        self.daemons = [self._daemon("scheduler", cluster.scheduler)]
        self.daemons += [self._daemon(f"server {rank}", server) for rank, server in enumerate(cluster.servers)]

    @staticmethod
    def _daemon(name: str, node: Any) -> Daemon:
        assert isinstance(node, ProcessNode)
        return Daemon(name, node.address, node.process)

    @property
    def addresses(self) -> list[str]:
        return [daemon.address for daemon in self.daemons]

    def ended(self) -> list[str]:
        """The daemons that do not run any more, with their exit codes."""
        return [f"{daemon.name}: {code}" for daemon in self.daemons if (code := daemon.process.poll()) is not None]

    def answers(self) -> bool:
        """Whether every daemon answers what `kvd status` asks."""
        report = self._observer.status()
        servers = report["servers"]
        return len(servers) == len(self.cluster.servers) and not any("error" in server for server in servers)

    def run(self) -> int:
        """The number of the job's run."""
        (job,) = self._observer.status()["jobs"]
        return int(job["run"], 16)

    def usage(self) -> list[Usage]:
        return [usage_of(daemon.pid) for daemon in self.daemons]

    def forget_peaks(self) -> None:
        """Resets the peaks that `peaks` reads."""
        for daemon in self.daemons:
            (Path("/proc") / str(daemon.pid) / "clear_refs").write_text("5")

    def peaks(self) -> list[int]:
        """The most memory that each daemon has used, in bytes."""
        peaks = []
        for daemon in self.daemons:
            status = (Path("/proc") / str(daemon.pid) / "status").read_text()
            (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
            peaks.append(int(line.split()[1]) << 10)
        return peaks

    def settles_at(self, before: list[Usage], timeout_s: float = SETTLE_TIMEOUT_S) -> list[tuple[str, Usage, Usage]]:
        """Waits for every daemon to use no more than before; those that do not, with both."""

        def high() -> list[tuple[str, Usage, Usage]]:
            pairs = zip(self.daemons, before, self.usage(), strict=True)
            return [(daemon.name, then, used) for daemon, then, used in pairs if not used.is_back_at(then)]

        with suppress(AssertionError):
            wait_until(lambda: not high(), "all is as before", timeout_s)
        return high()


@contextmanager
def under_attack(*, insecure: bool, workers: int = WORKERS, servers: int = SERVERS) -> Iterator[Target]:
    """A cluster with a key of its own, or with none, and a job that has trained for some epochs."""
    with TemporaryDirectory(prefix="kvd-attacks-") as folder, ExitStack() as stack:
        settings, keys = ({"insecure": True}, []) if insecure else _with_keys(Path(folder))
        cluster = stack.enter_context(
            LocalCluster(
                workers,
                servers,
                processes=True,
                path="tcp",
                server_prelude=NO_NUMBA,
                memory_limit_bytes=MEMORY_LIMIT_BYTES,
                **settings,
            )
        )
        job = Job(cluster)
        stack.callback(job.kill)
        job.trains_on(3)
        own = {name: value for name, value in cluster.settings.items() if name != "run"}
        observer = stack.enter_context(kvd.Observer(**own, scheduler=cluster.address))
        yield Target(cluster, job, observer, keys)


def _with_keys(folder: Path) -> tuple[dict[str, Any], list[NodeKey]]:
    """The settings of a cluster with a key for all and a list that allows the key of a worker besides; both keys."""
    cluster_key = new_cluster_key()
    worker_key = new_node_key("another-worker", cluster_key.keypair.public)
    keyfile, allowed = folder / "cluster.key", folder / "allowed.toml"
    write_key(keyfile, cluster_key)
    allowed.write_text(public_part(worker_key, ["worker"]))
    allowed.chmod(0o600)
    return {"keyfile": str(keyfile), "allowed_keys": str(allowed), "insecure": False}, [cluster_key, worker_key]
