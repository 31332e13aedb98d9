"""Which changes of which runs are on stable storage. One record has all runs: one Persist may save several changes."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.core.machine import Persist

MAX_UNDER_WAY = 256  # records that may be told of one by one: the shell saves only the newest of those that wait


class Saving:
    """The changes that are being saved.

    Attributes:
        problem: why records cannot be saved; "" if they can.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._changed: dict[int, int] = {}  # by run: the newest token of its machine, not yet in a record
        self._under_way: dict[int, dict[int, int]] = {}  # by the token of a Persist: the changes that it saves
        self._last_token = 0

    @property
    def is_due(self) -> bool:
        return bool(self._changed)

    def changed(self, run: int, token: int) -> None:
        """The machine of this run waits until its record is saved; `token` is its own."""
        self._changed[run] = token

    def begin(self, record: Mapping[str, object]) -> Persist:
        """Saves this record, which has all changes so far."""
        self._last_token += 1
        self._under_way[self._last_token], self._changed = self._changed, {}
        if len(self._under_way) > MAX_UNDER_WAY:
            first, second, *_ = self._under_way
            self._under_way[second] = self._under_way.pop(first) | self._under_way[second]
        return Persist(self._last_token, record)

    def saved(self, token: int) -> dict[int, int]:
        """The record with this token is saved, and so is what came before. By run: the newest token of its machine."""
        self.problem = ""
        newest: dict[int, int] = {}
        for earlier in [earlier for earlier in self._under_way if earlier <= token]:
            newest.update(self._under_way.pop(earlier))
        return newest

    def failed(self, why: str) -> None:
        """Records cannot be saved, until one is."""
        self.problem = why
