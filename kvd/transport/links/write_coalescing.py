"""Small frames that wait a moment for the next one to the same peer.

A server answers a push and the pull behind it in one go. Written one by one, the first answer wakes a worker that needs
the second, and takes a system call on either side.
"""

from __future__ import annotations

from typing import Protocol

MOST_HELD = 16
"""Frames that wait at once: with many workers, their answers do not wait for those of all others."""


class Holder(Protocol):
    """A link."""

    def write_held(self) -> None:
        """Writes the frames that wait there."""


class WriteCoalescing:
    """Frames wait from `begin` on, at most until `end`. One thread calls all of it, and sends the frames."""

    def __init__(self) -> None:
        self.is_on = False
        self._holders: list[Holder] = []

    def begin(self) -> None:
        """From now on frames may wait."""
        self.is_on = True

    def held(self, holder: Holder) -> None:
        """One more frame waits."""
        self._holders.append(holder)
        if len(self._holders) >= MOST_HELD:
            self.pass_on()

    def pass_on(self) -> None:
        """What waits is written now: something that may take long comes first."""
        while self._holders:
            self._holders.pop(0).write_held()

    def end(self) -> None:
        """The same, and nothing waits any more."""
        self.is_on = False
        if self._holders:
            self.pass_on()
