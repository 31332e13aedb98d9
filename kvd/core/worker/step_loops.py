"""The loops over steps of one program: where it is in them, where a restarted one goes on, and what each step pushes.

`begin` opens a loop and says with which step it goes on, `enter` begins a step, `leave` checks that it is complete, and
`end` closes the loop; `end` alone gives it up, with its step as far as that has come. Every push and broadcast is
announced before it is made (`take_pushes`, `take_broadcasts`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from kvd.core.places import (
    MAX_STEPS,
    START,
    Boundary,
    PlaceKind,
    Restored,
    Stopped,
    kind_of,
    place_of,
    step_of,
)
from kvd.errors import NotAllowed, NotResumed

LINES = """
    for step in kv.steps(total):  # goes on with the step in which the predecessor stopped
        ...                       # and pushes each key once
"""


class Replay(Enum):
    """What a broadcast of a restarted program is."""

    NEW = "new"  # this program takes part in it for the first time, or makes a step again with all that is in it
    PASSED = "passed"  # the predecessor was past it
    PERHAPS = "perhaps"  # the predecessor stopped among the pushes that are made here: their number tells


class StepLoops:
    """Where a program is among its steps.

    Invariants, checked by `validate`:
        outside of loops nothing is listed or touched; within one, the present place lies in it.

    A process has *missed* steps if its loops skip some that it has not made itself. Their effect on the weights is on
    the servers if these have an optimizer. If not, it was in the memory of the workers that made the steps.

    Args:
        predecessor: of this worker; None if it had none that died.
        is_strict: whether a restarted program must say where it goes on before it pushes (synchronous stores).

    Attributes:
        place: where the program is.
        is_inside: whether that is in a loop.
    """

    def __init__(self, predecessor: Stopped | None, *, is_strict: bool) -> None:
        self.place = START
        self.is_inside = False
        self._predecessor = predecessor or Stopped()
        self._is_strict = is_strict
        self._has_predecessor = predecessor is not None
        self._is_behind = self._has_predecessor  # what the predecessor did comes first
        self._is_redoing = False  # this is the first step after those that the predecessor finished
        self._kind = PlaceKind.OUTSIDE
        self._loops = 0  # begun so far
        self._restored = Restored()
        self._first = self._end = 0  # the steps of the present loop, or the end of the last one
        self._missed = ""  # why, if this process has missed steps
        self._is_newcomer = self._predecessor.is_new  # and has not caught up
        self._listed: Collection[str] | None = None
        self._pushed: set[str] = set()
        self._broadcast: set[str] = set()

    @property
    def is_plain(self) -> bool:
        """Whether pushes and broadcasts need not be announced: there is nothing to check."""
        return not self.is_inside and not self._is_behind and self._end >= self._restored.steps

    @property
    def is_behind_loops(self) -> bool:
        """Whether a predecessor came further, in loops over steps."""
        return self._is_behind and self._predecessor.place != START

    @property
    def label(self) -> str:
        """Tells apart the steps in which the same line of a program runs; empty outside of loops."""
        return f" {self._loops}.{step_of(self.place) - self._first}" if self.is_inside else ""

    @property
    def first(self) -> int:
        """The number of the open loop's first step among the steps of all loops."""
        return self._first

    @property
    def is_shared(self) -> bool:
        """Whether a loop is open whose steps all workers share."""
        return self.is_inside and self._kind is PlaceKind.SHARED

    # ── the loop ──

    def begin(self, total: int, keys: Collection[str] | None, *, shared: bool = False) -> int:
        """Opens a loop. Returns the step to go on with: `total` if there is nothing left to do.

        Raises:
            NotAllowed: another loop is open; the predecessor of this worker cannot be continued here.
        """
        if self.is_inside:
            text = "a loop over kv.steps is open: leave it (break ends it, unless a variable holds it: close it then)"
            raise NotAllowed(text)
        if self._end + total > MAX_STEPS:
            raise NotAllowed(f"the loops of a program have at most {MAX_STEPS} steps")
        kind = PlaceKind.SHARED if shared else PlaceKind.STEP
        first = self._step_to_go_on_with(kind, total)
        if first < total:
            for name in keys or ():
                self._check_left(name, keys or (), kind, self._end, first)
        self._note_skipped(kind, total, first)
        self._loops += 1
        self._kind, self._listed = kind, keys
        self._first, self._end = self._end, self._end + total
        self.is_inside = True
        self.place = place_of(PlaceKind.OUTSIDE, self._first)
        return first

    def _step_to_go_on_with(self, kind: PlaceKind, total: int) -> int:
        restored = self._steps_of_snapshot(total)
        if kind is PlaceKind.SHARED and 0 < restored < total:
            raise NotAllowed(
                f"the store was restored after step {restored} of a loop over kv.steps(…, shared=True), which has "
                f"{total} steps here: give the loop as many steps as it had, or call kv.resume() to start over"
            )
        if not self._is_behind:
            return restored
        stopped, stopped_in = step_of(self._predecessor.place) - self._end, kind_of(self._predecessor.place)
        if stopped >= total:
            return total
        if stopped >= 0 and stopped_in not in (kind, PlaceKind.OUTSIDE):
            raise NotAllowed(
                "the predecessor of this worker stopped in a loop over kv.steps that was shared where this one is not, "
                "or the reverse: run the same program again, or call kv.resume() to begin another"
            )
        return max(restored, stopped) if kind is PlaceKind.STEP else restored

    def _note_skipped(self, kind: PlaceKind, total: int, first: int) -> None:
        """A loop of this kind is about to begin with step `first`."""
        of_snapshot, stopped = self._steps_of_snapshot(total), self._predecessor.place
        has_shared = self._is_newcomer or (stopped != START and step_of(stopped) >= self._end)
        if first > of_snapshot or (kind is PlaceKind.SHARED and self._is_behind and has_shared):
            self._missed = self._missed or self._came_later
        elif of_snapshot and self._restored.begins_past:
            self._missed = "the job was restored from a snapshot"

    def _steps_of_snapshot(self, total: int) -> int:
        """How many steps of the loop that is about to begin were made before the snapshot that was restored."""
        return min(max(0, self._restored.steps - self._end), total)

    @property
    def _came_later(self) -> str:
        """That this process was not there when the job began; empty if it was."""
        if self._predecessor.is_new:
            return "this worker joined while the job was running"
        return "this worker was restarted" if self._has_predecessor else ""

    @property
    def has_missed_steps(self) -> bool:
        """Whether steps before the present point were made without this process, since `catch_up` was called last."""
        return bool(self._missed)

    def catch_up(self) -> None:
        """The process has, or is about to get, what the missed steps have changed."""
        self._missed, self._is_newcomer = "", False

    def miss_steps(self) -> None:
        """The other workers continue without this one."""
        self._missed = self._missed or self._came_later or "the other workers continued without this one"

    def missed_steps_error(self) -> NotResumed:
        """No optimizer is set on the servers, so they do not have what the missed steps have changed."""
        return NotResumed(
            f"{self._missed}, and kv.steps skips the steps that were made without it. But no optimizer is set on the "
            f"servers: what those steps have changed, such as the weights, is in the memory of the workers that made "
            f"them, and this process does not have it. Let the servers update the weights (kv.set_optimizer). With "
            f"kvd.torch, loop over optimizer.steps(total), which gets the state from another worker. Or load the state "
            f"before the first step that the loop gives from a checkpoint of your own, and say so with "
            f"kv.steps(total, restored=True). A program that begins again calls kv.resume() before the loop"
        )

    def enter(self, step: int) -> None:
        """Begins a step of the open loop."""
        self._is_redoing = self._is_behind
        self._is_behind = False
        self.place = place_of(self._kind, self._first + step)
        self._pushed, self._broadcast = set(), set()

    @property
    def counts_whole(self) -> bool:
        """Whether the present step is the one in which the predecessor stopped, and all of its pushes count: those of
        every key that the loop lists, in every slice. The keys are known."""
        stopped = self._predecessor.place
        if not self._is_redoing or self.place != stopped or kind_of(stopped) is not PlaceKind.STEP:
            return False
        left = [self._predecessor.left(name) for name in self._listed or ()]
        return bool(left) and all(
            each is not None and each.place == stopped and each.counted > each.begun for each in left
        )

    def pass_over(self) -> None:
        """The present step, which has not pushed anything here, counts as a whole, and is not made again.

        Raises:
            NotAllowed: it does not count as a whole, or has pushed.
        """
        if not self.counts_whole or self._pushed or self._broadcast:
            raise NotAllowed("only a step whose pushes count already, and that has pushed nothing, is passed over")
        self._pushed = set(self._listed or ())

    def leave_out(self) -> None:
        """The others make the present step without this worker, which has not pushed anything in it."""
        self._pushed = set(self._listed or ())

    def leave(self) -> None:
        """The present step, if there is one, is done.

        Raises:
            NotAllowed: a key was not pushed in it.
        """
        if kind_of(self.place) is PlaceKind.OUTSIDE:
            return
        if self._listed is None:
            self._listed = frozenset(self._pushed)
        missing = sorted(set(self._listed) - self._pushed)
        if missing:
            step = step_of(self.place) - self._first
            raise NotAllowed(
                f"step {step} of kv.steps has not pushed {_list(missing)}: each step pushes each key of the loop once "
                f"(keys=…, or those that its first step pushes)",
                key=missing[0],
            )
        self._is_redoing = False

    @property
    def is_past(self) -> bool:
        """Whether the predecessor came further than the end of the last loop, so that the state there is nobody's."""
        return self._is_behind and self._predecessor.place > place_of(PlaceKind.OUTSIDE, self._end)

    def end(self) -> None:
        """Closes the loop, or gives it up."""
        if self.is_inside:
            self.is_inside = self._is_redoing = False
            self.place = place_of(PlaceKind.OUTSIDE, self._end)
            self._listed, self._pushed, self._broadcast = None, set(), set()

    # ── points ──

    def check_may_stand_by(self) -> None:
        """Raises NotAllowed within a loop."""
        if self.is_inside:
            raise NotAllowed(
                "join(until=…) comes after a loop over kv.steps, not in it: leave the loop first (break ends it, "
                "unless a variable holds it: close it then)"
            )

    @property
    def is_at_news(self) -> bool:
        """Whether the program is, outside of loops, at a place that its predecessor has not come to."""
        return self._loops > 0 and not (self._is_behind and self._predecessor.place >= self.place)

    def go_on_at(self, steps: int) -> None:
        """The next loop begins with this step, among those of all loops: another worker has made so many."""
        self.check_may_stand_by()
        if steps > self._end and self._is_strict:  # in others each makes the steps of its own
            self._missed = self._missed or "the other workers made more steps than this one before they all met"
        self._end = max(self._end, steps)
        self.place = place_of(PlaceKind.OUTSIDE, self._end)

    def check_may_resume(self) -> None:
        """Raises NotAllowed within a loop."""
        if self.is_inside:
            raise NotAllowed("a loop over kv.steps goes on by itself: call resume or rewind before it")

    def resume(self) -> None:
        """The program has said where it goes on: whatever came before, its loops begin with their first steps."""
        self._is_behind = False
        self._restored = Restored()
        self._missed = ""

    # ── snapshots ──

    def check_may_restore(self) -> None:
        """Raises NotAllowed after the first loop has begun."""
        if self._loops:
            raise NotAllowed("restore comes before the first loop over kv.steps, instead of init and set_optimizer")

    def restored(self, steps: int, *, begins_past: bool = False) -> None:
        """The store has the values after this many steps of all loops: they are not made again.

        Args:
            begins_past: neither is what the program does before its first loop. It does not know of the restore.
        """
        self._restored = Restored(steps, begins_past)

    @property
    def restored_steps(self) -> int:
        """How many steps of all loops were made before the snapshot that was restored."""
        return self._restored.steps

    def boundary(self) -> Boundary:
        """Where the program is, for a snapshot. After it, the present step pushes nothing that it has not pushed yet.

        Raises:
            NotAllowed: in the midst of a step.
        """
        if not self.is_inside:
            return Boundary(self._end if self._loops else self._restored.steps, self.is_before_restored)
        self.check_together("a snapshot")
        if not self._pushed:
            return Boundary(step_of(self.place), False)
        if self._listed is None:
            self._listed = frozenset(self._pushed)
        missing = sorted(set(self._listed) - self._pushed)
        if missing:
            raise NotAllowed(
                f"step {step_of(self.place) - self._first} of kv.steps has yet to push {_list(missing)}: call snapshot "
                f"before the pushes of a step, or after them"
            )
        return Boundary(step_of(self.place) + 1, False)

    @property
    def is_before_restored(self) -> bool:
        """Whether the program comes, between its loops, to a place that lies before the snapshot."""
        return (
            (self._loops > 0 or self._restored.begins_past) and not self.is_inside and self._end < self._restored.steps
        )

    @property
    def steps_made(self) -> int:
        """How many steps of all loops are made once the present one is; outside of loops: have been made."""
        return step_of(self.place) + 1 if kind_of(self.place) is not PlaceKind.OUTSIDE else self._end

    @property
    def begun_loops(self) -> int:
        """How many loops have begun."""
        return self._loops

    # ── what a step pushes ──

    def take_pushes(self, names: Iterable[str]) -> bool:
        """These keys are about to be pushed. False: the predecessor has done that, so there is nothing to push.

        Raises:
            NotAllowed: the step may not push one of them.
            NotResumed: nobody knows whether the predecessor has made this push.
        """
        wanted = dict.fromkeys(names)
        if not self.is_inside:
            return self._take_outside(wanted)
        for name in wanted:
            self._check_in_step(name)
        self._pushed.update(wanted)
        return True

    def give_back(self, names: Iterable[str]) -> None:
        """What `take_pushes` let through was not pushed after all."""
        self._pushed.difference_update(names)

    def take_broadcasts(self, names: Iterable[str]) -> Replay:
        """These keys are about to be broadcast.

        Raises:
            NotAllowed: the step may not broadcast one of them.
        """
        if not self.is_inside:
            return self._broadcast_outside()
        self.check_together("a broadcast")
        for name in names:
            if name in self._pushed or name in self._broadcast:
                raise NotAllowed(
                    f"key {name!r} is broadcast and pushed, or broadcast twice, in one step of kv.steps: a restarted "
                    f"worker could not make that step again; broadcast it before the loop",
                    key=name,
                )
        self._broadcast.update(names)
        return Replay.NEW

    def check_together(self, what: str) -> None:
        """Raises NotAllowed in a shared step: one worker makes it, so the others are not there."""
        if self.is_shared:
            raise NotAllowed(
                f"{what} takes all workers, and a step of kv.steps(…, shared=True) is made by one of them: call it "
                f"before the loop or after it"
            )

    def _broadcast_outside(self) -> Replay:
        stopped = self._predecessor.place
        if self.is_before_restored:
            return Replay.PASSED
        if not self._has_predecessor or self.place > stopped:
            return Replay.NEW
        if self.place == stopped and (self._is_behind or stopped == START):  # even if the program has called rewind
            return Replay.PERHAPS
        return Replay.PASSED if self._is_behind else Replay.NEW

    def _take_outside(self, names: Iterable[str]) -> bool:
        if self.is_before_restored:
            return False
        if not self._is_behind:
            return True
        stopped = self._predecessor.place
        if self.place < stopped:
            return False
        if self.place == stopped and self._predecessor.trained and self._is_strict:
            name = next(iter(names), "")
            if self._predecessor.is_new:
                raise NotResumed(
                    f"this worker came when the job was under way, and pushes {name!r}, which others have pushed "
                    f"already. Write the training as{LINES}or call kv.resume() to take part from the next rounds on",
                    key=name,
                )
            raise NotResumed(
                f"this worker was restarted, and pushes {name!r} again; pushes of its predecessor have counted, and "
                f"nobody knows which this is. Write the training as{LINES}or call kv.rewind(step) before it. "
                "kv.resume() is right only if all workers start again together, from a checkpoint of their own",
                key=name,
            )
        return True

    def _check_in_step(self, name: str) -> None:
        if kind_of(self.place) is PlaceKind.OUTSIDE:
            raise NotAllowed(f"key {name!r} is pushed before the first step of kv.steps has begun", key=name)
        if self._listed is not None and name not in self._listed:
            raise NotAllowed(
                f"key {name!r} is not one of the keys of this loop over kv.steps ({_list(sorted(self._listed))}): "
                f"name it in keys=…, push it in the first step, or outside of the loop",
                key=name,
            )
        if name in self._pushed:
            raise NotAllowed(
                f"key {name!r} is pushed twice in one step of kv.steps: add the values first, or make two steps",
                key=name,
            )
        if name in self._broadcast:
            raise NotAllowed(
                f"key {name!r} is broadcast and pushed in one step of kv.steps: a restarted worker could not make that "
                f"step again; broadcast it before the loop",
                key=name,
            )
        if self._is_redoing:
            step = step_of(self.place)
            self._check_left(name, self._pushed | {name}, self._kind, self._first, step - self._first)

    # ── can the predecessor be continued? ──

    def _check_left(self, name: str, others: Iterable[str], kind: PlaceKind, begin: int, step: int) -> None:
        """Raises NotAllowed if the predecessor has left this key where no predecessor in the same loop would.

        Args:
            others: keys to compare it with.
            begin: the number of the loop's first step.
            step: the one that the predecessor stopped in, counted from there.
        """
        if not (self._is_behind or self._is_redoing) or kind is not PlaceKind.STEP:
            return
        stopped = self._predecessor.place
        left = self._predecessor.left(name)
        if left is None:
            return
        if kind_of(stopped) is PlaceKind.STEP:
            before = place_of(PlaceKind.STEP, step_of(stopped) - 1)
            is_first = begin + step <= max(begin, self._restored.steps)  # of the loop, in this job
            if not is_first and step_of(stopped) == begin + step and left.place not in (stopped, before):
                raise NotAllowed(
                    f"the keys are at different clocks: the predecessor of this worker stopped in step {step}, and its "
                    f"last push of {name!r} ({left.counted} count) was not made in that step or the one before. Run "
                    f"the same program again, or go on from a checkpoint and call kv.resume() first",
                    key=name,
                )
        elif self._is_strict and self._predecessor.trained and step_of(stopped) == begin:
            counts = {other: self._made_there(other) for other in others}
            if len({count for count in counts.values() if count is not None}) > 1:
                shown = ", ".join(f"{count} of {other!r}" for other, count in counts.items() if count is not None)
                raise NotAllowed(
                    f"the keys are at different clocks: the predecessor of this worker stopped outside of a loop over "
                    f"kv.steps, and of its pushes there count {shown}. Nobody knows which are missing: go on from a "
                    f"checkpoint, and call kv.resume() first",
                    key=name,
                )

    def _made_there(self, name: str) -> int | None:
        left = self._predecessor.left(name)
        return None if left is None else left.counted - min(left.begun, left.counted)

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        step = step_of(self.place)
        if self.is_inside:
            assert self._first <= step <= self._end, f"step {step} lies outside of its loop"
        else:
            assert self._listed is None, "keys are listed outside of loops"
            assert not self._pushed | self._broadcast, "a step is open outside of loops"
            assert self.place == place_of(PlaceKind.OUTSIDE, self._end), f"place {self.place} is not the end of a loop"


def _list(names: Collection[str]) -> str:
    """A few of the names, for a text."""
    shown = ", ".join(repr(name) for name in list(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
