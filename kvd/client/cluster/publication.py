"""How all workers learn that a snapshot is written that worker 0 writes while they go on.

They do not meet for it: a worker that is restarted meanwhile comes to no place where it would. Worker 0 leaves a note
with the scheduler, and the others look for it. The next snapshot is read after all have seen the note of the one
before.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.promise import Promise
from kvd.client.calls.snapshot_outcome import Outcome
from kvd.client.cluster.engine import Engine
from kvd.core import requests
from kvd.errors import KvdError, RequestTimeout, SnapshotError
from kvd.node.daemon.facts import wall_clock_s
from kvd.protocol.messages import LAST_SNAPSHOT, MemberState

NAME = "kvd:snapshot written"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class Publication:
    """The latest snapshot that is being written; its promise ends when it has its name.

    Args:
        every: steps from one scheduled snapshot to the next; 0: there is no schedule.
        is_writer: whether this is worker 0.
    """

    def __init__(self, engine: Engine, every: int, *, is_writer: bool) -> None:
        self._engine = engine
        self._every = every
        self._is_writer = is_writer
        self._latest: Promise | None = None

    def announce(self, writing: Promise, token: str, steps: int) -> Promise:
        """Worker 0 tells the others how the writing ends of the snapshot after so many steps."""
        self._latest = self._engine.run(self._announced(writing, token, steps))
        return self._latest

    def await_it(self, token: str) -> Promise:
        """The others wait for that."""
        self._latest = self._engine.run(self._awaited(token, self._writer()))
        return self._latest

    async def settled(self) -> None:
        """Returns when the latest has ended, well or not."""
        if self._latest is not None:
            with suppress(Exception):  # its handle has it
                await self._latest

    async def record(self, steps: int) -> None:
        """Leave a note that the snapshot after so many steps is written, for `kvd status`."""
        with suppress(KvdError):  # the snapshot is complete, whether or not the scheduler takes the note
            await self._engine.call(requests.Tell(LAST_SNAPSHOT, f"{steps} {wall_clock_s():.0f} {self._every}"))

    async def _announced(self, writing: Promise, token: str, steps: int) -> None:
        failure: BaseException | None = None
        outcome = Outcome(token=token)
        try:
            await writing
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for this snapshot any more
            failure = error
            outcome = Outcome.of_error(error)._replace(token=token)
        await self._engine.call(requests.Tell(NAME, outcome.to_note()))  # first, since the others wait for this note
        if failure is not None:
            raise failure
        await self.record(steps)

    async def _awaited(self, token: str, writer: tuple[int, bool]) -> None:
        limit_s, pause_s = self._engine.config.round_timeout_s, FIRST_PAUSE_S
        deadline = Deadline(limit_s)
        while True:
            is_lost = self._writer() != writer  # before the last look: it may have told just in time
            outcome = Outcome.from_note(await self._engine.call(requests.ToldAt(NAME)) or "")
            if outcome is not None and outcome.token == token:
                outcome.check("the snapshot")
                return
            if is_lost:
                raise SnapshotError("worker 0 died while it wrote the snapshot: if it is not there, take another one")
            if not deadline.left_s():
                text = f"worker 0 has been writing a snapshot for {limit_s:g} s (round_timeout_s): look at its disk"
                raise RequestTimeout(text, outcome="unknown", waiting_for=("worker 0",))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _writer(self) -> tuple[int, bool]:
        """Which process is worker 0, and whether it lives."""
        member = self._engine.machine.view.members.get(("worker", 0))
        if member is None:
            return 0, False
        return member.incarnation, member.state in (MemberState.ACTIVE, MemberState.IDLE, MemberState.DONE)
