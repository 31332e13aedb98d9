"""The express way of a server: whole rounds of small pushes that a training loop makes again and again.

A push that the lane (`kvd.core.server.lane`) knows, and whose round has nothing else in it, is not staged: it is held
as it came. When the pushes of all workers are here, the round is closed, applied and committed at once, and they are
answered: no push becomes a request that is open, and none waits.

Whatever else happens first is preceded by `materialize`: what is held goes the general way, in the order in which it
came, as if it had arrived just now. A round whose update is under way is closed already; who waits for it becomes an
open request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from kvd.core.machine import Contribution, JobDone, Peer, Received, Span
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup
from kvd.core.server.made import Use
from kvd.core.server.participants import Participants
from kvd.core.server.pending import Pending
from kvd.core.server.progress import PushRequest
from kvd.core.server.push import Pushes
from kvd.core.server.rounds import Record
from kvd.core.server.waiting import Waiters
from kvd.protocol.messages import ADD, Done, PushBatch, Values


class _Held(NamedTuple):
    """A push that is held."""

    rank: int
    event: Received
    push: PushBatch


@dataclass(slots=True, eq=False)
class _Round:
    """The round of a group that is open in the express way, or is being applied.

    Attributes:
        held: the pushes by rank, in the order in which they came.
        job: that applies them; 0 until all are here.
    """

    group: FusedGroup
    held: dict[int, _Held] = field(default_factory=dict)
    job: int = 0


_rank_of = attrgetter("rank")


class ExpressRounds:
    """The rounds of small groups in synchronous mode, without replicas.

    Args:
        small_push_bytes: pushes of more bytes are told when they are staged, and so are none of these.
    """

    def __init__(
        self,
        effects: ServerEffects,
        waiters: Waiters,
        participants: Participants,
        pushes: Pushes,
        *,
        small_push_bytes: int,
    ) -> None:
        self._effects = effects
        self._waiters = waiters
        self._participants = participants
        self._pushes = pushes
        self._small_push_bytes = small_push_bytes
        self._rounds: dict[int, _Round] = {}  # by the number of the group
        self._jobs: set[int] = set()  # that apply them
        self._requests: set[PushRequest] = set()  # those that are held

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, and no round is being applied."""
        return not self._rounds

    def awaits(self, job: int) -> bool:
        """Whether this job applies a round of the express way."""
        return job in self._jobs

    # ── pushes ──

    def take(self, group: FusedGroup, rank: int, event: Received, push: PushBatch) -> bool:
        """Holds a push to the next round of the group, or closes the round with it. False: nothing was done."""
        log = group.log
        round_ = self._rounds.get(group.number)
        if round_ is None:
            if not self._may_begin(group):
                return False
        elif round_.job or rank in round_.held:
            return False
        request = PushRequest(event.sender, push.request)
        if not self._is_new(event.peer, request) or not log.would_take(rank, push.clock, request):
            return False
        if round_ is None:
            round_ = self._rounds[group.number] = _Round(group)
        round_.held[rank] = _Held(rank, event, push)
        self._requests.add(request)
        if self._is_complete(round_, push.clock):
            self._close(round_)
        return True

    def _is_new(self, peer: Peer, request: PushRequest) -> bool:
        """Whether no request of this number is open, or held in another round: no worker of ours would make it."""
        return request not in self._requests and self._waiters.pending.may_open(peer, request.sender, request.number)

    def _may_begin(self, group: FusedGroup) -> bool:
        """Whether nothing is under way in the group."""
        log = group.log
        return (
            group.nbytes <= self._small_push_bytes
            and log.closing is None
            and not (log.has_staged or group.working or group.tasks or group.waiting)
            and not group.is_of_table
        )

    def _is_complete(self, round_: _Round, clock: int) -> bool:
        held, log = round_.held, round_.group.log
        for rank in self._participants.awaited:  # noqa: SIM110  a generator is one more call in each push
            if rank not in held and not log.is_past(rank, clock):
                return False
        return True

    def _close(self, round_: _Round) -> None:
        """All pushes are here: the round is closed, and its update begins."""
        given = []
        for rank, event, push in sorted(round_.held.values(), key=_rank_of):
            span = Span(event.payload, 0, event.nbytes)
            contribution = Contribution(rank, push.clock, span, push.samples, ADD, push.step, push.place)
            given.append((contribution, PushRequest(event.sender, push.request)))
        record = round_.group.log.close_whole(given)
        round_.job = self._pushes.apply(round_.group, record, self._applied)
        self._jobs.add(round_.job)

    # ── the end of a round ──

    def _applied(self, group: FusedGroup, record: Record, use: Use, done: JobDone, *, is_tuple: bool) -> None:
        """The end of the job of a round, which may have become an ordinary one meanwhile."""
        round_ = self._rounds.get(group.number)
        if round_ is None or round_.job != done.job or done.error is not None or group.is_gone or is_tuple:
            self.materialize()
            self._pushes.applied(group, record, use, done, is_tuple=is_tuple)
            return
        del self._rounds[group.number]
        self._jobs.discard(done.job)
        group.commit(done.result)
        version, spans = group.log.version, (Span(done.result, 0, group.nbytes),)
        for _, event, push in round_.held.values():
            self._requests.discard(PushRequest(event.sender, push.request))
            if push.pull:
                self._effects.send(event.peer, Values(push.request, (version,)), spans)
            else:
                self._effects.send(event.peer, Done(push.request))

    # ── the general way ──

    def materialize(self) -> None:
        """What is held goes the general way."""
        rounds, self._rounds = self._rounds, {}
        self._jobs.clear()
        self._requests.clear()
        for round_ in rounds.values():
            for rank, event, push in round_.held.values():
                if round_.job:
                    pending = Pending(event.peer, event.sender, push.request, True, push.pull, 1)
                    self._waiters.wait_for_round(pending, round_.group, rank, push.clock)
                else:
                    self._pushes.push_batch(event, push)

    def validate(self, groups: Iterable[FusedGroup]) -> None:
        """Raises AssertionError unless the groups whose rounds are open here have nothing else under way."""
        numbers = {group.number for group in groups}
        for number, round_ in self._rounds.items():
            log = round_.group.log
            assert number in numbers, f"a round of group {number} is open, which is not there"
            assert not round_.group.waiting, f"others wait for {round_.group.description}"
            assert not log.has_staged, f"a round of {round_.group.description} is open twice"
            assert (log.closing is not None) == (round_.job > 0), f"{round_} and {log.closing}"
