"""Who takes part in the rounds, as the view says, and what becomes of those who wait for a dead worker."""

from __future__ import annotations

from kvd.core.membership import ViewState, name_of
from kvd.core.server.groups import FusedGroup
from kvd.core.server.rounds import SliceLog
from kvd.core.server.waiting import Waiters
from kvd.protocol.messages import ErrorCode, NodeName, Refused

REMEDIES = (
    'start it again under its node id. If the scheduler and the servers have on_worker_loss = "wait", the others wait '
    'for that, as with `kvd launch --restart N`; if the scheduler has "shrink", they continue without it'
)  # for a worker that died, where on_worker_loss is "fail"


class Participants:
    """The ranks that a round waits for, and which of them are dead.

    Attributes:
        required: ranks that have not left the rounds, whether they are there yet or not.
        awaited: those of them that do not rest, and have caught up after a loss, or after they came late.
        dead: rank → seconds of silence before it was declared dead; empty if waiting calls are not to fail.
        apart: the ranks that are known to be without a part in the rounds: their pushes do not count.
    """

    def __init__(self, waiters: Waiters, *, fail_on_loss: bool) -> None:
        self.required: list[int] = []
        self.awaited: list[int] = []
        self.dead: dict[int, float] = {}
        self.apart: frozenset[int] = frozenset()
        self._known: frozenset[int] | None = None  # sync: all ranks that may take part
        self._waiters = waiters
        self._fail_on_loss = fail_on_loss
        self._resting: set[int] = set()
        self._behind: set[int] = set()  # async: were lost, or came late, and have yet to catch up

    def update(self, view: ViewState) -> None:
        earlier, self.required = self.required, view.required_ranks()
        self.apart = frozenset(view.ranks_apart())
        self._known = frozenset(view.all_worker_ranks()) if view.is_sync else None
        if not view.is_sync:
            self._behind.update(view.lost_ranks())
            if earlier and view.settings.is_elastic:
                self._behind.update(set(self.required).difference(earlier))
        self._update_awaited()
        self.dead = {}
        if self._fail_on_loss:
            self.dead = {rank: member.last_seen_s for rank, member in view.dead_workers().items()}

    def leaves_out(self, rank: int) -> bool:
        """Whether pushes of this rank do not count. The view of a scheduler without its record may not know one that
        came when the job was under way, until it has joined again: the rounds do not wait for it."""
        return rank in self.apart or (self._known is not None and rank not in self._known)

    def rest(self, rank: int) -> None:
        """The worker has nothing to push for now: in async mode nobody is too far ahead of it."""
        self._resting.add(rank)
        self._update_awaited()

    def wake(self, rank: int) -> None:
        """The worker pushes, or has a successor."""
        if rank in self._resting:
            self._resting.remove(rank)
            self._update_awaited()

    def pushed(self, rank: int, log: SliceLog) -> None:
        """A bounded staleness waits for a worker that was lost, or came late, when it has caught up in a slice."""
        if rank in self._behind and log.staged_clock(rank) >= log.slowest(self.awaited):
            self._behind.remove(rank)
            self._update_awaited()

    def validate(self, view: ViewState) -> None:
        """Raises AssertionError if rounds do not wait for exactly those whom the view names: then all servers would not
        wait for the same."""
        if view.is_sync:
            required = view.required_ranks()
            assert self.awaited == self.required == required, f"rounds wait for {self.awaited}, the view for {required}"
            assert self.apart == frozenset(view.ranks_apart()), f"{self.apart} are apart, and not in the view"

    def _update_awaited(self) -> None:
        passed_by = self._resting | self._behind
        self.awaited = [rank for rank in self.required if rank not in passed_by]

    def blockers(self, group: FusedGroup) -> list[int]:
        """The ranks that the group's waiting requests wait for."""
        log = group.log
        if not group.waiting or log.closing is not None:
            return []
        if log.sync:
            return log.missing(log.closed + 1, self.required)
        if log.staleness < 0:
            return []
        slowest = log.slowest(self.awaited)
        return [rank for rank in self.awaited if log.staged_clock(rank) == slowest]

    def fail_blocked(self, group: FusedGroup) -> None:
        """Tells those who wait for a dead worker. What they pushed stays staged, in case it comes back."""
        if not self.dead:
            return
        lost = [rank for rank in self.blockers(group) if rank in self.dead]
        if not lost:
            return
        waiting, group.waiting = group.waiting, []
        nodes = tuple(NodeName("worker", rank) for rank in lost)
        names = ", ".join(name_of(*node) for node in nodes)
        text = f"key {group.key!r} waits for {names}, which died: {REMEDIES}"
        last_seen_s = self.dead[lost[0]]
        for entry in waiting:
            request = entry.pending.request
            refusal = Refused(request, ErrorCode.NODE_LOST, text, group.key, nodes=nodes, last_seen_s=last_seen_s)
            self._waiters.fail(entry.pending, refusal)
