"""Saving and loading the optimizer's state of a cluster, as one safetensors file.

The file holds whole keys, so that it can be loaded into any number of servers: the array `KEY|master` or
`KEY|slot/NAME` for each key and slot, and as metadata the steps made per key and, if it was asked for, the optimizer.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kvd.core import requests
from kvd.errors import NotAllowed, ProtocolError
from kvd.node.wholefile import replace_file
from kvd.optimizer import Optimizer, from_wire, to_wire
from kvd.protocol.messages import BIGGEST, FetchState, ListKeys, OptimizerQuery, SetOptimizer, StoreState
from kvd.protocol.specs import DTYPES, KeySpec, padded

if TYPE_CHECKING:
    from kvd.client.cluster.engine import Engine

SEPARATOR = "|"
FORMAT = "kvd-optimizer-states-1"


class StateFile:
    """The content of such a file."""

    def __init__(self) -> None:
        self.arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {}  # key → slot → whole 1-D array
        self.steps: dict[str, int] = {}
        self.optimizer: Optimizer | None = None

    def write(self, path: Path) -> None:
        """Written aside and renamed: a crash leaves the old file or the new one, and several workers may write it."""
        tensors = {
            f"{key}{SEPARATOR}{slot}": array for key, slots in self.arrays.items() for slot, array in slots.items()
        }
        metadata = {"format": FORMAT, "steps": json.dumps(self.steps)}
        if self.optimizer is not None:
            metadata["optimizer"] = json.dumps(to_wire(self.optimizer))
        data = save(tensors, metadata)
        try:
            _check_place(path)
            replace_file(path, lambda file: file.write(data))
        except OSError as error:
            text = (
                f"{error.strerror}: the optimizer states cannot be saved there, choose a file in a folder that is there"
            )
            raise OSError(error.errno, text, str(path)) from None

    @classmethod
    def read(cls, path: Path) -> StateFile:
        """Raises NotAllowed if it is no such file, OSError if there is none; nothing in it is executed."""
        try:
            data = path.read_bytes()
        except OSError as error:
            text = f"{error.strerror}: no optimizer states can be loaded from there, name a file that was saved"
            raise OSError(error.errno, text, str(path)) from None
        content = cls()
        try:
            tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
            if metadata.get("format") != FORMAT:
                raise ValueError("it does not say that it holds optimizer states of kvd")
            content.steps = {str(key): int(step) for key, step in json.loads(metadata["steps"]).items()}
            if not all(0 <= step <= BIGGEST for step in content.steps.values()):
                raise ValueError("a key has made less than no steps")
            if "optimizer" in metadata:
                content.optimizer = from_wire(json.loads(metadata["optimizer"]))
            for name, array in tensors.items():
                if array.dtype.name not in ("float32", "float64") or len(name.rpartition(SEPARATOR)[2]) > 64:
                    raise ValueError(f"{name[:80]!r} is no array of a state")
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, ProtocolError) as error:
            raise NotAllowed(f"{path} holds no optimizer states: {error}") from None
        for name, array in tensors.items():
            key, _, slot = name.rpartition(SEPARATOR)
            content.arrays.setdefault(key, {})[slot] = array.reshape(-1)
        return content


def _check_place(place: Path) -> None:
    """OSError if there is a folder, a device or a pipe: none of them is a file that could be replaced."""
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")


async def all_keys(engine: Engine) -> list[str]:
    """The names of all keys of the cluster, in order."""
    names: set[str] = set()
    for server in engine.machine.view.servers():
        after, more = "", True
        while more:
            ((page, _, _),) = await engine.call(requests.Control((ListKeys(0, after),), (server.rank,)))
            names.update(entry.key for entry in page.entries)
            more = page.more
            after = page.entries[-1].key if page.entries else after
    return sorted(names)


async def fetch_states(engine: Engine, path: Path, dump_optimizer: bool) -> None:
    """Collects the state of every slice and writes the file. Call it between steps: all slices must have made as many
    updates. Raises NotAllowed if there is no optimizer, or if they have not."""
    content = StateFile()
    answers = await engine.call(requests.Control((OptimizerQuery(0),), (0,)))
    wire = answers[0][0].optimizer
    if wire is None:
        raise NotAllowed("no optimizer is set, so there is no state to save: call set_optimizer first")
    if dump_optimizer:
        content.optimizer = from_wire(wire)
    for key in await all_keys(engine):
        spec: KeySpec = await engine.call(requests.DescribeKey(key))
        messages = tuple(FetchState(0, key, index) for index in range(spec.num_slices))
        states = await engine.call(requests.SliceControl(key, messages))
        steps = {state.step for state, _, _ in states}
        if len(steps) > 1:
            raise NotAllowed(f"the slices of {key!r} are at different steps {sorted(steps)}: save between two steps")
        content.steps[key] = steps.pop()
        content.arrays[key] = _assemble(states)
    await asyncio.to_thread(content.write, path)  # a large one takes a while, and the loop has heartbeats to send


def _assemble(states: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Whole arrays from the answers of the slices in their order."""
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
    """How many elements each of the arrays of a payload has: all have the same number, all but the last are padded."""
    count = nbytes // sum(sizes)
    while count and sum(padded(count * size) for size in sizes[:-1]) + count * sizes[-1] > nbytes:
        count -= 1
    return count


async def store_states(engine: Engine, path: Path) -> None:
    """Gives every slice its part of the file. With an optimizer in the file, that one is set first."""
    content = StateFile.read(path)
    if content.optimizer is not None:
        await engine.call(requests.Control((SetOptimizer(0, to_wire(content.optimizer)),)))
    for key, step in content.steps.items():
        spec: KeySpec = await engine.call(requests.DescribeKey(key))
        slots = content.arrays.get(key, {})
        _check_lengths(key, spec, slots)
        messages, payloads, lengths = [], [], []
        for index in range(spec.num_slices):
            payload = _cut(spec, index, slots)
            described = tuple((name, array.dtype.name) for name, array in slots.items())
            messages.append(StoreState(0, key, index, step, described))
            payloads.append(payload)
            lengths.append(len(payload))
        await engine.call(requests.SliceControl(key, tuple(messages), tuple(payloads), tuple(lengths)))


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
