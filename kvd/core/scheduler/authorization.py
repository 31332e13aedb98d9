"""Which messages reach the machines of a scheduler: what the sender's key allows, from an incarnation of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.core.access import Doorkeeper
from kvd.core.machine import LogEntry, Received
from kvd.core.principals import HOLDER, KeyRole
from kvd.core.scheduler.machine import SchedulerMachine
from kvd.core.scheduler.runs.table import RunSlot
from kvd.protocol.messages import Join


class Door:
    """Looks at each message before it goes its way.

    Args:
        machines: gives the machines of the cluster and of all runs.
    """

    def __init__(self, machines: Callable[[], Iterable[SchedulerMachine]]) -> None:
        self._machines = machines
        self._doorkeeper = Doorkeeper(KeyRole.SCHEDULER)

    def objection(self, event: Received, slot: RunSlot | None) -> str:
        """Why the message, which names the run of `slot`, goes no further; "" if it does."""
        message = event.message
        if event.principal is not HOLDER:
            jobs = [None if slot is None else slot.job]
            if isinstance(message, Join):
                jobs.append(message.job.partition("@")[0])
            text = next(filter(None, (self._doorkeeper.objection(event, job) for job in jobs)), "")
            if text:
                return text
        if isinstance(message, Join) and self._is_of_another(event, message):
            return "another node has this incarnation: start this one again"
        return ""

    def line(self, event: Received, text: str, now: float) -> list[LogEntry]:
        """What the log says of a message that goes no further: not every one has a line."""
        entry = self._doorkeeper.log_entry(event, text, now)
        return [] if entry is None else [entry]

    def _is_of_another(self, event: Received, join: Join) -> bool:
        """Whether a node with another role or key has the sender's incarnation in any run: what the shell finds out of
        the process of an incarnation concerns all runs."""
        seats = [seat for machine in self._machines() if (seat := machine.roster.seat_of(event.sender)) is not None]
        return any((seat.member.role, seat.member.principal) != (join.role, event.principal.name) for seat in seats)
