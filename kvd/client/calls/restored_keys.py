"""Keys that a restore made, until the program makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvd.protocol.specs import KeySpec


class RestoredKeys:
    """The first `init` of such a key changes nothing: the program need not know of the restore."""

    def __init__(self) -> None:
        self._specs: dict[str, KeySpec] = {}
        self._lock = threading.Lock()

    def add(self, specs: Iterable[tuple[str, KeySpec]]) -> None:
        """These were restored."""
        with self._lock:
            self._specs.update(specs)

    def forget(self, names: Iterable[str]) -> None:
        """These are deleted, so the next keys of their names are others."""
        with self._lock:
            for name in names:
                self._specs.pop(name, None)

    def to_make(self, names: Sequence[str], specs: Sequence[KeySpec], merge: str) -> Sequence[int]:
        """The places of those that are still to be made. The others are no longer here.

        Args:
            merge: that of the cluster.

        Raises:
            ShapeMismatch, DtypeMismatch, MergeMismatch: one was restored with another spec. All of them stay here.
        """
        if not self._specs:
            return range(len(names))
        with self._lock:
            for name, spec in zip(names, specs, strict=True):
                if name in self._specs:
                    self._specs[name].check_same(spec, name)
                    self._specs[name].check_merge(spec, name, merge)
            return [place for place, name in enumerate(names) if self._specs.pop(name, None) is None]
