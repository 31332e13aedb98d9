"""The roster: which process holds which rank, and the state of each member.

A member's state changes only in `Roster.transition`, along TRANSITIONS.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from kvd.core.machine import Peer, Received
from kvd.core.membership import TAKING_PART, name_of
from kvd.core.principals import key_text
from kvd.protocol.messages import Departure, Join, Member, MemberState

MAX_REPLACED = 1024  # replaced incarnations remembered
MAX_REASON_CHARS = 80


class MemberEvent(Enum):
    """What can happen to a member."""

    HEARD = "was heard"
    LEFT_ROUNDS = "left the rounds"
    LEFT = "left"
    DECLARED_DEAD = "was declared dead"
    DROPPED = "was declared dead, and the rounds go on without it"
    RETURNED = "takes part again"
    ARRIVED = "knows where the rounds are"
    STEPPED_OUT = "cannot take part again yet"
    IDLED = "waits at a point"
    RELEASED = "has come to a point with all others"
    LATE = "is late, and the rounds go on without it"


TRANSITIONS: dict[MemberState, dict[MemberEvent, MemberState]] = {
    MemberState.ACTIVE: {
        MemberEvent.HEARD: MemberState.ACTIVE,
        MemberEvent.LEFT_ROUNDS: MemberState.DONE,
        MemberEvent.LEFT: MemberState.LEFT,
        MemberEvent.DECLARED_DEAD: MemberState.DEAD,
        MemberEvent.DROPPED: MemberState.LOST,
        MemberEvent.RETURNED: MemberState.ACTIVE,
        MemberEvent.ARRIVED: MemberState.ACTIVE,
        MemberEvent.STEPPED_OUT: MemberState.BACK,
        MemberEvent.IDLED: MemberState.IDLE,
        MemberEvent.LATE: MemberState.BACK,
    },
    MemberState.IDLE: {  # the rounds go on without it, and nothing that it has pushed is lost
        MemberEvent.HEARD: MemberState.IDLE,
        MemberEvent.IDLED: MemberState.IDLE,
        MemberEvent.RELEASED: MemberState.ACTIVE,
        MemberEvent.LEFT_ROUNDS: MemberState.DONE,
        MemberEvent.LEFT: MemberState.LEFT,
        MemberEvent.DECLARED_DEAD: MemberState.DEAD,  # from now on the rounds wait, for its successor
        MemberEvent.DROPPED: MemberState.LOST,
    },
    MemberState.DONE: {
        MemberEvent.HEARD: MemberState.DONE,
        MemberEvent.LEFT_ROUNDS: MemberState.DONE,
        MemberEvent.LEFT: MemberState.LEFT,
        MemberEvent.DECLARED_DEAD: MemberState.GONE,
    },
    MemberState.LEFT: {  # final: messages that arrive late change nothing
        MemberEvent.HEARD: MemberState.LEFT,
        MemberEvent.LEFT_ROUNDS: MemberState.LEFT,
        MemberEvent.LEFT: MemberState.LEFT,
    },
    MemberState.DEAD: {  # it was paused or cut off, and nobody took its rank
        MemberEvent.HEARD: MemberState.ACTIVE,
        MemberEvent.DROPPED: MemberState.LOST,
    },
    MemberState.GONE: {MemberEvent.HEARD: MemberState.DONE},
    MemberState.LOST: {MemberEvent.HEARD: MemberState.BACK},
    MemberState.BACK: {
        MemberEvent.HEARD: MemberState.BACK,
        MemberEvent.RETURNED: MemberState.RETURNING,
        MemberEvent.ARRIVED: MemberState.BACK,  # it was lost once more
        MemberEvent.STEPPED_OUT: MemberState.BACK,
        MemberEvent.LEFT_ROUNDS: MemberState.DONE,
        MemberEvent.LEFT: MemberState.LEFT,
        MemberEvent.DROPPED: MemberState.LOST,
    },
    MemberState.RETURNING: {
        MemberEvent.HEARD: MemberState.RETURNING,
        MemberEvent.RETURNED: MemberState.RETURNING,
        MemberEvent.ARRIVED: MemberState.ACTIVE,
        MemberEvent.STEPPED_OUT: MemberState.BACK,
        MemberEvent.IDLED: MemberState.IDLE,  # what it said of its arrival is on its way, or lost
        MemberEvent.LATE: MemberState.BACK,
        MemberEvent.LEFT_ROUNDS: MemberState.DONE,
        MemberEvent.LEFT: MemberState.LEFT,
        MemberEvent.DROPPED: MemberState.LOST,
    },
}
LIVING = (MemberState.ACTIVE, MemberState.IDLE, MemberState.DONE, MemberState.BACK, MemberState.RETURNING)
AFTER_A_LOSS = (MemberState.BACK, MemberState.RETURNING)
_WITH_A_STEP = (MemberState.ACTIVE, MemberState.IDLE, MemberState.DEAD)  # which the others find out

# What the next holder of a rank is told of the one before: a holder that is replaced while it lives counts as dead.
AS_PREDECESSOR = {
    MemberState.ACTIVE: MemberState.DEAD,
    MemberState.IDLE: MemberState.DEAD,
    MemberState.DONE: MemberState.DONE,
    MemberState.LEFT: MemberState.LEFT,
    MemberState.DEAD: MemberState.DEAD,
    MemberState.GONE: MemberState.DONE,
    MemberState.LOST: MemberState.LOST,
    MemberState.BACK: MemberState.LOST,
    MemberState.RETURNING: MemberState.LOST,
}

# How a node that gives up joining leaves a place that it took over, so that the place is as it found it.
AS_FOUND = {
    MemberState.DEAD: Departure.FAILED,
    MemberState.DONE: Departure.DONE,
    MemberState.LEFT: Departure.LEFT,
    MemberState.LOST: Departure.FAILED,
}
FINISHED = (None, MemberState.LEFT, MemberState.DONE)  # predecessors without a step that would have to be made again
_DEAD_WORKER = ("worker", MemberState.DEAD)


@dataclass(slots=True)
class Seat:
    """One rank of one role, and its latest holder."""

    member: Member
    host: str
    pid: int
    peer: Peer | None = None  # where the holder was last heard from
    predecessor: MemberState | None = None
    host_name: str = ""
    is_new: bool = False  # its holder came when the job was under way, and has yet to take part
    took_part: int = 0  # the number of its latest TakePart: an earlier one that comes again changes nothing
    came_in: int = 0  # the place of its program from which on the rounds wait for it, if that was not the first

    @property
    def place(self) -> tuple[str, int]:
        return self.member.role, self.member.rank

    @property
    def name(self) -> str:
        return name_of(self.member.role, self.member.rank)

    @property
    def is_late(self) -> bool:
        """Whether the rounds go on without it since it was late. Of one that was lost the view gives no reason then."""
        return self.member.state in AFTER_A_LOSS and bool(self.member.reason)

    @property
    def is_living(self) -> bool:
        return self.member.state in LIVING

    @property
    def told_predecessor(self) -> MemberState | None:
        """What its holder is told of the one before: see `Welcome`."""
        return MemberState.BACK if self.is_new else self.predecessor


class Roster:
    """All seats of a cluster, and the incarnations that lost theirs to another process."""

    def __init__(
        self,
        num_servers: int,
        num_workers: int,
        seats: Iterable[Seat] = (),
        replaced: Iterable[tuple[int, str]] = (),
        *,
        shrinks: bool = False,
        quorum: int = 0,
        most_workers: int = 0,
    ) -> None:
        """`seats` and `replaced` come from a record. Seats beyond the cluster's size are dropped.

        Args:
            num_workers: the workers with which the job is complete.
            shrinks: the rounds and barriers go on without a worker that died, as long as another one is there.
            quorum: they do so as long as this many are there; 0: that is not so.
            most_workers: the seats of workers, if there are more.
        """
        self.shrinks = shrinks
        self.quorum = quorum
        self._needed = {"server": num_servers, "worker": num_workers}
        self._sizes = {"server": num_servers, "worker": max(num_workers, most_workers)}
        self._seats = {seat.place: seat for seat in seats if seat.member.rank < self._sizes[seat.member.role]}
        self._by_incarnation = {seat.member.incarnation: seat for seat in self._seats.values()}
        self._replaced = OrderedDict(replaced)  # incarnation → the name of the place that it lost
        self._ranks: dict[str, list[int]] = {}  # what was asked of the states since the latest change, by question

    # ── who is where ──

    def seats(self) -> Collection[Seat]:
        """In the order in which the places were first taken."""
        return self._seats.values()

    def living(self) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.is_living]

    def seat_of(self, incarnation: int) -> Seat | None:
        return self._by_incarnation.get(incarnation)

    def worker_seat_of(self, incarnation: int) -> Seat | None:
        seat = self.seat_of(incarnation)
        return seat if seat is not None and seat.member.role == "worker" else None

    def has_seat(self, role: str, rank: int) -> bool:
        return (role, rank) in self._seats

    def lost_place(self, incarnation: int) -> str | None:
        """The name of the place that this incarnation lost to another process; None if it lost none."""
        return self._replaced.get(incarnation)

    def replaced(self) -> list[tuple[int, str]]:
        """All incarnations that lost their place, with its name, the oldest first."""
        return list(self._replaced.items())

    def living_holder(self, role: str, rank: int) -> Seat | None:
        """The seat of this rank, if its holder lives."""
        seat = self._seats.get((role, rank))
        return seat if seat is not None and seat.is_living else None

    def foreign_key(self, event: Received) -> str:
        """What is wrong if the sender's incarnation joined under another key than it uses now; "" if nothing is."""
        seat = self.seat_of(event.sender)
        if seat is None or seat.member.principal == event.principal.name:
            return ""
        joined, now = key_text(seat.member.principal), event.principal.describe()
        return f"{seat.name} joined under {joined}, and this came under {now}: use one key for all of a process"

    def missing(self) -> list[str]:
        """The names of places that nobody has taken yet, and without which the job does not begin."""
        return [name_of(role, rank) for role, rank in self._untaken()]

    def may_lose(self, seat: Seat) -> bool:
        """Whether the rounds can go on without this worker: a quorum takes part, or, if they shrink, another one pushes
        or may."""
        pushing = (MemberState.ACTIVE, MemberState.IDLE, *AFTER_A_LOSS)
        can_shrink = self.shrinks and any(
            other.state in pushing and rank != seat.member.rank for rank, other in self._holders("worker").items()
        )
        return can_shrink or self.has_quorum_without([seat.member.rank])

    def comes_in_before(self, seat: Seat) -> str | None:
        """The worker after which this one can come in, if nobody takes part: two that come in at once choose a step
        each, as no server can tell either where the others are."""
        others = [(rank, member.state) for rank, member in self._holders("worker").items() if rank != seat.member.rank]
        if seat.member.state is not MemberState.BACK or any(state in _WITH_A_STEP for _, state in others):
            return None
        return next((name_of("worker", rank) for rank, state in others if state is MemberState.RETURNING), None)

    def has_quorum_without(self, ranks: Collection[int]) -> bool:
        """Whether so many workers take part besides these that the rounds need nobody else."""
        others = [member for rank, member in self._holders("worker").items() if rank not in ranks]
        return 0 < self.quorum <= sum(member.state in TAKING_PART for member in others)

    @property
    def loses_workers(self) -> bool:
        """Whether the rounds ever go on without a worker that died."""
        return self.shrinks or self.quorum > 0

    def is_complete(self) -> bool:
        """Whether each rank that the job needs has been taken at least once."""
        return next(self._untaken(), None) is None

    def has_all_workers(self) -> bool:
        """Whether each rank of a worker that the job needs has been taken at least once."""
        return all(("worker", rank) in self._seats for rank in range(self._needed["worker"]))

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join once the job is under way."""
        return self._sizes["worker"] > self._needed["worker"]

    def worker_states(self) -> list[MemberState]:
        """The states of the workers that have joined."""
        return [member.state for member in self._holders("worker").values()]

    @property
    def has_workers(self) -> bool:
        """Whether any worker has joined."""
        return any(role == "worker" for role, _ in self._seats)

    def first_worker_key(self) -> str:
        """Name of the key under which the worker joined that was seated first; "" for the cluster's key or nobody."""
        return next((seat.member.principal for seat in self._seats.values() if seat.member.role == "worker"), "")

    def has_worker_named(self, node_id: str) -> bool:
        """Whether a worker of this node id has a rank."""
        return any(member.node_id == node_id for member in self._holders("worker").values())

    def barrier_ranks(self) -> list[int]:
        """The ranks of the workers that barriers wait for: those that have neither left nor are lost, and do not wait
        at a point, and those that the job needs, joined or not."""
        known = self._ranks.get("barrier")
        if known is not None:
            return known
        passed_by = {MemberState.LEFT, MemberState.LOST, MemberState.BACK, MemberState.IDLE}
        if self.shrinks:
            passed_by.add(MemberState.GONE)
        found = self._ranks["barrier"] = self._ranks_without(passed_by)
        return found

    def came_in(self) -> dict[int, int]:
        """The workers that took part later than others: rank → the place of the program from which on they did."""
        return {seat.member.rank: seat.came_in for seat in self._seats.values() if seat.came_in}

    def point_ranks(self) -> list[int]:
        """The ranks of the workers that points wait for: those that rounds wait for, or wait at one."""
        return self._ranks_without(
            {MemberState.LEFT, MemberState.DONE, MemberState.GONE, MemberState.LOST, MemberState.BACK}
        )

    def _ranks_without(self, passed_by: Collection[MemberState]) -> list[int]:
        workers = self._holders("worker")
        awaited = {rank for rank, member in workers.items() if member.state not in passed_by}
        return sorted(awaited.union(rank for rank in range(self._needed["worker"]) if rank not in workers))

    def dead_ranks(self) -> list[int]:
        """The ranks of the dead workers, also of those that had left the rounds."""
        known = self._ranks.get("dead")
        if known is not None:
            return known
        found = self._ranks["dead"] = [
            rank
            for rank, member in self._holders("worker").items()
            if member.state in (MemberState.DEAD, MemberState.GONE)
        ]
        return found

    def dead_seats(self) -> list[Seat]:
        """The seats of workers that are dead, and that the rounds wait for."""
        if not self.dead_ranks():
            return []
        return [seat for seat in self._seats.values() if (seat.member.role, seat.member.state) == _DEAD_WORKER]

    # ── taking a place ──

    def rank_for(self, join: Join, *, had_it: bool = False) -> int | None:
        """The rank for a new incarnation: its own by node id, else the one it asks for, else the first that is free.
        Ranks that the job needs are taken before others.

        Args:
            had_it: the process had the rank that it asks for before this scheduler was started.

        Returns:
            None: every rank has a living holder.
        """
        holders = self._holders(join.role)
        for rank, member in holders.items():
            if member.node_id == join.node_id:
                return rank
        ranks, needed = range(self._sizes[join.role]), self._needed[join.role]
        free = [rank for rank in ranks if rank not in holders]
        left = [rank for rank in ranks if rank in holders and holders[rank].state is MemberState.LEFT]
        awaited = [rank for rank in free if rank < needed]
        if join.rank in free + left and (had_it or join.rank < needed or not awaited):
            return join.rank
        dead = [
            rank
            for rank in ranks
            if rank in holders and holders[rank].state in (MemberState.DEAD, MemberState.GONE, MemberState.LOST)
        ]
        candidates = awaited or sorted(free + left) or dead
        return join.rank if join.rank in candidates else next(iter(candidates), None)

    def same_process(self, join: Join, incarnation: int) -> Seat | None:
        """The seat that another store of this process holds under the same node id, if there is one."""
        for seat in self._seats.values():
            if (
                seat.is_living
                and (seat.member.role, seat.member.node_id) == (join.role, join.node_id)
                and (seat.host, seat.pid) == (join.host, join.pid)
                and seat.member.incarnation != incarnation
            ):
                return seat
        return None

    def take_seat(
        self, join: Join, rank: int, incarnation: int, peer: Peer, principal: str = ""
    ) -> tuple[Seat, Seat | None]:
        """Gives the rank to a new incarnation, which joins under the key of this name. Returns its seat, and the seat
        of the holder that it replaces. The successor of one that was lost, and a worker that comes when the job is
        under way, take no part yet."""
        is_extra = rank >= self._needed[join.role] or (self.is_elastic and self.has_all_workers())
        is_late = join.role == "worker" and is_extra
        place = (join.role, rank)
        earlier = self._seats.get(place)
        predecessor = None
        if earlier is not None:
            predecessor = AS_PREDECESSOR[earlier.member.state]
            self._note_loss(earlier)
        is_new = is_late and predecessor in FINISHED
        state = MemberState.BACK if is_new or predecessor is MemberState.LOST else MemberState.ACTIVE
        member = Member(join.role, rank, join.node_id, incarnation, join.address, state, "", 0.0, join.key, principal)
        seat = Seat(member, join.host, join.pid, peer, predecessor, join.host_name, is_new)
        if earlier is not None and not is_new:
            seat.came_in = earlier.came_in
        self._seats[place] = seat
        self._by_incarnation[incarnation] = seat
        self._ranks = {}
        return seat, earlier

    def adopt(self, seats: Iterable[Seat]) -> None:
        """Takes over the places of nodes that another roster knows."""
        for seat in seats:
            earlier = self._seats.get(seat.place)
            if earlier is not None:
                self._by_incarnation.pop(earlier.member.incarnation, None)
            own = self._seats[seat.place] = replace(seat)
            self._by_incarnation[own.member.incarnation] = own
        self._ranks = {}

    def vacate(self, seat: Seat) -> None:
        """Nobody has taken this place yet: its holder was the first, gave up, and does not get it back."""
        del self._seats[seat.place]
        self._ranks = {}
        self._note_loss(seat)

    def forget(self) -> None:
        """Nobody has a place until it is taken again."""
        self._seats.clear()
        self._by_incarnation.clear()
        self._ranks = {}

    def _note_loss(self, seat: Seat) -> None:
        self._by_incarnation.pop(seat.member.incarnation, None)
        self._replaced[seat.member.incarnation] = seat.name
        while len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)

    # ── what happens to a member ──

    def heard(self, seat: Seat, peer: Peer) -> bool:
        """Its holder sent something. True: it was dead, and is back."""
        seat.peer = peer
        return self.transition(seat, MemberEvent.HEARD)

    def transition(self, seat: Seat, event: MemberEvent, reason: str = "", silence_s: float = 0.0) -> bool:
        """Changes the member's state as TRANSITIONS says; True if the state is now another.

        Raises:
            ValueError: this cannot happen to a member in its state.
        """
        before = seat.member.state
        after = TRANSITIONS[before].get(event)
        if after is None:
            raise ValueError(f"{seat.name} is {before}, and a member in this state never {event.value}")
        if after is before:
            return False
        seat.is_new = seat.is_new and event is not MemberEvent.RETURNED
        seat.member = seat.member._replace(state=after, reason=reason[:MAX_REASON_CHARS], last_seen_s=silence_s)
        self._ranks = {}
        return True

    def validate(self) -> None:
        """Raises AssertionError if an incarnation has two places, or one that it lost to another process."""
        holders = [seat.member.incarnation for seat in self._seats.values()]
        assert len(set(holders)) == len(holders), f"an incarnation has two places: {holders}"
        assert self._replaced.keys().isdisjoint(holders), "a process has the place that it lost"
        assert self._by_incarnation == {seat.member.incarnation: seat for seat in self._seats.values()}, "a stale index"
        known, self._ranks = self._ranks, {}
        assert known.get("barrier", self.barrier_ranks()) == self.barrier_ranks(), "stale ranks at barriers"
        assert known.get("dead", self.dead_ranks()) == self.dead_ranks(), "stale ranks of the dead"

    def _untaken(self) -> Iterator[tuple[str, int]]:
        """The places that the job needs and nobody has taken yet."""
        places = ((role, rank) for role, size in self._needed.items() for rank in range(size))
        return (place for place in places if place not in self._seats)

    def _holders(self, role: str) -> dict[int, Member]:
        return {seat.member.rank: seat.member for seat in self._seats.values() if seat.member.role == role}
