"""The memory of a server, which the runs share: what each was granted, and who gives way when it is full."""

from __future__ import annotations

from collections.abc import Callable


class ServerMemory:
    """Grants memory to runs when they make keys. What a run was granted is its own until it is released.

    Args:
        limit_bytes: of all runs together.
        make_room: gives up the values of one run that is over, and says whether it could.
    """

    def __init__(self, limit_bytes: int, make_room: Callable[[], bool] = lambda: False) -> None:
        self.limit_bytes = limit_bytes
        self._make_room = make_room
        self._granted_bytes: dict[int, int] = {}  # by run

    def grant(self, run: int, nbytes: int) -> bool:
        """Whether this run may use `nbytes` in all, what it was granted before included."""
        while nbytes + self.of_others(run) > self.limit_bytes:
            if nbytes > self.limit_bytes or not self._make_room():
                return False
        self._granted_bytes[run] = nbytes
        return True

    def release(self, run: int) -> None:
        """This run uses no memory any more."""
        self._granted_bytes.pop(run, None)

    def of_others(self, run: int) -> int:
        """What the other runs were granted, in bytes."""
        return sum(nbytes for other, nbytes in self._granted_bytes.items() if other != run)
