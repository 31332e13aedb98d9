"""The lane: a short way into a round, for the push that a training loop makes again and again.

A worker pushes the same batch, round after round. What the general way (`kvd.core.server.push`) has found out about one
push of it holds for the next one, as long as only pushes and pulls of batches come, and jobs end: who the sender is,
which group the batch is, that the worker takes part, that the key may be pushed. The lane remembers this, and looks at
what may be different each time. Any other message makes it forget.

The lane only stages: the slice log, the open requests and those who wait are those of the general way, which closes the
round, has it applied, commits it and answers. So a push that the lane took is one like any other, whatever comes next.
A push that it does not take goes the general way as it came: nothing was changed.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.machine import Buffer, Contribution, Peer, Received, Span
from kvd.core.server.attachments import Attachments
from kvd.core.server.batches import BatchTable
from kvd.core.server.effects import ServerEffects
from kvd.core.server.express import ExpressRounds, Round
from kvd.core.server.groups import FusedGroup
from kvd.core.server.keys import KeyTable
from kvd.core.server.pending import Pending
from kvd.core.server.progress import PushRequest
from kvd.core.server.readings import Readings
from kvd.core.server.repeated import RepeatedPush
from kvd.core.server.stillness import Stillness
from kvd.core.server.waiting import Waiters
from kvd.protocol.fixed import PushNumbers
from kvd.protocol.messages import ADD, PushBatch, Staged

MAX_REMEMBERED = 1 << 12  # batches of all workers; one more, and all are forgotten


class PushLane:
    """The pushes of batches, in synchronous mode.

    Args:
        general: takes a push the general way.
        advance: goes on with a group that has something new.
        rounds: where pushes are held.
        small_push_bytes: pushes of up to this many bytes are not answered by Staged.
        is_on: otherwise it takes no push.
    """

    def __init__(
        self,
        effects: ServerEffects,
        attachments: Attachments,
        batches: BatchTable,
        table: KeyTable,
        waiters: Waiters,
        stillness: Stillness,
        readings: Readings,
        general: Callable[[Received, PushBatch], None],
        advance: Callable[[FusedGroup], None],
        rounds: ExpressRounds,
        *,
        small_push_bytes: int,
        is_on: bool = True,
    ) -> None:
        self._effects = effects
        self._attachments = attachments
        self._batches = batches
        self._table = table
        self._waiters = waiters
        self._stillness = stillness
        self._readings = readings
        self._general = general
        self._advance = advance
        self._rounds = rounds
        self._small_push_bytes = small_push_bytes
        self._is_on = is_on
        self._usual: dict[tuple[int, int], RepeatedPush] = {}  # by sender and number of the batch

    def push_batch(self, event: Received, push: PushBatch) -> None:
        usual = self._usual.get((event.sender, push.batch))
        if usual is None or not self._take(usual, event, push):
            self._general(event, push)
            self._remember(event, push)

    def hold(
        self, peer: Peer, sender: int, push: PushNumbers, payload: Buffer, nbytes: int, source: object
    ) -> Round | None:
        """Has a push of a batch held for its round, see `kvd.core.server.express`. This changes no deadline. If it is
        the last push of the round, the round has an update: the shell makes it, and says `ExpressRounds.end` before the
        machine's next step, or runs it as an ordinary job. None: nothing was done, and the push is for that step.

        Args:
            peer, sender: its connection and its worker.
            payload: the values, `nbytes` bytes.
            source: where its answer goes; only the shell looks at it.
        """
        usual = self._usual.get((sender, push.batch))
        if usual is None or usual.peer != peer:
            return None
        group = usual.group
        if push.clock != group.log.closed + 1 or nbytes != group.nbytes or self._readings.is_on:
            return None
        round_ = self._rounds.take(usual, push, payload, source)
        if round_ is not None and push.settled > self._readings.over:
            self._readings.step_is_over(push.settled)
        return round_

    def forget(self) -> None:
        """Something has come that may change what is remembered."""
        self._usual.clear()

    # ── what is remembered ──

    def _remember(self, event: Received, push: PushBatch) -> None:
        """If the push was staged just now, the next one goes by the lane."""
        rank, batch = self._attachments.find(event.sender), self._batches.find(event.sender, push.batch)
        if not self._is_on or rank is None or batch is None or batch.group is None:
            return
        group = self._table.groups.get(batch.group)
        if group is None or not group.log.sync or group.is_of_table:
            return
        if group.log.progress_of(rank).last_request != PushRequest(event.sender, push.request):
            return
        if len(self._usual) >= MAX_REMEMBERED:
            self._usual.clear()
        self._usual[event.sender, push.batch] = RepeatedPush.of(event, rank, group)

    # ── the lane ──

    def _take(self, usual: RepeatedPush, event: Received, push: PushBatch) -> bool:
        """Stages the push, and lets it wait for its round. False: nothing was done."""
        group, rank, log = usual.group, usual.rank, usual.group.log
        if not self._may_take(usual, event, push):
            return False
        if not self._waiters.pending.may_open(event.peer, event.sender, push.request):
            return False
        span = Span(event.payload, 0, event.nbytes)
        given = Contribution(rank, push.clock, span, push.samples, ADD, push.step, push.place)
        if not log.stage_next(given, PushRequest(event.sender, push.request)):
            return False
        if push.settled > self._readings.over:
            self._readings.step_is_over(push.settled)
        pending = Pending(event.peer, event.sender, push.request, True, push.pull, 1)
        self._waiters.wait_for_round(pending, group, rank, push.clock)
        self._advance(group)
        if event.nbytes > self._small_push_bytes and not pending.closed and log.closed < push.clock:
            self._effects.send(event.peer, Staged(push.request))
        return True

    def _may_take(self, usual: RepeatedPush, event: Received, push: PushBatch) -> bool:
        """Whether this is a push of all of the group to its next round, and concerns nobody else."""
        group = usual.group
        return (
            event.peer == usual.peer
            and event.nbytes == group.nbytes
            and push.how == ADD
            and not push.probe
            and push.clock == group.log.closed + 1
            and self._stillness.of(group)
        )
