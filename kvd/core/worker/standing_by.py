"""A worker waits at a point until all have come there, and the rounds go on without it meanwhile.

When all have come, the scheduler lets all take part again in one view, and tells each. Then, in an order in which no
round can close without one of them:

1. The worker has that view itself.
2. It tells the leaders of all partitions (StepInto). Each answers once it knows that view, too, and so waits for all
   workers; the rounds that the worker has missed are not its own. It is only asked (WhereAre) if this program has
   missed none: the one before it had come here.
3. It asks for the clocks of its keys. With a bounded staleness, where each worker has clocks of its own and goes on
   with those of the farthest, all wait for each other once more.
4. It tells the servers where its program is now (ComeTo): a successor then knows that the point is passed.

A worker that was lost comes here as well, and is told with which step the others go on; it takes no part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.places import PlaceKind, place_of
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.clocks import WorkerClocks
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.core.worker.keys import KeyState, KeyTable
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.predecessor import Predecessor
from kvd.errors import BarrierBroken, KeyNotFound, KvdError, NotAllowed
from kvd.protocol.messages import (
    ComeTo,
    Enter,
    Epoch,
    ErrorCode,
    MemberState,
    Refused,
    StandBy,
    Standing,
    StepInto,
    Together,
    WhereAre,
)


class StandingBy:
    """Carries out StandBy, one at a time."""

    def __init__(
        self,
        session: SchedulerSession,
        keys: KeyTable,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        participation: Participation,
        clocks: WorkerClocks,
        predecessor: Predecessor,
    ) -> None:
        self._session = session
        self._view = session.view
        self._keys = keys
        self._asker = asker
        self._calls = calls
        self._pushes = pushes
        self._participation = participation
        self._clocks = clocks
        self._predecessor = predecessor
        self._call: InFlight | None = None  # that waits
        self._said: StandBy | None = None  # where it waits: the scheduler may forget it
        self._generations: dict[str, int] = {}  # by name: the one that comes next
        self._passed: list[StandBy] = []  # the points that this program has passed, for a scheduler without its record
        self._told_generation = 0  # the start of the scheduler that knows them
        self._lacking: tuple[Epoch, Callable[[], None]] | None = None  # the view that it waits for, and what comes then

    # ── to the point ──

    def stand_by(self, call: InFlight, request: requests.StandBy) -> None:
        """Completes the call with the number of steps after which all go on."""
        part = self._participation
        if self._pushes or self._call is not None:
            text = "join(until=…) while pushes are under way, or in two threads at once: call flush first"
            self._calls.complete(call, error=NotAllowed(text))
            return
        if not (part.in_rounds or part.is_apart or part.point is not None):
            self._calls.complete(call, error=NotAllowed("this worker has left the rounds for good (join or close)"))
            return
        generation = self._generations.get(request.name, 0)
        is_past = self._predecessor.place > place_of(PlaceKind.OUTSIDE, request.steps)
        standing = Standing.ASKS if is_past else Standing.WAITS
        said = StandBy(0, request.name, generation, request.steps, standing)
        was_in = part.in_rounds
        if not is_past:
            self._said = said
            part.stand_by(request.name.partition(":")[2])
        self._call = call
        call.hold(self._given_up)
        self._asker.ask(call, SCHEDULER, said, partial(self._answered, call, request, said, was_in))

    def _given_up(self, call: InFlight) -> None:
        """The caller waits no more. The worker still stands by."""
        self._call = None
        self._lacking = None

    def _answered(
        self, call: InFlight, request: requests.StandBy, said: StandBy, was_in: bool, event: Received
    ) -> None:
        error = self._asker.error_of(event)
        message = event.message
        if error is not None or not isinstance(message, Together):
            if was_in and not isinstance(error, BarrierBroken):  # the scheduler has not let it stand by
                self._said = None
                self._participation.come_together()
            self._end(call, error=error)
            return
        self._said = None
        then = partial(self._go_on, call, said, message)
        if self._view.epoch < event.epoch:
            self._lacking = (event.epoch, then)
        else:
            then()

    # ── all have come ──

    def _go_on(self, call: InFlight, said: StandBy, together: Together) -> None:
        place, stopped = place_of(PlaceKind.OUTSIDE, together.steps), self._predecessor.place
        if self._participation.is_apart or stopped > place:
            self._passed_by(call, said, together)
        elif stopped == place and not together.waited:
            self._ask_leaders(call, WhereAre(0, True), partial(self._level, call, said, together))
        elif self._view.is_sync or self._view.settings.staleness >= 0:
            self._ask_leaders(call, StepInto(0, 0, 0), partial(self._take_clocks, call, said, together))
        else:
            self._come_to(call, said, together)

    def _ask_leaders(self, call: InFlight, message: WhereAre | StepInto | ComeTo, then: Callable[[], None]) -> None:
        leaders = [self._asker.to_leader(partition, message) for partition in self._view.partition_numbers()]

        def answered(answers: list[Received], error: KvdError | None) -> None:
            for event in answers:
                refused = event.message
                if isinstance(refused, Refused) and refused.error is ErrorCode.NOT_ALLOWED and self._view.is_sync:
                    self._participation.left_out(event.epoch)  # it was lost meanwhile
            if error is None or self._participation.is_apart:
                then()
            else:
                self._end(call, error=error)

        self._asker.ask_all(call, leaders, answered)

    def _take_clocks(self, call: InFlight, said: StandBy, together: Together) -> None:
        ready = [key for key in self._keys.by_name.values() if key.state is KeyState.READY]
        left = len(ready)
        failed: KvdError | None = None

        def taken(error: KvdError | None) -> None:
            nonlocal left, failed
            left -= 1
            if error is not None and not isinstance(error, KeyNotFound):  # one that was deleted meanwhile
                failed = failed or error
            if left > 0 or call.state is COMPLETED:
                return
            if failed is not None and not self._participation.is_apart:
                self._end(call, error=failed)
            else:
                self._level(call, said, together)

        for key in ready:
            self._clocks.take_again(key, taken)
        if not ready:
            self._level(call, said, together)

    def _level(self, call: InFlight, said: StandBy, together: Together) -> None:
        """In async mode nobody pushes before all have the clocks of the farthest."""
        if self._view.is_sync or self._view.settings.staleness < 0:
            self._come_to(call, said, together)
            return

        name = f"level:{said.name.partition(':')[2]}"  # as long as the name of the point

        def met(event: Received) -> None:
            error = self._asker.error_of(event)
            if error is None:
                self._come_to(call, said, together)
            else:
                self._end(call, error=error)

        self._asker.ask(call, SCHEDULER, Enter(0, name, said.generation), met)

    def _come_to(self, call: InFlight, said: StandBy, together: Together) -> None:
        """If no other worker has made more steps, the program is where it has said that it is; and a program that was
        here before may have pushed since."""
        place = place_of(PlaceKind.OUTSIDE, together.steps)
        if together.steps <= said.steps or self._predecessor.place == place or self._participation.is_apart:
            self._passed_by(call, said, together)
            return
        self._ask_leaders(call, ComeTo(0, place), partial(self._passed_by, call, said, together))

    def _passed_by(self, call: InFlight, said: StandBy, together: Together) -> None:
        self._generations[said.name] = said.generation + 1
        self._passed.append(StandBy(0, said.name, said.generation, together.steps, Standing.KNOWS))
        self._participation.come_together()
        self._end(call, max(said.steps, together.steps))

    def _end(self, call: InFlight, result: int | None = None, error: KvdError | None = None) -> None:
        self._call = None
        call.let_go()
        self._calls.complete(call, result, error)

    # ── the view ──

    def view_changed(self) -> None:
        """Goes on if the view is there that was missing. Tells a scheduler that was restarted what it may have lost."""
        if not self._session.joined or self._session.is_closed or self._participation.is_observer:
            return
        if self._lacking is not None and self._view.epoch >= self._lacking[0]:
            _, then = self._lacking
            self._lacking = None
            then()
        generation = self._view.epoch.generation
        before, self._told_generation = self._told_generation, generation
        if before not in (0, generation):
            self._tell(list(self._passed))
        if self._call is None and self._said is not None and self._is_taken_for_active():
            self._asker.ask(None, SCHEDULER, self._said, lambda event: None)

    def _is_taken_for_active(self) -> bool:
        """Whether the scheduler has forgotten that this worker stands by, or has let all go on since."""
        member = self._view.worker(self._session.rank)
        return member is not None and member.state is MemberState.ACTIVE

    def _tell(self, points: list[StandBy]) -> None:
        """One after the other, the latest first: somebody may wait there."""
        if points:
            latest = points.pop()
            self._asker.ask(None, SCHEDULER, latest, lambda event: self._tell(points))
