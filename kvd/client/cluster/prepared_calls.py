"""The calls that were prepared for the express ways, by their keys, with a limit of their memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

MOST_PREPARED = 1024
MOST_PREPARED_BYTES = 16 << 20

T = TypeVar("T")


class PreparedCalls(Generic[T]):
    """At most `MOST_PREPARED` calls with `MOST_PREPARED_BYTES` of frames: beyond that all are prepared again.

    Attributes:
        by_key: the calls, by the key as the program writes it.
    """

    def __init__(self) -> None:
        self.by_key: dict[str | int, T] = {}
        self._nbytes = 0  # at most: those of calls that were dropped count until all are

    def keep(self, key: str | int, call: T, nbytes: int) -> None:
        """Keeps a call, whose frames take so many bytes."""
        if len(self.by_key) >= MOST_PREPARED or self._nbytes + nbytes > MOST_PREPARED_BYTES:
            self.clear()
        self.by_key[key] = call
        self._nbytes += nbytes

    def forget(self, names: Collection[str]) -> None:
        """Drop the calls on the keys with these names."""
        for key in [key for key in self.by_key if str(key) in names]:
            self.drop(key)

    def drop(self, key: str | int) -> None:
        self.by_key.pop(key, None)

    def clear(self) -> None:
        self.by_key.clear()
        self._nbytes = 0
