"""A real cluster on loopback for tests: daemons in threads (quick) or in processes (can be killed)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import kvd
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.joining import Arrival
from kvd.client.cluster.nodes import ClusterNodes
from kvd.client.cluster.observer import Observer
from kvd.client.facades.blocking import backend_of
from kvd.client.facades.open import open_backend
from kvd.config import Role, child_environment, load
from kvd.errors import BarrierBroken, NodeLost
from kvd.node.daemon.daemon import Daemon
from kvd.node.daemon.roles import new_daemon

logger = logging.getLogger(__name__)

T = TypeVar("T")
PathName = Literal["shm", "ipc", "tcp"]
PATHS: tuple[PathName, ...] = get_args(PathName)
START_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
DAEMON = """
import sys
from pathlib import Path
from kvd.config import load
from kvd.node.daemon.roles import run_daemon
sys.exit(run_daemon(load({}), sys.argv[1], ready_file=Path(sys.argv[2])))
"""


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """Polls until `holds` returns something true, and returns it; AssertionError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = holds()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)


def engine_of(store: kvd.KVStore) -> Engine:
    """The engine of a store of a cluster, for tests that look into its machine or break it."""
    nodes = backend_of(store).nodes
    assert isinstance(nodes, ClusterNodes), "a store without a cluster has no engine"
    return nodes.engine


class ThreadNode:
    """A daemon in a thread of this process."""

    def __init__(self, role: Role, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._role = role
        self._daemon: Daemon | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"test-{role}", daemon=True)
        self._thread.start()
        wait_until(lambda: self._daemon is not None and self._daemon.address, f"{role} listens")

    @property
    def address(self) -> str:
        assert self._daemon is not None
        return self._daemon.address

    @property
    def metrics_url(self) -> str:
        assert self._daemon is not None
        return self._daemon.metrics_url

    def _run(self) -> None:
        loaded = load(self._settings, environ={})
        asyncio.run(self._main(loaded))

    async def _main(self, loaded: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._daemon = new_daemon(loaded, self._role)
        await self._daemon.run(signals=False)

    def stop(self) -> None:
        if self._loop is not None and self._daemon is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._daemon.end, 0, "the test is over")
            self._thread.join(10)


