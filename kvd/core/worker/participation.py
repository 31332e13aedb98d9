"""Whether this node takes part in the rounds: a worker does until it leaves them, an observer never."""

from __future__ import annotations

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Received
from kvd.core.outbox import Outbox
from kvd.core.places import PlaceKind, kind_of
from kvd.core.pseudonyms import pseudonym
from kvd.core.session import SchedulerSession
from kvd.core.worker.asking import Asker
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import InFlight
from kvd.errors import KvdError, NotAllowed, NotResumed
from kvd.protocol.messages import NO_VIEW, Departure, Epoch, Leave, MemberState, TakePart, Taking


class Participation:
    """Leaves the rounds, and remembers it.

    Attributes:
        is_observer: this node has no rank, and only asks.
        in_rounds: whether it may push and initialise keys.
        is_apart: it was lost or late, or has just come: the rounds go on without it, until it takes part
            (`kvd.core.worker.returning`).
        is_returning: that is under way.
        point: where it waits until all workers have come there, as the program named it; None: nowhere. The rounds go
            on without it meanwhile (`kvd.core.worker.standing_by`).
    """

    def __init__(self, session: SchedulerSession, outbox: Outbox, asker: Asker, calls: CallBook) -> None:
        self._session = session
        self._outbox = outbox
        self._asker = asker
        self._calls = calls
        self.is_observer = session.identity.role == "observer"
        self.in_rounds = not self.is_observer
        self.is_apart = False
        self.is_returning = False
        self._has_come_in = False
        self.point: str | None = None
        self._was_idle = False
        self._apart_since = NO_VIEW
        self._awaited_since = NO_VIEW  # while it returns: the view in which the rounds wait for it; NO_VIEW: not yet
        self._is_out_again = False  # a later view says that they do not

    @property
    def was_lost(self) -> bool:
        """Whether the rounds have ever gone on without it, since it was lost."""
        return self._apart_since != NO_VIEW

    @property
    def has_missed_rounds(self) -> bool:
        """Whether the rounds have ever gone on without it: the clocks of keys that it finds later are not 0."""
        return self.was_lost or self._was_idle

    def leaves_out(self, place: int) -> bool:
        """Whether a push at this place is not made: a loop over steps goes on by itself with a later step."""
        return self.is_apart and kind_of(place) is PlaceKind.STEP

    def push_error(self) -> KvdError:
        """Why a node outside the rounds does not push."""
        if self.is_apart and self._session.predecessor is MemberState.BACK and not self._has_come_in:
            return NotResumed(
                "this worker came when the job was under way, and the others go on without it: call kv.resume() to "
                "take part from the next rounds on (kv.clock and a pull say where they are); a loop over kv.steps does "
                "so by itself"
            )
        if self.is_apart:
            return NotResumed(
                "the others went on without this worker: it was late by more than quorum_grace_s, silent for longer "
                "than worker_timeout_s, or started again after that. Call kv.resume() to take part again from the "
                "next rounds on (kv.clock and a pull say where they are); a loop over kv.steps does so by itself"
            )
        if self.is_observer:
            return NotAllowed("an observer does not push: join as a worker")
        if self.point is not None:
            return NotAllowed(
                f"this worker waits at {self.point!r} until all have come there, and the rounds go on without it: call "
                f"kv.join(until={self.point!r}) again, and push when it has returned"
            )
        return NotAllowed("this worker has left the rounds (join or close): it pushes no more")

    def leave(self, call: InFlight, request: requests.Depart) -> None:
        if self.is_observer:
            self._session.close()
            self._calls.complete(call)
            return

        if request.departure is Departure.WITHDRAWN:
            self._session.close()  # a further Join would overtake the answer, and take a place again

        def answered(event: Received) -> None:
            error = self._asker.error_of(event)
            if error is None:
                self.in_rounds, self.point = False, None
                if request.departure is not Departure.DONE:
                    self._session.close()
            self._calls.complete(call, error=error)

        self._asker.ask(call, SCHEDULER, Leave(0, request.departure), answered)

    def view_changed(self) -> None:
        """Compares what the view says of this worker with what it knows itself."""
        member = self._session.view.by_incarnation(pseudonym(self._session.incarnation))
        if not self._session.joined or self._session.is_closed or member is None:
            return
        if member.state in (MemberState.DONE, MemberState.LEFT):
            self.in_rounds = self.is_apart = False  # the answer to our Leave may be lost
        elif member.state in (MemberState.LOST, MemberState.BACK):
            self._go_apart(self._session.view.epoch)
        elif self.is_apart:
            if not self.is_returning and self._session.view.epoch > self._apart_since:
                self.step_out()  # the scheduler was restarted without its record, and has forgotten the loss
        elif (
            member.state == MemberState.ACTIVE and not self.in_rounds and self.point is None and not self._is_leaving()
        ):
            # The scheduler was restarted without its record, and has forgotten that this worker left.
            self._asker.ask(None, SCHEDULER, Leave(0, Departure.DONE), lambda event: None)

    # ── at a point ──

    def stand_by(self, point: str) -> None:
        """The rounds go on without this worker until all have come to this point."""
        self.point = point
        self.in_rounds = False
        self._was_idle = True

    def come_together(self) -> None:
        """All have, and this worker takes part again, unless it was lost meanwhile."""
        self.point = None
        self.in_rounds = not self.is_apart

    # ── after a loss ──

    def left_out(self, epoch: Epoch) -> None:
        """A server that knows the view of this epoch has not counted a push of this worker."""
        if epoch > self._apart_since:
            self._go_apart(epoch)

    def _go_apart(self, epoch: Epoch) -> None:
        if self.is_returning:
            self._is_out_again |= NO_VIEW < self._awaited_since < epoch
            return
        self.in_rounds, self.is_apart = False, True
        self._apart_since = max(self._apart_since, epoch)

    def begin_return(self) -> None:
        """It asks the scheduler to let the rounds wait for it."""
        self.is_returning = True
        self._awaited_since, self._is_out_again = NO_VIEW, False

    def awaited_since(self, epoch: Epoch) -> None:
        """They do in the view of this epoch."""
        self._awaited_since = epoch

    def step_out(self) -> None:
        """The rounds are to go on without this worker for now."""
        self.is_returning = False
        self._asker.ask(None, SCHEDULER, TakePart(0, Taking.OUT), lambda event: None)

    def come_back(self, place: int) -> bool:
        """The rounds wait for this worker, which knows where they are: its program goes on at this place. False: they
        went on without it meanwhile."""
        if self._is_out_again:
            self.step_out()
            return False
        self._asker.ask(None, SCHEDULER, TakePart(0, Taking.ARRIVED, place), lambda event: None)
        self.in_rounds, self.is_apart, self.is_returning, self._has_come_in = True, False, False, True
        self._apart_since = max(self._session.view.epoch, self._awaited_since)
        return True

    def _is_leaving(self) -> bool:
        return any(isinstance(entry.send.message, Leave) for entry in self._outbox.entries())
