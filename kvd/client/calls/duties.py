"""Work that a thread does while it waits in a store, such as giving its state to a worker that was restarted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Duty(Protocol):
    """The duty of one thread, whose waits call it. Between `begin_wait` and `end_wait` nothing of the program runs."""

    def begin_wait(self, wake: Callable[[], object]) -> None:
        """The thread begins to wait. `wake`, called on any thread, has it look whether there is work."""

    def end_wait(self) -> None:
        """The thread goes on with the program."""

    def next_s(self) -> float | None:
        """Seconds until there is work without a call of `wake`; None: never."""

    def is_due(self) -> bool:
        """Whether there is work now."""

    def run(self) -> None:
        """Does it. Waits within it have no duty."""


def least(first_s: float | None, second_s: float | None) -> float | None:
    """The shorter of two times; None is without an end."""
    if first_s is None or second_s is None:
        return second_s if first_s is None else first_s
    return min(first_s, second_s)
