"""The async façade: every method of `kvd.KVStore` as a coroutine of the same name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kvd.client.calls.backend import CAPABILITIES, Backend, Node
from kvd.client.calls.exits import forget, remember
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Ticket
from kvd.client.facades.blocking import count_dead
from kvd.client.facades.open import open_backend
from kvd.client.local.values import LocalBackend, Updater
from kvd.errors import NotAllowed, RequestTimeout
from kvd.optimizer import Optimizer

_ErrorType = type[BaseException]  # in the class, `type` is the store's


class KVStore:
    """The store for programs that run an event loop. See `kvd.KVStore` for what the methods do and raise.

    The `_async` forms return a Handle at once, which can be awaited, or waited for in another thread.

    Nothing blocks the loop. Where more pushes are under way than `memory_limit_bytes` allows, those that are awaited
    wait for room, first come, first served, and the loop goes on; until they return, leave their values as they are.
    The `_async` forms cannot wait: they raise RequestTimeout with the outcome "not_sent" at once, and may be called
    again when a handle is done.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._barrier_before_exit = True
        self._open = True
        if not isinstance(backend, LocalBackend):
            remember(self)

    @property
    def type(self) -> str:
        return self._backend.type

    @property
    def rank(self) -> int:
        return self._backend.rank

    @property
    def local_rank(self) -> int:
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
        if capability not in CAPABILITIES:
            raise ValueError(f"no capability is called {capability!r}; there are: {', '.join(CAPABILITIES)}")
        return CAPABILITIES[capability]

    async def init(self, key: Any, value: Any) -> None:
        await self._backend.init(key, value)

    def init_async(self, key: Any, value: Any) -> Handle:
        return self._backend.init(key, value)

    async def push(self, key: Any, value: Any, priority: int = 0, *, samples: int = 1) -> Handle:
        return await _when_there_is_room(lambda ticket: self._backend.push(key, value, priority, samples, ticket))

    def push_async(self, key: Any, value: Any, priority: int = 0, *, samples: int = 1) -> Handle:
        return self._backend.push(key, value, priority, samples, Ticket())

    async def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        return await self._backend.pull(key, out, priority)

    def pull_async(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> Handle:
        return self._backend.pull(key, out, priority)

    async def bind(self, key: Any) -> Any:
        return await self._backend.bind(key)

    async def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, samples: int = 1) -> Any:
        handle = await _when_there_is_room(
            lambda ticket: self._backend.pushpull(key, value, out, priority, samples, private=True, ticket=ticket)
        )
        return await handle

    def pushpull_async(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, samples: int = 1) -> Handle:
        return self._backend.pushpull(key, value, out, priority, samples, private=True, ticket=Ticket())

    async def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        return await (
            await _when_there_is_room(lambda ticket: self._backend.broadcast(key, value, out, priority, ticket))
        )

    def broadcast_async(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Handle:
        return self._backend.broadcast(key, value, out, priority, Ticket())

    async def flush(self, timeout: float | None = None) -> None:
        await self._backend.flush(timeout)

    async def barrier(self, name: str = "", timeout: float | None = None) -> None:
        await self._backend.barrier(name, timeout)

    async def join(self) -> None:
        await self._backend.join()

    async def rewind(self, clock: int) -> None:
        await self._backend.rewind(clock)

    async def clock(self, key: Any) -> int:
        return int(await self._backend.clock(key))

    async def version(self, key: Any) -> int:
        return int(await self._backend.version(key))

    async def send_command_to_servers(self, head: int | str, body: bytes | str) -> list[bytes]:
        return list(await self._backend.send_command(head, body))

    async def set_optimizer(self, optimizer: Optimizer | None) -> None:
        await self._backend.set_optimizer(optimizer)

    async def update_optimizer(self, **hyperparameters: Any) -> None:
        await self._backend.update_optimizer(hyperparameters)

    async def set_updater(self, updater: Updater | None) -> None:
        if not isinstance(self._backend, LocalBackend):
            raise NotAllowed("an updater is code, and no code crosses the wire: use set_optimizer with a cluster")
        self._backend.set_updater(updater)

    async def save_optimizer_states(self, path: Any, dump_optimizer: bool = False) -> None:
        await self._backend.save_optimizer_states(path, dump_optimizer)

    async def load_optimizer_states(self, path: Any) -> None:
        await self._backend.load_optimizer_states(path)

    async def num_dead_node(self, node_id: int, timeout: float = 60) -> int:
        return count_dead(self._backend, node_id, timeout)

    async def dead_nodes(self) -> Sequence[Node]:
        return self._backend.dead_nodes(0)

    async def set_barrier_before_exit(self, flag: bool) -> None:
        self._barrier_before_exit = bool(flag)

    async def close(self) -> None:
        if self._open:
            self._open = False
            forget(self)
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._backend.end_close(self._backend.begin_close(self._barrier_before_exit))

    async def __aenter__(self) -> KVStore:
        return self

    async def __aexit__(
        self, kind: _ErrorType | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            self._open = False
            forget(self)
            await asyncio.to_thread(self._backend.abandon, failed=True)


async def _when_there_is_room(begin: Callable[[Ticket], Handle]) -> Handle:
    """Begins a push; if there is no room for it, when there is."""
    ticket = Ticket()
    try:
        return begin(ticket)
    except RequestTimeout:
        if ticket.room is None:  # the error of an earlier call, which this one is told
            raise
    async with ticket.room.turn(ticket):
        return begin(ticket)


async def create(type: str = "local", **settings: Any) -> KVStore:  # noqa: A002  the name is part of the surface
    """As `kvd.create`, for an event loop."""
    return KVStore(await asyncio.wrap_future(_open_in_thread(type, settings)))


def _open_in_thread(type_name: str, settings: dict[str, Any]) -> Future[Backend]:
    """In a thread of its own, which nobody has to wait for: a creation that is cancelled leaves the cluster again."""
    future: Future[Backend] = Future()

    def work() -> None:
        try:
            backend = open_backend(type_name, settings)
        except BaseException as error:  # noqa: BLE001  it belongs to the one who awaits the store
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(backend)
            else:
                backend.end_close(backend.begin_close(False))

    threading.Thread(target=work, name="kvd-create", daemon=True).start()
    return future
