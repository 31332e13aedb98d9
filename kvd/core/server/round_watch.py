"""Progress of the rounds of one run, as `kvd status` and `kvd doctor` show it: steps, pace, and rounds that stay open.

`look` runs with the heartbeats, about once a second, and less often if there are thousands of groups. It reads what the
rounds keep anyway, so pushes cost nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from kvd.core.membership import ViewState, name_of
from kvd.core.open_waits import LOOK_S, OpenWaits, Pace
from kvd.core.server.groups import FusedGroup
from kvd.core.server.key_requests import KeyRequests
from kvd.core.server.keys import KeyTable
from kvd.core.server.participants import Participants
from kvd.core.server.records import Records
from kvd.core.server.staleness import SeenStaleness

SECONDS_PER_GROUP: Final = 2e-4  # between two looks: examining a group takes a few microseconds
RATE_LOOKS: Final = 10  # over which the rate of steps is taken
HEARTBEAT_S: Final = 1.0  # assumed before the first look
MAX_SHOWN: Final = 4  # open rounds in a report, which wait for different nodes
MAX_EXAMINED: Final = 64  # of them, to find these
_LOOKUP: Final = "a key that worker 0 has yet to make"  # the name of that wait; those of rounds are numbers of groups


class RoundWatch:
    """Counts steps, and measures for how long rounds have been open.

    Args:
        staleness: counts the pushes of each worker in asynchronous mode.

    Attributes:
        rounds: rounds closed so far, those of all groups added up.
    """

    def __init__(
        self,
        view: ViewState,
        table: KeyTable,
        participants: Participants,
        keys: KeyRequests,
        records: Records,
        staleness: SeenStaleness,
    ) -> None:
        self.rounds = 0
        self._view = view
        self._table = table
        self._participants = participants
        self._keys = keys
        self._records = records
        self._staleness = staleness
        self._waits = OpenWaits()
        self._looked_at: float | None = None
        self._pace = Pace()  # of steps: at each look, the rounds of the group that closed most of them
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_LOOKS + 1)  # time and steps at the latest looks
        self._pushes: dict[int, Pace] = {}  # by rank; asynchronous mode only

    def look(self, now: float) -> None:
        """Take over what has changed since the last look."""
        last = now - HEARTBEAT_S if self._looked_at is None else self._looked_at
        if now < last + max(LOOK_S, SECONDS_PER_GROUP * len(self._table.groups)):
            return
        self._looked_at = now
        most = 0
        marks: dict[str | int, object] = {}
        for group in self._table.groups.values():
            log, pace = group.log, group.log.pace
            if pace.steps != log.closed or pace.since is None:
                log.pace = pace.seen(log.closed, now, last)
                closed = max(0, log.closed - pace.steps)
                self.rounds += closed
                most = max(most, closed)
            if group.waiting:
                marks[group.number] = log.closed
        awaited_key = self._keys.awaited_key
        if awaited_key is not None:
            marks[_LOOKUP] = awaited_key
        self._waits.look(marks, now)
        if most:
            self._pace = self._pace.seen(self._pace.steps + most, now, last)
        self._recent.append((now, self._pace.steps))
        if not self._view.is_sync:
            self._look_at_workers(now, last)

    def _look_at_workers(self, now: float, last: float) -> None:
        """Asynchronous mode has no rounds that all share: the pushes of each worker are counted."""
        pushes = {}
        for rank in self._participants.awaited:
            count, pace = self._staleness.pushes_of(rank), self._pushes.get(rank, Pace())
            pushes[rank] = pace.seen(count, now, last) if pace.steps != count or pace.since is None else pace
        self._pushes = pushes

    # ── for people ──

    def explain(self, now: float) -> dict[str, object]:
        """The newest step, steps per second, and what has been open for how long, as plain data ready for JSON."""
        since = self._pace.since
        return {
            "step": max((group.log.step for group in self._table.groups.values()), default=0),
            "steps_per_s": self._rate(),
            "rounds": self.rounds,
            "usual_step_s": _rounded(self._pace.usual_s),
            "last_step_ago_s": None if since is None else round(now - since, 3),
            "open_rounds": list(self._open_rounds(now)),
            "last_pushes": self._last_pushes(now),
        }

    def _rate(self) -> float:
        """Steps per second, over the latest looks."""
        if len(self._recent) < 2:
            return 0.0
        (begin, first), (end, last) = self._recent[0], self._recent[-1]
        return round((last - first) / (end - begin), 3)

    def _open_rounds(self, now: float) -> Iterator[dict[str, object]]:
        """The oldest open round for each set of nodes that some wait for, and the wait for keys to be made."""
        shown: set[tuple[str, ...]] = set()
        waits_for: tuple[str, ...]
        for name in self._waits.oldest_first()[:MAX_EXAMINED]:
            if len(shown) == MAX_SHOWN:
                return
            usual_s = None
            if name == _LOOKUP:
                key, number, waits_for = self._keys.awaited_key, 0, (name_of("worker", 0),)
                since = self._waits.since(name, key)
            else:
                group = self._table.groups.get(name) if isinstance(name, int) else None
                if group is None or not group.waiting:
                    continue
                since = self._waits.since(name, group.log.closed)
                key, number, usual_s = group.key, group.log.closed + (group.log.closing is None), group.log.pace.usual_s
                waits_for = self._blockers(group)
            if key is None or since is None or not waits_for or waits_for in shown:
                continue
            shown.add(waits_for)
            yield {
                "key": key,
                "round": number,
                "age_s": round(now - since, 3),
                "usual_s": _rounded(usual_s),
                "standstill_s": self._waits.standstill_s(usual_s),
                "waits_for": list(waits_for),
            }

    def _blockers(self, group: FusedGroup) -> tuple[str, ...]:
        """The workers whose pushes are missing; once the round is closed, the servers that have yet to hold it."""
        if group.log.closing is None:
            return tuple(name_of("worker", rank) for rank in self._participants.blockers(group))
        return tuple(name_of("server", holder.rank) for holder in self._records.holders_of(group.partition))

    def _last_pushes(self, now: float) -> dict[str, object]:
        """By the name of a worker in asynchronous mode: how long ago its latest push counted here."""
        return {
            name_of("worker", rank): {
                "ago_s": round(now - pace.since, 3),
                "usual_s": _rounded(pace.usual_s),
                "standstill_s": self._waits.standstill_s(pace.usual_s),
            }
            for rank, pace in sorted(self._pushes.items())
            if pace.steps and pace.since is not None
        }


def _rounded(usual_s: float | None) -> float | None:
    return None if usual_s is None else round(usual_s, 6)
