"""Keys and values of a store in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvd.client.calls import checks
from kvd.client.calls.bound_arrays import BoundArrays, BoundList, bind_result
from kvd.client.calls.casting import CastOuts, cast_values
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.merging import MergeChoice, own_merges, with_merge
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.tables import (
    check_descriptions,
    check_no_tables,
    check_whole,
    has_tables,
    parted,
    with_dense_rows,
)
from kvd.client.calls.tied_weights import TensorsOfKeys
from kvd.client.calls.values import (
    Array,
    Source,
    Target,
    Unlike,
    first_unlike,
    fresh_target,
    in_places,
    of_each,
    pulled_values,
    read_only,
    source_of,
    target_of,
    targets_by_name,
    values_by_name,
)
from kvd.client.local.keys import Entry, LocalKeys, table_spec
from kvd.client.local.tables import LocalTables
from kvd.client.local.updates import LocalUpdates
from kvd.compute.optimizers import SliceState
from kvd.compute.tensors import contiguous_bytes, named_dtype
from kvd.core.worker.step_loops import Replay
from kvd.errors import KeyExists, KvdError
from kvd.protocol.specs import MAX_SLICE_BYTES, KeySpec
from kvd.tables.first_rows import first_rows


class LocalValues:
    """Safe to use from several threads. Nothing is ever under way, so no call needs a reservation."""

    def __init__(self, keys: LocalKeys, updates: LocalUpdates, tables: LocalTables, steps: ProgramSteps) -> None:
        self._keys = keys
        self._updates = updates
        self._tables = tables
        self._steps = steps
        self._tensors = TensorsOfKeys()

    def init(self, key: Any, value: Any, merge: MergeChoice = None, *, gradients: bool = False) -> Handle:
        keys = self._keys.named(key)
        keys.check_distinct("init")
        names, values, tables = parted(keys, value, lambda _: False)
        merges = own_merges(keys, merge)
        whole = KeyList(names, True, None, keys.written)
        sources = _sources(whole, values, copy=True)
        self._tensors.note(whole, values)
        sources = with_merge(keys, names, sources, merges, gradients=gradients)
        check_descriptions(tables)
        begun = {name: first_rows(description, self._keys.written.of(name)) for name, description in tables}

        def work() -> None:
            default = self._updates.merge
            specs = [source.spec for source in sources]
            specs += [table_spec(description, merges.get(name, "")) for name, description in tables]
            wanted = [*names, *[name for name, _ in tables]]
            to_make = {wanted[place] for place in self._keys.restored.to_make(wanted, specs, default)}
            fresh = [(name, source) for name, source in zip(names, sources, strict=True) if name in to_make]
            new_tables = [(name, description) for name, description in tables if name in to_make]
            for name, spec in zip(wanted, specs, strict=True):
                if name in to_make and self._keys.is_live(name):
                    live = self._keys.spec(name)
                    live.check_same(spec, name)
                    live.check_merge(spec, name, default)
                    text = f"key {name!r} is live already: init makes a key once; push changes its value"
                    raise KeyExists(text, key=name)
            for name, source in fresh:
                self._keys.make(name, source)
            for name, description in new_tables:
                self._tables.make(name, description, merges.get(name, ""), begun[name])

        return self._keys.watched(keys.names, work, "init")

    def push(
        self, key: Any, value: Any, priority: int, samples: int, reservation: Reservation | None, cast: bool = False
    ) -> Handle:
        keys = self._keys.named(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        if self._keys.tables or has_tables(keys, value):
            return self._push_also_tables(keys, value, samples, cast)
        sources = _sources(keys, value, copy=False)
        if not self._steps.take_pushes(keys.names):
            return Handle.of(None)
        return self._watched_push(keys, lambda: self._update(keys.names, sources, samples, cast))

    def _watched_push(self, keys: KeyList, work: Callable[[], Any], what: str = "push") -> Handle:
        return self._keys.watched(keys.names, work, what, self._steps.untake_pushes)

    def _push_also_tables(self, keys: KeyList, value: Any, samples: int, cast: bool) -> Handle:
        value = self._with_dense_rows(keys, value, cast=cast)
        names, values, tables = parted(keys, value, self._keys.is_table)
        sources = _sources(KeyList(names, True, None, keys.written), values, copy=False)
        rows = self._keys.at_once(lambda: self._tables.rows(tables, cast=cast))
        if not self._steps.take_pushes(keys.names):
            return Handle.of(None)

        def work() -> None:
            self._tables.check([name for name, _ in tables])
            self._update(names, sources, samples, cast)
            self._tables.push([name for name, _ in tables], rows, samples)

        return self._watched_push(keys, work)

    def _with_dense_rows(self, keys: KeyList, value: Any, *, cast: bool, in_place: bool = False) -> Any:
        """See `with_dense_rows`."""

        def spec_of_key(name: str) -> KeySpec:
            return self._keys.entry(name).spec

        return self._keys.at_once(
            lambda: with_dense_rows(keys, value, self._keys.is_table, spec_of_key, cast=cast, in_place=in_place)
        )

    def _update(self, names: list[str], sources: list[Source], samples: int, cast: bool) -> None:
        """All keys are checked before the first changes."""
        entries = self._keys.matching(names, [source.spec for source in sources], cast=cast)
        for name, entry in zip(names, entries, strict=True):
            self._updates.check(name, entry)
        for name, entry, source in zip(names, entries, sources, strict=True):
            received = source.data.view(named_dtype(source.spec.dtype))
            self._updates.apply(name, entry, cast_values(received, entry.value.dtype), samples)

    def pull(self, key: Any, out: Any, priority: int, cast: bool = False, view: bool = False) -> Handle:
        keys = self._keys.named(key)
        checks.priority_and_samples(priority)
        if cast and out is not None:
            outs = CastOuts(keys, out)
            return self._keys.answered(lambda: self._read_cast(keys, outs))
        targets = None if out is None else _targets(keys, out)
        return self._keys.answered(lambda: self._read_only(keys) if view else self._read(keys, targets, out))

    def _read_only(self, keys: KeyList) -> Any:
        """Copies: what is stored is updated in place."""
        arrays = [read_only(self._keys.entry(name).value_as_array().copy()) for name in keys.names]
        return in_places(keys, arrays, shared=True)

    def _read(self, keys: KeyList, targets: list[Target] | None, out: Any) -> Any:
        """Writes the values into the targets of `out` (None: new arrays), and gives the result of the call."""
        if targets is None:
            targets = [fresh_target(self._keys.entry(name).spec) for name in keys.names]
        entries = self._keys.matching(keys.names, [target.spec for target in targets], what="out")
        for entry, target in zip(entries, targets, strict=True):
            np.copyto(target.data, contiguous_bytes(entry.value))
        return pulled_values(keys, targets, out)

    def _read_cast(self, keys: KeyList, outs: CastOuts) -> Any:
        return outs.fill([self._keys.entry(name).value_as_array() for name in keys.names])

    def pushpull_and_wait(
        self, key: Any, value: Any, out: Any, priority: int, samples: int, cast: bool = False, view: bool = False
    ) -> Any:
        return self.pushpull(key, value, out, priority, samples, False, None, cast, view).wait()

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any,
        priority: int,
        samples: int,
        copy: bool,
        reservation: Reservation | None,
        cast: bool = False,
        view: bool = False,
    ) -> Handle:
        keys = self._keys.named(key)
        priority, samples = checks.priority_and_samples(priority, samples)
        check_no_tables(keys, self._keys.is_table)
        in_place = "pushpull" if out is None else ""
        value = self._with_dense_rows(keys, value, cast=cast, in_place=bool(in_place) and not view)
        out = value if out is None else out
        outs = CastOuts(keys, out, in_place) if cast and not view else None
        targets = [] if cast or view else _targets(keys, out, in_place)
        sources = _sources(keys, value, copy=False)
        is_wanted = self._steps.take_pushes(keys.names)

        def work() -> Any:
            entries = self._keys.matching(keys.names, [source.spec for source in sources], cast=cast)
            if outs is not None:
                outs.check([entry.spec for entry in entries])
            elif not view:
                self._keys.matching(keys.names, [target.spec for target in targets], what="out")
            if is_wanted:
                self._update(keys.names, sources, samples, cast)
            if view:
                return self._read_only(keys)
            return self._read(keys, targets, out) if outs is None else self._read_cast(keys, outs)

        return self._watched_push(keys, work, "pushpull")

    def pushpull_bound(self, bound: BoundList, targets: Callable[[], Sequence[Array]], priority: int) -> Handle:
        keys, sources = bound.keys, bound.sources
        self._keys.check_open()
        self._keys.unobserved.raise_for(keys.names)
        is_wanted = self._steps.take_pushes(keys.names)

        def work() -> list[Array]:
            if is_wanted:
                self._update(keys.names, sources, 1, False)
            return [contiguous_bytes(self._keys.entry(name).value.copy()) for name in keys.names]

        def fill(values: Sequence[Array]) -> None:
            for value, target in zip(values, targets(), strict=True):
                np.copyto(target, value)

        return self._keys.watched(keys.names, work, "pushpull", self._steps.untake_pushes, fill)

    # ── the value of this worker replaces the stored one ──

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, reservation: Reservation | None) -> Handle:
        keys = self._keys.named(key)
        keys.check_distinct("broadcast")
        checks.priority_and_samples(priority)
        check_whole(keys, value, "broadcast", self._keys.is_table)
        in_place = "broadcast" if out is None else ""
        out = value if out is None else out
        targets, sources = _targets(keys, out, in_place), _sources(keys, value, copy=True)
        unlike = first_unlike(keys, sources, targets)
        if unlike is not None:
            return self._keys.watched(keys.names, partial(self._check_unlike, unlike), "broadcast")
        is_past = self._steps.take_broadcasts(keys.names) is Replay.PASSED

        def work() -> Any:
            if is_past:
                self._make_missing(keys.names, sources)
            else:
                self._replace(keys.names, sources)
            return self._read(keys, targets, out)

        return self._keys.watched(keys.names, work, "broadcast")

    def _check_unlike(self, unlike: Unlike) -> None:
        """Raises ShapeMismatch or DtypeMismatch about the value or the `out`, whichever does not fit the key."""
        entry = self._keys.entries.get(unlike.name)
        unlike.check(unlike.value if entry is None else entry.spec)

    def _make_missing(self, names: list[str], sources: list[Source]) -> None:
        for name, source in zip(names, sources, strict=True):
            if name not in self._keys.entries:
                self._keys.make(name, source)

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
            self._keys.watched([name], partial(self._replace, [name], sources), "broadcast")

    def keep_error(self, names: Sequence[str], error: KvdError) -> None:
        """See `Assignments.keep_error`."""

        def work() -> None:
            raise error

        self._keys.watched(list(names), work, "pushpull")

    def has_assigned(self, key: str) -> bool:
        """See `Assignments.has_assigned`. Nobody has a predecessor here."""
        return self._keys.entry(key).version > 0

    # ── the end of keys ──

    def delete(self, key: Any) -> Handle:
        """All keys are there, or none is deleted."""
        names = self._keys.named(key).names

        def work() -> None:
            for name in names:
                self._keys.version(name)
            for name in names:
                self._keys.drop(name)
            self._keys.restored.forget(names)
            self._tensors.forget(names)

        return self._keys.watched(names, work, "delete")

    # ── arrays to keep ──

    def bind(self, key: Any) -> Handle:
        """Arrays to use as with a cluster, though there is no copy to save."""
        keys = self._keys.named(key)

        def work() -> Any:
            entries = [self._keys.entry(name) for name in keys.names]
            return bind_result(
                keys, [self._bound(name, entry) for name, entry in zip(keys.names, entries, strict=True)]
            )

        return self._keys.answered(work)

    def gradients(self, keys: KeyList) -> Handle:
        def work() -> BoundList:
            return BoundList.of(keys, [self._bound(name, self._keys.entry(name)) for name in keys.names])

        return self._keys.answered(work)

    def is_bound(self, name: str) -> bool:
        entry = self._keys.entries.get(name)
        return self._keys.is_open and entry is not None and entry.bound is not None

    def _bound(self, name: str, entry: Entry) -> BoundArrays:
        if entry.bound is None:
            entry.bound = BoundArrays.of(entry.spec, np.empty(entry.spec.nbytes, np.uint8))
            weight = entry.bound.weight
            self._read(KeyList([name], False), [target_of(weight, MAX_SLICE_BYTES)], weight)
        return entry.bound


def _sources(keys: KeyList, value: Any, *, copy: bool) -> list[Source]:
    return of_each(keys, values_by_name(keys, value), lambda _, entry: source_of(entry, MAX_SLICE_BYTES, copy=copy))


def _targets(keys: KeyList, out: Any, in_place: str = "") -> list[Target]:
    return targets_by_name(keys, out, MAX_SLICE_BYTES, in_place=in_place)
