"""Worker 0 makes the keys of a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvd.client.calls.values import source_of
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import store_optimizer, store_state
from kvd.client.cluster.state_reader import some_at_once
from kvd.core import requests
from kvd.core.requests import Item
from kvd.errors import NotAllowed
from kvd.protocol.messages import MemberState
from kvd.protocol.specs import KeySpec
from kvd.snapshots.manifest import StoredKey
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import PART_BYTES


async def restore_keys(engine: Engine, snapshot: StoredSnapshot) -> Sequence[tuple[str, KeySpec]]:
    """Gives the servers the optimizer, the values and the states of a snapshot that was verified. Returns its keys."""
    optimizer = snapshot.manifest.origin.optimizer
    if optimizer is not None:
        await store_optimizer(engine, optimizer)
    slice_bytes = engine.machine.view.settings.slice_bytes
    keys = {key.key: key for key in snapshot.manifest.keys}
    specs = {name: KeySpec(key.dtype, key.shape, slice_bytes) for name, key in keys.items()}
    for names in _batches(specs):
        await _make_keys(engine, snapshot, [keys[name] for name in names], slice_bytes)
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


async def _make_keys(engine: Engine, snapshot: StoredSnapshot, keys: Sequence[StoredKey], slice_bytes: int) -> None:
    def read() -> tuple[list[Item], list[dict[str, np.ndarray[Any, Any]]]]:
        items, states = [], []
        for key in keys:  # value and state lie side by side
            data, spec = source_of(snapshot.value(key), slice_bytes, copy=False)
            items.append(Item(key.key, spec, data))
            states.append(snapshot.state(key))
        return items, states

    items, states = await asyncio.to_thread(read)
    await engine.call(requests.InitKeys(tuple(items)))
    await some_at_once(
        [
            partial(store_state, engine, key.key, key.updates, state)
            for key, state in zip(keys, states, strict=True)
            if key.updates or state
        ]
    )


def _batches(specs: Mapping[str, KeySpec]) -> Iterator[list[str]]:
    """The keys in groups, each about as large as a part, unless one key is larger."""
    names: list[str] = []
    nbytes = 0
    for name, spec in specs.items():
        if names and nbytes + spec.nbytes > PART_BYTES:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += spec.nbytes
    if names:
        yield names
