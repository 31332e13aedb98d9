"""Check of the record that a scheduler restarts from: it may have been put back from an earlier time.

Every view is recorded before it is announced. A node that knows a later view than the record therefore proves that the
record is too old, and the scheduler then asks its nodes, as if there were no record.

Until every server of the record was heard, or is overdue since this start, the record is only a claim. The scheduler
acknowledges heartbeats and does nothing else: no view is announced, nobody joins, no death counts, no barrier is
settled. Pushes and pulls continue with the views that the nodes have.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core.machine import Received
from kvd.core.membership import name_of
from kvd.core.scheduler.membership.views import MOST_TOLD
from kvd.protocol.messages import Epoch


class RecordCheck:
    """Compares a record with what the nodes know.

    Args:
        recorded: the newest view of the record.
        began: the first view of this scheduler.
        servers: ranks of the servers in the record.
        timeout_s: seconds until a silent server is overdue.
    """

    def __init__(self, recorded: Epoch, began: Epoch, servers: Iterable[int], timeout_s: float, now: float) -> None:
        self.began = began
        self._recorded = recorded
        self._awaited = set(servers)
        self._timeout_s = timeout_s
        self._until = now + timeout_s

    @property
    def is_open(self) -> bool:
        """Whether a server of the record has yet to be heard."""
        return bool(self._awaited)

    def text(self) -> str:
        """The reason why nobody can join yet."""
        names = ", ".join(name_of("server", rank) for rank in sorted(self._awaited))
        return f"waiting to hear from {names}: the record of this scheduler may be too old"

    def next_deadline(self) -> float | None:
        """When the silent servers are overdue; None if all were heard."""
        return self._until if self._awaited else None

    def heard(self, rank: int | None) -> None:
        """Record that a process with this server's place was heard."""
        self._awaited.discard(-1 if rank is None else rank)

    def start_over(self, now: float) -> None:
        """Give every server a full timeout: this scheduler was paused."""
        self._until = now + self._timeout_s

    def expire(self, now: float) -> None:
        """Stop waiting for servers that are overdue."""
        if now >= self._until:
            self._awaited.clear()

    def is_news(self, event: Received) -> bool:
        """Return whether the sender knows a view of an earlier scheduler that is later than the record."""
        return self._recorded < event.epoch < self.began or (self.is_open and event.epoch > self._recorded)

    def is_refuted(self, event: Received, role: str) -> bool:
        """Return whether the sender, which has a seat or may join in this role, proves that the record is too old."""
        return self.is_news(event) and event.epoch.generation <= MOST_TOLD.get(role, 0)

    def give_up(self) -> None:
        """Nothing counts any more of what the record says: the nodes are asked."""
        self._recorded = self.began
        self._awaited.clear()
