"""Snapshots of a cluster: all workers call, worker 0 writes or reads, and all learn how that ended.

What the workers know of one another lies in a barrier: worker 0 enters it when it is done, with a note. In synchronous
stores that is the only meeting: no round closes without worker 0, so all that it reads is of one step. A snapshot that
is written while the programs go on has the barrier after it was read, and `Publication` after it was written.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvd.client.calls import checks
from kvd.client.calls.backend import StoreFacts
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.healing import Healing
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.promise import Promise
from kvd.client.calls.restored_keys import RestoredKeys
from kvd.client.calls.snapshot_outcome import Outcome
from kvd.client.calls.snapshot_schedule import SnapshotSchedule
from kvd.client.calls.snapshot_writing import SnapshotWriting
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.ahead import one_ahead
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.lost_values import LostValues
from kvd.client.cluster.prepared import prepared_or
from kvd.client.cluster.publication import Publication
from kvd.client.cluster.restoring import check_is_new, has_values, restore_keys
from kvd.client.cluster.state_reader import StateReader
from kvd.core import requests
from kvd.errors import KvdError, RequestTimeout, SnapshotError
from kvd.protocol.messages import MemberState
from kvd.snapshots.manifest import Origin
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.series import NextSnapshot, SnapshotSeries
from kvd.snapshots.shelf import newest_at, same_in
from kvd.snapshots.writer import KeyContent, ProgramContent, is_written

logger = logging.getLogger("kvd")


class _Meeting(NamedTuple):
    """The barriers of one call, the place of the program there, and when all of it ends."""

    begin: str
    end: str
    place: int
    deadline: Deadline


class _Read(NamedTuple):
    """What worker 0 has read after so many steps, and where it goes."""

    steps: int
    snapshot: NextSnapshot
    contents: Sequence[Sequence[KeyContent]]
    program: ProgramContent | None


class ClusterSnapshots:
    """Each call is a coroutine on the engine's loop.

    Args:
        facts: of the store.
        restored: gets the keys that this worker restores.
        healing: has the state of a program that updates the weights itself.
    """

    def __init__(
        self,
        engine: Engine,
        steps: ProgramSteps,
        facts: StoreFacts,
        unobserved: UnobservedErrors,
        restored: RestoredKeys,
        healing: Healing,
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._facts = facts
        self._unobserved = unobserved
        self._restored = restored
        self._healing = healing
        self._schedule = SnapshotSchedule(engine.config, facts.job, lambda: self._lineage)
        steps.take_snapshots(self._schedule, self._scheduled)
        self._publication = Publication(engine, engine.config.snapshot_every, is_writer=facts.rank == 0)
        self._read_by_token: dict[str, _Read] = {}  # what this worker has read, until it is being written
        self._writing: SnapshotWriting | None = None  # the latest
        self._lost = LostValues(engine.machine.view)
        self._series = SnapshotSeries()
        self._restored_from = ""  # the lineage of that snapshot
        self._found: StoredSnapshot | None = None  # what this worker has restored

    def snapshot(self, path: Any) -> Handle:
        folder = checks.file_path(path)
        self._engine.check_usable()
        boundary = self._steps.boundary()
        if boundary.is_past:
            return Handle.of(None)
        program = self._state_of_program(boundary.steps)
        work = self._snapshot(folder, boundary.steps, program, self._meeting("snapshot"))
        return Handle(self._engine.run(work), what="snapshot")

    def snapshot_async(self, path: Any) -> Handle:
        folder = checks.file_path(path)
        self._engine.check_usable()
        boundary = self._steps.boundary()
        if boundary.is_past:
            return Handle.of(Handle.of(None))
        program = self._state_of_program(boundary.steps)
        work = self._begin(folder, boundary.steps, program, self._meeting("snapshot"))
        return Handle(self._engine.run(work), what="snapshot")

    def restore(self, path: Any, missing_ok: bool, or_older: bool) -> Handle:
        folder = checks.file_path(path)
        self._steps.check_may_restore()

        def find() -> StoredSnapshot | None:
            return newest_at(folder, missing_ok=missing_ok, or_older=or_older)

        work = self._restore(str(folder), partial(self._make_all, find), self._meeting("restore"))
        return Handle(self._engine.run(work), what="restore")

    def begin_run(self) -> Handle:
        """A worker that comes to the run later learns what became of it."""
        work = self._restore(str(self._schedule.folder), self._begin_run, self._meeting("restore run"), at_begin=True)
        return Handle(self._engine.run(work), what="create")

    async def written(self, deadline: Deadline) -> None:
        """Returns when no snapshot is being written any more, or raises RequestTimeout."""
        try:
            await asyncio.wait_for(self._publication.settled(), deadline.left_s())
        except TimeoutError:
            text = "the snapshot that is being written was not done in time, and is given up: look at worker 0's disk"
            raise RequestTimeout(text, outcome="unknown", waiting_for=("worker 0",)) from None

    def give_up(self) -> None:
        """Writes nothing any more."""
        if self._writing is not None:
            self._writing.give_up()

    def _state_of_program(self, steps: int) -> ProgramContent | None:
        return self._healing.for_snapshot(steps, is_writer=self._facts.rank == 0)

    def _meeting(self, call: str) -> _Meeting:
        begin, end = (checks.barrier_name(self._steps.meeting(f"kvd:{call}{when}"), "") for when in ("", " end"))
        return _Meeting(begin, end, self._steps.place, Deadline(self._engine.config.round_timeout_s))

    # ── all workers ──

    async def _snapshot(self, folder: Path, steps: int, program: ProgramContent | None, meeting: _Meeting) -> None:
        outcome = await self._taken(meeting, lambda: self._write(folder, steps, program))
        if outcome is not None:
            outcome.check("the snapshot")

    async def _begin(
        self, folder: Path, steps: int, program: ProgramContent | None, meeting: _Meeting, *, scheduled: bool = False
    ) -> Handle:
        """Returns when the state was read; the handle says when it is written."""

        async def read() -> Outcome:
            if scheduled:
                await asyncio.to_thread(self._schedule.make_room, folder)
            return await self._read_state(folder, steps, program)

        outcome = await self._taken(meeting, read)
        if outcome is None:
            return Handle.of(None)
        outcome.check("the snapshot")
        if not outcome.token:  # it was there already
            return Handle.of(None)
        if self._facts.rank > 0:
            return Handle(self._publication.await_it(outcome.token), what="snapshot")
        if outcome.token in self._read_by_token:
            handle = self._write_behind(outcome.token, scheduled=scheduled)
            return handle if scheduled else self._unobserved.watch((), handle)
        return await self._begin_again(folder, steps, program, outcome.token)

    async def _taken(self, meeting: _Meeting, work: Callable[[], Awaitable[Outcome]]) -> Outcome | None:
        """What became of worker 0's work between two steps."""

        async def prepare() -> None:
            await self._publication.settled()  # one at a time
            await self._engine.call(requests.Flush(), within=meeting.deadline)
            self._unobserved.raise_for(None)  # what failed is missing in the values
            self._lost.check()
            if not self._facts.versioned:  # until all are here, others push
                await self._engine.call(requests.Barrier(meeting.begin, place=meeting.place), within=meeting.deadline)

        return await self._together(meeting, prepare, work)

    def _scheduled(self, steps: int) -> Handle:
        """The snapshot after a step, by the schedule. Done when it is read; what is wrong with the disk is logged."""
        path, meeting = self._schedule.path(steps), self._meeting("snapshot scheduled")
        program = self._state_of_program(steps)

        async def work() -> None:
            try:
                self._schedule.watch(steps, await self._begin(path, steps, program, meeting, scheduled=True))
            except SnapshotError as error:
                self._schedule.failed(steps, error)

        return Handle(self._engine.run(work()), what="snapshot")

    async def _restore(
        self, path: str, work: Callable[[], Awaitable[Outcome]], meeting: _Meeting, *, at_begin: bool = False
    ) -> int | None:
        async def prepare() -> None:
            pass

        prepared = partial(prepared_or, self._engine, work)
        outcome = await self._together(meeting, prepare, prepared, was_before=at_begin)
        if outcome is None:
            text = "the scheduler has lost what worker 0 said of the snapshot it restored: start the whole job again"
            raise SnapshotError(text, path=path)
        outcome.check("the restore")
        if outcome.is_missing:
            return None
        self._restored_from = outcome.lineage
        if outcome.has_program:
            await self._find_program(Path(path), outcome)
        self._steps.restored(outcome.steps, begins_past=at_begin)
        return outcome.steps

    async def _find_program(self, path: Path, outcome: Outcome) -> None:
        """Worker 0 loads the state of the program when its loop begins, and the others get it from there. A restarted
        worker 0 finds the snapshot of its predecessor again, unless later ones have replaced it."""
        snapshot = self._found
        if self._facts.rank == 0 and snapshot is None:
            snapshot = await asyncio.to_thread(same_in, path, outcome.lineage, outcome.steps)
        self._healing.restored(snapshot, has_program=True)

    async def _together(
        self,
        meeting: _Meeting,
        prepare: Callable[[], Awaitable[None]],
        work: Callable[[], Awaitable[Outcome]],
        *,
        was_before: bool = False,
    ) -> Outcome | None:
        """Worker 0 does the work, and all learn how it ended; None if that is forgotten. A restarted worker learns how
        the call of its predecessor ended, and does not repeat it.

        Args:
            was_before: the others may have been here before this worker came for the first time.
        """
        if was_before or self._engine.session.predecessor == MemberState.DEAD:
            note = await self._engine.call(requests.SaidAt(meeting.end), within=meeting.deadline)
            if note is not None:
                for name in (meeting.begin, meeting.end):
                    await self._engine.call(requests.Barrier(name, passed=True))
                return Outcome.from_note(note)
        await prepare()
        says, failure = None, None
        if self._facts.rank == 0:
            try:
                outcome = await work()
            except KvdError as error:
                outcome, failure = Outcome.of_error(error), error
            says = outcome.to_note()
        end = requests.Barrier(meeting.end, says=says, listens=True, place=meeting.place)
        note = await self._engine.call(end, within=meeting.deadline)
        if failure is not None:
            raise failure
        return Outcome.from_note(note or "")

    # ── worker 0 ──

    async def _write(self, folder: Path, steps: int, program: ProgramContent | None) -> Outcome:
        """Reads the next group while one is written: no more than these two are in memory."""
        state = await self._reader(program)
        snapshot = await self._next(folder, steps, state)
        if snapshot is not None:
            async with _aborted_by_errors(snapshot):
                async with one_ahead([partial(state.read, names) for names in snapshot.groups]) as groups:
                    async for contents in groups:
                        await asyncio.to_thread(snapshot.add_group, contents)
                self._lost.check()
                if program is not None:
                    await asyncio.to_thread(snapshot.add_program, program)
                await asyncio.to_thread(snapshot.finish)
            await self._publication.record(steps)
        return Outcome(steps, self._lineage)

    async def _reader(self, program: ProgramContent | None) -> StateReader:
        return await StateReader.begin(self._engine, {} if program is None else program.weights)

    async def _read_state(self, folder: Path, steps: int, program: ProgramContent | None, token: str = "") -> Outcome:
        """Reads everything, and writes nothing yet."""
        state = await self._reader(program)
        snapshot = await self._next(folder, steps, state)
        if snapshot is None:
            return Outcome(steps, self._lineage)
        async with _aborted_by_errors(snapshot):
            contents = [await state.read(names) for names in snapshot.groups]
            self._lost.check()
        token = token or secrets.token_hex(8)
        self._read_by_token[token] = _Read(steps, snapshot, contents, program)
        return Outcome(steps, self._lineage, token=token)

    def _write_behind(self, token: str, *, scheduled: bool = False) -> Handle:
        """Has the thread write what was read."""
        steps, snapshot, contents, program = self._read_by_token.pop(token)
        self._writing = SnapshotWriting(snapshot, contents, program, self._schedule.published if scheduled else None)
        return Handle(self._publication.announce(self._writing.promise, token, steps), what="snapshot")

    async def _begin_again(self, folder: Path, steps: int, program: ProgramContent | None, token: str) -> Handle:
        """The predecessor of this worker died with what it had read. In synchronous stores the values are still there:
        no round has closed without this worker. In others the handle says that they are gone; nothing else fails."""
        ended = Promise()
        try:
            if not self._facts.versioned:
                text = f"worker 0 died before {folder} was written, and the values have changed since: take another one"
                raise SnapshotError(text, path=str(folder))
            await self._read_state(folder, steps, program, token)
            if token in self._read_by_token:
                return self._write_behind(token)
            ended.set_result(None)  # it had been written
        except KvdError as error:
            ended.set_exception(error)
        return Handle(self._publication.announce(ended, token, steps), what="snapshot")

    async def _next(self, folder: Path, steps: int, state: StateReader) -> NextSnapshot | None:
        """The snapshot that is to be written; None: this very one is there already."""
        facts = self._facts
        origin = Origin(facts.job, facts.type, self._lineage, steps, facts.num_workers, state.optimizer)
        if await asyncio.to_thread(is_written, folder, origin, state.clocks, self._restored_from):
            return None
        return await asyncio.to_thread(self._series.begin, folder, origin, state.marks)

    @property
    def _lineage(self) -> str:
        return f"{self._engine.session.run:x}"

    async def _make_all(self, find: Callable[[], StoredSnapshot | None]) -> Outcome:
        snapshot = await asyncio.to_thread(find)  # all of it is verified before the first key is made
        if snapshot is None:
            return Outcome(is_missing=True)
        await check_is_new(self._engine, snapshot)
        self._restored.add(await restore_keys(self._engine, snapshot))
        origin, has_program = snapshot.manifest.origin, snapshot.manifest.program is not None
        self._found = snapshot if has_program else None
        return Outcome(origin.steps, origin.lineage, has_program=has_program)

    async def _begin_run(self) -> Outcome:
        schedule, outcome = self._schedule, Outcome(is_missing=True)
        if await has_values(self._engine):
            return outcome
        snapshot = await asyncio.to_thread(schedule.newest)
        if snapshot is not None:
            outcome = await self._make_all(lambda: snapshot)
            logger.info("restored %s: the job goes on after step %d", snapshot.path, outcome.steps)
        await asyncio.to_thread(schedule.check, outcome.steps)
        return outcome


@asynccontextmanager
async def _aborted_by_errors(snapshot: NextSnapshot) -> AsyncIterator[None]:
    """An error in this block removes what was written."""
    try:
        yield
    except BaseException:
        await asyncio.shield(asyncio.to_thread(snapshot.abort))
        raise
