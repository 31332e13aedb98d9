"""The express way of a server: whole rounds of small pushes that a training loop makes again and again.

The shell reads the numbers of such a push out of its frame, and gives them to `take`, with the bytes. A push that the
lane (`kvd.core.server.lane`) knows, and whose round has nothing else in it, is held there. With the push of the last
worker the round is closed, and its update is what `take` returns. The shell makes it and says `end`: the round is
committed, and who pushed is answered. No push becomes a message, an event or an open request.

Whatever else happens first is preceded by `materialize`: what is held goes the general way, in the order in which it
came, as if it had arrived just now. A round whose update is under way is closed already; who waits for it becomes an
open request, and the update an ordinary job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.core.machine import Apply, Buffer
from kvd.core.server.effects import ServerEffects
from kvd.core.server.groups import FusedGroup
from kvd.core.server.made import Use
from kvd.core.server.participants import Participants
from kvd.core.server.progress import PushRequest
from kvd.core.server.push import Pushes
from kvd.core.server.repeated import RepeatedPush
from kvd.core.server.rounds import Record
from kvd.core.server.stillness import Stillness
from kvd.core.server.waiting import Waiters
from kvd.protocol.fixed import PushNumbers


@dataclass(slots=True, eq=False)
class Round:
    """The round of a group that is open in the express way, or is being applied.

    Attributes:
        missing: the ranks that have yet to push.
        held: the pushes by rank, in the order in which they came.
        record, use: all of them, once nobody is missing, and what their update uses.
        update: makes the next version of them; None: somebody is missing.
    """

    group: FusedGroup
    missing: set[int]
    held: dict[int, RepeatedPush] = field(default_factory=dict)
    record: Record | None = None
    use: Use | None = None
    update: Apply | None = None


class ExpressRounds:
    """The rounds of small groups in synchronous mode, without replicas.

    Args:
        small_push_bytes: pushes of more bytes are told when they are staged, and so are none of these.

    Attributes:
        is_on: whether there are no replicas.
    """

    def __init__(
        self,
        effects: ServerEffects,
        waiters: Waiters,
        participants: Participants,
        pushes: Pushes,
        stillness: Stillness,
        *,
        small_push_bytes: int,
    ) -> None:
        self.is_on = True
        self._stillness = stillness
        self._effects = effects
        self._waiters = waiters
        self._participants = participants
        self._pushes = pushes
        self._small_push_bytes = small_push_bytes
        self._rounds: dict[int, Round] = {}  # by the number of the group
        self._requests: set[tuple[int, int]] = set()  # sender and number of those that are held

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, and no round is being applied."""
        return not self._rounds

    # ── pushes ──

    def take(self, push: RepeatedPush, numbers: PushNumbers, payload: Buffer, source: object) -> Round | None:
        """Holds a push to the next round of its group, and closes the round with the last one. None: nothing was done.

        Args:
            push: what is known of it; what follows is of this one, see `RepeatedPush`.

        Returns:
            The round in which it is held.
        """
        group, rank, clock = push.group, push.rank, numbers.clock
        round_ = self._rounds.get(group.number)
        if round_ is not None and (round_.update is not None or rank in round_.held):
            return None
        name = push.sender, numbers.request
        if name in self._requests or name in self._waiters.pending.names:
            return None
        if not group.log.would_take(rank, clock, *name):
            return None
        if round_ is None:
            if not self._may_begin(group):
                return None
            missing = group.log.due(clock, self._participants.awaited)
            round_ = self._rounds[group.number] = Round(group, missing)
        push.numbers, push.payload, push.source = numbers, payload, source
        round_.held[rank] = push
        self._requests.add(name)
        round_.missing.discard(rank)
        if not round_.missing:
            self._close(round_)
        return round_

    def _may_begin(self, group: FusedGroup) -> bool:
        """Whether nothing is under way in the group, and nobody else wants to know of its pushes. This stays so as long
        as a round is open here."""
        log = group.log
        return (
            self.is_on
            and group.nbytes <= self._small_push_bytes
            and log.closing is None
            and not (log.has_staged or group.working or group.tasks or group.waiting)
            and self._stillness.of(group)
        )

    def _close(self, round_: Round) -> None:
        """All pushes are here: the round is closed, and its update can be made."""
        group, held = round_.group, round_.held
        contributions, requests = [], []
        for rank in sorted(held):
            push = held[rank]
            contributions.append(push.contribution())
            requests.append(PushRequest(push.sender, push.numbers.request))
        round_.record = record = group.log.close_whole(contributions, requests, group.nbytes)
        round_.use = use = self._pushes.use_of(group, record)
        round_.update = self._pushes.update_of(group, record, use, self._effects.new_job())

    # ── the end of a round ──

    def end(self, round_: Round, buffer: Buffer) -> bool:
        """The update was made: the round is a version, and whose pushes are in it is to be told. False: it is an
        ordinary one by now, and waits for the end of its job."""
        group = round_.group
        if self._rounds.get(group.number) is not round_:
            return False
        del self._rounds[group.number]
        for push in round_.held.values():
            self._requests.discard((push.sender, push.numbers.request))
            push.payload = None
        group.commit(buffer)
        return True

    # ── the general way ──

    def materialize(self) -> None:
        """What is held goes the general way."""
        rounds, self._rounds = self._rounds, {}
        self._requests.clear()
        for round_ in rounds.values():
            group, update = round_.group, round_.update
            for push in round_.held.values():
                if update is None:
                    self._pushes.push_batch(*push.received())
                else:
                    self._waiters.wait_for_round(push.pending(), group, push.rank, push.numbers.clock)
                push.payload = None
            if round_.record is not None and round_.use is not None and update is not None:
                self._pushes.await_update(group, round_.record, round_.use, update)

    def validate(self, groups: Iterable[FusedGroup]) -> None:
        """Raises AssertionError if the groups whose rounds are open here have something else under way, or a request
        is not known that is held."""
        numbers = {group.number for group in groups}
        held = set()
        for number, round_ in self._rounds.items():
            log = round_.group.log
            assert number in numbers, f"a round of group {number} is open, which is not there"
            assert not round_.group.waiting, f"others wait for {round_.group.description}"
            assert not log.has_staged, f"a round of {round_.group.description} is open twice"
            assert (log.closing is not None) == (round_.update is not None), f"{round_} and {log.closing}"
            assert bool(round_.missing) == (round_.update is None), f"{round_} waits for nobody, or for somebody"
            assert round_.held, f"a round of {round_.group.description} is open without a push"
            held |= {(push.sender, push.numbers.request) for push in round_.held.values()}
        assert held == self._requests, f"{held} are held, {self._requests} are known"
