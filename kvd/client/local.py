"""The store without a cluster: types `local` and `device`, with the arithmetic of the servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvd.client.backend import Node, StoreType
from kvd.client.bound import Bound
from kvd.client.handle import Handle
from kvd.client.states import StateFile
from kvd.client.values import Array, fresh_target, key_list, key_name, missing, paired, source_of, target_of
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import contiguous_bytes, named_dtype
from kvd.errors import KeyExists, NotAllowed, StoreClosed
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.protocol.specs import DTYPES, MAX_SLICE_BYTES, KeySpec

Updater = Callable[[str, Array, Array], None]


@dataclass(slots=True)
class _Entry:
    """One key: its value as a flat array, and what the optimizer remembers of it."""

    spec: KeySpec
    value: Array
    state: SliceState = field(default_factory=SliceState)
    version: int = 0
    bound: Bound | None = None


class LocalBackend:
    """Everything happens in the call, so every handle is done. Safe to use from several threads."""

    def __init__(self, kind: StoreType, merge: str = "sum") -> None:
        self.type = kind.name
        self.rank = 0
        self.local_rank = 0
        self.num_workers = 1
        self.num_servers = 0
        self.merge = merge
        self.restarted = False
        self._entries: dict[str, _Entry] = {}
        self._optimizer: Optimizer | None = None
        self._updater: Updater | None = None
        self._lock = threading.RLock()
        self._closed = False

    # ── values ──

    def init(self, key: Any, value: Any) -> Handle:
        names, many = self._keys(key)
        with self._lock:
            made = {}
            for name, entry in zip(names, paired(names, many, value, "values"), strict=True):
                if name in self._entries:
                    text = f"key {name!r} is live already: init makes a key once; push changes its value"
                    raise KeyExists(text, key=name)
                data, spec = source_of(entry, MAX_SLICE_BYTES, private=True)
                made[name] = _Entry(spec, data.view(named_dtype(spec.dtype)))
            self._entries.update(made)
        return Handle.of(None)

    def push(self, key: Any, value: Any, priority: int, samples: int) -> Handle:
        names, many = self._keys(key)
        with self._lock:
            given = [
                (self._entry(name), source_of(entry, MAX_SLICE_BYTES, private=False))
                for name, entry in zip(names, paired(names, many, value, "values"), strict=True)
            ]
            for name, (entry, source) in zip(names, given, strict=True):
                entry.spec.check_same(source.spec, name)
                if self._optimizer is not None and not DTYPES[entry.spec.dtype].is_float:
                    text = f"key {name!r} is {entry.spec.dtype}: optimizers update float keys only"
                    raise NotAllowed(text, key=name)
                if self.merge == "weighted" and not DTYPES[entry.spec.dtype].is_float:
                    text = f"key {name!r} is {entry.spec.dtype}: a weighted merge takes float keys only"
                    raise NotAllowed(text, key=name)
            for name, (entry, source) in zip(names, given, strict=True):
                self._apply(name, entry, source.data.view(entry.value.dtype), samples)
        return Handle.of(None)

    def _apply(self, name: str, entry: _Entry, received: Array, samples: int) -> None:
        if self._updater is not None:
            shape = entry.spec.shape
            self._updater(name, received.reshape(shape), entry.value.reshape(shape))
        else:
            out = np.empty_like(entry.value)
            mode: Any = self.merge
            apply_update(self._optimizer, entry.state, entry.value, [received], out, mode, [samples])
            entry.value = out
        entry.version += 1

    def pull(self, key: Any, out: Any, priority: int) -> Handle:
        names, many = self._keys(key)
        outs = [None] * len(names) if out is None else paired(names, many, out, "outs")
        with self._lock:
            results = [self._give(name, goal) for name, goal in zip(names, outs, strict=True)]
        return Handle.of(results if many else results[0])

    def _give(self, name: str, out: Any) -> Any:
        entry = self._entry(name)
        target = fresh_target(entry.spec) if out is None else target_of(out, MAX_SLICE_BYTES)
        entry.spec.check_same(target.spec, name)
        np.copyto(target.data, contiguous_bytes(entry.value))
        return target.finish()

    def bind(self, key: Any) -> Handle:
        """There is no copy to save: arrays to use as with a cluster."""
        names, many = self._keys(key)
        with self._lock:
            for name in names:
                entry = self._entry(name)
                if entry.bound is None:
                    entry.bound = Bound.of(entry.spec, np.empty(entry.spec.nbytes, np.uint8))
                    self._give(name, entry.bound.weight)
            bound = [arrays for name in names if (arrays := self._entry(name).bound) is not None]
        if not many:
            return Handle.of((bound[0].gradient, bound[0].weight))
        return Handle.of(([entry.gradient for entry in bound], [entry.weight for entry in bound]))

    def pushpull(self, key: Any, value: Any, out: Any, priority: int, samples: int, *, private: bool) -> Handle:
        outs = value if out is None else out
        names, many = self._keys(key)
        with self._lock:
            for name, goal in zip(names, paired(names, many, outs, "outs"), strict=True):
                self._entry(name).spec.check_same(target_of(goal, MAX_SLICE_BYTES).spec, name)
            self.push(key, value, priority, samples)
            return self.pull(key, outs, priority)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int) -> Handle:
        names, many = self._keys(key)
        with self._lock:
            for name, entry in zip(names, paired(names, many, value, "values"), strict=True):
                data, spec = source_of(entry, MAX_SLICE_BYTES, private=True)
                known = self._entries.get(name)
                if known is None:
                    known = self._entries[name] = _Entry(spec, data.view(named_dtype(spec.dtype)).copy())
                known.spec.check_same(spec, name)
                known.value = data.view(known.value.dtype).copy()
                known.state = SliceState()
                known.version += 1
            return self.pull(key, value if out is None else out, priority)

    # ── rounds: there is nobody to wait for ──

    def flush(self, timeout: float | None) -> Handle:
        return self._nothing_to_do()

    def barrier(self, name: str, timeout: float | None) -> Handle:
        return self._nothing_to_do()

    def join(self) -> Handle:
        return self._nothing_to_do()

    def rewind(self, clock: int) -> Handle:
        raise NotAllowed(f"a {self.type} store has no steps to go back to: load a checkpoint instead")

    def clock(self, key: Any) -> Handle:
        return self.version(key)

    def version(self, key: Any) -> Handle:
        self._check_open()
        with self._lock:
            return Handle.of(self._entry(key_name(key)).version)

    def send_command(self, head: int | str, body: bytes | str) -> Handle:
        self._check_open()
        key_name(head)
        return Handle.of([])  # there are no servers, so nobody answers

    # ── optimizer ──

    def set_optimizer(self, optimizer: Optimizer | None) -> Handle:
        self._check_open()
        with self._lock:
            if optimizer != self._optimizer:
                self._optimizer = optimizer
                for entry in self._entries.values():
                    entry.state = SliceState()
        return Handle.of(None)

    def set_updater(self, updater: Updater | None) -> None:
        """`updater(key, received, stored)` changes `stored` in place; None: as without one."""
        self._check_open()
        self._updater = updater

    def update_optimizer(self, changes: dict[str, Any]) -> Handle:
        self._check_open()
        with self._lock:
            if self._optimizer is None:
                raise NotAllowed("no optimizer is set whose hyperparameters could change: call set_optimizer first")
            self._optimizer = with_hyperparameters(self._optimizer, changes)
        return Handle.of(None)

    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle:
        self._check_open()
        content = StateFile()
        with self._lock:
            if self._optimizer is None:
                raise NotAllowed("no optimizer is set, so there is no state to save: call set_optimizer first")
            content.optimizer = self._optimizer if dump_optimizer else None
            for name, entry in self._entries.items():
                arrays = entry.state.export()
                content.steps[name] = int(arrays.pop("step"))
                content.arrays[name] = arrays
        content.write(Path(path))
        return Handle.of(None)

    def load_optimizer_states(self, path: Any) -> Handle:
        self._check_open()
        content = StateFile.read(Path(path))
        with self._lock:
            states = {}
            for name, step in content.steps.items():
                arrays = {**content.arrays.get(name, {}), "step": np.asarray(step, np.int64)}
                entry = self._entry(name)
                states[name] = SliceState.load(arrays)
                if any(array.size != entry.value.size for slot, array in arrays.items() if slot != "step"):
                    raise NotAllowed(f"the state of {name!r} in {path} has another size than the key", key=name)
            if content.optimizer is not None:
                self._optimizer = content.optimizer
            for name, state in states.items():
                self._entries[name].state = state
        return Handle.of(None)

    # ── the rest ──

    def dead_nodes(self, timeout_s: float) -> Sequence[Node]:
        self._check_open()
        return []

    def is_scheduler_dead(self, timeout_s: float) -> bool:
        return False

    def begin_close(self, barrier: bool) -> Handle:
        return Handle.of(None)

    def end_close(self, leaving: Handle) -> None:
        self._closed = True

    def abandon(self, *, failed: bool) -> None:
        self._closed = True

    def _keys(self, key: Any) -> tuple[list[str], bool]:
        self._check_open()
        return key_list(key)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise missing(name)
        return entry

    def _nothing_to_do(self) -> Handle:
        self._check_open()
        return Handle.of(None)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this store is closed: create another")
