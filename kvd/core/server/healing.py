"""States of programs that update the weights themselves: a worker gives its own to those that lack it.

Where the servers have no optimizer, what a step has made is in the memory of the workers alone. A worker whose program
waits in the store offers its state; a restarted or new one asks for the state after exactly so many steps. The leader
of the first partition pairs them: it takes the parts of the state from one, and hands them to all who want it.

1. A state is only given to workers that want the state after the same number of steps.
2. There is one transfer at a time. All who want this state when it begins take it. Of its parts few are here at once.
3. A worker that the rounds went on without, and that wants a state which nobody offers, is told to find out where they
   are: no worker may have that state any more.
4. If every living worker lacks a state, nobody can have it: those who want one are told. Before the first round
   counts, that of worker 0 does: its first values, or those of the snapshot that the run began with. A worker that has
   said nothing yet may have a state; but one that takes no part in the rounds yet does not have the first one.
5. Of each worker the newest request counts: a late copy of an offer that was withdrawn pairs nobody.

Nothing of this is recorded. Another leader begins with nothing: requests that wait follow their partition
(`kvd.core.worker.moves`), and a transfer that was under way begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvd.core.machine import Peer, Received, Span
from kvd.core.server.attachments import Attachments
from kvd.core.server.effects import ServerEffects
from kvd.core.session import SchedulerSession
from kvd.protocol.messages import (
    BIGGEST,
    MAX_MEMBERS,
    NO_STATE,
    PARTS_AHEAD,
    STATE_PART_BYTES,
    Done,
    ErrorCode,
    FetchPart,
    GiveState,
    Gone,
    Member,
    MemberState,
    Message,
    NotYetReason,
    OfferState,
    StateGiven,
    StateGone,
    StatePart,
    WantState,
)

PRESENT = frozenset(
    {MemberState.ACTIVE, MemberState.IDLE, MemberState.DONE, MemberState.BACK, MemberState.RETURNING}
)  # states of workers whose programs run
MAY_COME = frozenset({MemberState.DEAD})  # it may be restarted


@dataclass(slots=True, eq=False)
class _Asked:
    """An offer or a wish that waits for its answer."""

    sender: int
    peer: Peer
    request: int
    made: int
    has_pushed: bool = False  # see WantState
    restored: bool = False  # see WantState

    @property
    def is_first(self) -> bool:
        """Whether the run has begun with this state, which is that of worker 0."""
        return self.made == 0 or self.restored

    def is_of(self, event: Received, request: int) -> bool:
        return (self.sender, self.request) == (event.sender, request)


@dataclass(slots=True, eq=False)
class _Taker:
    """A worker that takes part in a transfer.

    Attributes:
        have: it has all parts below this one.
        is_told: its wish was answered with StateGiven.
        fetches: parts that it waits for, each with the number of its request and the connection.
    """

    asked: _Asked
    have: int = 0
    is_told: bool = False
    fetches: dict[int, tuple[int, Peer]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Part:
    """A part that is here until all takers have it."""

    peer: Peer
    message: StatePart
    payload: Span


class _Size(NamedTuple):
    """The number of parts of a state, and the bytes of its head."""

    parts: int
    head_nbytes: int


@dataclass(slots=True, eq=False)
class _Transfer:
    """One reading of a worker's state, for all who want it."""

    number: int
    rank: int  # of the worker that gives it
    donor: _Asked
    takers: dict[int, _Taker]
    size: _Size | None = None  # known with the first part
    parts: dict[int, _Part] = field(default_factory=dict)

    @property
    def lowest(self) -> int:
        """All takers have the parts below this one."""
        return min((taker.have for taker in self.takers.values()), default=0)


