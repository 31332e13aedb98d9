"""The blocking façade."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvd.client.calls.backend import CAPABILITIES, Backend, Node
from kvd.client.calls.checks import node_number, seconds
from kvd.client.calls.exits import forget, remember
from kvd.client.calls.handle import Handle
from kvd.client.facades.open import open_backend
from kvd.client.local.values import LocalBackend, Updater
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer

Key = Any
Value = Any
_ErrorType = type[BaseException]  # in the class, `type` is the store's


class KVStore:
    """A store of keys and their values, shared by the workers of a job. `kvd.create` makes one.

    Keys are `str` or `int` (an int is the key of its decimal text). Values are anything that speaks DLPack or the
    buffer protocol: NumPy, CuPy, torch, JAX. Where a key is taken, a list of keys with a list of values is too; a value
    may be a list of arrays, one per device, which are summed first. Every call returns or raises before its deadline,
    which is the setting `request_timeout_s` unless it takes a `timeout` in seconds. Thread-safe: the order of the
    clocks is the order of the calls.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._barrier_before_exit = True
        self._open = True
        if not isinstance(backend, LocalBackend):
            remember(self)

    # ── who and what ──

    @property
    def type(self) -> str:
        """The type that it was created with."""
        return self._backend.type

    @property
    def rank(self) -> int:
        """The number of this worker, from 0 to `num_workers` - 1."""
        return self._backend.rank

    @property
    def local_rank(self) -> int:
        """The number of this worker on its host, as LOCAL_RANK says; 0 without it."""
        return self._backend.local_rank

    @property
    def num_workers(self) -> int:
        return self._backend.num_workers

    @property
    def num_servers(self) -> int:
        return self._backend.num_servers

    @property
    def merge(self) -> str:
        """How the contributions to a round become one: "sum", "mean" or "weighted"; "" where there are no rounds."""
        return self._backend.merge

    @property
    def restarted(self) -> bool:
        """Whether this worker took the place of one that died: its clocks go on where those of that one ended."""
        return self._backend.restarted

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do this: "optimizer", "compression", "row_sparse", "bind". Else ValueError."""
        if capability not in CAPABILITIES:
            raise ValueError(f"no capability is called {capability!r}; there are: {', '.join(CAPABILITIES)}")
        return CAPABILITIES[capability]

    # ── values ──

    def init(self, key: Key, value: Value) -> None:
        """Makes the key with rank 0's value; returns when every worker may pull it.

        Raises:
            KeyExists: it is live already (not after a restart of this worker with the same shape and dtype).
            ShapeMismatch, DtypeMismatch: rank 0 made it otherwise.
            NodeLost: rank 0 is gone.
        """
        self._wait(self._here().init(key, value))

    def init_async(self, key: Key, value: Value) -> Handle:
        """As `init`, without waiting."""
        return self._here().init(key, value)

    def push(self, key: Key, value: Value, priority: int = 0, *, samples: int = 1) -> Handle:
        """Sends a value to be merged; returns at once. Ordered before later calls on the same key.

        Args:
            priority: higher ones leave this worker first.
            samples: what the value stands for, where the merge is weighted.
        """
        return self._here().push(key, value, priority, samples)

    push_async = push

    def pull(self, key: Key, out: Value = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Fills `out`, an array or one per device, with the key's value and returns it; None: a new NumPy array.

        Raises:
            KeyNotFound: nobody has made the key.
            ShapeMismatch, DtypeMismatch: `out` does not fit the key.
            NodeLost: the value waits for a worker that died, or its server did.
        """
        return self._wait(self._here().pull(key, out, priority))

    def pull_async(self, key: Key, out: Value = None, priority: int = 0, ignore_sparse: bool = True) -> Handle:
        """As `pull`; `out` is filled when the handle is done."""
        return self._here().pull(key, out, priority)

    def bind(self, key: Key) -> Any:
        """Arrays to keep for a key: (gradient, weight), the same at each call; of a list of keys, two lists.

        `gradient`, zeros at first, lies in memory that a server of this host reads directly: a push of it copies
        nothing. It must not be written to from a push until that is done (its handle, or the `pushpull`). `weight` has
        the key's value, and changes only in a `pull` or `pushpull` of the key with it as `out`. With servers elsewhere
        it works as well, with copies. After a call that failed, leave the bound gradient as it is until `flush` has
        returned: what was under way may still be read from it.

        Raises:
            KeyNotFound: nobody has made the key.
        """
        return self._wait(self._here().bind(key))

    def pushpull(self, key: Key, value: Value, out: Value = None, priority: int = 0, *, samples: int = 1) -> Any:
        """Push and pull in one round trip. Without `out` the result is written into `value`."""
        return self._wait(self._here().pushpull(key, value, out, priority, samples, private=False))

    def pushpull_async(
        self, key: Key, value: Value, out: Value = None, priority: int = 0, *, samples: int = 1
    ) -> Handle:
        """As `pushpull`; `out` is filled when the handle is done."""
        return self._here().pushpull(key, value, out, priority, samples, private=True)

    def broadcast(self, key: Key, value: Value, out: Value = None, priority: int = 0) -> Any:
        """Gives rank 0's value to everyone's `out` (None: into `value`), making the key if it is new.

        All workers call it; the values of the others are not read.
        """
        return self._wait(self._here().broadcast(key, value, out, priority))

    def broadcast_async(self, key: Key, value: Value, out: Value = None, priority: int = 0) -> Handle:
        """As `broadcast`, without waiting."""
        return self._here().broadcast(key, value, out, priority)

    # ── rounds and barriers ──

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every push so far is acknowledged; raises what they raised."""
        self._wait(self._here().flush(timeout))

    def barrier(self, name: str = "", timeout: float | None = None) -> None:
        """Waits for all workers that have not left.

        Name the barriers of a program that may be restarted, each place its own: a worker that is started anew passes
        those that its predecessor passed.

        Raises:
            BarrierBroken: `missing` names the workers that died before they came.
        """
        self._wait(self._here().barrier(name, timeout))

    def join(self) -> None:
        """Leaves the rounds and stays: the others no longer wait for this worker's pushes (uneven data)."""
        self._wait(self._here().join())

    def rewind(self, clock: int) -> None:
        """Goes back to the step after push number `clock` of each key: the one in which the predecessor died."""
        self._wait(self._here().rewind(clock))

    def clock(self, key: Key) -> int:
        """How many pushes of this worker to the key count; after a restart, those of its predecessor."""
        return int(self._wait(self._here().clock(key)))

    def version(self, key: Key) -> int:
        """How many rounds (asynchronous: pushes) of the key are committed."""
        return int(self._wait(self._here().version(key)))

    # ── servers and optimizer ──

    def send_command_to_servers(self, head: int | str, body: bytes | str) -> list[bytes]:
        """Runs the controller registered for `head` on every server; their answers in rank order, or an error of one.

        Raises:
            NotAllowed: no such controller is installed, or it failed.
        """
        return list(self._wait(self._here().send_command(head, body)))

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """The servers update the values with it from now on. The one that is set already changes nothing; another
        starts with new state. None: a merged value replaces the stored one."""
        self._wait(self._here().set_optimizer(optimizer))

    def update_optimizer(self, **hyperparameters: Any) -> None:
        """Changes the learning rate and the like from this worker's next push on, on every server; the state stays."""
        self._wait(self._here().update_optimizer(hyperparameters))

    def set_updater(self, updater: Updater | None) -> None:
        """Types `local` and `device` only: `updater(key, received, stored)` changes `stored` in place."""
        backend = self._here()
        if not isinstance(backend, LocalBackend):
            raise NotAllowed("an updater is code, and no code crosses the wire: use set_optimizer with a cluster")
        backend.set_updater(updater)

    def save_optimizer_states(self, path: Any, dump_optimizer: bool = False) -> None:
        """Writes the optimizer's state of all keys to a safetensors file; with `dump_optimizer`, the optimizer too."""
        self._wait(self._here().save_optimizer_states(path, dump_optimizer))

    def load_optimizer_states(self, path: Any) -> None:
        """Reads such a file into the store."""
        self._wait(self._here().load_optimizer_states(path))

    # ── who is dead ──

    def num_dead_node(self, node_id: int, timeout: float = 60) -> int:
        """How many of these nodes are dead: declared so, or silent for more than `timeout` seconds (0: declared only).

        Args:
            node_id: as in ps-lite: group masks (scheduler 1, servers 2, workers 4, sums allowed), or one node: server r
                is 8 + 2r, worker r is 9 + 2r.
        """
        return count_dead(self._here(), node_id, timeout)

    def dead_nodes(self) -> Sequence[Node]:
        """The servers and workers that are declared dead."""
        return self._here().dead_nodes(0)

    # ── the end ──

    def set_barrier_before_exit(self, flag: bool) -> None:
        """Whether `close` waits for all workers. True unless it is changed."""
        self._barrier_before_exit = bool(flag)

    def close(self) -> None:
        """Leaves the cluster: flush, leave the rounds, wait for the others, go. The others wait for us no longer."""
        if self._open:
            backend = self._here()
            self._open = False
            forget(self)
            backend.end_close(backend.begin_close(self._barrier_before_exit))

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: _ErrorType | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # leave at once: no flush, no barrier
            self._abandon(failed=True)

    def _abandon(self, *, failed: bool) -> None:
        self._open = False
        forget(self)
        self._backend.abandon(failed=failed)

    def _here(self) -> Backend:
        if _in_event_loop():
            raise NotAllowed("a blocking call would stop the running event loop: use kvd.aio there, and await it")
        return self._backend

    @staticmethod
    def _wait(handle: Handle) -> Any:
        return handle.wait()


