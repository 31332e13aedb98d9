"""Saving and loading the optimizer states of a cluster: slices on the servers, whole keys in the file.

The coroutines run on the engine's loop, see `Engine.run`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from kvd.client.calls.optimizer_state_file import OptimizerStateFile
from kvd.client.calls.row_states import check_fits
from kvd.client.calls.tables import no_table_error
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.stored_tables import fetch_table, store_table_state
from kvd.core import requests
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer, from_wire, to_wire
from kvd.protocol.messages import FetchState, OptimizerQuery, SetOptimizer, StoreState
from kvd.protocol.specs import DTYPES, KeySpec, padded
from kvd.tables.wire import table_of_spec


async def fetch_states(engine: Engine, path: Path, dump_optimizer: bool) -> None:
    """Collects the state of every slice and writes the file. Call it between steps: all slices of a key must have had
    the same number of updates.

    Raises:
        NotAllowed: there is no optimizer, or the slices of a key differ.
        OSError: the file cannot be written.
    """
    content = OptimizerStateFile()
    optimizer = await fetch_optimizer(engine)
    if optimizer is None:
        raise NotAllowed("no optimizer is set, so there is no state to save: call set_optimizer first")
    if dump_optimizer:
        content.optimizer = optimizer
    entries = [entry for _, entry in await list_keys(engine)]
    tables = {entry.key for entry in entries if entry.table is not None}
    for key in sorted({entry.key for entry in entries}):
        if key in tables:
            spec = await engine.call(requests.DescribeKey(key))
            content.tables[key] = (await fetch_table(engine, key, spec)).without_rows()
        else:
            content.steps[key], content.arrays[key] = await fetch_state(engine, key)
    await asyncio.to_thread(content.write, path)  # a large file takes a while, and the loop has heartbeats to send


async def fetch_optimizer(engine: Engine) -> Optimizer | None:
    """The optimizer of the servers, with the hyperparameters that it has by now."""
    first = engine.machine.view.first_partition
    answers = await engine.call(requests.Control((OptimizerQuery(0),), partitions=(first,)))
    wire = answers[0][0].optimizer
    return None if wire is None else from_wire(wire)


async def fetch_state(engine: Engine, key: str) -> tuple[int, dict[str, np.ndarray[Any, Any]]]:
    """How many updates a key has had, and the whole arrays of its state by slot.

    Raises:
        NotAllowed: its slices differ.
    """
    spec: KeySpec = await engine.call(requests.DescribeKey(key))
    messages = tuple(FetchState(0, key, index) for index in range(spec.num_slices))
    states = await engine.call(requests.SliceControl(key, messages))
    steps = {state.step for state, _, _ in states}
    if len(steps) > 1:
        raise NotAllowed(f"the slices of {key!r} are at different steps {sorted(steps)}: save between two steps")
    return steps.pop(), _assemble(states)


def _assemble(states: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Whole arrays, by slot, from the answers of the slices in their order."""
    pieces: dict[str, list[np.ndarray[Any, Any]]] = {}
    for state, payload, nbytes in states:
        if not state.slots:
            continue
        sizes = [np.dtype(dtype).itemsize for _, dtype in state.slots]
        count = _elements(nbytes, sizes)
        offset = 0
        for (slot, dtype), size in zip(state.slots, sizes, strict=True):
            array = np.frombuffer(payload, dtype, count, offset) if count else np.empty(0, dtype)
            pieces.setdefault(slot, []).append(array.copy())
            offset += padded(count * size)
    return {slot: np.concatenate(arrays) for slot, arrays in pieces.items()}


def _elements(nbytes: int, sizes: list[int]) -> int:
    """How many elements each array of a payload has: all have the same number, and all but the last are padded."""
    count = nbytes // sum(sizes)
    while count and sum(padded(count * size) for size in sizes[:-1]) + count * sizes[-1] > nbytes:
        count -= 1
    return count


async def store_states(engine: Engine, path: Path) -> None:
    """Gives every slice its part of the file. An optimizer in the file is set first.

    Raises:
        NotAllowed: the file does not fit the keys.
        KeyNotFound: it has a key that nobody made.
        OSError: it cannot be read.
    """
    content = OptimizerStateFile.read(path)
    for key, stored in content.tables.items():
        spec: KeySpec = await engine.call(requests.DescribeKey(key))
        if spec.table is None:
            raise no_table_error(engine.written.of(key))
        check_fits(table_of_spec(spec), engine.written.of(key), stored)
    if content.optimizer is not None:
        await store_optimizer(engine, content.optimizer)
    for key, step in content.steps.items():
        await store_state(engine, key, step, content.arrays.get(key, {}))
    for key, stored in content.tables.items():
        await store_table_state(engine, key, stored)


async def try_optimizer(engine: Engine, optimizer: Optimizer, timeout_s: float | None = None) -> None:
    """Raises an error if one of the servers could not use the optimizer: then none is told to. Of most, each can."""
    if optimizer.needs_whole_keys or optimizer.compensates_delay or not optimizer.updates_rows:
        await engine.call(requests.Control((SetOptimizer(0, to_wire(optimizer), is_trial=True),)), timeout_s)


async def store_optimizer(engine: Engine, optimizer: Optimizer) -> None:
    """The servers use this optimizer, which came from a file."""
    await try_optimizer(engine, optimizer)
    await engine.call(requests.Control((SetOptimizer(0, to_wire(optimizer), loaded=True),)))


async def store_state(engine: Engine, key: str, step: int, slots: dict[str, np.ndarray[Any, Any]]) -> None:
    """Gives every slice of a key its part of the whole arrays.

    Args:
        step: how many updates the key has had.
        slots: the arrays by slot.

    Raises:
        NotAllowed: an array has not the size of the key.
    """
    spec: KeySpec = await engine.call(requests.DescribeKey(key))
    _check_lengths(key, spec, slots)
    described = tuple((name, array.dtype.name) for name, array in slots.items())
    messages = tuple(StoreState(0, key, index, step, described) for index in range(spec.num_slices))
    payloads = tuple(_cut(spec, index, slots) for index in range(spec.num_slices))
    await engine.call(requests.SliceControl(key, messages, payloads, tuple(map(len, payloads))))


def _check_lengths(key: str, spec: KeySpec, slots: dict[str, np.ndarray[Any, Any]]) -> None:
    count = spec.nbytes // DTYPES[spec.dtype].itemsize
    for name, array in slots.items():
        if array.size != count:
            raise NotAllowed(f"the file has {array.size} values of {name} for key {key!r}, which has {count}", key=key)


def _cut(spec: KeySpec, index: int, slots: dict[str, np.ndarray[Any, Any]]) -> bytes:
    itemsize = DTYPES[spec.dtype].itemsize
    offset, nbytes = spec.span(index)
    first, last = offset // itemsize, (offset + nbytes) // itemsize
    pieces = [array[first:last].tobytes() for array in slots.values()]
    return b"".join([piece + bytes(-len(piece) % 8) for piece in pieces[:-1]] + pieces[-1:])