class Healing:
    """Pairs offers and wishes, and passes states on.

    Invariants, checked by `validate`:
        a rank offers, wants, gives or takes: one of these.
        at most `PARTS_AHEAD` parts are here, none of which all takers have.

    Args:
        memory_error: why there is no memory for so many bytes more; empty if there is.
        give_back: less memory is needed than before.
    """

    def __init__(
        self,
        session: SchedulerSession,
        effects: ServerEffects,
        attachments: Attachments,
        memory_error: Callable[[int], str],
        give_back: Callable[[], None],
    ) -> None:
        self._session = session
        self._view = session.view
        self._effects = effects
        self._attachments = attachments
        self._memory_error = memory_error
        self._give_back = give_back
        self._offers: dict[int, _Asked] = {}  # by rank
        self._wants: dict[int, _Asked] = {}
        self._transfer: _Transfer | None = None
        self._lost: dict[int, int] = {}  # ranks that were told that nobody has their state, and their incarnations
        self._latest: dict[int, tuple[int, int]] = {}  # rank → sender and number of its newest offer or wish
        self._transfers = 0  # begun so far
        self.handlers: dict[type[Any], Callable[[Received, Any], None]] = {
            OfferState: self.offer,
            WantState: self.want,
            StatePart: self.take_part,
            FetchPart: self.fetch,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of parts that are here."""
        return 0 if self._transfer is None else sum(part.payload.nbytes for part in self._transfer.parts.values())

    # ── offers and wishes ──

    def offer(self, event: Received, message: OfferState) -> None:
        """Whether the sender's program waits, and with which state."""
        rank = self._rank_of(event, message.request)
        if rank is None:
            return
        if not self._is_newest(rank, event, message.request):
            self._answer_copy(rank, event, message)
            return
        self._let_go(rank)
        if message.made == NO_STATE:
            self._effects.send(event.peer, Done(message.request))
        else:
            self._lost.pop(rank, None)
            self._offers[rank] = _Asked(event.sender, event.peer, message.request, message.made)
        self._look()

    def want(self, event: Received, message: WantState) -> None:
        """The sender's program lacks a state."""
        rank = self._rank_of(event, message.request)
        if rank is None:
            return
        if not self._is_newest(rank, event, message.request):
            self._answer_copy(rank, event, message)
            return
        self._let_go(rank)
        self._lost.pop(rank, None)
        self._wants[rank] = _Asked(
            event.sender, event.peer, message.request, message.made, message.has_pushed, message.restored
        )
        self._look()

    def _rank_of(self, event: Received, request: int) -> int | None:
        """The rank of the sender; None if it was answered here."""
        rank = self._attachments.rank_of(event, request)
        if rank is None:
            return None
        if not self._view.is_sync:
            text = "the states of programs are passed on in synchronous stores only: elsewhere each has another one"
            self._effects.refuse(event.peer, request, ErrorCode.NOT_ALLOWED, text)
            return None
        if event.epoch > self._view.epoch or not self._is_home:
            text = "another server leads the first partition, or will"
            self._effects.not_yet(event.peer, request, NotYetReason.ELSEWHERE, text)
            return None
        return rank

    @property
    def _is_home(self) -> bool:
        """Whether this server leads the first partition."""
        leader = self._view.members.get(("server", self._view.leader_of(self._view.first_partition)))
        return leader is not None and leader.incarnation == self._session.incarnation

    def _is_newest(self, rank: int, event: Received, request: int) -> bool:
        """Whether the sender has made no such request before."""
        sender, latest = self._latest.get(rank, (0, 0))
        if sender == event.sender and request <= latest:
            return False
        self._latest[rank] = event.sender, request
        return True

    def _answer_copy(self, rank: int, event: Received, message: OfferState | WantState) -> None:
        """The request came before: it waits, or is answered as it was; or it does not count any more."""
        request = message.request
        transfer = self._transfer
        for waiting in (self._offers.get(rank), self._wants.get(rank)):
            if waiting is not None and waiting.is_of(event, request):
                waiting.peer = event.peer
                return
        if transfer is not None and transfer.donor.is_of(event, request):
            transfer.donor.peer = event.peer
            self._ask_donor(transfer)
            return
        taker = None if transfer is None else transfer.takers.get(rank)
        if transfer is not None and taker is not None and taker.asked.is_of(event, request):
            taker.asked.peer = event.peer
            if taker.is_told:
                self._tell_taker(transfer, taker)
            return
        is_offer = isinstance(message, OfferState)
        self._effects.send(event.peer, Done(request) if is_offer else StateGone(request, Gone.AGAIN))

    def _let_go(self, rank: int) -> None:
        """A newer request of the rank replaces what it has said before."""
        offer, want = self._offers.pop(rank, None), self._wants.pop(rank, None)
        if offer is not None:
            self._effects.send(offer.peer, Done(offer.request))
        if want is not None:
            self._effects.send(want.peer, StateGone(want.request, Gone.AGAIN))
        transfer = self._transfer
        if transfer is None:
            return
        if transfer.rank == rank:
            self._end_transfer(transfer)
        elif rank in transfer.takers:
            self._drop_taker(transfer, rank)

    # ── pairs ──

    def _lives(self, rank: int, sender: int) -> bool:
        """Whether the view says that this incarnation has the rank, and that its program runs."""
        member = self._view.worker(rank)
        return member is not None and member.incarnation == sender and member.state in PRESENT

    def _look(self) -> None:
        """Begins a transfer if one is possible; if none ever will be, says so."""
        if self._transfer is not None or not self._wants:
            return
        wants = {rank: want for rank, want in self._wants.items() if self._lives(rank, want.sender)}
        for made in sorted({want.made for want in wants.values()}):
            donors = [rank for rank, offer in self._offers.items() if self._may_give(rank, offer, made)]
            if donors:
                self._begin(min(donors), [rank for rank, want in wants.items() if want.made == made])
                return
        for rank in self._view.ranks_apart():
            want = wants.pop(rank, None)
            if want is not None:
                self._answer_want(rank, StateGone(want.request, Gone.PASSED))
        self._say_gone(wants)

    def _may_give(self, rank: int, offer: _Asked, made: int) -> bool:
        """Whether a rank has the state after so many steps, and can be asked for it."""
        return offer.made == made and self._lives(rank, offer.sender)

    def _begin(self, donor: int, takers: list[int]) -> None:
        self._transfers += 1
        number = (self._session.incarnation + self._transfers) % BIGGEST  # no other leader has one of this number
        taking = {rank: _Taker(self._wants.pop(rank)) for rank in sorted(takers)[:MAX_MEMBERS]}
        transfer = self._transfer = _Transfer(number, donor, self._offers.pop(donor), taking)
        self._ask_donor(transfer)

    def _ask_donor(self, transfer: _Transfer) -> None:
        message = GiveState(transfer.donor.request, transfer.number, tuple(transfer.takers))
        self._effects.send(transfer.donor.peer, message)

    def _tell_taker(self, transfer: _Transfer, taker: _Taker) -> None:
        assert transfer.size is not None
        taker.is_told = True
        message = StateGiven(taker.asked.request, transfer.number, transfer.rank, *transfer.size)
        self._effects.send(taker.asked.peer, message)

    # ── nobody has it ──

    def _say_gone(self, wants: dict[int, _Asked]) -> None:
        """If no living worker can have a state, those who want one are told."""
        lacking = {rank for rank, sender in self._lost.items() if self._lives(rank, sender)} | wants.keys()
        others = [who for who in self._view.members.values() if who.role == "worker" and who.rank not in lacking]
        if self._may_have_one([who for who in others if who.state is not MemberState.BACK]):
            return
        may_be_late = self._may_have_one(others)
        is_over = bool(others) and all(who.state is MemberState.LEFT for who in others)
        for rank, want in wants.items():
            if want.is_first and self._may_begin(wants):
                if rank == 0 and self._counts_nothing(wants):
                    waiting = sum(other.is_first for other in wants.values()) - 1
                    self._answer_want(rank, StateGone(want.request, Gone.FIRST, waiting))
            elif not may_be_late:
                self._lost[rank] = want.sender
                self._answer_want(rank, StateGone(want.request, Gone.OVER if is_over else Gone.LOST))

    def _may_begin(self, wants: dict[int, _Asked]) -> bool:
        """Whether the first state of worker 0 is, or may be, that of all."""
        first = self._view.worker(0)
        if 0 not in wants and first is not None and first.state not in MAY_COME:
            return False
        return self._counts_nothing(wants) or any(rank not in wants for rank in self._view.required_ranks())

    @staticmethod
    def _counts_nothing(wants: dict[int, _Asked]) -> bool:
        """Whether no round counts, for certain: one of the ranks that it would take has never pushed."""
        return any(not want.has_pushed for want in wants.values())

    @staticmethod
    def _may_have_one(others: list[Member]) -> bool:
        """Whether one of these workers, who want no state, may have one."""
        return any(who.state in PRESENT for who in others)

    def _answer_want(self, rank: int, answer: Message) -> None:
        self._effects.send(self._wants.pop(rank).peer, answer)

    # ── the parts ──

    def take_part(self, event: Received, message: StatePart) -> None:
        """A part of a state, from the worker that gives it."""
        if self._rank_of(event, message.request) is None:
            return
        transfer = self._transfer
        if transfer is None or transfer.number != message.transfer or transfer.donor.sender != event.sender:
            self._effects.send(event.peer, StateGone(message.request, Gone.AGAIN))
            return
        known = transfer.parts.get(message.part)
        if known is not None and known.message.request == message.request:
            known.peer = event.peer
            return
        if message.part < transfer.lowest:
            self._effects.send(event.peer, Done(message.request))
            return
        size = _Size(message.num_parts, message.head_nbytes)
        if (
            known is not None
            or message.part >= min(message.num_parts, transfer.lowest + PARTS_AHEAD)
            or transfer.size not in (None, size)
            or event.payload is None
            or not 0 < event.nbytes <= STATE_PART_BYTES
        ):
            text = (
                f"part {message.part} of {message.num_parts} of a state, with {event.nbytes} bytes, does not fit here"
            )
            self._effects.refuse(event.peer, message.request, ErrorCode.PROTOCOL_ERROR, text)
            return
        error = self._memory_error(event.nbytes)
        if error:
            self._refuse_takers(transfer, error)
            self._effects.send(event.peer, StateGone(message.request, Gone.AGAIN))
            self._look()
            return
        transfer.size = size
        transfer.parts[message.part] = part = _Part(event.peer, message, Span(event.payload, 0, event.nbytes))
        for taker in transfer.takers.values():
            if not taker.is_told:
                self._tell_taker(transfer, taker)
            fetch = taker.fetches.pop(message.part, None)
            if fetch is not None:
                self._send_part(part, *fetch)

    def _refuse_takers(self, transfer: _Transfer, text: str) -> None:
        """There is no memory to pass the state on."""
        for taker in transfer.takers.values():
            waiting = taker.fetches.values() if taker.is_told else [(taker.asked.request, taker.asked.peer)]
            for request, peer in waiting:
                self._effects.refuse(peer, request, ErrorCode.NOT_ALLOWED, text)
        transfer.takers.clear()
        self._end_transfer(transfer)

    def _send_part(self, part: _Part, request: int, peer: Peer) -> None:
        message = part.message
        answer = StatePart(
            request, message.transfer, message.part, message.num_parts, message.head_nbytes, message.checksum
        )
        self._effects.send(peer, answer, (part.payload,))

    def fetch(self, event: Received, message: FetchPart) -> None:
        """A worker that takes a state asks for a part, and says which ones it has."""
        rank = self._rank_of(event, message.request)
        if rank is None:
            return
        transfer = self._transfer
        taker = None if transfer is None or transfer.number != message.transfer else transfer.takers.get(rank)
        if transfer is None or taker is None or taker.asked.sender != event.sender or transfer.size is None:
            self._effects.send(event.peer, StateGone(message.request, Gone.AGAIN))
            return
        parts = transfer.size.parts
        is_end = message.part == message.have == parts
        if not is_end and not message.have <= message.part < min(parts, message.have + PARTS_AHEAD):
            text = f"part {message.part} of {parts} of a state cannot be fetched with {message.have} parts"
            self._effects.refuse(event.peer, message.request, ErrorCode.PROTOCOL_ERROR, text)
            return
        taker.have = max(taker.have, message.have)
        part = transfer.parts.get(message.part)
        if is_end:
            self._effects.send(event.peer, Done(message.request))
            self._drop_taker(transfer, rank)
            self._look()
            return
        if message.part < taker.have:  # a late copy, whose sender waits no more
            self._effects.send(event.peer, StateGone(message.request, Gone.AGAIN))
        elif part is not None:
            self._send_part(part, message.request, event.peer)
        else:
            taker.fetches[message.part] = message.request, event.peer
        self._drop_taken(transfer)

    def _drop_taken(self, transfer: _Transfer) -> None:
        """Forgets the parts that all takers have, and lets the next ones come."""
        lowest = transfer.lowest
        for number in [number for number in transfer.parts if number < lowest]:
            part = transfer.parts.pop(number)
            self._effects.send(part.peer, Done(part.message.request))

    # ── the end of a transfer ──

    def _drop_taker(self, transfer: _Transfer, rank: int) -> None:
        """The worker has the state, or takes it no more. The last one ends the transfer."""
        taker = transfer.takers.pop(rank)
        for request, peer in taker.fetches.values():
            self._effects.send(peer, StateGone(request, Gone.AGAIN))
        if transfer.takers:
            self._drop_taken(transfer)
        else:
            self._end_transfer(transfer)

    def _end_transfer(self, transfer: _Transfer) -> None:
        """It is over. Those who have not taken all ask again; those who know nothing of it wait for another one."""
        self._transfer = None
        for part in transfer.parts.values():
            self._effects.send(part.peer, StateGone(part.message.request, Gone.AGAIN))
        for rank, taker in transfer.takers.items():
            if not taker.is_told:
                self._wants[rank] = taker.asked
            for request, peer in taker.fetches.values():
                self._effects.send(peer, StateGone(request, Gone.AGAIN))
        self._give_back()

    # ── the view ──

    def view_changed(self) -> None:
        """Forgets workers that were replaced, and all of it if another server leads the first partition now."""
        if not self._is_home:
            self._offers.clear()
            self._wants.clear()
            self._lost.clear()
            if self._transfer is not None:
                self._transfer = None
                self._give_back()
            return
        transfer = self._transfer
        if transfer is not None and not self._lives(transfer.rank, transfer.donor.sender):
            self._end_transfer(transfer)
        elif transfer is not None:
            for rank, taker in list(transfer.takers.items()):
                if not self._lives(rank, taker.asked.sender):
                    self._drop_taker(transfer, rank)
        for waiting in (self._offers, self._wants):
            for rank in [rank for rank, asked in waiting.items() if self._attachments.find(asked.sender) != rank]:
                del waiting[rank]
        self._look()

    # ── for whom the requests wait ──

    def waits_of(self, sender: int) -> Iterator[tuple[int, str, list[int]]]:
        """The open requests of a worker that others have to do something for: number, what is wanted, and whose turn
        it is."""
        transfer = self._transfer
        for rank, want in self._wants.items():
            if want.sender == sender:
                lacking = self._wants.keys() | self._lost.keys()
                workers = [who for who in self._view.members.values() if who.role == "worker"]
                able = [who.rank for who in workers if who.state in PRESENT and who.rank not in lacking]
                if transfer is not None:
                    able = [transfer.rank]
                yield want.request, _title(want.made), sorted(able) or [other for other in (0, 1) if other != rank][:1]
        if transfer is None:
            return
        title = _title(transfer.donor.made)
        for taker in transfer.takers.values():
            if taker.asked.sender == sender:
                if not taker.is_told:
                    yield taker.asked.request, title, [transfer.rank]
                for request, _ in taker.fetches.values():
                    yield request, title, [transfer.rank]
        if transfer.donor.sender == sender:
            for part in transfer.parts.values():
                yield part.message.request, title, sorted(transfer.takers)

    # ── invariants ──

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        transfer = self._transfer
        busy = [] if transfer is None else [transfer.rank, *transfer.takers]
        ranks = [*self._offers, *self._wants, *busy]
        assert len(set(ranks)) == len(ranks), f"a rank does two things at once: {sorted(ranks)}"
        if transfer is not None:
            assert transfer.takers, "a state is given to nobody"
            assert len(transfer.parts) <= PARTS_AHEAD, f"{len(transfer.parts)} parts of a state are here"
            assert all(part >= transfer.lowest for part in transfer.parts), "a part is kept that all takers have"


def _title(made: int) -> str:
    """What a worker wants, for texts."""
    return f"the state after {made} steps" if made != 1 else "the state after 1 step"
