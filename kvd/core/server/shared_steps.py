"""The steps that all workers of an asynchronous store share (`kv.steps(…, shared=True)`), given out one by one.

The server of rank 0 gives them out. A number lives as long as the keys that its step is pushed to, which a scheduler's
record would outlive; and giving one out costs a message to a server that a worker talks to anyway, where a scheduler
would have to write its record first. A worker reports a step as done when its pushes have counted. The step of a worker
that died is given to the next one that asks, or to its successor if that asks first. A step that two workers make after
all counts once per slice (`kvd.core.server.counted_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvd.core.machine import Received
from kvd.core.membership import ViewState, name_of
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.participants import Participants
from kvd.core.server.records import Records
from kvd.protocol.messages import NO_STEP, Done, ErrorCode, HeldStep, HoldLoop, Rest, StepIs, StepsLeft, TakeStep

MAX_LOOPS = 4096  # of one run


@dataclass(slots=True)
class SharedLoop:
    """The steps of one loop, from 0 to `total` - 1.

    Invariants, checked by `validate`:
        a number that was given out is done, held by one worker, or returned.
    """

    total: int
    opened_by: int  # the rank whose number counts
    given: int = 0  # numbers below this were given out at least once
    held: dict[int, int] = field(default_factory=dict)  # rank → the step that it makes
    returned: set[int] = field(default_factory=set)  # steps whose workers died

    def take(self, rank: int, done: int) -> tuple[StepsLeft, int]:
        """The step that this rank makes next, after `done`; the same again until that is done."""
        if done != NO_STEP:
            self.returned.discard(done)
            if self.held.get(rank) == done:
                del self.held[rank]
        step = self.held.get(rank, NO_STEP)
        if step == NO_STEP and self.returned:
            step = min(self.returned)
            self.returned.remove(step)
        elif step == NO_STEP and self.given < self.total:
            step = self.given
            self.given += 1
        if step != NO_STEP:
            self.held[rank] = step
            return StepsLeft.SOME, step
        return (StepsLeft.OTHERS if self.held else StepsLeft.NONE), NO_STEP

    def give_back(self, gone: Collection[int]) -> None:
        """The workers of these ranks are dead, or have left."""
        for rank in gone:
            step = self.held.pop(rank, NO_STEP)
            if step != NO_STEP:
                self.returned.add(step)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        open_steps = [*self.held.values(), *self.returned]
        assert len(set(open_steps)) == len(open_steps), f"a step is given out twice: {self}"
        assert all(0 <= step < self.given for step in open_steps), f"a step is held that was not given out: {self}"
        assert self.given <= self.total, f"more steps than there are: {self}"


class SharedSteps:
    """Answers TakeStep and Rest. `advance_all` closes the rounds that no longer wait for a worker that rests."""

    def __init__(
        self,
        view: ViewState,
        effects: ServerEffects,
        attachments: Attachments,
        participants: Participants,
        records: Records,
        advance_all: Callable[[], None],
    ) -> None:
        self._view = view
        self._effects = effects
        self._attachments = attachments
        self._participants = participants
        self._records = records
        self._advance_all = advance_all
        self._loops: dict[int, SharedLoop] = {}  # by the number of the first step among those of all loops

    def take(self, event: Received, message: TakeStep) -> None:
        rank = self._rank_of(event, message.request)
        if rank is None:
            return
        loop = self._loops.get(message.first)
        if loop is None:
            if len(self._loops) >= MAX_LOOPS:
                text = f"a program has at most {MAX_LOOPS} loops over shared steps"
                self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text)
                return
            loop = self._loops[message.first] = SharedLoop(message.total, rank)
        if loop.total != message.total:
            text = (
                f"{name_of('worker', rank)} shares {message.total} steps, {name_of('worker', loop.opened_by)} "
                f"{loop.total}: all workers call kv.steps(…, shared=True) with the same number"
            )
            self._effects.refuse(event.peer, message.request, ErrorCode.NOT_ALLOWED, text)
            return
        left, step = loop.take(rank, message.done)
        held_by = tuple(sorted(loop.held)) if left is StepsLeft.OTHERS else ()
        answer = StepIs(message.request, left, step, held_by)
        partition = self._view.shards[0]
        records = [(partition, self._record(message.first, loop))] if self._records.is_held(partition) else []
        self._records.hold_in(records, lambda: self._effects.send(event.peer, answer))

    # ── other servers ──

    def _record(self, first: int, loop: SharedLoop) -> HoldLoop:
        held = tuple([HeldStep(rank, step) for rank, step in sorted(loop.held.items())])
        partition = self._view.shards[0]
        returned = tuple(sorted(loop.returned))
        return HoldLoop(0, partition, first, loop.total, loop.opened_by, loop.given, held, returned)

    def records(self, partition: int) -> list[HoldLoop]:
        """What the backup of this partition is told of all loops."""
        is_here = bool(self._view.shards) and self._view.shards[0] == partition
        return [self._record(first, loop) for first, loop in self._loops.items()] if is_here else []

    def take_over(self, loops: Iterable[HoldLoop]) -> None:
        """This server leads the partition of the loops now."""
        for told in loops:
            loop = self._loops[told.first] = SharedLoop(told.total, told.opened_by, told.given)
            loop.held = dict(told.held)
            loop.returned = set(told.returned)
        self.view_changed()

    def drop_partition(self, partition: int) -> None:
        """Another server leads it now."""
        if self._view.shards and self._view.shards[0] == partition:
            self._loops.clear()

    def rest(self, event: Received, message: Rest) -> None:
        """The worker has no step to make: until it pushes again, no other is too far ahead of it."""
        rank = self._rank_of(event, message.request)
        if rank is None:
            return
        self._participants.rest(rank)
        self._advance_all()
        self._effects.send(event.peer, Done(message.request))

    def _rank_of(self, event: Received, request: int) -> int | None:
        """The rank of the sender; None if it was answered here."""
        rank = self._attachments.rank_of(event, request)
        if rank is not None and self._view.is_sync:
            text = "workers share steps in asynchronous stores only: in rounds each makes every step"
            self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, text)
            return None
        return rank

    def view_changed(self) -> None:
        """The steps of those who are gone are given out again."""
        active = set(self._view.required_ranks()) - self._view.dead_workers().keys()
        for loop in self._loops.values():
            loop.give_back([rank for rank in loop.held if rank not in active])

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for loop in self._loops.values():
            loop.validate()
