"""A pull on the server: resolve what it is about, then wait for the version and be answered (`waiting`). A pull of rows
from a part of a table has them read first."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Peer, Received, Span
from kvd.core.server.attachments import Attachments
from kvd.core.server.disputes import Disputes
from kvd.core.server.effects import ServerEffects
from kvd.core.server.participants import Participants
from kvd.core.server.pending import Pending
from kvd.core.server.targets import PushTarget, TargetResolver
from kvd.core.server.verdicts import Verdicts
from kvd.core.server.waiting import Waiters
from kvd.protocol.messages import ANY_CLOCK, NO_RANK, ErrorCode, Pull, PullBatch, PullRows
from kvd.protocol.specs import ROW_ID_BYTES


class Pulls:
    """The pulls of workers and observers.

    Args:
        memory_error: why there is no memory for so many bytes of row ids of a table; empty if there is.
    """

    def __init__(
        self,
        effects: ServerEffects,
        attachments: Attachments,
        targets: TargetResolver,
        verdicts: Verdicts,
        waiters: Waiters,
        participants: Participants,
        disputes: Disputes,
        memory_error: Callable[[str, int], str],
    ) -> None:
        self._effects = effects
        self._attachments = attachments
        self._targets = targets
        self._verdicts = verdicts
        self._waiters = waiters
        self._participants = participants
        self._disputes = disputes
        self._memory_error = memory_error

    def pull(self, event: Received, pull: Pull) -> None:
        if self._waiters.joins_open(event, pull.request):
            return
        rank = self._attachments.find(event.sender)
        if rank is None and any(part.clock != ANY_CLOCK for part in pull.parts):
            self._attachments.rank_of(event, pull.request)  # which tells the sender to attach
            return
        targets = self._targets.of_parts(event, pull)
        if targets is not None:
            self._wait_or_answer(event, pull.request, NO_RANK if rank is None else rank, targets, takes=pull.takes)

    def pull_batch(self, event: Received, pull: PullBatch) -> None:
        if self.take(event.peer, event.sender, pull):
            return
        rank = self._attachments.rank_of(event, pull.request)
        if rank is None or self._waiters.joins_open(event, pull.request):
            return
        targets = self._targets.of_batch(event, pull)
        if targets is not None:
            self._wait_or_answer(event, pull.request, rank, targets)

    def take(self, peer: Peer, sender: int, pull: PullBatch) -> bool:
        """Answers a pull of a worker that has a verdict on its pushes of the batch, or lets it wait.

        Returns:
            False if there is none, or the request is open already: nothing was done.
        """
        admitted = self._verdicts.find(peer, sender, pull.batch)
        if admitted is None:
            return False
        group, verdict = admitted
        request, clock, version = pull.request, pull.clock, group.log.version
        if clock == version:
            return not self._waiters.pending.is_full_for(peer) and self._waiters.answer_newest(
                peer, sender, request, group
            )
        if clock < version:
            return False
        pending = Pending(peer, sender, request, False, True, 1)
        if not self._waiters.wait_for_round(pending, group, verdict.rank, clock):
            return False
        if self._participants.dead or self._disputes.open:
            self._participants.fail_blocked(group)
            self._disputes.fail_waiting(group)
        return True

    def pull_rows(self, event: Received, pull: PullRows) -> None:
        if self._waiters.joins_open(event, pull.request):
            return
        rank = self._attachments.find(event.sender)
        if rank is None and pull.part.clock != ANY_CLOCK and not self._targets.has_version(pull.part):
            self._attachments.rank_of(event, pull.request)  # which tells the sender, a worker then, to attach
            return
        target = self._targets.of_rows(event, pull)
        if target is None:
            return
        group = target.group
        if rank is None:
            self._read_rows(event, pull, target)
            return
        waits = target.clock != ANY_CLOCK and group.log.committed_clock(rank) < target.clock
        if waits and (text := self._memory_error(group.key, event.nbytes)):
            self._effects.refuse(event.peer, pull.request, ErrorCode.NOT_ALLOWED, text, group.key)
        else:
            self._wait_or_answer(event, pull.request, rank, [target], Span(event.payload, 0, event.nbytes))

    def _read_rows(self, event: Received, pull: PullRows, target: PushTarget) -> None:
        """A reader wants rows of the newest version, or of one that is there: it waits for nothing."""
        rows_nbytes = event.nbytes // ROW_ID_BYTES * target.group.slices[0].spec.row_nbytes
        if text := self._memory_error(target.group.key, rows_nbytes):
            self._effects.refuse(event.peer, pull.request, ErrorCode.NOT_ALLOWED, text, target.group.key)
        else:
            self._wait_or_answer(event, pull.request, NO_RANK, [target], Span(event.payload, 0, event.nbytes))

    def _wait_or_answer(
        self,
        event: Received,
        request: int,
        rank: int,
        targets: list[PushTarget],
        row_ids: Span | None = None,
        takes: str = "",
    ) -> None:
        if self._waiters.pending.is_full_for(event.peer):
            text = "too many requests wait already: try again"
            self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, text)
            return
        pending = Pending(event.peer, event.sender, request, False, True, len(targets), row_ids=row_ids, takes=takes)
        self._waiters.wait(pending, rank, targets)
        for target in targets:
            self._participants.fail_blocked(target.group)
            self._disputes.fail_waiting(target.group)
