"""Keys and values of a store in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.bound_arrays import BoundArrays, bind_result
from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.values import Array, Source, Target, fresh_target, paired, source_of, target_of
from kvd.client.local.keys import Entry, LocalKeys
from kvd.client.local.updates import LocalUpdates
from kvd.compute.optimizers import SliceState
from kvd.compute.tensors import contiguous_bytes
from kvd.errors import KeyExists
from kvd.protocol.specs import MAX_SLICE_BYTES


class LocalValues:
    """Safe to use from several threads. Nothing is ever under way, so no call needs a reservation."""

    def __init__(self, keys: LocalKeys, updates: LocalUpdates, steps: ProgramSteps) -> None:
        self._keys = keys
        self._updates = updates
        self._steps = steps

    def init(self, key: Any, value: Any) -> Handle:
        names, many = self._keys.names(key)
        sources = _sources(names, many, value, copy=True)

        def work() -> None:
            for name in names:
                if name in self._keys.entries:
                    text = f"key {name!r} is live already: init makes a key once; push changes its value"
                    raise KeyExists(text, key=name)
            for name, source in zip(names, sources, strict=True):
                self._keys.make(name, source)

        return self._keys.watched(names, work)

    def push(self, key: Any, value: Any, priority: int, samples: int, reservation: Reservation | None) -> Handle:
        names, many = self._keys.names(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        sources = _sources(names, many, value, copy=False)
        self._steps.take_pushes(names)
        return self._keys.watched(names, lambda: self._update(names, sources, samples))

    def _update(self, names: list[str], sources: list[Source], samples: int) -> None:
        """All keys are checked before the first changes."""
        entries = self._keys.matching(names, [source.spec for source in sources])
        for name, entry in zip(names, entries, strict=True):
            self._updates.check(name, entry)
        for name, entry, source in zip(names, entries, sources, strict=True):
            self._updates.apply(name, entry, source.data.view(entry.value.dtype), samples)

    def pull(self, key: Any, out: Any, priority: int) -> Handle:
        names, many = self._keys.names(key)
        checks.priority_and_samples(priority)
        targets = None if out is None or not names else _targets(names, many, out)
        return self._keys.answered(lambda: self._read(names, many, targets))

    def _read(self, names: list[str], many: bool, targets: list[Target] | None) -> Any:
        """Writes the values into the targets (None: new arrays), and gives the result of the call."""
        if targets is None:
            targets = [fresh_target(self._keys.entry(name).spec) for name in names]
        entries = self._keys.matching(names, [target.spec for target in targets])
        for entry, target in zip(entries, targets, strict=True):
            np.copyto(target.data, contiguous_bytes(entry.value))
        arrays = [target.finish() for target in targets]
        return arrays if many else arrays[0]

    def pushpull(
        self, key: Any, value: Any, out: Any, priority: int, samples: int, copy: bool, reservation: Reservation | None
    ) -> Handle:
        names, many = self._keys.names(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        targets = _targets(names, many, value if out is None else out)
        sources = _sources(names, many, value, copy=False)
        for name, source, target in zip(names, sources, targets, strict=True):
            source.spec.check_same(target.spec, name)
        self._steps.take_pushes(names)

        def work() -> Any:
            self._update(names, sources, samples)
            return self._read(names, many, targets)

        return self._keys.watched(names, work)

    # ── the value of this worker replaces the stored one ──

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, reservation: Reservation | None) -> Handle:
        names, many = self._keys.names(key)
        checks.priority_and_samples(priority)
        targets = _targets(names, many, value if out is None else out)
        sources = _sources(names, many, value, copy=True)
        self._steps.take_broadcasts(names)

        def work() -> Any:
            self._replace(names, sources)
            return self._read(names, many, targets)

        return self._keys.watched(names, work)

    def _replace(self, names: list[str], sources: list[Source]) -> None:
        for name, source in zip(names, sources, strict=True):
            entry = self._keys.entries.get(name) or self._keys.make(name, source)
            entry.spec.check_same(source.spec, name)
            entry.value = source.data.view(entry.value.dtype).copy()
            entry.state = SliceState()
            entry.version += 1

    def assign(self, values: Mapping[str, Array], absent: Sequence[str]) -> None:
        """See `Assignments.assign`. Nobody waits here, so nobody needs to hear who is absent."""
        for name, value in values.items():
            sources = [source_of(value, MAX_SLICE_BYTES, copy=True)]
            self._keys.watched([name], partial(self._replace, [name], sources))

    # ── arrays to keep ──

    def bind(self, key: Any) -> Handle:
        """Arrays to use as with a cluster, though there is no copy to save."""
        names, many = self._keys.names(key)

        def work() -> Any:
            entries = [self._keys.entry(name) for name in names]
            return bind_result([self._bound(name, entry) for name, entry in zip(names, entries, strict=True)], many)

        return self._keys.answered(work)

    def _bound(self, name: str, entry: Entry) -> BoundArrays:
        if entry.bound is None:
            entry.bound = BoundArrays.of(entry.spec, np.empty(entry.spec.nbytes, np.uint8))
            self._read([name], False, [target_of(entry.bound.weight, MAX_SLICE_BYTES)])
        return entry.bound


def _sources(names: list[str], many: bool, value: Any, *, copy: bool) -> list[Source]:
    return [source_of(entry, MAX_SLICE_BYTES, copy=copy) for entry in paired(names, many, value, "values")]


def _targets(names: list[str], many: bool, out: Any) -> list[Target]:
    return [target_of(entry, MAX_SLICE_BYTES) for entry in paired(names, many, out, "outs")]
