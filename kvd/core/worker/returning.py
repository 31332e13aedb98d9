"""A worker takes part again that was lost or late, since the others went on without it; or for the first time, if it
came when the job was under way.

It does so in an order in which nobody can miss anything:

1. It asks where the others are. In a loop over steps it waits until they are past the loop's first step, so that every
   key of the loop has been pushed at a known step.
2. It tells the scheduler (TakePart), which saves and announces it: from now on no round closes without this worker.
3. It asks the servers again. Each answers once its own view says so: what it says cannot be overtaken any more.
4. It tells the servers from which step on it pushes (StepInto): they let go of the rounds before that one.
5. It asks for the clocks that it has in the keys now, and tells the scheduler that it has arrived, and at which step:
   nobody waits for it at barriers of earlier ones. Until then, a successor of it begins at 1: it would not know where
   the rounds are either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.membership import TAKING_PART
from kvd.core.places import START, PlaceKind, kind_of, place_of, step_of
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.clocks import WorkerClocks
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.core.worker.keys import KeyState, KeyTable, WorkerKey
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers
from kvd.errors import KvdError, NotAllowed
from kvd.protocol.messages import MemberState, StepInto, TakePart, Taking, TheyAre, WhereAre


class _Whereabouts(NamedTuple):
    """The newest place at which any worker has pushed, and the newest of this one."""

    place: int
    own: int


Then = Callable[[_Whereabouts], None]


class Returning:
    """Carries out TakePartAgain, one at a time."""

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        keys: KeyTable,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        participation: Participation,
        clocks: WorkerClocks,
    ) -> None:
        self._session = session
        self._view = session.view
        self._servers = servers
        self._keys = keys
        self._asker = asker
        self._calls = calls
        self._pushes = pushes
        self._participation = participation
        self._clocks = clocks

    def take_part_again(self, call: InFlight, request: requests.TakePartAgain) -> None:
        """Completes the call with a Returned."""
        call.start()
        if not self._participation.is_apart:
            self._calls.complete(call, requests.Returned(requests.Return.NOT_LOST))
        elif self._pushes or self._participation.is_returning:
            text = "this worker cannot take part again while pushes are under way, or twice at once: call flush first"
            self._calls.complete(call, error=NotAllowed(text))
        elif request.loop is None or self._is_alone():
            self._tell_scheduler(call, request)
        else:
            self._where_are(call, lambda where: self._found(call, request, where), frozen=False)

    # ── 1: where are the others? ──

    def _found(self, call: InFlight, request: requests.TakePartAgain, where: _Whereabouts) -> None:
        early = self._too_early_or_late(request, where.place)
        if early is None:
            self._tell_scheduler(call, request)
        else:
            self._calls.complete(call, requests.Returned(early))

    @staticmethod
    def _too_early_or_late(request: requests.TakePartAgain, place: int) -> requests.Return | None:
        """Why a worker in this loop cannot take part now, if the others are at this place."""
        if request.loop is None:
            return None
        if step_of(place) >= request.loop.end:
            return requests.Return.OVER
        is_inside = kind_of(place) is PlaceKind.STEP and step_of(place) > request.loop.first
        return None if is_inside else requests.Return.LATER

    def _is_alone(self) -> bool:
        """Whether no other worker takes part: there is nobody to keep step with. A dead one that is not lost does: the
        rounds wait for it."""
        others = [
            member.state
            for member in self._view.members.values()
            if member.role == "worker" and member.rank != self._session.rank
        ]
        return not any(state in (*TAKING_PART, MemberState.DEAD) for state in others)

    def _where_are(self, call: InFlight, then: Then, *, frozen: bool) -> None:
        def answered(answers: list[Received], error: KvdError | None) -> None:
            if error is not None:
                self._failed(call, error)
            else:
                told = [event.message for event in answers if isinstance(event.message, TheyAre)]
                then(_Whereabouts(max(each.place for each in told), max(each.own for each in told)))

        self._ask_leaders(call, WhereAre(0, frozen), answered)

    def _ask_leaders(
        self, call: InFlight, message: Any, then: Callable[[list[Received], KvdError | None], None]
    ) -> None:
        leaders = [self._asker.to_leader(partition, message) for partition in self._view.partition_numbers()]
        self._asker.ask_all(call, leaders, then)

    # ── 2, 3: the rounds wait for this worker ──

    def _tell_scheduler(self, call: InFlight, request: requests.TakePartAgain) -> None:
        is_alone = self._is_alone()
        self._participation.begin_return()
        call.hold(self._given_up)

        def answered(event: Received) -> None:
            error = self._asker.error_of(event)
            if error is not None:
                self._failed(call, error)
            elif event.epoch > self._view.epoch:  # the view that says so is on its way: servers would not believe it
                self._asker.ask(call, SCHEDULER, TakePart(0, Taking.IN), answered)
            else:
                self._participation.awaited_since(event.epoch)
                self._where_are(call, lambda where: self._frozen(call, request, where, is_alone=is_alone), frozen=True)

        self._asker.ask(call, SCHEDULER, TakePart(0, Taking.IN), answered)

    def _frozen(self, call: InFlight, request: requests.TakePartAgain, where: _Whereabouts, *, is_alone: bool) -> None:
        """The next step is one that nobody has begun, this worker included: a push of its own that did not count may
        still be on its way."""
        loop = request.loop
        if loop is None:
            self._step_into(call, StepInto(0, 0, 0), START)
            return
        early = self._too_early_or_late(request, where.place)
        if early is requests.Return.OVER or (early is not None and not (is_alone and self._is_alone())):
            self._participation.step_out()
            self._calls.complete(call, requests.Returned(early))
            return
        begun = [step_of(place) for place in where if kind_of(place) is PlaceKind.STEP]
        step = max(loop.first - 1, *begun, -1) + 1
        into = StepInto(0, loop.first, step, is_past_loop=step >= loop.end)
        self._step_into(call, into, place_of(PlaceKind.OUTSIDE, step))

    # ── 4, 5: from which step, under which clocks ──

    def _step_into(self, call: InFlight, into: StepInto, place: int) -> None:
        def answered(answers: list[Received], error: KvdError | None) -> None:
            if error is not None:
                self._failed(call, error)
            else:
                ready = [key for key in self._keys.by_name.values() if key.state is KeyState.READY]
                self._take_clocks(call, ready, into.step, place)

        self._ask_leaders(call, into, answered)

    def _take_clocks(self, call: InFlight, keys: Sequence[WorkerKey], step: int, place: int) -> None:
        """One key after the other, as a look-up does."""
        if not keys:
            how = requests.Return.NOW if self._participation.come_back(place) else requests.Return.LATER
            self._calls.complete(call, requests.Returned(how, step))
            return
        key, *rest = keys

        def taken(error: KvdError | None) -> None:
            if call.state is COMPLETED:
                return  # it was given up
            if error is not None:
                self._failed(call, error)
            else:
                self._take_clocks(call, rest, step, place)

        self._clocks.take_again(key, taken)

    def _failed(self, call: InFlight, error: KvdError) -> None:
        if self._participation.is_returning:
            self._participation.step_out()
            if isinstance(error, NotAllowed):  # it was lost or late once more meanwhile
                self._calls.complete(call, requests.Returned(requests.Return.LATER))
                return
        self._calls.complete(call, error=error)

    def _given_up(self, call: InFlight) -> None:
        """The caller waits no more."""
        if self._participation.is_returning:
            self._participation.step_out()
