"""The errors of calls whose handles are never waited on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.errors import KvdError, RemoteError

MOST_KEPT = 4096  # failed calls
MOST_NOTES = 20  # with one error


class UnobservedErrors:
    """Raised by the next call on one of the keys, by `flush` or by `close`.

    At most `MOST_KEPT` failed calls are kept. Once there are that many, the next call on any key raises their errors,
    and failed calls that come before it are only counted.

    Attributes:
        failed: the calls that are kept, by number, in the order in which they failed. To look at.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self.failed: dict[int, tuple[frozenset[str], Handle, KvdError]] = {}
        self._by_key: dict[str, set[int]] = {}
        self._not_kept = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many failed calls are kept. Some of them may have been observed by now."""
        return len(self.failed)

    def clear(self) -> None:
        """Forgets them all."""
        with self._lock:
            self._take_all()

    def watch(
        self, names: Sequence[str], handle: Handle, refused: Callable[[Sequence[str]], None] | None = None
    ) -> Handle:
        """Keeps the error of the call on these keys, if it fails, until its handle or a later call raises it.

        Args:
            refused: called with the keys if the call did not leave this process, since something is wrong with it.
        """

        def failed(promise: Promise) -> None:
            error = promise.exception()
            if refused is not None and isinstance(error, RemoteError) and not error.node:
                refused(names)
            if isinstance(error, KvdError):
                handle.release_result()
                self._keep(frozenset(names), handle, error)

        handle.on_error(failed)
        return handle

    def raise_for(self, names: Sequence[str] | None) -> None:
        """Raises the first unobserved error of the calls on these keys (None: on any key), with the others as notes."""
        if not self.failed:
            return
        with self._lock:
            if names is None or len(self.failed) >= MOST_KEPT:
                taken, not_kept = self._take_all()
            else:
                taken, not_kept = self._take(names), 0
        errors = [error for _, handle, error in taken if not handle.claimed]
        if not errors:
            return
        first, *others = errors
        for other in others[:MOST_NOTES]:
            first.add_note(f"also: {other}")
        unnamed = len(others[MOST_NOTES:]) + not_kept
        if unnamed:
            first.add_note(f"also: {unnamed} more calls failed")
        raise first

    def _keep(self, keys: frozenset[str], handle: Handle, error: KvdError) -> None:
        with self._lock:
            if len(self.failed) >= MOST_KEPT:
                self._not_kept += 1
                return
            number = next(self._numbers)
            self.failed[number] = keys, handle, error
            for key in keys:
                self._by_key.setdefault(key, set()).add(number)

    def _take(self, names: Sequence[str]) -> list[tuple[frozenset[str], Handle, KvdError]]:
        """Removes the failed calls on these keys, without looking at others."""
        numbers = sorted({number for name in names for number in self._by_key.get(name, ())})
        taken = [self.failed.pop(number) for number in numbers]
        for number, (keys, _, _) in zip(numbers, taken, strict=True):
            for key in keys:
                mine = self._by_key[key]
                mine.discard(number)
                if not mine:
                    del self._by_key[key]
        return taken

    def _take_all(self) -> tuple[list[tuple[frozenset[str], Handle, KvdError]], int]:
        """Removes all. Returns those that were kept, and how many were not."""
        taken, not_kept = list(self.failed.values()), self._not_kept
        self.failed.clear()
        self._by_key, self._not_kept = {}, 0
        return taken, not_kept
