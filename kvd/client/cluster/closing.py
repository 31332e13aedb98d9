"""How a worker leaves its cluster."""

from __future__ import annotations

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.engine import STOP_TIMEOUT_S, Engine
from kvd.client.cluster.snapshots import ClusterSnapshots
from kvd.core import requests
from kvd.errors import KvdError
from kvd.protocol.messages import EXIT_BARRIER, Departure

ABANDON_S = 1.0  # to tell the scheduler when a program leaves with an error
LEAST_GOODBYE_S = 0.3  # to tell the scheduler after the deadline: otherwise the others wait until this worker is missed


class ClusterClosing:
    """In good order, or at once. All parts of leaving in good order share one deadline, `round_timeout_s`; a node that
    does not answer ends it after `request_timeout_s`."""

    def __init__(
        self, engine: Engine, unobserved: UnobservedErrors, snapshots: ClusterSnapshots, steps: ProgramSteps
    ) -> None:
        self._engine = engine
        self._unobserved = unobserved
        self._snapshots = snapshots
        self._steps = steps
        self._silence: Deadline | None = None  # of nodes that owe an answer; set when closing begins

    def begin_close(self, barrier: bool) -> Handle:
        """Flushes, waits for a snapshot that is being written, leaves the rounds and meets the other workers; the first
        error ends it."""
        config = self._engine.config
        deadline = Deadline(config.round_timeout_s)
        self._silence = Deadline(config.request_timeout_s)
        self._steps.ended()

        async def work() -> None:
            await self._engine.call(requests.Flush(past_deaths=False), within=deadline)
            await self._snapshots.written(deadline)
            await self._engine.call(requests.Depart(Departure.DONE), within=deadline)
            if barrier:
                await self._engine.call(requests.Barrier(EXIT_BARRIER), within=deadline)

        return Handle(self._engine.run(work()), what="close")

    def end_close(self, leaving: Handle) -> None:
        """Leaves the cluster when `leaving` is done, and raises the first error after that."""
        error: KvdError | None = None
        try:
            leaving.wait()
        except KvdError as failure:
            error = failure
        except BaseException:  # of a signal handler, such as Ctrl-C's: leave at once
            self.abandon(failed=True)
            raise
        self._snapshots.give_up()  # it is written by now, or its time is up
        self._engine.stop(STOP_TIMEOUT_S if error is None else self._goodbye_s())
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
        self._snapshots.give_up()
        self._engine.stop(ABANDON_S, Departure.FAILED if failed else Departure.LEFT)

    def withdraw(self) -> None:
        """Leaves as if it had never joined: nobody has used this store."""
        self._engine.withdraw()

    def _goodbye_s(self) -> float:
        """What is left for telling the scheduler, when something did not answer."""
        left_s = STOP_TIMEOUT_S if self._silence is None else self._silence.left_s()
        return min(max(left_s, LEAST_GOODBYE_S), STOP_TIMEOUT_S)
