"""Worker 0 makes the keys of a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvd.client.calls.values import Array, source_of
from kvd.client.cluster.ahead import one_ahead
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import store_optimizer, store_state
from kvd.client.cluster.state_reader import some_at_once
from kvd.client.cluster.stored_tables import store_table
from kvd.core import requests
from kvd.core.requests import Item
from kvd.errors import NotAllowed
from kvd.protocol.messages import MemberState
from kvd.protocol.specs import DTYPES, KeySpec
from kvd.snapshots.manifest import StoredKey
from kvd.snapshots.part_memory import PartMemory
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import PART_BYTES
from kvd.tables.stored_rows import StoredRows


class _Batch(NamedTuple):
    """Some keys, as they were read."""

    keys: Sequence[StoredKey]
    items: tuple[Item, ...]
    states: Sequence[dict[str, Array]]
    tables: Sequence[tuple[str, StoredRows]]


async def restore_keys(engine: Engine, snapshot: StoredSnapshot) -> Sequence[tuple[str, KeySpec]]:
    """Gives the servers the optimizer, the values and the states of a snapshot that was verified. Returns its keys.

    While a batch of keys is on its way, the next one is read.
    """
    optimizer = snapshot.manifest.origin.optimizer
    if optimizer is not None:
        await store_optimizer(engine, optimizer)
    settings = engine.machine.view.settings
    keys = snapshot.manifest.keys
    specs = {key.key: _spec_of(key, settings.slice_bytes, settings.num_servers) for key in keys}
    memory = PartMemory(max((part.nbytes for part in snapshot.manifest.parts), default=0))
    planned = list(_batches(keys))
    last_use = {part: number for number, batch in enumerate(planned) for part in _parts_of(batch)}
    work = [partial(asyncio.to_thread, _read, snapshot, batch, specs, memory) for batch in planned]
    number = 0
    async with one_ahead(work) as batches:
        async for batch in batches:
            await _make_keys(engine, batch)
            memory.give_back([part for part in _parts_of(batch.keys) if last_use[part] == number])
            number += 1
    return list(specs.items())


async def has_values(engine: Engine) -> bool:
    """Whether the job is under way: something was pushed. Keys alone may be those of a predecessor that died while it
    restored them."""
    found = [entry for _, entry in await list_keys(engine)]
    return any(entry.version for entry in found) if engine.session.predecessor == MemberState.DEAD else bool(found)


async def check_is_new(engine: Engine, snapshot: StoredSnapshot) -> None:
    """Raises NotAllowed if the job has values already. A predecessor that died in this call may have left some."""
    found = [entry for _, entry in await list_keys(engine)]
    if engine.session.predecessor == MemberState.DEAD and not any(entry.version for entry in found):
        known = {key.key for key in snapshot.manifest.keys}
        found = [entry for entry in found if entry.key not in known]
    if found:
        text = (
            f"this job has keys already, such as {found[0].key!r}: restore comes in place of init and "
            f"set_optimizer, in a new job"
        )
        raise NotAllowed(text, key=found[0].key)


def _spec_of(key: StoredKey, slice_bytes: int, parts: int) -> KeySpec:
    table = None if key.table is None else key.table.spec._replace(parts=parts)
    return KeySpec(key.dtype, key.shape, slice_bytes, key.merge, table, key.gradients)


def _read(
    snapshot: StoredSnapshot, keys: Sequence[StoredKey], specs: Mapping[str, KeySpec], memory: PartMemory
) -> _Batch:
    items, states, tables = [], [], []
    for key in keys:  # value and state lie side by side
        spec = specs[key.key]
        if key.table is not None:
            items.append(Item(key.key, spec, np.empty(0, np.uint8)))
            tables.append((key.key, snapshot.rows(key, memory)))
            continue
        data, _ = source_of(snapshot.value(key, memory), spec.slice_bytes, copy=False)
        items.append(Item(key.key, spec, data))
        states.append(snapshot.state(key, memory))
    return _Batch(keys, tuple(items), states, tables)


async def _make_keys(engine: Engine, batch: _Batch) -> None:
    await engine.call(requests.InitKeys(batch.items))
    values = [key for key in batch.keys if key.table is None]
    await some_at_once(
        [
            partial(store_state, engine, key.key, key.updates, state)
            for key, state in zip(values, batch.states, strict=True)
            if key.updates or state
        ]
    )
    await some_at_once([partial(store_table, engine, name, stored) for name, stored in batch.tables])


def _batches(keys: Iterable[StoredKey]) -> Iterator[Sequence[StoredKey]]:
    """The keys in groups, each with its states about as large as a part, unless one key is larger."""
    batch: list[StoredKey] = []
    nbytes = 0
    for key in keys:
        own = _nbytes(key)
        if batch and nbytes + own > PART_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(key)
        nbytes += own
    if batch:
        yield batch


def _parts_of(keys: Iterable[StoredKey]) -> set[int]:
    """In which parts values and states of these keys lie."""
    return {piece.part for key in keys for pieces, _ in key.pieces() for piece in pieces}


def _nbytes(key: StoredKey) -> int:
    """Of its value and its state."""
    return sum(piece.elements * DTYPES[dtype].itemsize for pieces, dtype in key.pieces() for piece in pieces)
