"""How a worker leaves its cluster."""

from __future__ import annotations

from kvd.client.calls.handle import Handle
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.errors import KvdError
from kvd.protocol.messages import Departure

EXIT_BARRIER = "kvd:exit"
ABANDON_S = 1.0  # to tell the scheduler when a program leaves with an error


class ClusterClosing:
    """In good order, or at once."""

    def __init__(self, engine: Engine, unobserved: UnobservedErrors) -> None:
        self._engine = engine
        self._unobserved = unobserved

    def begin_close(self, barrier: bool) -> Handle:
        """Flushes, leaves the rounds and meets the other workers; the first error ends it."""

        async def work() -> None:
            await self._engine.call(requests.Flush())
            await self._engine.call(requests.Depart(Departure.DONE))
            if barrier:
                await self._engine.call(requests.Barrier(EXIT_BARRIER))

        return Handle(self._engine.run(work()), what="close")

    def end_close(self, leaving: Handle) -> None:
        """Leaves the cluster when `leaving` is done, and raises the first error after that."""
        error: KvdError | None = None
        try:
            leaving.wait()
        except KvdError as failure:
            error = failure
        except BaseException:  # Ctrl-C: leave at once
            self.abandon(failed=True)
            raise
        self._engine.stop()
        try:
            self._unobserved.raise_for(None)
        except KvdError as first:
            if error is not None and error is not first:
                first.add_note(f"also: {error}")
            raise
        if error is not None:
            raise error

    def abandon(self, *, failed: bool) -> None:
        """Leaves at once; a worker that `failed` counts as dead."""
        self._engine.stop(ABANDON_S, failed=failed)
