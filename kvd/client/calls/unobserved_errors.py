"""The errors of calls whose handles are never waited on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from kvd.client.calls.handle import Handle
from kvd.client.calls.promise import Promise
from kvd.core.places import START, PlaceKind, kind_of, step_of
from kvd.errors import KvdError, RemoteError

MOST_KEPT = 4096  # failed calls
MOST_NOTES = 20  # with one error
MOST_NAMED = 3  # keys of one call


class FailedCall(NamedTuple):
    """A call that failed.

    Attributes:
        keys: each once, in the order of the call.
        place: where the program was when it made the call, see `kvd.core.places`.
    """

    keys: tuple[str, ...]
    place: int
    handle: Handle
    error: KvdError

    def title(self) -> str:
        """Return which call it was."""
        names = ", ".join(map(repr, self.keys[:MOST_NAMED])) + (" …" if len(self.keys) > MOST_NAMED else "")
        step = "" if kind_of(self.place) is PlaceKind.OUTSIDE else f" in step {step_of(self.place)}"
        return f"{self.handle.what.removeprefix('the ')}{f' of {names}' if names else ''}{step}"


class UnobservedErrors:
    """Raised by the next call on one of the keys, by `flush` or by `close`. A note says which call failed.

    At most `MOST_KEPT` failed calls are kept. Once there are that many, the next call on any key raises their errors,
    and failed calls that come before it are only counted.

    Args:
        place: asks where the program is.

    Attributes:
        failed: the calls that are kept, by number, in the order in which they failed. To look at.
    """

    def __init__(self, place: Callable[[], int] = lambda: START) -> None:
        self._place = place
        self._numbers = count()
        self.failed: dict[int, FailedCall] = {}
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

        place = self._place()

        def failed(promise: Promise) -> None:
            error = promise.exception()
            if refused is not None and isinstance(error, RemoteError) and not error.node:
                refused(names)
            if isinstance(error, KvdError):
                handle.release_result()
                self._keep(FailedCall(tuple(dict.fromkeys(names)), place, handle, error))

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
        left = [call for call in taken if not call.handle.claimed]
        if not left:
            return
        first, *others = [call.error for call in left]
        first.add_note(f"the call that failed is an earlier {left[0].title()}, which nobody waited for")
        for other in others[:MOST_NOTES]:
            first.add_note(f"also: {other}")
        unnamed = len(others[MOST_NOTES:]) + not_kept
        if unnamed:
            first.add_note(f"also: {unnamed} more calls failed")
        raise first

    def _keep(self, call: FailedCall) -> None:
        with self._lock:
            if len(self.failed) >= MOST_KEPT:
                self._not_kept += 1
                return
            number = next(self._numbers)
            self.failed[number] = call
            for key in call.keys:
                self._by_key.setdefault(key, set()).add(number)

    def _take(self, names: Sequence[str]) -> list[FailedCall]:
        """Removes the failed calls on these keys, without looking at others."""
        numbers = sorted({number for name in names for number in self._by_key.get(name, ())})
        taken = [self.failed.pop(number) for number in numbers]
        for number, call in zip(numbers, taken, strict=True):
            for key in call.keys:
                mine = self._by_key[key]
                mine.discard(number)
                if not mine:
                    del self._by_key[key]
        return taken

    def _take_all(self) -> tuple[list[FailedCall], int]:
        """Removes all. Returns those that were kept, and how many were not."""
        taken, not_kept = list(self.failed.values()), self._not_kept
        self.failed.clear()
        self._by_key, self._not_kept = {}, 0
        return taken, not_kept
