"""The loops over steps of a store's program, for its threads, and the iteration that `kv.steps` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import ClassVar

from kvd.client.calls import checks
from kvd.client.calls.handle import Handle
from kvd.client.calls.held_signals import with_uninterrupted_methods
from kvd.client.calls.keys import key_list
from kvd.client.calls.process_bound import ProcessBound
from kvd.client.calls.promise import Promise
from kvd.client.calls.snapshot_schedule import SnapshotSchedule
from kvd.core.places import Boundary, PlaceKind, Point, kind_of, step_of
from kvd.core.worker.step_loops import Replay, StepLoops
from kvd.errors import KvdError, NotAllowed, NotResumed
from kvd.protocol.messages import NO_STEP


class ProgramSteps:
    """`StepLoops` behind a lock, and the broadcasts that belong to the present step.

    Args:
        has_optimizer: asks whether an optimizer updates the values of the store.
        announce: tells the servers that all pushes have counted that were made before this place; None: there are none.
        share: gets this worker's next step of a shared loop, None at its end, from the number of the loop's first step,
            how many it has, and the step that is done; None: workers share no steps here.
        come_back: has the others wait again for this worker, which they went on without, and gets the step of this loop
            in which they do; None: they are past the loop.
        is_apart: whether they went on without this worker.
    """

    def __init__(
        self,
        loops: StepLoops,
        has_optimizer: Callable[[], Promise],
        announce: Callable[[int], Promise] | None = None,
        share: Callable[[int, int, int], Promise] | None = None,
        come_back: Callable[[int, int], Promise] | None = None,
        is_apart: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loops = loops
        self._has_optimizer = has_optimizer
        self._announce = announce
        self._share = share
        self._come_back = come_back
        self.is_apart = is_apart
        self._has_pushed_outside = False  # since the last loop
        self._is_updating = False  # what the present step has pushed has come back, and changes the program's state
        self._lock = threading.RLock()  # an iteration that is dropped ends its loop, whatever its thread does then
        self._broadcasts: list[Promise] = []
        self._schedule: SnapshotSchedule | None = None
        self._take: Callable[[int], Handle] | None = None

    def take_snapshots(self, schedule: SnapshotSchedule, take: Callable[[int], Handle]) -> None:
        """Takes snapshots by this schedule: `take` begins the one after so many steps."""
        self._schedule, self._take = schedule, take

    @property
    def place(self) -> int:
        """Where the program is, for its next push."""
        return self._loops.place

    def has_optimizer(self) -> Promise:
        """A promise of whether an optimizer updates the values of the store."""
        return self._has_optimizer()

    @property
    def is_in_step(self) -> bool:
        """Whether the program is in a step of a loop."""
        return kind_of(self._loops.place) is not PlaceKind.OUTSIDE

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

    def untake_pushes(self, names: Collection[str]) -> None:
        """What `take_pushes` let through was refused before it left this process: the step has yet to push it."""
        with self._lock:
            self._loops.give_back(names)

    def take_broadcasts(self, names: Collection[str]) -> Replay:
        """See `StepLoops.take_broadcasts`."""
        self.check_not_updating("a broadcast")
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
            self._loops.check_together("a barrier")
            return kind + self._loops.label

    def point(self) -> Point:
        """Where the program comes to a point.

        Raises:
            NotAllowed: within a loop.
        """
        with self._lock:
            self._loops.check_may_stand_by()
            is_news = self._loops.is_at_news and not self._has_pushed_outside
            return Point(self._loops.steps_made, self._loops.place if is_news else None)

    def go_on_at(self, steps: int) -> None:
        """See `StepLoops.go_on_at`."""
        with self._lock:
            self._loops.go_on_at(steps)

    def check_may_resume(self) -> None:
        """See `StepLoops.check_may_resume`."""
        with self._lock:
            self._loops.check_may_resume()

    def resume(self) -> None:
        """See `StepLoops.resume`."""
        with self._lock:
            self._loops.resume()

    def boundary(self) -> Boundary:
        """See `StepLoops.boundary`."""
        with self._lock:
            return self._loops.boundary()

    def check_may_restore(self) -> None:
        """See `StepLoops.check_may_restore`."""
        with self._lock:
            self._loops.check_may_restore()

    def restored(self, steps: int, *, begins_past: bool = False) -> None:
        """See `StepLoops.restored`."""
        with self._lock:
            self._loops.restored(steps, begins_past=begins_past)

    @property
    def restored_steps(self) -> int:
        """How many steps were made before the snapshot that the store was restored from; 0: it was not restored."""
        return self._loops.restored_steps

    @property
    def begun_loops(self) -> int:
        """See `StepLoops.begun_loops`."""
        return self._loops.begun_loops

    @property
    def is_before_restored(self) -> bool:
        """See `StepLoops.is_before_restored`."""
        return self._loops.is_before_restored

    def ended(self) -> None:
        """The program is at its end."""
        if self._schedule is not None:
            self._schedule.ended(self._loops.begun_loops)

    # ── the loop, for its iteration ──

    def begin(self, total: int, keys: Collection[str] | None, *, shared: bool) -> int:
        is_shared = shared and self._share is not None
        with self._lock:
            if is_shared and self._schedule is not None:
                self._schedule.check_loop()
            return self._loops.begin(total, keys, shared=is_shared)

    def due_snapshot(self) -> Handle | None:
        """The snapshot after the step that has just been left, if one is taken there. It is read before the next step
        begins."""
        if self._schedule is None or self._take is None:
            return None
        with self._lock:
            steps = self._loops.steps_made
            return self._take(steps) if self._schedule.is_due(steps) else None

    def ask_for_step(self, total: int, done: int) -> Promise | None:
        """The next step of a shared loop; None in other loops."""
        with self._lock:
            if self._share is None or not self._loops.is_shared:
                return None
            return self._share(self._loops.first, total, done)

    def come_back(self, total: int) -> Promise | None:
        """The next step of this loop in which the others wait for this worker; None: they do anyway."""
        with self._lock:
            if self._come_back is None or not self._waits_to_come_back():
                return None
            return self._come_back(self._loops.first, total)

    def _waits_to_come_back(self) -> bool:
        return self._come_back is not None and self.is_apart() and not self._loops.is_shared

    def ask_for_optimizer(self) -> Promise | None:
        """Asks whether the servers have what missed steps have changed; None: this process has missed none."""
        with self._lock:
            if self._waits_to_come_back():
                self._loops.miss_steps()
            return self._has_optimizer() if self._loops.has_missed_steps else None

    def catch_up(self) -> None:
        """See `StepLoops.catch_up`."""
        with self._lock:
            self._loops.catch_up()

    def missed_steps_error(self) -> NotResumed:
        """See `StepLoops.missed_steps_error`."""
        with self._lock:
            return self._loops.missed_steps_error()

    @property
    def number(self) -> int:
        """The present step among those of all loops; outside of loops, that of the next one."""
        with self._lock:
            return step_of(self._loops.place)

    @property
    def is_past(self) -> bool:
        """See `StepLoops.is_past`."""
        with self._lock:
            return self._loops.is_past

    @property
    def counts_whole(self) -> bool:
        """See `StepLoops.counts_whole`."""
        with self._lock:
            return self._loops.counts_whole

    def updating(self) -> None:
        """The program changes its state from now on, until the present step ends."""
        self._is_updating = True

    def check_not_updating(self, what: str) -> None:
        """Raises NotAllowed if the present step meets no other worker any more: one that was restarted has the state
        after this step, and does not make it again."""
        if self._is_updating:
            raise NotAllowed(
                f"{what} within a step comes before backward(), or between two steps: a worker that is restarted after "
                f"backward() gets the state after this step, and never comes to it"
            )

    def pass_over(self) -> None:
        """See `StepLoops.pass_over`."""
        with self._lock:
            self._loops.pass_over()

    def leave_out(self) -> None:
        """See `StepLoops.leave_out`."""
        with self._lock:
            self._loops.leave_out()

    def enter(self, step: int) -> Promise | None:
        """Begins a step. The promise, if there is one, is kept before the step pushes."""
        with self._lock:
            self._loops.enter(step)
            has_pushed, self._has_pushed_outside = self._has_pushed_outside, False
            return self._announce(self._loops.place) if has_pushed and self._announce is not None else None

    def leave(self) -> None:
        self._is_updating = False
        with self._lock:
            self._loops.leave()

    def end(self) -> None:
        self._is_updating = False
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
        snapshot: what the step that has just ended waits for.

    Args:
        total: as the program gave it; so are `keys`.

    Raises:
        NotAllowed: wrong arguments.
    """

    def __init__(self, steps: ProgramSteps, total: object, keys: object, shared: object, restored: object) -> None:
        self._state = IterationState.NEW
        self._steps = steps
        self._total = checks.whole("the number of steps", total, 0)
        self._keys = None if keys is None else _key_names(keys)
        self._shared = _flag("shared", shared)
        self._restored = _flag("restored", restored)
        self._is_shared = False
        self._next = 0
        self._done = NO_STEP
        self.announced: Promise | None = None
        self.snapshot: Handle | None = None

    def end_step(self) -> None:
        """Ends the present step, or begins the loop. Wait for `before_next` first, and for `snapshot` after it.

        Raises:
            NotAllowed: the step has not pushed all of its keys; see also `StepLoops.begin`.
        """
        self.snapshot = None
        if self._state is IterationState.NEW:
            self._next = self._steps.begin(self._total, self._keys, shared=self._shared)
            self._state = IterationState.OPEN
        elif self._state is IterationState.OPEN:
            self._steps.leave()
            self.snapshot = self._steps.due_snapshot()

    def ask_for_optimizer(self) -> Promise | None:
        """See `ProgramSteps.ask_for_optimizer`. The answer is for `catch_up`."""
        if self._state is IterationState.ENDED:
            return None
        if self._restored:
            self._steps.catch_up()
            return None
        return self._steps.ask_for_optimizer()

    def catch_up(self, *, has_optimizer: bool) -> None:
        """Goes past the steps that this process has missed.

        Raises:
            NotResumed: they have changed nothing but the memory of the workers that made them.
        """
        if not has_optimizer:
            raise self._steps.missed_steps_error()
        self._steps.catch_up()

    @property
    def next(self) -> int | None:
        """The step that begins next, unless `ask_for_next` gives a promise of it; None: the loop is over."""
        return self._next if self._state is IterationState.OPEN and self._next < self._total else None

    def ask_for_next(self) -> Promise | None:
        """A promise of the step that begins next (None at the end), if others know it: in a shared loop, and for a
        worker without which the others went on."""
        if self.next is None:
            return None
        given = self._steps.ask_for_step(self._total, self._done)
        self._is_shared = given is not None
        return given or self._steps.come_back(self._total)

    def begin_step(self, step: int) -> None:
        """Begins this step. Wait for `announced` after it."""
        self.announced = self._steps.enter(step)
        self._next, self._done = (0 if self._is_shared else step + 1), step  # of shared steps others know the next

    def before_next(self) -> Sequence[Promise]:
        """What the present step waits for before it ends; errors are the program's to see."""
        return self._steps.take_open_broadcasts() if self._state is IterationState.OPEN else ()

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """An error in this block ends the loop."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the loop, whatever step it is in."""
        state, self._state = self._state, IterationState.ENDED
        if state is IterationState.OPEN:
            self._steps.end()


