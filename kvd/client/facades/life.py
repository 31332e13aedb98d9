"""Whether a store is open, and how it ends: by `close`, by an error, or with its process."""

from __future__ import annotations

from kvd.client.calls.backend import Backend
from kvd.client.calls.exits import forget, leave_at_exit
from kvd.client.calls.handle import Handle


class StoreLife:
    """Open from the start. It ends once: `claim_end` says who ends it.

    Attributes:
        barrier_before_exit: whether `close` waits for all workers.
    """

    def __init__(self, backend: Backend) -> None:
        self.barrier_before_exit = True
        self._closing = backend.closing
        self._open = True
        if backend.facts.distributed:
            leave_at_exit(self)

    @property
    def is_open(self) -> bool:
        return self._open

    def claim_end(self) -> bool:
        """True for the first caller, who must end the store then."""
        first, self._open = self._open, False
        forget(self)
        return first

    def close(self) -> None:
        """Leaves in good order. Call `claim_end` first."""
        self.end_close(self.begin_close())

    def begin_close(self, *, barrier: bool = True) -> Handle:
        """Begins to leave in good order. `barrier`: it may meet the other workers, if the program wants that."""
        return self._closing.begin_close(barrier and self.barrier_before_exit)

    def end_close(self, leaving: Handle) -> None:
        self._closing.end_close(leaving)

    def abandon(self, *, failed: bool) -> None:
        """Leaves at once, without flush and barrier. `failed`: the program failed, which counts as a death."""
        self.claim_end()
        self._closing.abandon(failed=failed)

    def withdraw(self) -> None:
        """Leaves as if it had never joined: the program has not got this store."""
        self.claim_end()
        self._closing.withdraw()
