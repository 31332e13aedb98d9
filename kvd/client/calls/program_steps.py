"""The loops over steps of a store's program, for its threads, and the iteration that `kv.steps` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from kvd.client.calls import checks
from kvd.client.calls.keys import key_list
from kvd.client.calls.promise import Promise
from kvd.core.worker.step_loops import Replay, StepLoops
from kvd.errors import KvdError, NotAllowed


class ProgramSteps:
    """`StepLoops` behind a lock, and the broadcasts that belong to the present step.

    Args:
        announce: tells the servers that all pushes have counted that were made before this place; None: there are none.
    """

    def __init__(self, loops: StepLoops, announce: Callable[[int], Promise] | None = None) -> None:
        self._loops = loops
        self._announce = announce
        self._has_pushed_outside = False  # since the last loop
        self._lock = threading.RLock()  # an iteration that is dropped ends its loop, whatever its thread does then
        self._broadcasts: list[Promise] = []

    @property
    def place(self) -> int:
        """Where the program is, for its next push."""
        return self._loops.place

    @property
    def is_behind_loops(self) -> bool:
        """See `StepLoops.is_behind_loops`."""
        return self._loops.is_behind_loops

    # ── calls of the program ──

    def take_pushes(self, names: Collection[str]) -> bool:
        """See `StepLoops.take_pushes`."""
        if self._loops.is_plain:
            self._has_pushed_outside = True
            return True
        with self._lock:
            is_wanted = self._loops.take_pushes(names)
            self._has_pushed_outside |= is_wanted and not self._loops.is_inside
        return is_wanted

    def take_broadcasts(self, names: Collection[str]) -> Replay:
        """See `StepLoops.take_broadcasts`."""
        with self._lock:
            return self._loops.take_broadcasts(names)

    def add_broadcast(self, promise: Promise) -> Promise:
        """The step is not done before this broadcast is."""
        if self._loops.is_inside:
            with self._lock:
                self._broadcasts.append(promise)
        return promise

    def meeting(self, kind: str) -> str:
        """The kind of a barrier at the present place: each step has its own, which a step that is made again finds."""
        with self._lock:
            return kind + self._loops.label

    def check_may_resume(self) -> None:
        """See `StepLoops.check_may_resume`."""
        with self._lock:
            self._loops.check_may_resume()

    def resume(self) -> None:
        """See `StepLoops.resume`."""
        with self._lock:
            self._loops.resume()

    # ── the loop, for its iteration ──

    def begin(self, total: int, keys: Collection[str] | None) -> int:
        with self._lock:
            return self._loops.begin(total, keys)

    def enter(self, step: int) -> Promise | None:
        """Begins a step. The promise, if there is one, is kept before the step pushes."""
        with self._lock:
            self._loops.enter(step)
            has_pushed, self._has_pushed_outside = self._has_pushed_outside, False
            return self._announce(self._loops.place) if has_pushed and self._announce is not None else None

    def leave(self) -> None:
        with self._lock:
            self._loops.leave()

    def end(self) -> None:
        with self._lock:
            self._loops.end()
            self._broadcasts.clear()

    def take_open_broadcasts(self) -> Sequence[Promise]:
        """The broadcasts of the present step, once."""
        with self._lock:
            broadcasts, self._broadcasts = self._broadcasts, []
        return broadcasts


class IterationState(Enum):
    """How far an iteration has come. It only goes forward."""

    NEW = auto()  # its loop has not begun
    OPEN = auto()
    ENDED = auto()


class StepIteration:
    """One loop over steps, as `kv.steps` gives it to a blocking and to an async `for`.

    It begins with its first step and ends with its last one, with an error, with `close`, or when nothing refers to it
    any more, as after `break`.

    Attributes:
        announced: what the step that has just begun waits for.

    Args:
        total: as the program gave it; so are `keys`.

    Raises:
        NotAllowed: wrong arguments.
    """

    def __init__(self, steps: ProgramSteps, total: object, keys: object, shared: object) -> None:
        self._state = IterationState.NEW
        self._steps = steps
        self._total = checks.whole("the number of steps", total, 0)
        self._keys = None if keys is None else _key_names(keys)
        if not isinstance(shared, bool):
            raise NotAllowed(f"shared is True or False, not {shared!r:.40}")
        if shared:
            raise NotAllowed("kv.steps(…, shared=True) is not built yet: give each worker its own number of steps")
        self._next = 0
        self.announced: Promise | None = None

    def next_step(self) -> int | None:
        """The step that begins now; None at the end. Wait for `before_next` first, and for `announced` after it.

        Raises:
            NotAllowed: the step before has not pushed all of its keys; see also `StepLoops.begin`.
        """
        if self._state is IterationState.ENDED:
            return None
        try:
            if self._state is IterationState.NEW:
                self._next = self._steps.begin(self._total, self._keys)
                self._state = IterationState.OPEN
            else:
                self._steps.leave()
            if self._next < self._total:
                self.announced = self._steps.enter(self._next)
                self._next += 1
                return self._next - 1
        except BaseException:
            self.close()
            raise
        self.close()
        return None

    def before_next(self) -> Sequence[Promise]:
        """What the present step waits for before it ends; errors are the program's to see."""
        return self._steps.take_open_broadcasts() if self._state is IterationState.OPEN else ()

    def close(self) -> None:
        """Ends the loop, whatever step it is in."""
        state, self._state = self._state, IterationState.ENDED
        if state is IterationState.OPEN:
            self._steps.end()


class Steps:
    """The steps of a loop: see `kvd.KVStore.steps`."""

    def __init__(self, iteration: StepIteration) -> None:
        self._iteration = iteration

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        for promise in self._iteration.before_next():
            promise.exception()
        step = self._iteration.next_step()
        if step is None:
            raise StopIteration
        if self._iteration.announced is not None:
            self._iteration.announced.result()
        return step

    def close(self) -> None:
        """Ends the loop early; `break` does so by itself, unless a variable holds these steps."""
        self._iteration.close()

    def __del__(self) -> None:
        _close_dropped(self)


class AsyncSteps:
    """The same for an event loop."""

    def __init__(self, iteration: StepIteration) -> None:
        self._iteration = iteration

    def __aiter__(self) -> AsyncSteps:
        return self

    async def __anext__(self) -> int:
        for promise in self._iteration.before_next():
            with suppress(KvdError):
                await promise
        step = self._iteration.next_step()
        if step is None:
            raise StopAsyncIteration
        if self._iteration.announced is not None:
            await self._iteration.announced
        return step

    def close(self) -> None:
        """See `Steps.close`."""
        self._iteration.close()

    def __del__(self) -> None:
        _close_dropped(self)


def _close_dropped(steps: Any) -> None:
    iteration = getattr(steps, "_iteration", None)  # its arguments may have been wrong
    if iteration is not None:
        iteration.close()


def _key_names(keys: object) -> list[str]:
    names, many = key_list(keys)
    if not names:
        raise NotAllowed("keys is empty: list the keys that each step pushes, or leave it out")
    return names if many else names[:1]