@with_uninterrupted_methods
class _Loop(ProcessBound):
    """The steps of a loop, for a blocking and for an async `for`."""

    _NOT_COPYABLE: ClassVar[str] = (
        "a loop over steps cannot be copied, pickled or saved, since it belongs to the store of this process: call "
        "kv.steps in the process that makes the steps"
    )

    def __init__(self, iteration: StepIteration) -> None:
        self._iteration = iteration

    def close(self) -> None:
        """Ends the loop early; `break` does so by itself, unless a variable holds these steps."""
        self._iteration.close()

    def __del__(self) -> None:
        iteration = getattr(self, "_iteration", None)  # a signal handler may have raised before it was set
        if iteration is not None:
            iteration.close()


@with_uninterrupted_methods
class Steps(_Loop):
    """The steps of a loop: see `kvd.KVStore.steps`."""

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        for promise in self._iteration.before_next():
            promise.exception()
        with self._iteration.closed_by_errors():
            self._iteration.end_step()
            if self._iteration.snapshot is not None:
                self._iteration.snapshot.wait()
            asked = self._iteration.ask_for_optimizer()
            if asked is not None:
                self._iteration.catch_up(has_optimizer=asked.result())
            given = self._iteration.ask_for_next()
            step = self._iteration.next if given is None else given.result()
        if step is None:
            self._iteration.close()
            raise StopIteration
        self._iteration.begin_step(step)
        if self._iteration.announced is not None:
            self._iteration.announced.result()
        return step


@with_uninterrupted_methods
class AsyncSteps(_Loop):
    """The same for an event loop."""

    def __aiter__(self) -> AsyncSteps:
        return self

    async def __anext__(self) -> int:
        for promise in self._iteration.before_next():
            with suppress(KvdError):
                await promise
        with self._iteration.closed_by_errors():
            self._iteration.end_step()
            if self._iteration.snapshot is not None:
                await self._iteration.snapshot
            asked = self._iteration.ask_for_optimizer()
            if asked is not None:
                self._iteration.catch_up(has_optimizer=await asked)
            given = self._iteration.ask_for_next()
            step = self._iteration.next if given is None else await given
        if step is None:
            self._iteration.close()
            raise StopAsyncIteration
        self._iteration.begin_step(step)
        if self._iteration.announced is not None:
            await self._iteration.announced
        return step


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise NotAllowed(f"{name} is True or False, not {value!r:.40}")
    return value


def _key_names(keys: object) -> list[str]:
    named = key_list(keys)
    named.check_distinct("a step")
    names = named.names
    if not names:
        raise NotAllowed("keys is empty: list the keys that each step pushes, or leave it out")
    return names