def count_dead(backend: Backend, node_id: int, timeout: float) -> int:
    """The count of `num_dead_node`, for both façades."""
    node_id, timeout_s = node_number(node_id), seconds(timeout)
    dead = backend.dead_nodes(timeout_s)
    if node_id >= 8:
        role, rank = ("worker" if node_id % 2 else "server"), (node_id - 8) // 2
        return sum(node.role == role and node.rank == rank for node in dead)
    count = int(bool(node_id & 1) and backend.is_scheduler_dead(timeout_s))
    groups = {"server": 2, "worker": 4}
    return count + sum(bool(node_id & groups[node.role]) for node in dead)


def leave_at_once(store: KVStore) -> None:
    """Goes in good order, with no flush and no barrier: for a visitor whose request was refused."""
    store._abandon(failed=False)


def create(type: str = "local", **settings: Any) -> KVStore:  # noqa: A002  the name is part of the public surface
    """Makes a store.

    Args:
        type: `local` and `device` live in this process; `dist_sync`, `dist_async`, `dist_device_sync` and
            `dist_device_async` join the cluster that KVD_* (or DMLC_*) variables, a file or `settings` name.
        settings: the fields of `kvd.Config`.

    Raises:
        ConfigError: a setting is wrong, or the cluster has another.
        ConnectError: no scheduler answers.
        RequestTimeout: servers are missing.
        NotAllowed: the cluster is full.
    """
    if _in_event_loop():
        raise NotAllowed("kvd.create blocks, and would stop the running event loop: use await kvd.aio.create(...)")
    return KVStore(open_backend(type, settings))


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None