class ProcessNode:
    """A daemon in a process of its own.

    Args:
        prelude: code that runs there first, for instance to remove something that the daemon may need.
    """

    def __init__(
        self, role: Role, settings: dict[str, Any], folder: Path, log: Path | None = None, prelude: str = ""
    ) -> None:
        ready = folder / f"{role}-{time.monotonic_ns()}"
        changes = load({**settings, "parent_pid": os.getpid()}, environ={}).environment()
        environment = child_environment({**changes, "PYTHONPATH": str(ROOT)})
        self.log = log or folder / f"{ready.name}.log"
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", prelude + DAEMON, role, str(ready)], env=environment, stderr=stream
            )
        wait_until(lambda: ready.exists() or self.process.poll() is not None, f"{role} is ready")
        if not ready.exists():
            raise AssertionError(f"{role} exited with {self.process.poll()}: {self.log.read_text()}")
        self.address = ready.read_text().strip()

    @property
    def metrics_url(self) -> str:
        """As its log says."""
        [url] = re.findall(r"metrics at (http://[\w.:\[\]/]+)", self.log.read_text())
        return str(url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


class LocalCluster:
    """A scheduler and servers; `run` runs a function per worker, each with a store of its own, in threads.

    Args:
        num_workers, num_servers: the size.
        processes: daemons in processes of their own.
        path: how messages travel: "shm" in shared memory, "ipc" by ZeroMQ over Unix sockets, "tcp" by ZeroMQ over
            loopback; None: `default_path`.
        server_prelude, scheduler_prelude: code that such daemons run first in processes of their own.
        settings: further settings for all nodes, such as ``replicas``.

    Attributes:
        default_path: the path of clusters that name none.
        default_insecure: whether clusters that do not say so use no keys.
    """

    default_path: ClassVar[PathName] = "shm"
    default_insecure: ClassVar[bool] = False

    def __init__(
        self,
        num_workers: int = 1,
        num_servers: int = 1,
        *,
        processes: bool = False,
        path: PathName | None = None,
        server_prelude: str = "",
        scheduler_prelude: str = "",
        **settings: Any,
    ) -> None:
        self.num_workers = num_workers
        self.num_servers = num_servers
        self.path = path or self.default_path
        self.settings = {
            "heartbeat_interval_s": 0.2,
            "request_timeout_s": 60.0,
            "join_timeout_s": 60.0,
            "run": secrets.token_hex(8),  # all stores are workers of one start of a program
            **settings,
        }
        load({**self.settings, "num_servers": num_servers}, environ={})  # raises here what a daemon would log
        if self.path != "shm":
            self.settings.setdefault("shared_memory", "off")
        if self.default_insecure and "allowed_keys" not in settings:
            self.settings.setdefault("insecure", True)
        self._processes = processes
        self._preludes = {"server": server_prelude, "scheduler": scheduler_prelude}
        self._numbers = count(1)
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-test-")
        self.folder = Path(self._folder.name)
        self.stores: list[kvd.KVStore] = []
        self.scheduler = self._start_scheduler()
        self.address = self.scheduler.address
        self.servers = [self._start_server(rank) for rank in range(num_servers)]

    def _start_scheduler(self, **settings: Any) -> ThreadNode | ProcessNode:
        return self.start("scheduler", num_workers=self.num_workers, num_servers=self.num_servers, **settings)

    def _start_server(self, rank: int) -> ThreadNode | ProcessNode:
        return self.start("server", node_id=f"server-{rank}", preferred_rank=rank)

    def kill_server(self, rank: int) -> None:
        """SIGKILL for a server; only where it runs in a process of its own."""
        node = self.servers[rank]
        assert isinstance(node, ProcessNode), "a thread cannot be killed: use processes=True"
        node.kill()

    def restart_server(self, rank: int) -> None:
        """Starts a server again under its name, once its predecessor has ended."""
        self.servers[rank] = self._start_server(rank)

    def kill_scheduler(self) -> None:
        """SIGKILL for the scheduler; only where it runs in a process of its own."""
        assert isinstance(self.scheduler, ProcessNode), "a thread cannot be killed: use processes=True"
        self.scheduler.kill()

    def restart_scheduler(self) -> None:
        """Starts the scheduler again at its address, with what it knew if the cluster has a ``state_dir``."""
        self.scheduler = self._start_scheduler(bind=self.address)

    def start(self, role: Role, **settings: Any) -> ThreadNode | ProcessNode:
        """Starts one more daemon."""
        given = {**self.settings, "bind": self._free_address(role), **settings}
        if role == "server":
            given["scheduler"] = self.address
        if not self._processes:
            return ThreadNode(role, given)
        return ProcessNode(role, given, self.folder, prelude=self._preludes[role])

    def _free_address(self, role: Role) -> str:
        """An address where no node listens yet."""
        if self.path == "ipc":
            return f"ipc://{self.folder}/{role}-{next(self._numbers)}.sock"
        return "tcp://127.0.0.1:0"

    def store(self, type: str = "dist_sync", **settings: Any) -> kvd.KVStore:  # noqa: A002
        """A worker's store, once all workers have come. It is closed with the cluster and does not wait for the others
        then."""
        return self._kept(kvd.create(type, **{**self.settings, "scheduler": self.address, **settings}))

    def lone_store(self, type: str = "dist_sync", **settings: Any) -> kvd.KVStore:  # noqa: A002
        """As `store`, for a worker whose fellows come later, or never."""
        given = {**self.settings, "scheduler": self.address, **settings}
        arrival = Arrival(wait_for_workers=False, tell=logger.warning)
        return self._kept(kvd.KVStore(open_backend(type, given, arrival)))

    def observer(self, **settings: Any) -> Observer:
        """Looks into the cluster; a context manager."""
        return Observer(load({**self.settings, "scheduler": self.address, **settings}, environ={}).config)

    def _kept(self, store: kvd.KVStore) -> kvd.KVStore:
        self.stores.append(store)
        return store

    def open_stores(
        self,
        type: str = "dist_sync",  # noqa: A002
        each: Sequence[dict[str, Any]] = (),
        **settings: Any,
    ) -> list[kvd.KVStore]:
        """One store per worker in rank order, opened at the same time, as `store` gives them.

        Args:
            each: settings of each worker.
            settings: settings of all of them.
        """
        own = [{"preferred_rank": rank, **more} for rank, more in enumerate(each or [{}] * self.num_workers)]
        with ThreadPoolExecutor(len(own)) as pool:
            opening = [pool.submit(self.store, type, **{**settings, **more}) for more in own]
        return [future.result() for future in opening]

    def run(self, program: Callable[[kvd.KVStore], T], type: str = "dist_sync", **settings: Any) -> list[T]:  # noqa: A002
        """Runs the program once per worker, at the same time; returns the results in rank order.

        A worker that fails makes the others fail. Of several errors it raises one that is not a mere
        consequence (NodeLost, BarrierBroken), if there is one.
        """

        def worker(number: int) -> tuple[int, T]:
            with kvd.create(
                type, **{**self.settings, "scheduler": self.address, "node_id": f"worker-{number}", **settings}
            ) as store:
                return store.rank, program(store)

        with ThreadPoolExecutor(self.num_workers) as pool:
            futures = [pool.submit(worker, number) for number in range(self.num_workers)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, NodeLost | BarrierBroken)), errors[0])
        return [result for _, result in sorted([future.result() for future in futures], key=lambda entry: entry[0])]

    def script(
        self, code: str, number: int, *arguments: str, stdin: int | None = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a program in a process of its own as worker `number`; its output can be read from the pipe.

        Args:
            stdin: as that of `subprocess.Popen`.
        """
        given = {**self.settings, "scheduler": self.address, "node_id": f"worker-{number}", **settings}
        environment = child_environment({**load(given, environ={}).environment(), "PYTHONPATH": str(ROOT)})
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        for store in self.stores:
            store.set_barrier_before_exit(False)
            store.__exit__(RuntimeError, None, None)
        nodes: Sequence[ThreadNode | ProcessNode] = [*self.servers, self.scheduler]
        for node in nodes:
            node.stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
