"""The lane of tables: a short way for the pushes and pulls of rows that a training loop makes again and again.

As the lane of batches (`kvd.core.server.lane`), it remembers of a worker's pushes to a part of a table what holds for
the next one: who the sender is, and which part it is. It stages a push, and lets a pull wait for its version, as the
general way does; what it does not take goes the general way as it came. Pushes and pulls of rows, and what batches do,
change nothing of what it remembers. Any other message makes it forget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvd.core.machine import Contribution, Peer, Received, Span
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import Slice
from kvd.core.server.keys import KeyTable
from kvd.core.server.memory_use import MemoryUse
from kvd.core.server.pending import Pending
from kvd.core.server.progress import PushRequest
from kvd.core.server.pull import Pulls
from kvd.core.server.push import Pushes
from kvd.core.server.readings import Readings
from kvd.core.server.stillness import Stillness
from kvd.core.server.targets import PushTarget
from kvd.core.server.waiting import Waiters
from kvd.protocol.messages import ADD, ANY_CLOCK, PullRows, Push, Staged
from kvd.protocol.specs import MAX_PAYLOAD_BYTES, ROW_ID_BYTES

MAX_REMEMBERED = 1 << 12  # parts of tables, of all workers; one more, and all are forgotten


class UsualRows(NamedTuple):
    """What is remembered of the pushes of rows by a worker to a part of a table."""

    peer: Peer
    rank: int
    slice: Slice


class RowLane:
    """The pushes and pulls of rows, in synchronous mode. Pushes of other keys pass through.

    Args:
        pushes, pulls: the general way.
        forget_all: makes all lanes forget, since something has come that may change what they remember.
        small_push_bytes: pushes of up to this many bytes are not answered by Staged.
        is_on: otherwise it takes nothing.
    """

    def __init__(
        self,
        effects: ServerEffects,
        attachments: Attachments,
        table: KeyTable,
        waiters: Waiters,
        stillness: Stillness,
        readings: Readings,
        memory: MemoryUse,
        pushes: Pushes,
        pulls: Pulls,
        forget_all: Callable[[], None],
        *,
        small_push_bytes: int,
        is_on: bool = True,
    ) -> None:
        self._effects = effects
        self._attachments = attachments
        self._table = table
        self._waiters = waiters
        self._stillness = stillness
        self._readings = readings
        self._memory = memory
        self._pushes = pushes
        self._pulls = pulls
        self._forget_all = forget_all
        self._small_push_bytes = small_push_bytes
        self._is_on = is_on
        self._usual: dict[tuple[int, str, int], UsualRows] = {}  # by sender, key and index

    def push(self, event: Received, push: Push) -> None:
        part = push.parts[0]
        usual = self._usual.get((event.sender, part.key, part.slice_index))
        if usual is not None and self._take_push(usual, event, push):
            return
        slice_ = self._table.slices.get((part.key, part.slice_index))
        if slice_ is None or slice_.spec.table is None:
            self._forget_all()
            self._pushes.push(event, push)
        else:
            self._pushes.push(event, push)
            self._remember(event, push)

    def pull(self, event: Received, pull: PullRows) -> None:
        usual = self._usual.get((event.sender, pull.part.key, pull.part.slice_index))
        if usual is None or not self._take_pull(usual, event, pull):
            self._pulls.pull_rows(event, pull)

    def forget(self) -> None:
        """Something has come that may change what is remembered."""
        self._usual.clear()

    def _remember(self, event: Received, push: Push) -> None:
        """If the push was staged just now, the next one goes by the lane."""
        part = push.parts[0]
        slice_ = self._table.slices.get((part.key, part.slice_index))
        rank = self._attachments.find(event.sender)
        if not self._is_on or slice_ is None or rank is None or not slice_.log.sync:
            return
        if slice_.log.progress_of(rank).last_request != PushRequest(event.sender, push.request):
            return
        if len(self._usual) >= MAX_REMEMBERED:
            self._usual.clear()
        self._usual[event.sender, part.key, part.slice_index] = UsualRows(event.peer, rank, slice_)

    # ── the lane ──

    def _take_push(self, usual: UsualRows, event: Received, push: Push) -> bool:
        """Stages the push, and lets it wait for its round. False: nothing was done."""
        slice_, rank, part = usual.slice, usual.rank, push.parts[0]
        group, log, clock = slice_.group, slice_.log, part.clock
        if not (
            event.peer == usual.peer
            and len(push.parts) == 1
            and part.creation == slice_.creation
            and push.how == ADD
            and not (push.pull or push.probe or push.coding is not None or event.fault)
            and clock == log.closed + 1
            and slice_.spec.num_rows(event.nbytes) is not None
            and self._stillness.of(group)
            and self._waiters.pending.may_open(event.peer, event.sender, push.request)
            and not self._memory.row_error(slice_.key, slice_.spec, event.nbytes)
        ):
            return False
        span = Span(event.payload, 0, event.nbytes)
        given = Contribution(rank, clock, span, push.samples, ADD, push.step, push.place)
        if not log.stage_next(given, PushRequest(event.sender, push.request)):
            return False
        if push.settled > self._readings.over:
            self._readings.step_is_over(push.settled)
        pending = Pending(event.peer, event.sender, push.request, True, False, 1)
        self._waiters.wait_for_round(pending, group, rank, clock)
        self._pushes.advance(group)
        if event.nbytes > self._small_push_bytes and not pending.closed and log.closed < clock:
            self._effects.send(event.peer, Staged(push.request))
        return True

    def _take_pull(self, usual: UsualRows, event: Received, pull: PullRows) -> bool:
        """Lets the pull wait for its version, or has its rows read if that is there. False: nothing was done."""
        slice_, rank, part = usual.slice, usual.rank, pull.part
        num_rows, rest = divmod(event.nbytes, ROW_ID_BYTES)
        waits = slice_.log.committed_clock(rank) < part.clock
        if not (
            event.peer == usual.peer
            and part.creation == slice_.creation
            and part.clock != ANY_CLOCK
            and not rest
            and num_rows * slice_.spec.row_nbytes <= MAX_PAYLOAD_BYTES
            and self._stillness.of(slice_.group)
            and self._waiters.pending.may_open(event.peer, event.sender, pull.request)
            and not (waits and self._memory.ids_error(slice_.key, event.nbytes))
        ):
            return False
        ids = Span(event.payload, 0, event.nbytes)
        pending = Pending(event.peer, event.sender, pull.request, False, True, 1, row_ids=ids)
        if waits:
            self._waiters.wait_for_round(pending, slice_.group, rank, part.clock)
        else:
            self._waiters.wait(pending, rank, [PushTarget(slice_.group, slice_, part.clock, event.nbytes)])
        return True
