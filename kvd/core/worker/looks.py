"""A look at what this worker waits for, as the servers, its own threads and the scheduler see it.

The servers are asked which of its requests wait for other workers (WaitQuery, Waits); the shell is asked which threads
wait inside the store (Census, CensusTaken); then the scheduler is told, and says how the others are (WaitReport,
WaitNews). Questions that get lost are not repeated: after a second the look goes on without the answer.

The scheduler also hears whether this worker is blocked. If all are, it has them look again; if nothing has happened
between the two looks, nobody can move (`kvd.core.scheduler.barriers.deadlocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvd.core.machine import SCHEDULER, Census, CensusTaken, Effect, PeerKind, Received, Send
from kvd.core.outbox import Outbox
from kvd.core.session import SchedulerSession, SessionState
from kvd.core.worker.asking import Asker
from kvd.core.worker.blockers import Blockers
from kvd.core.worker.calls import CallBook
from kvd.core.worker.explanations import Explainer
from kvd.core.worker.holds import ANSWER_S, Holds
from kvd.core.worker.in_flight import InFlight
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.servers import NOT_CONNECTED
from kvd.protocol.messages import (
    MAX_ASKED_ABOUT,
    MAX_ASKED_BARRIERS,
    MAX_TEXT_CHARS,
    Enter,
    FetchPart,
    NodeName,
    OfferState,
    StandBy,
    StatePart,
    WaitNews,
    WaitQuery,
    WaitReport,
    Waits,
    WantState,
)

NEVER = float("inf")


class LookState(Enum):
    """How far a look has come."""

    IDLE = "nothing is asked"
    SERVERS = "the servers are asked"
    THREADS = "the shell is asked"
    SCHEDULER = "the scheduler is asked"


LOOK_TRANSITIONS: dict[LookState, frozenset[LookState]] = {
    LookState.IDLE: frozenset({LookState.SERVERS}),
    LookState.SERVERS: frozenset({LookState.THREADS, LookState.SERVERS}),  # SERVERS: it starts from the beginning
    LookState.THREADS: frozenset({LookState.SCHEDULER, LookState.IDLE, LookState.SERVERS}),
    LookState.SCHEDULER: frozenset({LookState.IDLE, LookState.SERVERS}),
}


@dataclass(slots=True, eq=False)
class _Look:
    """What the present look has asked and found."""

    state: LookState = LookState.IDLE
    give_up_at: float = NEVER  # the look goes on then without the answers that it waits for
    check: int = 0  # the latest that the scheduler asked for before this look began
    unanswered: set[int] = field(default_factory=set)  # the questions to servers
    report: int = 0  # the question to the scheduler
    held: set[int] = field(default_factory=set)  # requests that wait for other workers only
    is_complete: bool = True  # every server answered, listed all, and knows the same view as this worker

    def move_to(self, state: LookState, give_up_at: float) -> None:
        """Changes the state, as LOOK_TRANSITIONS allows."""
        if state not in LOOK_TRANSITIONS[self.state]:
            raise RuntimeError(f"a look cannot go from {self.state.name} to {state.name}: this is a bug in kvd")
        self.state, self.give_up_at = state, give_up_at


class _Stamp:
    """A number that stays the same while nothing happens."""

    def __init__(self) -> None:
        self.number = 0
        self._activity: tuple[int, ...] = ()

    def renewed(self, *activity: int) -> int:
        """The number for these counters: the one before if none of them has moved."""
        if activity != self._activity:
            self._activity = activity
            self.number += 1
        return self.number

    def stands_at(self, *activity: int) -> bool:
        """Whether the first counters are still the same."""
        return self._activity[: len(activity)] == activity


class Looks:
    """Makes one look at a time.

    Args:
        emit: takes effects, in their order.
        done: a look has ended.
        stuck: the scheduler says that nobody can move: takes the calls that threads wait for, and a text per worker.

    Attributes:
        give_up_at: when `tick` has something to do.
    """

    def __init__(
        self,
        session: SchedulerSession,
        outbox: Outbox,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        holds: Holds,
        explainer: Explainer,
        emit: Callable[[Effect], None],
        done: Callable[[float], None],
        stuck: Callable[[Sequence[InFlight], tuple[str, ...], float], None],
    ) -> None:
        self._session = session
        self._outbox = outbox
        self._asker = asker
        self._calls = calls
        self._pushes = pushes
        self._holds = holds
        self._explainer = explainer
        self._emit = emit
        self._done = done
        self._stuck = stuck
        self._look = _Look()
        self._check = 0
        self._stamp = _Stamp()
        self._waited_for: tuple[int, ...] = ()  # the calls that threads waited for when the last report was made

    @property
    def give_up_at(self) -> float:
        return self._look.give_up_at

    @property
    def is_idle(self) -> bool:
        return self._look.state is LookState.IDLE

    # ── the servers ──

    def begin(self, now: float) -> None:
        """Starts a look. One that is under way starts from the beginning."""
        look = self._look = _Look(self._look.state, check=self._check)
        look.move_to(LookState.SERVERS, now + ANSWER_S)
        peers = {entry.peer for entry in self._outbox.entries()}
        self._holds.forget_all_but(peers | {SCHEDULER})
        for peer in sorted(peers - {NOT_CONNECTED}, key=str):
            if peer.kind is PeerKind.SERVER:
                number = self._asker.number()
                look.unanswered.add(number)
                self._holds.asked(peer, now)
                self._emit(Send(peer, WaitQuery(number)))
        if not look.unanswered:
            self._ask_threads(now)

    def _server_answered(self, event: Received, waits: Waits, now: float) -> None:
        """An answer that comes late still counts for the requests that it names."""
        held = self._holds.take_waits(event.peer, waits, now)
        look = self._look
        if look.state is not LookState.SERVERS or waits.request not in look.unanswered:
            return
        look.unanswered.discard(waits.request)
        look.held |= held
        if not waits.is_all or event.epoch != self._session.view.epoch:
            look.is_complete = False
        if not look.unanswered:
            self._ask_threads(now)

    # ── the threads ──

    def _ask_threads(self, now: float) -> None:
        look = self._look
        look.is_complete = look.is_complete and not look.unanswered
        look.move_to(LookState.THREADS, now + ANSWER_S)
        self._emit(Census())

    def census_taken(self, census: CensusTaken | None, now: float) -> None:
        """The shell has looked at the program's threads; None: it did not answer."""
        if self._look.state is not LookState.THREADS:
            return
        if self._session.identity.role != "worker" or self._session.state is not SessionState.JOINED:
            self._end(now)  # the scheduler would not know whom it talks to
            return
        blockers = Blockers(self._outbox, self._pushes)
        calls = [] if census is None else [self._calls.find(number) for number in census.calls]
        waiting = [call for call in calls if call is not None]
        is_blocked = census is not None and census.everyone and len(waiting) == len(calls) > 0
        is_blocked = is_blocked and self._is_blocked(waiting, blockers)
        entered = 0 if census is None else census.entered
        self._waited_for = () if census is None else census.calls
        lines = [self._explainer.stuck_line(call, blockers.of(call), now) for call in waiting] if is_blocked else []
        if len(lines) > 2:
            lines[1:] = [f"{len(lines) - 1} more calls wait, too"]
        look = self._look
        look.report = self._asker.number()
        report = WaitReport(
            look.report,
            self._nodes(now),
            tuple(sorted(self._barriers()))[:MAX_ASKED_BARRIERS],
            is_blocked,
            self._stamp.renewed(self._calls.activity, self._outbox.activity, entered),
            look.check,
            tuple(line[:MAX_TEXT_CHARS] for line in lines),
        )
        look.move_to(LookState.SCHEDULER, now + ANSWER_S)
        self._holds.asked(SCHEDULER, now)
        self._emit(Send(SCHEDULER, report))

    def _is_blocked(self, waiting: Sequence[InFlight], blockers: Blockers) -> bool:
        """Whether nothing of this worker is under way: all that it has asked waits for other workers, and the calls
        that its threads wait for, which have no deadline of their own, wait for some of that. An offer of its state
        changes nothing: whoever wants one is not blocked."""
        if not self._look.is_complete or len(self._barriers()) > MAX_ASKED_BARRIERS:
            return False
        for entry in self._outbox.entries():
            message = entry.send.message
            if isinstance(message, WantState | FetchPart | StatePart):
                return False  # a state is on its way, or will be
            if entry.request not in self._look.held and not isinstance(message, Enter | StandBy | OfferState):
                return False
        return all(call.answer_s is not None and blockers.of(call) for call in waiting)

    def _barriers(self) -> set[str]:
        """The names of the barriers that were entered, and of the point at which the program waits."""
        messages = [entry.send.message for entry in self._outbox.entries()]
        return {message.name for message in messages if isinstance(message, Enter | StandBy)}

    def _nodes(self, now: float) -> tuple[NodeName, ...]:
        """The nodes that something waits for: what the scheduler says of them goes into texts."""
        names: dict[NodeName, None] = {}
        for entry in self._outbox.entries():
            if self._holds.is_held(entry, now):
                names.update((NodeName("worker", absent.rank), None) for absent in self._holds.blocked(entry).absent)
            else:
                place = self._explainer.place_of(entry.peer)
                names.update({} if place is None else {NodeName(*place): None})
            if len(names) >= MAX_ASKED_ABOUT:
                break
        return tuple(names)[:MAX_ASKED_ABOUT]

    # ── the scheduler ──

    def _scheduler_answered(self, news: WaitNews, now: float) -> None:
        look = self._look
        if news.request:
            self._holds.take_news(news, now)
            if look.state is LookState.SCHEDULER and news.request == look.report:
                self._end(now)
        elif news.deadlock:
            is_current = news.stamp == self._stamp.number
            if is_current and self._stamp.stands_at(self._calls.activity, self._outbox.activity):
                calls = [call for number in self._waited_for if (call := self._calls.find(number)) is not None]
                self._stuck(calls, news.deadlock, now)
        elif news.check:
            self._check = news.check
            self.begin(now)

    def _end(self, now: float) -> None:
        self._look.move_to(LookState.IDLE, NEVER)
        self._done(now)

    # ── events ──

    def answered(self, event: Received, now: float) -> None:
        """An answer to one of the questions, or unasked news of the scheduler."""
        message = event.message
        if isinstance(message, Waits) and event.peer.kind is PeerKind.SERVER:
            self._server_answered(event, message, now)
        elif isinstance(message, WaitNews) and event.peer == SCHEDULER:
            self._scheduler_answered(message, now)

    def tick(self, now: float) -> None:
        """Goes on without an answer that does not come."""
        look = self._look
        if now < look.give_up_at:
            return
        if look.state is LookState.SERVERS:
            self._ask_threads(now)
        elif look.state is LookState.THREADS:
            self.census_taken(None, now)
        elif look.state is LookState.SCHEDULER:
            self._end(now)

    def validate(self) -> None:
        """Raises AssertionError if a look that is under way has no end, or one that is over has."""
        look = self._look
        assert (look.state is LookState.IDLE) == (look.give_up_at == NEVER), f"a look never ends: {look}"
