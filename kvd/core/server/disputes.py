"""What becomes of pushes and pulls while the workers disagree on the optimizer.

No round closes, and all who wait, or come to wait, are told why. What is pushed stays staged and counts when they agree
again: every slice of a push has the same fate, on whichever server it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvd.core.server.groups import FusedGroup
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_agreement import OptimizerAgreement
from kvd.core.server.waiting import Waiters
from kvd.protocol.messages import ErrorCode, Refused, Taken


class Disputes:
    """Between the agreement and the requests of workers.

    Attributes:
        open: those who are at odds, if there are any.
    """

    def __init__(self, agreement: OptimizerAgreement, table: KeyTable, waiters: Waiters) -> None:
        self.open: Mapping[int, object] = agreement.disputes
        self._agreement = agreement
        self._table = table
        self._waiters = waiters

    def pushed(self, rank: int) -> None:
        """The rank has pushed for a round that has yet to close."""
        text = self._agreement.late(rank)
        if text:
            self._agreement.differ(rank, text)
            self.fail_all()

    def fail_all(self) -> None:
        """Tells all who wait."""
        for group in self._table.groups.values():
            self.fail_waiting(group)

    def fail_waiting(self, group: FusedGroup) -> None:
        """Tells those who wait for the group, unless its round is being applied."""
        if not self.open or group.log.closing is not None:
            return
        text = self._agreement.dispute
        waiting, group.waiting = group.waiting, []
        for entry in waiting:
            pending = entry.pending
            taken = Taken.KEPT if pending.push else Taken.NOTHING
            self._waiters.fail(pending, Refused(pending.request, ErrorCode.NOT_ALLOWED, text, taken=taken))

    def find_ahead(self, rank: int) -> None:
        """The rank has set the next optimizer, with all its pushes committed: others that have pushed on are late."""
        for group in self._table.groups.values():
            log = group.log
            for other in log.progress if log.sync else ():
                if log.staged_clock(other) > log.staged_clock(rank):
                    self.pushed(other)
