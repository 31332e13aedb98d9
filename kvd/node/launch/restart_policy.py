"""Restart policy of a job: how often each process, or the whole job, is started again, and how soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MOST_DOUBLINGS: Final = 60
"""More make no difference, and a float has an end."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """How often a process that failed is started again, and how soon: at once, then later and later.

    Attributes:
        limit: how often each process is, in all.
        first_s: how long its second restart in a row waits; each further one waits twice as long as the one before.
        longest_s: no restart waits longer.
        well_after_s: a process that ran for so long was well, and its next restart begins a new row.
    """

    limit: int = 0
    first_s: float = 1.0
    longest_s: float = 30.0
    well_after_s: float = 60.0

    def delay_s(self, in_a_row: int) -> float:
        """How long a restart waits that follows so many in a row."""
        if not in_a_row:
            return 0.0
        return min(self.longest_s, self.first_s * 2.0 ** min(in_a_row - 1, _MOST_DOUBLINGS))


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart of one process.

    Attributes:
        number: of this restart, from 1 on.
        limit: how many there may be.
        delay_s: how long the process waits for it.
    """

    number: int
    limit: int
    delay_s: float

    def __str__(self) -> str:
        when = f" in {self.delay_s:g} s" if self.delay_s else ""
        return f"restart {self.number} of {self.limit}{when}"


class RestartCount:
    """Counts the restarts of one process.

    Attributes:
        used: how many it has had.
    """

    def __init__(self, rule: RestartRule) -> None:
        self.used = 0
        self._rule = rule
        self._in_a_row = 0

    def next(self, ran_s: float) -> Restart | None:
        """The next restart of the process, which failed after it had run for so long. None: it has had all."""
        if self.used >= self._rule.limit:
            return None
        if ran_s >= self._rule.well_after_s:
            self._in_a_row = 0
        delay_s = self._rule.delay_s(self._in_a_row)
        self._in_a_row += 1
        self.used += 1
        return Restart(self.used, self._rule.limit, delay_s)


class Restarts:
    """The restarts of all processes of a job, those to come included. Used on the loop on which it was made."""

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._loop = asyncio.get_running_loop()
        self._counts: dict[str, RestartCount] = {}  # by node id
        self._to_come: dict[str, tuple[asyncio.Future[None], Callable[[], object]]] = {}  # by node id

    @property
    def due(self) -> set[asyncio.Future[None]]:
        """Of each restart to come: done when it is due."""
        return {due for due, _ in self._to_come.values()}

    def used(self, name: str) -> int:
        """How often this process was started again, or will be: a restart to come counts."""
        return self._count(name).used

    def plan(self, name: str, ran_s: float, start: Callable[[], object]) -> Restart | None:
        """Have a process that failed started again, by `start_due`.

        Args:
            name: its node id.
            ran_s: how long it had run.
            start: starts it.

        Returns:
            The restart, or None: the process has had all of its restarts.
        """
        restart = self._count(name).next(ran_s)
        if restart is not None:
            due: asyncio.Future[None] = self._loop.create_future()
            self._to_come[name] = due, start
            if restart.delay_s:
                self._loop.call_later(restart.delay_s, due.set_result, None)
            else:
                due.set_result(None)
        return restart

    def start_due(self) -> None:
        """Start each process whose restart is due."""
        for name, (due, start) in list(self._to_come.items()):
            if due.done():
                del self._to_come[name]
                start()

    def cancel(self) -> None:
        """None of the restarts to come takes place."""
        self._to_come.clear()

    def _count(self, name: str) -> RestartCount:
        return self._counts.setdefault(name, RestartCount(self._rule))


class JobRestarts:
    """Restarts of a whole job: one whose values are gone begins again from its newest snapshot.

    Args:
        rule: how often, and how soon.
        replicas: how many copies of each value there are.
        restores: whether the job restores a snapshot.

    Attributes:
        is_due: whether all processes are to end, and the next run is to begin.
    """

    def __init__(self, rule: RestartRule, replicas: int, *, restores: bool) -> None:
        self.is_due = False
        self._replicas = replicas
        self._restores = restores
        self._count = RestartCount(rule)
        self._delay_s = 0.0
        self._servers_ended = 0  # in this run

    @property
    def may_have_lost_copies(self) -> bool:
        """Whether so many servers have ended in this run that both copies of a value may be gone."""
        return self._replicas > 1 and self._servers_ended >= self._replicas

    def server_ended(self) -> None:
        """One more server has ended, whatever becomes of it."""
        self._servers_ended += 1

    def plan(self, ran_s: float) -> Restart | None:
        """Have the job begin again.

        Args:
            ran_s: how long that process had run whose end is the reason.

        Returns:
            The restart, or None: the job does not restore, or has had all of its restarts.
        """
        if self.is_due or not self._restores:
            return None
        restart = self._count.next(ran_s)
        if restart is not None:
            self.is_due, self._delay_s = True, restart.delay_s
        return restart

    def begin(self) -> float:
        """The next run begins, after so many seconds."""
        self.is_due = False
        self._servers_ended = 0
        return self._delay_s
