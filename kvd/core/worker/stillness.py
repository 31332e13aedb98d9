"""Whether a call that a worker begins would find anything else under way."""

from __future__ import annotations

from kvd.core.outbox import Outbox
from kvd.core.session import SchedulerSession
from kvd.core.worker.calls import CallBook
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.participation import Participation
from kvd.core.worker.servers import Servers


class Stillness:
    """Whether anything is under way in the machine of a worker, besides what the lane has sent."""

    def __init__(
        self,
        session: SchedulerSession,
        servers: Servers,
        participation: Participation,
        outbox: Outbox,
        calls: CallBook,
        pushes: OpenPushes,
    ) -> None:
        self._session = session
        self._servers = servers
        self._participation = participation
        self._outbox = outbox
        self._calls = calls
        self._pushes = pushes

    def takes_part(self) -> bool:
        """Whether this worker takes part as usual."""
        part = self._participation
        return part.in_rounds and not part.is_apart and not self._servers.orphans and self._session.failure is None

    def is_total(self) -> bool:
        """Whether nothing at all is under way, and this worker takes part as usual."""
        return not self._calls and not self._outbox and not self._pushes and self.takes_part()

    def lets_leave(self, place: int | None) -> bool:
        """Whether a call on keys that are at rest, which takes no credit, would start and leave at once.

        Args:
            place: of a push: where the program is, see `kvd.core.places`; None: it is a pull.
        """
        is_alone = not self._calls and not self._outbox and not self._pushes
        is_late = place is not None and not self._pushes.lets_start_at(place)
        return (is_alone or (self._outbox.is_clear and not is_late)) and self.takes_part()

    def disturb(self) -> None:
        """A call was made and answered: who looks for activity sees it."""
        self._outbox.activity += 1
        self._calls.activity += 1
