"""The async façade: every method of `kvd.KVStore` as a coroutine of the same name."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from kvd.client.calls.backend import Backend, Node, Updater
from kvd.client.calls.checks import wants_copy
from kvd.client.calls.exits import ends_well
from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import uninterrupted, with_uninterrupted_methods
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.merging import MergeChoice
from kvd.client.calls.program_steps import AsyncSteps, StepIteration
from kvd.client.calls.staleness import Staleness
from kvd.client.cluster.joining import Arrival
from kvd.client.facades import blocking
from kvd.client.facades.dead_nodes import count_dead
from kvd.client.facades.life import StoreLife
from kvd.client.facades.open import check_backend, open_backend
from kvd.client.facades.properties import StoreProperties
from kvd.client.registry import find_factory
from kvd.errors import ConfigError, RequestTimeout
from kvd.optimizer import Optimizer

_ErrorType = type[BaseException]  # in the class, `type` is the store's


@with_uninterrupted_methods
class KVStore(StoreProperties):
    """The store for programs that run an event loop. See `kvd.KVStore` for what the methods do and raise.

    The ``_async`` forms return a Handle at once, which can be awaited, or waited for in another thread.

    No call blocks the loop. When the pushes under way take all of `memory_limit_bytes`, awaited pushes wait for room,
    first come, first served, and the loop goes on; do not change their values until they return. The ``_async`` forms
    cannot wait: they raise RequestTimeout with the outcome "not_sent" at once, and can be called again when a handle is
    done.
    """

    def __init__(self, backend: Backend) -> None:
        check_backend(backend, "await kvd.aio.create")
        super().__init__(backend.facts)
        self._backend = backend
        self._life = StoreLife(backend)

    async def init(self, key: Any, value: Any, *, merge: MergeChoice = None) -> None:
        await self._backend.values.init(key, value, merge)

    def init_async(self, key: Any, value: Any, *, merge: MergeChoice = None) -> Handle:
        return self._backend.values.init(key, value, merge)

    async def push(self, key: Any, value: Any, priority: int = 0, *, samples: int = 1, cast: bool = False) -> Handle:
        await self._find_out(key, value)
        return await _when_there_is_room(
            lambda reservation: self._backend.values.push(key, value, priority, samples, reservation, cast)
        )

    def push_async(self, key: Any, value: Any, priority: int = 0, *, samples: int = 1, cast: bool = False) -> Handle:
        return self._backend.values.push(key, value, priority, samples, Reservation(), cast)

    async def pull(
        self,
        key: Any,
        out: Any = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        cast: bool = False,
        copy: bool = True,
    ) -> Any:
        return await self._backend.values.pull(key, out, priority, cast, not wants_copy(copy, out))

    def pull_async(
        self,
        key: Any,
        out: Any = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        cast: bool = False,
        copy: bool = True,
    ) -> Handle:
        return self._backend.values.pull(key, out, priority, cast, not wants_copy(copy, out))

    async def row_sparse_pull(self, key: Any, row_ids: Any, out: Any = None, priority: int = 0) -> Any:
        await self._find_out(key)
        return await self._backend.tables.row_sparse_pull(key, row_ids, out, priority)

    def row_sparse_pull_async(self, key: Any, row_ids: Any, out: Any = None, priority: int = 0) -> Handle:
        return self._backend.tables.row_sparse_pull(key, row_ids, out, priority)

    async def export_table(self, key: Any, path: str | os.PathLike[str], since: int | None = None) -> int:
        await self._find_out(key)
        return int(await self._backend.tables.export_table(key, path, since))

    async def _find_out(self, key: Any, value: Any = None, *, takes_pairs: bool = True) -> None:
        """Waits until it is known which keys are tables, if a call needs to know."""
        unknown = self._backend.tables.unknown(key, value, takes_pairs=takes_pairs)
        if unknown is not None:
            await unknown

    async def bind(self, key: Any) -> Any:
        return await self._backend.binding.bind(key)

    async def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any = None,
        priority: int = 0,
        *,
        samples: int = 1,
        cast: bool = False,
        copy: bool = True,
    ) -> Any:
        view = not wants_copy(copy, out)
        await self._find_out(key, value, takes_pairs=False)
        handle = await _when_there_is_room(
            lambda reservation: self._backend.values.pushpull(
                key, value, out, priority, samples, True, reservation, cast, view
            )
        )
        return await handle

    def pushpull_async(
        self,
        key: Any,
        value: Any,
        out: Any = None,
        priority: int = 0,
        *,
        samples: int = 1,
        cast: bool = False,
        copy: bool = True,
    ) -> Handle:
        view = not wants_copy(copy, out)
        return self._backend.values.pushpull(key, value, out, priority, samples, True, Reservation(), cast, view)

    async def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        return await (
            await _when_there_is_room(
                lambda reservation: self._backend.assignments.broadcast(key, value, out, priority, reservation)
            )
        )

    def broadcast_async(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Handle:
        return self._backend.assignments.broadcast(key, value, out, priority, Reservation())

    async def delete(self, key: Any) -> None:
        await self._backend.deletion.delete(key)

    def delete_async(self, key: Any) -> Handle:
        return self._backend.deletion.delete(key)

    async def flush(self, timeout: float | None = None) -> None:
        await self._backend.rounds.flush(timeout)

    async def barrier(self, name: str = "", timeout: float | None = None) -> None:
        await self._backend.rounds.barrier(name, timeout)

    async def join(self, until: str | int | None = None) -> None:
        await self._backend.rounds.join(until)

    def steps(
        self, total: int, keys: Sequence[Any] | None = None, shared: bool = False, restored: bool = False
    ) -> AsyncSteps:
        """``async for step in kv.steps(total)``."""
        return AsyncSteps(StepIteration(self._backend.steps, total, keys, shared, restored))

    async def resume(self) -> None:
        await self._backend.rounds.resume()

    async def rewind(self, clock: int) -> None:
        await self._backend.rounds.rewind(clock)

    async def clock(self, key: Any) -> int:
        return int(await self._backend.rounds.clock(key))

    async def version(self, key: Any) -> int:
        return int(await self._backend.rounds.version(key))

    async def send_command_to_servers(self, head: int | str, body: bytes | str) -> list[bytes]:
        return list(await self._backend.nodes.send_command(head, body))

    async def set_optimizer(self, optimizer: Optimizer | None) -> None:
        await self._backend.updates.set_optimizer(optimizer)

    async def set_gradient_compression(self, params: Mapping[str, Any]) -> None:
        await self._backend.updates.set_gradient_compression(params)

    async def update_optimizer(self, **hyperparameters: Any) -> None:
        await self._backend.updates.update_optimizer(hyperparameters)

    async def set_updater(self, updater: Updater | None) -> None:
        self._backend.updates.set_updater(updater)

    async def save_optimizer_states(self, path: Any, dump_optimizer: bool = False) -> None:
        await self._backend.updates.save_optimizer_states(path, dump_optimizer)

    async def load_optimizer_states(self, path: Any) -> None:
        await self._backend.updates.load_optimizer_states(path)

    async def snapshot(self, path: Any) -> None:
        await self._backend.snapshots.snapshot(path)

    async def snapshot_async(self, path: Any) -> Handle:
        """As `snapshot`, but the loop goes on while it is written: awaited, it gives a handle as soon as the state has
        been read. See `kvd.KVStore.snapshot_async`."""
        written: Handle = await self._backend.snapshots.snapshot_async(path)
        return written

    async def restore(self, path: Any, missing_ok: bool = False, or_older: bool = False) -> int | None:
        steps: int | None = await self._backend.snapshots.restore(path, missing_ok, or_older)
        return steps

    async def push_staleness(self) -> dict[str, Staleness]:
        return dict(await self._backend.nodes.push_staleness())

    async def num_dead_node(self, node_id: int, timeout: float = 60) -> int:
        return count_dead(self._backend.nodes, node_id, timeout)

    async def dead_nodes(self) -> Sequence[Node]:
        return self._backend.nodes.dead_nodes(0)

    async def set_barrier_before_exit(self, flag: bool) -> None:
        self._life.barrier_before_exit = bool(flag)

    async def close(self) -> None:
        if self._life.claim_end():
            await asyncio.to_thread(self._life.close)

    async def __aenter__(self) -> KVStore:
        return self

    async def __aexit__(
        self, kind: _ErrorType | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if ends_well(kind, error):
            await self.close()
        else:
            self._life.claim_end()
            await asyncio.to_thread(self._life.abandon, failed=True)


for _name, _method in vars(KVStore).items():  # one text says what a method does, for both façades
    if not _name.startswith("_") and not _method.__doc__:
        _method.__doc__ = getattr(blocking.KVStore, _name).__doc__


async def _when_there_is_room(begin: Callable[[Reservation], Handle]) -> Handle:
    """Begins a push now, or when the memory budget has room for it."""
    reservation = Reservation()
    try:
        return begin(reservation)
    except RequestTimeout:
        if reservation.budget is None:  # the error of an earlier call, which this one raises
            raise
    async with reservation.budget.granted(reservation):
        return begin(reservation)


@uninterrupted
async def create(type: str = "local", **settings: Any) -> KVStore:  # noqa: A002  the name is part of the surface
    """As `kvd.create`, for an event loop. It makes the types of kvd only.

    Raises:
        ConfigError: the name is that of a registered store, whose members may block; or as `kvd.create`.
    """
    if find_factory(type) is not None:
        text = f"the store {type!r} was registered by another library and may block: make it with kvd.create"
        raise ConfigError(text, setting="type")
    opening = _open_in_thread(type, settings)
    try:
        return KVStore(await asyncio.wrap_future(opening))
    except BaseException:
        if not opening.cancel() and opening.exception() is None:  # a signal handler has raised at the end
            await asyncio.to_thread(opening.result().closing.withdraw)
        raise


def _open_in_thread(type_name: str, settings: dict[str, Any]) -> Future[Backend]:
    """Opens the store in a thread of its own, so that a creation can be cancelled: it then gives its place back."""
    future: Future[Backend] = Future()
    arrival = Arrival()
    future.add_done_callback(lambda ended: arrival.give_up() if ended.cancelled() else None)

    def work() -> None:
        try:
            backend = open_backend(type_name, settings, arrival)
        except BaseException as error:  # noqa: BLE001  the future passes it on
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(backend)
            else:
                backend.closing.withdraw()

    threading.Thread(target=work, name="kvd-create", daemon=True).start()
    return future
