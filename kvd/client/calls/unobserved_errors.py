"""The errors of calls whose handles are never waited on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.errors import KvdError


class UnobservedErrors:
    """Raised by the next call on one of the keys, by `flush` or by `close`."""

    def __init__(self) -> None:
        self._failed: list[tuple[frozenset[str], Handle, KvdError]] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._failed)

    def clear(self) -> None:
        """Forgets them all."""
        with self._lock:
            self._failed = []

    def watch(self, names: Sequence[str], handle: Handle) -> Handle:
        """Keeps the error of the call on these keys, if it fails, until its handle or a later call raises it."""
        keys = frozenset(names)

        def ended(promise: Promise) -> None:
            error = promise.exception()
            if isinstance(error, KvdError):
                with self._lock:
                    self._failed.append((keys, handle, error))

        handle.on_end(ended)
        return handle

    def raise_for(self, names: Sequence[str] | None) -> None:
        """Raises the first unobserved error of the calls on these keys (None: on any key), with the others as notes."""
        if not self._failed:
            return
        with self._lock:
            unseen = [(keys, handle, error) for keys, handle, error in self._failed if not handle.claimed]
            mine = [entry for entry in unseen if names is None or not entry[0].isdisjoint(names)]
            self._failed = [entry for entry in unseen if entry not in mine]
        if mine:
            first = mine[0][2]
            for _, _, other in mine[1:]:
                first.add_note(f"also: {other}")
            raise first
