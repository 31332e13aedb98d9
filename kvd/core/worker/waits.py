"""Calls that wait for long: when they end, and what their callers and the log are told.

A call whose requests all wait for other workers goes on until its deadline. One that a node owes an answer ends
earlier: `answer_s` after that was asked. Looks (`kvd.core.worker.looks`) tell the two apart. They come when a call has
waited for `notice_s`, then whenever it has waited twice as long, but often enough that the silence of a node is
certain; and before a deadline that comes earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvd.core import requests
from kvd.core.machine import CensusTaken, Effect, LogEntry, Received
from kvd.core.outbox import Outbox
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.blockers import Blockers
from kvd.core.worker.calls import CallBook
from kvd.core.worker.explanations import Explainer
from kvd.core.worker.holds import Holds
from kvd.core.worker.in_flight import COMPLETED, InFlight
from kvd.core.worker.looks import NEVER, Looks
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.words import title_of
from kvd.errors import Deadlock
from kvd.protocol.messages import OfferState

LOOKS_PER_ANSWER = 3  # in the time that a node may owe an answer: one may get lost
LEAST_GAP_S = 0.1  # between two looks
LAST_LOOK_S = 1.0  # before a deadline
TAKEN_ALONG_S = 1.0  # a call that has waited so long takes part in a look that another is due for


class _Watched(NamedTuple):
    """When a call is looked at next, and when the log explains it next."""

    look_at: float
    notice_at: float


class Waits:
    """Watches the open calls.

    Args:
        notice_s: after this many seconds the log explains a call that waits.
        emit: takes effects, in their order.

    Attributes:
        due_at: when `tick` has something to do.
        next_look: not later than any call is looked at.
        soon_s: when the first look at a call with the default deadlines is due, at most, in seconds from its beginning.
    """

    def __init__(
        self,
        session: SchedulerSession,
        outbox: Outbox,
        asker: Asker,
        calls: CallBook,
        pushes: OpenPushes,
        notice_s: float,
        emit: Callable[[Effect], None],
    ) -> None:
        self.due_at = NEVER
        self._outbox = outbox
        self._calls = calls
        self._pushes = pushes
        self._notice_s = notice_s
        self._emit = emit
        self._holds = Holds(outbox)
        self._explainer = Explainer(session, self._holds)
        self._looks = Looks(
            session, outbox, asker, calls, pushes, self._holds, self._explainer, emit, self._looked, self._stuck
        )
        self._watched: dict[int, _Watched] = {}  # calls that were looked at, by number
        self.next_look = NEVER
        self.soon_s = notice_s
        self._last_notice = float("-inf")

    # ── when to look ──

    def note(self, call: InFlight) -> None:
        """A call was accepted."""
        answer_s = call.answer_s
        if answer_s is not None and answer_s < self.soon_s * LOOKS_PER_ANSWER:
            self.soon_s = answer_s / LOOKS_PER_ANSWER
        soon = call.begun + self.soon_s
        if self.next_look <= soon and answer_s is not None and call.deadline > soon + self.soon_s:
            return  # the usual case: a look comes before this call is due for its first
        at = self.first_look(call.begun, call.deadline, call.answer_s)
        if at < self.next_look:
            self.next_look = at
            self._set_due()

    def first_look(self, begun: float, deadline: float, answer_s: float | None) -> float:
        """When a call is looked at for the first time, see LocalCall."""
        at = begun + self._notice_s
        if answer_s is not None:
            at = min(at, begun + answer_s / LOOKS_PER_ANSWER)
        return min(at, (begun + deadline) / 2)

    def calls_are_due(self, now: float) -> bool:
        """Whether open calls are to be looked at, or ended."""
        deadlines = self._calls.deadlines
        return now >= self.due_at or (bool(deadlines) and now >= deadlines[0][0])

    def _later_look(self, call: InFlight, notice_at: float, now: float) -> float:
        times = [now + max(now - call.begun, LEAST_GAP_S), notice_at, call.deadline - LAST_LOOK_S]
        if call.answer_s is not None:
            times.append(now + call.answer_s / LOOKS_PER_ANSWER)
        return min(at for at in times if at > now)

    def tick(self, now: float) -> None:
        """Looks if a call is due, and goes on with a look whose questions are not answered."""
        self._looks.tick(now)
        if now >= self.next_look:
            calls = self._calls.open_calls()
            watched = {call.number: self._watch_of(call) for call in calls}
            if self._looks.is_idle and any(entry.look_at <= now for entry in watched.values()):
                for call in calls:
                    entry = watched[call.number]
                    if entry.look_at <= now or now - call.begun >= TAKEN_ALONG_S:
                        watched[call.number] = entry._replace(look_at=self._later_look(call, entry.notice_at, now))
                self._looks.begin(now)
            self._watched = watched
            earliest = min((entry.look_at for entry in watched.values()), default=NEVER)
            self.next_look = max(earliest, now + LEAST_GAP_S)
        self._set_due()

    def _watch_of(self, call: InFlight) -> _Watched:
        watched = self._watched.get(call.number)
        return watched or _Watched(
            self.first_look(call.begun, call.deadline, call.answer_s), call.begun + self._notice_s
        )

    def _set_due(self) -> None:
        self.due_at = min(self.next_look, self._looks.give_up_at)

    # ── answers ──

    def answered(self, event: Received, now: float) -> None:
        """What a server or the scheduler says about waits."""
        self._looks.answered(event, now)
        self._set_due()

    def census_taken(self, census: CensusTaken, now: float) -> None:
        """What the shell says about the program's threads."""
        self._looks.census_taken(census, now)
        self._set_due()

    def _looked(self, now: float) -> None:
        """A look has ended: the log explains the calls that are due."""
        if now - self._last_notice < self._notice_s / 2:
            return
        due = [
            call
            for call in self._calls.open_calls()
            if self._watch_of(call).notice_at <= now and not _is_nobodys(call.request)
        ]
        if not due:
            return
        for call in due:
            watched = self._watch_of(call)
            self._watched[call.number] = watched._replace(notice_at=now + (now - call.begun))
        text = self._explainer.notice(due[0], self._blockers().of(due[0]), now)
        others = len(due) - 1
        more = "" if not others else f" ({others} more {'call waits' if others == 1 else 'calls wait'}, too)"
        self._emit(LogEntry("warning", text + more))
        self._last_notice = now

    def _stuck(self, calls: Sequence[InFlight], lines: tuple[str, ...], now: float) -> None:
        """Nobody can move: the calls that threads wait for end."""
        blockers = self._blockers()
        nodes = {call: self._explainer.reason(blockers.of(call), now).nodes for call in calls}
        for call in calls:
            text = (
                f"{title_of(call)} cannot end: every worker waits for another one, and none can go on. "
                f"{'; '.join(lines)}. Let all workers push the same keys in the same order, and meet at the same "
                f"barriers"
            )
            outcome = self._explainer.outcome(call)
            self._calls.abandon(call, Deadlock(text, outcome=outcome, waiting_for=nodes[call], waits=lines))

    # ── the end of a call ──

    def expire(self, now: float) -> None:
        """Ends the calls whose time is up, unless other workers are behind it."""
        blockers = self._blockers()
        ended = []
        for call in self._calls.take_due(now):
            entries = blockers.of(call)
            since = min((self._holds.owes_since(entry) for entry in entries), default=float("-inf"))
            if now < call.deadline and call.answer_s is not None and since + call.answer_s > now:
                self._calls.put_off(call, since + call.answer_s)
            else:
                ended.append((call, self._explainer.reason(entries, now)))
        for call, reason in ended:  # now that all reasons are known: the end of one call lets others begin
            if call.state is not COMPLETED:
                self._calls.abandon(call, self._explainer.timeout_error(call, reason, now))

    def _blockers(self) -> Blockers:
        return Blockers(self._outbox, self._pushes)

    def validate(self) -> None:
        """Raises AssertionError if a call is never looked at."""
        self._looks.validate()
        assert self.next_look < NEVER or not len(self._calls), "calls are open, and no look comes"


def _is_nobodys(request: requests.Request) -> bool:
    """Whether no thread waits for the call, or says itself for whom."""
    if isinstance(request, requests.JoinCluster):
        return True
    return isinstance(request, requests.Control) and isinstance(next(iter(request.messages), None), OfferState)
