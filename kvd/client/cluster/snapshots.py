"""Snapshots of a cluster: all workers call, worker 0 writes or reads, and all learn how that ended.

What the workers know of one another lies in a barrier: worker 0 enters it when it is done, with a note. In synchronous
stores that is the only meeting: no round closes without worker 0, so all that it reads is of one step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvd.client.calls import checks
from kvd.client.calls.backend import StoreFacts
from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.snapshot_outcome import Outcome
from kvd.client.calls.values import Array, fresh_target, source_of
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import fetch_optimizer, fetch_state, store_optimizer, store_state
from kvd.client.cluster.transfers import pull_into
from kvd.core import requests
from kvd.core.requests import Item
from kvd.errors import KvdError, NotAllowed, SnapshotError
from kvd.optimizer import Optimizer
from kvd.protocol.messages import MemberState
from kvd.protocol.specs import KeySpec
from kvd.snapshots.manifest import Origin, StoredKey
from kvd.snapshots.reader import StoredSnapshot
from kvd.snapshots.writer import PART_BYTES, SnapshotWriter, is_written

AT_ONCE = 32  # keys whose states are on their way at the same time
CHANGED = "the values change while the snapshot is taken: all workers call snapshot between the same two steps"


T = TypeVar("T")


class _Meeting(NamedTuple):
    """The barriers of one call, and when all of it ends."""

    begin: str
    end: str
    deadline: Deadline


class ClusterSnapshots:
    """Each call is a coroutine on the engine's loop.

    Args:
        facts: of the store.
    """

    def __init__(self, engine: Engine, steps: ProgramSteps, facts: StoreFacts) -> None:
        self._engine = engine
        self._steps = steps
        self._facts = facts
        self._restored_from = ""  # the lineage of that snapshot

    def snapshot(self, path: Any) -> Handle:
        folder = checks.file_path(path)
        self._engine.check_usable()
        boundary = self._steps.boundary()
        if boundary.is_past:
            return Handle.of(None)
        work = self._snapshot(folder, boundary.steps, self._meeting("snapshot"))
        return Handle(self._engine.run(work), what="snapshot")

    def restore(self, path: Any, missing_ok: bool) -> Handle:
        folder = checks.file_path(path)
        self._steps.check_may_restore()
        work = self._restore(folder, missing_ok, self._meeting("restore"))
        return Handle(self._engine.run(work), what="restore")

    def _meeting(self, call: str) -> _Meeting:
        begin, end = (checks.barrier_name(self._steps.meeting(f"kvd:{call}{when}"), "") for when in ("", " end"))
        return _Meeting(begin, end, Deadline(self._engine.config.round_timeout_s))

    # ── all workers ──

    async def _snapshot(self, folder: Path, steps: int, meeting: _Meeting) -> None:
        async def prepare() -> None:
            await self._engine.call(requests.Flush(), within=meeting.deadline)
            if not self._facts.versioned:  # until all are here, others push
                await self._engine.call(requests.Barrier(meeting.begin), within=meeting.deadline)

        outcome = await self._together(meeting, prepare, lambda: self._write(folder, steps))
        if outcome is not None:
            outcome.check("the snapshot")

    async def _restore(self, folder: Path, missing_ok: bool, meeting: _Meeting) -> int | None:
        async def prepare() -> None:
            pass

        outcome = await self._together(meeting, prepare, lambda: self._read(folder, missing_ok))
        if outcome is None:
            text = "the scheduler has lost what worker 0 said of the snapshot it restored: start the whole job again"
            raise SnapshotError(text, path=str(folder))
        outcome.check("the restore")
        if outcome.is_missing:
            return None
        self._restored_from = outcome.lineage
        self._steps.restored(outcome.steps)
        return outcome.steps

    async def _together(
        self, meeting: _Meeting, prepare: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[Outcome]]
    ) -> Outcome | None:
        """Worker 0 does the work, and all learn how it ended; None if that is forgotten. A restarted worker learns how
        the call of its predecessor ended, and does not repeat it."""
        if self._engine.session.predecessor == MemberState.DEAD:
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
        end = requests.Barrier(meeting.end, says=says, listens=True)
        note = await self._engine.call(end, within=meeting.deadline)
        if failure is not None:
            raise failure
        return Outcome.from_note(note or "")

    # ── worker 0 writes ──

    async def _write(self, folder: Path, steps: int) -> Outcome:
        optimizer, (specs, clocks) = await fetch_optimizer(self._engine), await self._keys()
        lineage = f"{self._engine.session.run:x}"
        facts = self._facts
        origin = Origin(facts.job, facts.type, lineage, steps, facts.num_workers, optimizer)
        if await asyncio.to_thread(is_written, folder, origin, clocks, self._restored_from):
            return Outcome(steps, lineage)
        writer = await asyncio.to_thread(SnapshotWriter, folder, origin)
        try:
            for names in _batches(specs):
                await self._write_keys(writer, {name: specs[name] for name in names}, clocks, optimizer)
            await asyncio.to_thread(writer.finish)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(writer.abort))
            raise
        return Outcome(steps, lineage)

    async def _keys(self) -> tuple[dict[str, KeySpec], dict[str, int]]:
        """The keys by name: what they are like, and their clocks."""
        specs: dict[str, KeySpec] = {}
        clocks: dict[str, int] = {}
        for _, entry in sorted(await list_keys(self._engine), key=lambda found: found[1].key):
            if clocks.setdefault(entry.key, entry.version) != entry.version:
                raise NotAllowed(CHANGED, key=entry.key)
            if entry.key not in specs:
                specs[entry.key] = await self._engine.call(requests.DescribeKey(entry.key))
        return specs, clocks

    async def _write_keys(
        self,
        writer: SnapshotWriter,
        specs: Mapping[str, KeySpec],
        clocks: Mapping[str, int],
        optimizer: Optimizer | None,
    ) -> None:
        names = list(specs)
        targets = [fresh_target(spec) for spec in specs.values()]
        versions = await self._engine.call(pull_into(names, targets, 0))
        for name, version in zip(names, versions, strict=True):
            if not version.oldest == version.newest == clocks[name]:
                raise NotAllowed(CHANGED, key=name)
        states: list[tuple[int, dict[str, Array]]] = [(0, {}) for _ in names]
        if optimizer is not None:
            states = await _some_at_once([partial(fetch_state, self._engine, name) for name in names])

        def add() -> None:
            for name, target, (updates, state) in zip(names, targets, states, strict=True):
                writer.add(name, target.finish(), clocks[name], updates, state)

        await asyncio.to_thread(add)

    # ── worker 0 reads ──

    async def _read(self, folder: Path, missing_ok: bool) -> Outcome:
        if missing_ok and not await asyncio.to_thread(os.path.lexists, folder):
            return Outcome(is_missing=True)
        snapshot = await asyncio.to_thread(StoredSnapshot.open, folder)
        origin = snapshot.manifest.origin
        await self._check_is_new(snapshot)
        await asyncio.to_thread(snapshot.verify)  # all of it, before the first key is made
        if origin.optimizer is not None:
            await store_optimizer(self._engine, origin.optimizer)
        slice_bytes = self._engine.machine.view.settings.slice_bytes
        keys = {key.key: key for key in snapshot.manifest.keys}
        for names in _batches({name: KeySpec(key.dtype, key.shape, slice_bytes) for name, key in keys.items()}):
            await self._make_keys(snapshot, [keys[name] for name in names], slice_bytes)
        return Outcome(origin.steps, origin.lineage)

    async def _make_keys(self, snapshot: StoredSnapshot, keys: Sequence[StoredKey], slice_bytes: int) -> None:
        def read() -> tuple[list[Item], list[dict[str, Array]]]:
            items, states = [], []
            for key in keys:  # value and state lie side by side
                data, spec = source_of(snapshot.value(key), slice_bytes, copy=False)
                items.append(Item(key.key, spec, data))
                states.append(snapshot.state(key))
            return items, states

        items, states = await asyncio.to_thread(read)
        await self._engine.call(requests.InitKeys(tuple(items)))
        await _some_at_once(
            [
                partial(store_state, self._engine, key.key, key.updates, state)
                for key, state in zip(keys, states, strict=True)
                if key.updates or state
            ]
        )

    async def _check_is_new(self, snapshot: StoredSnapshot) -> None:
        """Raises NotAllowed if the job has values already. A predecessor that died in this call may have left some."""
        found = [entry for _, entry in await list_keys(self._engine)]
        if self._engine.session.predecessor == MemberState.DEAD and not any(entry.version for entry in found):
            known = {key.key for key in snapshot.manifest.keys}
            found = [entry for entry in found if entry.key not in known]
        if found:
            text = (
                f"this job has keys already, such as {found[0].key!r}: restore comes in place of init and "
                f"set_optimizer, in a new job"
            )
            raise NotAllowed(text, key=found[0].key)


async def _some_at_once(work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all, in order. The first error is raised, and what has begun is not left behind."""
    results: list[T] = []
    for start in range(0, len(work), AT_ONCE):
        begun = [each() for each in work[start : start + AT_ONCE]]
        ended = await asyncio.gather(*begun, return_exceptions=True)
        for result in ended:
            if isinstance(result, BaseException):
                raise result
            results.append(result)
    return results


def _batches(specs: Mapping[str, KeySpec]) -> Iterator[list[str]]:
    """The keys in groups, each about as large as a part, unless one key is larger."""
    names: list[str] = []
    nbytes = 0
    for name, spec in specs.items():
        if names and nbytes + spec.nbytes > PART_BYTES:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += spec.nbytes
    if names:
        yield names
