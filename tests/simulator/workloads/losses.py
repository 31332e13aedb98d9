"""Losses: the others go on without a worker that died or was paused, and it takes part again in a later step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvd.core.requests import ClockOf, Depart, Flush, Loop, Return, TakePartAgain, Transfer, UncountedVersions
from kvd.core.worker.return_pause import ReturnPause
from kvd.core.worker.step_loops import StepLoops
from kvd.errors import KvdError
from kvd.optimizer import SGD
from kvd.protocol.messages import Departure
from tests.simulator.process import Coroutine, PendingCall, Process, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.ledger import Ledger
from tests.simulator.workloads.steps import MAX_ATTEMPTS, RETRY_S, enter_with, insist

RETURN_S = 0.1


@dataclass
class LossLedger(Ledger):
    """With the merge "mean", the push of (rank, step) leaves 1/k in its own place if k pushes were in its round: those
    of one step add up to 1, so all that are in one round are of one step, and none counts twice.

    Attributes:
        least: how many workers have pushed for each round, or came in after it.
        lost: how many pushes did not count.
        returns: how many times a worker took part again.
    """

    pace_s: float = 0.7
    size: int = 2048  # two full slices
    least: int = 0  # a step is nobody's whose only worker dies in it while another comes back
    lost: int = 0
    returns: int = 0
    came_into: set[tuple[int, int]] = field(default_factory=set)  # steps, and the ranks that took part again from there

    def program(self, me: Me) -> Coroutine:
        self.watch(me.world)
        yield from enter_with(me, self.keys, self.make, SGD(learning_rate=1.0))
        loops = StepLoops(me.machine.stopped(), is_strict=True)
        yield from self.train(me, loops, ReturnPause(me.machine.view), self.steps)
        yield Flush()
        yield Depart(Departure.DONE)

    def train(self, me: Me, loops: StepLoops, pause: ReturnPause, total: int) -> Coroutine:
        """A loop of `total` steps, in which the worker takes part again if it was lost."""
        step: int | None = loops.begin(total, self.keys)
        while step is not None and step < total:
            if me.machine.is_apart:
                step = yield from self.come_back(me, loops, pause, total)
                continue
            loops.enter(step)
            yield from self.push_all(me, loops, loops.first + step)
            yield from self.pushed(me, loops, step)
            loops.leave()
            loops.validate()
            if self.leaves(me, step):
                break
            yield Sleep(self.computes_s(me.rank, step))
            step += 1
        loops.end()

    def pushed(self, me: Me, loops: StepLoops, step: int) -> Coroutine:
        """What a kind of ledger does in a step after its pushes."""
        yield from ()

    def leaves(self, me: Me, step: int) -> bool:
        """Whether the worker leaves after this step."""
        return False

    def computes_s(self, rank: int, step: int) -> float:
        """How long the worker computes after this step: some push long before others do."""
        return self.pace_s * ((7 * step + 3 * rank) % 5)

    def push_all(self, me: Me, loops: StepLoops, step: int) -> Coroutine:
        place = self.place(me, step + 1)
        calls = []
        for key in self.keys:
            loops.take_pushes([key])
            self.note(key, place, "begun")
            call = yield from self.begin(me, self.push((key,), place, loops.place))
            self._pushes[call] = ((key,), place)
            calls.append(call)
        for call in calls:
            with suppress(KvdError):
                yield call

    def begin(self, me: Me, push: Transfer) -> Generator[Any, Any, PendingCall]:
        """Starts a push, again if it is refused before it has begun; the pushes of a worker that is apart never do."""
        name = ClockOf(push.items[0].key)
        before = yield from insist(name)
        for _ in range(MAX_ATTEMPTS):
            call = yield Start(push)
            assert isinstance(call, PendingCall)
            if (yield from insist(name)) > before or (call.done and call.error is None):
                return call
            yield Sleep(RETRY_S)
        raise AssertionError(f"a push of {name.key!r} does not begin: {call.error}")

    def come_back(self, me: Me, loops: StepLoops, pause: ReturnPause, total: int) -> Generator[Any, Any, int | None]:
        """The step of the loop with which the worker goes on; None: the others are past the loop."""
        stays_s = pause.next_s(loops.place)
        while stays_s > 0 and not pause.is_needed:
            yield Sleep(RETURN_S)
            stays_s -= RETURN_S
        while True:
            yield Flush()
            returned = yield from insist(TakePartAgain(Loop(loops.first, loops.first + total)))
            if returned.how is Return.NOW:
                self.returns += 1
                pause.came_into(returned.step)
                self.came_into.add((returned.step, me.rank))
                return int(returned.step) - loops.first
            if returned.how is Return.OVER:
                return None
            yield Sleep(RETURN_S)

    def ended(self, world: World, process: Process, call: PendingCall) -> None:
        keys, place = self._pushes.get(call, ((), 0))
        if keys and call.error is None and isinstance(call.result, UncountedVersions):
            self.lost += 1
            self.note(keys[0], place, "uncounted")
        else:
            super().ended(world, process, call)

    def check_acked(self, world: World, process: Process, key: str, place: int) -> None:
        if not all(self.reaches_all(world, key, each, lambda value: value > 0) for each in self.both(place)):
            world.fail(f"{process.name} has an ack for a push to place {place} of {key!r}, which is not there")

    def both(self, place: int) -> tuple[int, int]:
        """Where a push leaves something in each of the two slices."""
        return place, self.size - 1 - place

    def check(self, world: World) -> None:
        for key in self.keys:
            value = self.value(world, key)
            for step in range(self.steps):
                places = [rank * self.steps + step for rank in range(self.workers)]
                for slice_index in range(2):
                    given = [float(value[self.both(place)[slice_index]]) for place in places]
                    counted = [part for part in given if part]
                    came_later = [rank for rank in range(self.workers) if (step + 1, rank) in self.came_into]
                    is_small = len(counted) + len(came_later) < self.least
                    if is_small or any(abs(part - 1 / len(counted)) > 1e-6 for part in counted):
                        world.fail(f"the pushes of step {step} of {key!r} left {given} in slice {slice_index}")
                for place in places:
                    self.check_place(world, key, place, [float(value[each]) > 0 for each in self.both(place)])

    def check_place(self, world: World, key: str, place: int, there: list[bool]) -> None:
        outcomes = self.outcomes.get((key, place), set())
        is_wrong = (
            ("acked" in outcomes and not all(there))
            or (outcomes == {"begun", "uncounted"} and all(there))
            or (outcomes <= {"begun", "not_sent"} and any(there) and "begun" not in outcomes)
        )
        if is_wrong:
            world.fail(f"place {place} of {key!r}, {sorted(outcomes)}, is there in slices {there}")
