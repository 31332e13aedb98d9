"""The bound arrays of a worker, by key: which pushes come from them, and whether they stayed as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvd.client.calls.bound_arrays import BoundArrays, GradientChecksums, adjacent_arrays
from kvd.client.calls.keys import WrittenKeys
from kvd.client.calls.promise import Promise
from kvd.client.calls.values import Array, Source, source_of
from kvd.core.requests import Transfer
from kvd.protocol.specs import KeySpec


class BoundKeys:
    """Arrays are added once per key and stay.

    Args:
        written: how the program writes the keys.

    Attributes:
        changes: how often keys were bound, or unbound.
    """

    def __init__(self, written: WrittenKeys) -> None:
        self.changes = 0
        self._written = written
        self._arrays: dict[str, BoundArrays] = {}
        self._without_weight: set[str] = set()  # theirs was never pulled
        self._lock = threading.Lock()

    def add(self, specs: Mapping[str, KeySpec], memory: Callable[[int], Array]) -> None:
        """Make arrays for the keys that have none."""
        with self._lock:
            fresh = {name: spec for name, spec in specs.items() if name not in self._arrays}
            self._arrays.update(adjacent_arrays(fresh, memory))
            self._without_weight.update(fresh)
            self.changes += 1

    def take_without_weight(self, names: Sequence[str]) -> dict[str, BoundArrays]:
        """Return the arrays of those of the keys whose weights are yet to be pulled, which the caller does next."""
        with self._lock:
            taken = {name: self._arrays[name] for name in names if name in self._without_weight}
            self._without_weight.difference_update(taken)
        return taken

    def forget(self, names: Sequence[str]) -> None:
        """The keys are deleted: their arrays are the program's."""
        with self._lock:
            for name in names:
                self._arrays.pop(name, None)
                self._without_weight.discard(name)
            self.changes += 1

    def arrays(self, names: Sequence[str]) -> list[BoundArrays]:
        return [self._arrays[name] for name in names]

    def has(self, name: str) -> bool:
        """Whether the key is bound."""
        return name in self._arrays

    def source(self, name: str, value: Any, slice_bytes: int) -> Source | None:
        """The bound gradient of the key, if the value is that array or any view of it; None if it is not."""
        arrays = self._arrays.get(name)
        if arrays is None or value is arrays.gradient:
            return None if arrays is None else arrays.source
        if isinstance(value, list | tuple):  # one array per device: their sum is another array
            return None
        source = source_of(value, slice_bytes, copy=False)
        return source if arrays.owns(source.data) else None

    def verified(self, submit: Callable[[Transfer], Promise]) -> Callable[[Transfer], Promise]:
        """`submit`, such that its promise also tells whether the bound gradients of the push stayed as they were.

        Gradients that the answer is written into are not checked.
        """

        def submit_verified(transfer: Transfer) -> Promise:
            pushed = {}
            for item in transfer.items:
                arrays = self._arrays.get(item.key)
                if arrays is not None and arrays.owns(item.source) and not arrays.overlaps(item.target):
                    pushed[item.key] = arrays
            checksums = GradientChecksums(pushed, self._written)
            return checksums.verified(submit(transfer))

        return submit_verified
