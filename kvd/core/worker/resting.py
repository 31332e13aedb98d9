"""Whether the program has said that it has no step to make: a server that comes later is told so, too."""

from __future__ import annotations

from kvd.core.worker.keys import KeyTable


class Resting:
    """Begins with Rest, and ends with the next push."""

    def __init__(self, keys: KeyTable) -> None:
        self._keys = keys
        self._since: int | None = None

    def begin(self) -> None:
        self._since = self._pushes()

    @property
    def is_on(self) -> bool:
        return self._since is not None and self._since == self._pushes()

    def _pushes(self) -> int:
        return sum(key.clock for key in self._keys.by_name.values())
