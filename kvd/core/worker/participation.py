"""Whether this node takes part in the rounds: a worker does until it leaves them, an observer never."""

from __future__ import annotations

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.outbox import Outbox
from kvd.core.pseudonyms import pseudonym
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import Call, CallBook
from kvd.errors import NotAllowed
from kvd.protocol.messages import Departure, Leave, MemberState


class Participation:
    """Leaves the rounds, and remembers it.

    Attributes:
        is_observer: this node has no rank, and only asks.
        in_rounds: whether it may push and initialise keys.
    """

    def __init__(self, session: SchedulerSession, outbox: Outbox, asker: Asker, calls: CallBook) -> None:
        self._session = session
        self._outbox = outbox
        self._asker = asker
        self._calls = calls
        self.is_observer = session.identity.role == "observer"
        self.in_rounds = not self.is_observer

    def push_error(self) -> NotAllowed:
        """Why a node outside the rounds does not push."""
        if self.is_observer:
            return NotAllowed("an observer does not push: join as a worker")
        return NotAllowed("this worker has left the rounds (join or close): it pushes no more")

    def leave(self, call: Call, request: requests.Depart) -> None:
        if self.is_observer:
            self._session.close()
            self._calls.complete(call)
            return

        if request.departure is Departure.WITHDRAWN:
            self._session.close()  # a further Join would overtake the answer, and take a place again

        def answered(event: Received) -> None:
            error = self._asker.error_of(event)
            if error is None:
                self.in_rounds = False
                if request.departure is not Departure.DONE:
                    self._session.close()
            self._calls.complete(call, error=error)

        self._asker.ask(call, SCHEDULER, Leave(0, request.departure), answered)

    def view_changed(self) -> None:
        """Compares what the view says of this worker with what it knows itself."""
        member = self._session.view.by_incarnation(pseudonym(self._session.incarnation))
        if not self._session.joined or member is None:
            return
        if member.state in (MemberState.DONE, MemberState.LEFT):
            self.in_rounds = False  # the answer to our Leave may be lost
        elif member.state == MemberState.ACTIVE and not self.in_rounds and not self._is_leaving():
            # The scheduler was restarted without its record, and has forgotten that this worker left.
            self._asker.ask(None, SCHEDULER, Leave(0, Departure.DONE), lambda event: None)

    def _is_leaving(self) -> bool:
        return any(isinstance(entry.send.message, Leave) for entry in self._outbox.entries())
