"""The store without a cluster: types `local` and `device`, with the arithmetic of the servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.backend import Node, StoreType
from kvd.client.calls.bound_arrays import Bound
from kvd.client.calls.exits import tell_at_exit
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Ticket
from kvd.client.calls.promise import Promise
from kvd.client.calls.unobserved_errors import Unheard
from kvd.client.calls.values import (
    Array,
    Source,
    Target,
    fresh_target,
    key_list,
    key_name,
    missing,
    paired,
    source_of,
    target_of,
)
from kvd.client.cluster.optimizer_states import StateFile
from kvd.compute.optimizers import SliceState, apply_update
from kvd.compute.tensors import contiguous_bytes, named_dtype
from kvd.core.push_policy import push_error
from kvd.errors import KeyExists, KvdError, NotAllowed
from kvd.optimizer import Optimizer, with_hyperparameters
from kvd.protocol.messages import ADD
from kvd.protocol.specs import MAX_SLICE_BYTES, KeySpec

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
    """Everything happens in the call, so every handle is done. Safe to use from several threads.

    What would be found out by a server in a cluster is told by the handle, as there.
    """

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
        self._unheard = Unheard()
        self._closed = False
        self._pid = os.getpid()

    # ── values ──

    def init(self, key: Any, value: Any) -> Handle:
        names, many = self._keys(key)
        sources = self._sources(names, many, value, private=True)

        def work() -> None:
            for name in names:
                if name in self._entries:
                    text = f"key {name!r} is live already: init makes a key once; push changes its value"
                    raise KeyExists(text, key=name)
            for name, source in zip(names, sources, strict=True):
                self._make(name, source)

        return self._watched(names, work)

    def _make(self, name: str, source: Source) -> _Entry:
        entry = _Entry(source.spec, source.data.view(named_dtype(source.spec.dtype)))
        self._entries[name] = entry
        return entry

    def push(self, key: Any, value: Any, priority: int, samples: int, ticket: Ticket | None = None) -> Handle:
        names, many = self._keys(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        sources = self._sources(names, many, value, private=False)
        return self._watched(names, lambda: self._merge(names, sources, samples))

    def _merge(self, names: list[str], sources: list[Source], samples: int) -> None:
        entries = self._fitting(names, [source.spec for source in sources])
        for name, entry in zip(names, entries, strict=True):
            has_optimizer = self._optimizer is not None
            text = push_error(name, entry.spec.dtype, ADD, has_optimizer=has_optimizer, merge=self.merge)
            if text is not None:
                raise NotAllowed(text, key=name)
        for name, entry, source in zip(names, entries, sources, strict=True):
            self._apply(name, entry, source.data.view(entry.value.dtype), samples)

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
        checks.priority_and_samples(priority)
        targets = None if out is None or not names else self._targets(names, many, out)
        return self._answered(lambda: self._give(names, many, targets))

    def _give(self, names: list[str], many: bool, targets: list[Target] | None) -> Any:
        """Writes the values into the targets (None: new arrays), and gives what the caller gets."""
        if targets is None:
            targets = [fresh_target(self._entry(name).spec) for name in names]
        entries = self._fitting(names, [target.spec for target in targets])
        for entry, target in zip(entries, targets, strict=True):
            np.copyto(target.data, contiguous_bytes(entry.value))
        arrays = [target.finish() for target in targets]
        return arrays if many else arrays[0]

    def bind(self, key: Any) -> Handle:
        """There is no copy to save: arrays to use as with a cluster."""
        names, many = self._keys(key)

        def work() -> Any:
            entries = [self._entry(name) for name in names]
            bound = [self._bound(name, entry) for name, entry in zip(names, entries, strict=True)]
            if not many:
                return bound[0].gradient, bound[0].weight
            return [arrays.gradient for arrays in bound], [arrays.weight for arrays in bound]

        return self._answered(work)

    def _bound(self, name: str, entry: _Entry) -> Bound:
        if entry.bound is None:
            entry.bound = Bound.of(entry.spec, np.empty(entry.spec.nbytes, np.uint8))
            self._give([name], False, [target_of(entry.bound.weight, MAX_SLICE_BYTES)])
        return entry.bound

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any,
        priority: int,
        samples: int,
        *,
        private: bool,
        ticket: Ticket | None = None,
    ) -> Handle:
        names, many = self._keys(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        targets = self._targets(names, many, value if out is None else out)
        sources = self._sources(names, many, value, private=False)
        for name, source, target in zip(names, sources, targets, strict=True):
            source.spec.check_same(target.spec, name)

        def work() -> Any:
            self._merge(names, sources, samples)
            return self._give(names, many, targets)

        return self._watched(names, work)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, ticket: Ticket | None = None) -> Handle:
        names, many = self._keys(key)
        checks.priority_and_samples(priority)
        targets = self._targets(names, many, value if out is None else out)
        sources = self._sources(names, many, value, private=True)

        def work() -> Any:
            for name, source in zip(names, sources, strict=True):
                entry = self._entries.get(name) or self._make(name, source)
                entry.spec.check_same(source.spec, name)
                entry.value = source.data.view(entry.value.dtype).copy()
                entry.state = SliceState()
                entry.version += 1
            return self._give(names, many, targets)

        return self._watched(names, work)

    # ── rounds: there is nobody to wait for ──

    def flush(self, timeout: float | None) -> Handle:
        self._check_open()
        self._check_timeout(timeout)
        return self._answered(lambda: self._unheard.tell(None))

    def barrier(self, name: str, timeout: float | None) -> Handle:
        self._check_open()
        checks.barrier_name("user", name)
        self._check_timeout(timeout)
        return Handle.of(None)

    def join(self) -> Handle:
        self._check_open()
        return Handle.of(None)

    def rewind(self, clock: int) -> Handle:
        self._check_open()
        checks.clock_number(clock)
        raise NotAllowed(f"a {self.type} store has no steps to go back to: load a checkpoint instead")

    def clock(self, key: Any) -> Handle:
        return self.version(key)

    def version(self, key: Any) -> Handle:
        self._check_open()
        name = key_name(key)
        return self._answered(lambda: self._entry(name).version)

    def send_command(self, head: int | str, body: bytes | str) -> Handle:
        self._check_open()
        checks.command_head(head)
        checks.command_body(body)
        return Handle.of([])  # there are no servers: nobody answers, and nobody can say that there is no such command

    # ── optimizer ──

    def set_optimizer(self, optimizer: Optimizer | None) -> Handle:
        self._check_open()
        optimizer = checks.known_optimizer(optimizer)
        with self._lock:
            if optimizer != self._optimizer:
                self._optimizer = optimizer
                for entry in self._entries.values():
                    entry.state = SliceState()
        return Handle.of(None)

    def set_updater(self, updater: Updater | None) -> None:
        """`updater(key, received, stored)` changes `stored` in place; None: as without one."""
        self._check_open()
        if updater is not None and not callable(updater):
            text = f"an updater is a function of a key, what was received and what is stored, not {updater!r:.40}"
            raise NotAllowed(text)
        self._updater = updater

    def update_optimizer(self, changes: dict[str, Any]) -> Handle:
        self._check_open()
        plain = checks.hyperparameters(changes)

        def work() -> None:
            if self._optimizer is None:
                raise NotAllowed("no optimizer is set whose hyperparameters could change: call set_optimizer first")
            self._optimizer = with_hyperparameters(self._optimizer, plain)

        return self._answered(work)

    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle:
        self._check_open()
        place = checks.file_path(path)
        content = StateFile()

        def work() -> None:
            if self._optimizer is None:
                raise NotAllowed("no optimizer is set, so there is no state to save: call set_optimizer first")
            content.optimizer = self._optimizer if dump_optimizer else None
            for name, entry in self._entries.items():
                arrays = entry.state.export()
                content.steps[name] = int(arrays.pop("step"))
                content.arrays[name] = arrays
            content.write(place)

        return self._answered(work)

    def load_optimizer_states(self, path: Any) -> Handle:
        self._check_open()
        place = checks.file_path(path)
        return self._answered(lambda: self._take_over(StateFile.read(place), place))

    def _take_over(self, content: StateFile, path: object) -> None:
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

    # ── the rest ──

    def dead_nodes(self, timeout_s: float) -> Sequence[Node]:
        self._check_open()
        return []

    def is_scheduler_dead(self, timeout_s: float) -> bool:
        return False

    def begin_close(self, barrier: bool) -> Handle:
        self._check_open()
        return Handle.of(None)

    def end_close(self, leaving: Handle) -> None:
        self._closed = True
        self._unheard.tell(None)

    def abandon(self, *, failed: bool) -> None:
        self._closed = True
        self._unheard.clear()

    # ── helpers ──

    def _keys(self, key: Any) -> tuple[list[str], bool]:
        self._check_open()
        names, many = key_list(key)
        self._unheard.tell(names)
        return names, many

    def _sources(self, names: list[str], many: bool, value: Any, *, private: bool) -> list[Source]:
        return [source_of(entry, MAX_SLICE_BYTES, private=private) for entry in paired(names, many, value, "values")]

    def _targets(self, names: list[str], many: bool, out: Any) -> list[Target]:
        return [target_of(entry, MAX_SLICE_BYTES) for entry in paired(names, many, out, "outs")]

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise missing(name)
        return entry

    def _fitting(self, names: list[str], specs: list[KeySpec]) -> list[_Entry]:
        """The keys with these names, which values of these specs fit."""
        entries = [self._entry(name) for name in names]
        for name, entry, spec in zip(names, entries, specs, strict=True):
            entry.spec.check_same(spec, name)
        return entries

    def _answered(self, work: Callable[[], Any]) -> Handle:
        """The handle of what is done at once: what it refuses is told to who asks the handle."""
        promise = Promise()
        try:
            with self._lock:
                promise.set_result(work())
        except KvdError as error:  # anything else comes out of an updater or of the file system, and is told at once
            promise.set_exception(error)
        return Handle(promise)

    def _watched(self, names: list[str], work: Callable[[], Any]) -> Handle:
        handle = self._unheard.watch(names, self._answered(work))
        if self._unheard:
            tell_at_exit(self._unheard)
        return handle

    @staticmethod
    def _check_timeout(timeout: float | None) -> None:
        if timeout is not None:
            checks.seconds(timeout)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise checks.belongs_to_parent()
        if self._closed:
            raise checks.is_closed()
