"""Records on stable storage: one after the other, and again if it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from enum import Enum, auto
from functools import partial

from kvd.core.machine import Event, Persist, Persisted, PersistFailed
from kvd.node.daemon.process_limits import NO_DESCRIPTOR
from kvd.node.storage.state_lock import InUse
from kvd.observe.log import event

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0

logger = logging.getLogger("kvd.node")


class SaverState(Enum):
    """What the saver does."""

    IDLE = auto()
    SAVING = auto()
    PAUSING = auto()  # before it tries again
    STOPPED = auto()


class RecordSaver:
    """Saves records in the executor.

    While one is being saved, only the newest of those that come is kept: it has all that the others have. A record that
    cannot be saved is tried again, or a newer one in its place, until it can.

    Args:
        save: puts a record on stable storage, or raises.
        feed: takes events for the machine, on the loop's thread.
    """

    def __init__(
        self, save: Callable[[Mapping[str, object]], None], executor: Executor, feed: Callable[[Event], None]
    ) -> None:
        self._save = save
        self._executor = executor
        self._feed = feed
        self._next: Persist | None = None
        self._state = SaverState.IDLE
        self._problem = ""  # why the latest one could not be saved
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None

    def save(self, record: Persist) -> None:
        """Persisted or PersistFailed will say what became of it."""
        self._next = record
        if self._state is SaverState.IDLE:
            self._begin()

    def stop(self) -> None:
        """Nothing is tried again."""
        self._state = SaverState.STOPPED
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        record, self._next = self._next, None
        assert record is not None
        self._state = SaverState.SAVING
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._save, record.record)
        future.add_done_callback(partial(self._tried, record))

    def _tried(self, record: Persist, done: asyncio.Future[None]) -> None:
        if done.cancelled() or self._state is SaverState.STOPPED:
            return
        error = done.exception()
        if error is not None:
            self._failed(record, error)
            return
        if self._problem:
            event(logger, logging.WARNING, "the state can be saved again")
        self._problem, self._pause_s = "", FIRST_PAUSE_S
        self._state = SaverState.IDLE
        self._feed(Persisted(record.token))
        if self._next is not None and self._state is SaverState.IDLE:
            self._begin()

    def _failed(self, record: Persist, error: BaseException) -> None:
        problem = str(error)
        if problem != self._problem:
            self._problem = problem
            text = f"the state cannot be saved ({problem}): {_what_to_do(error)}"
            event(logger, logging.ERROR, f"{text}. Joining, leaving and barriers wait for that")
            self._feed(PersistFailed(problem))
        self._next = self._next or record
        self._state = SaverState.PAUSING
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._begin)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def _what_to_do(error: BaseException) -> str:
    if isinstance(error, InUse):
        return "two schedulers use one state_dir: end one of them"
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
        return "raise the limit of open files (ulimit -n), or cut off those who hold so many connections"
    return "free space in state_dir, or make it writable"
