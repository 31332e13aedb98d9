"""What the servers and the scheduler last said about this worker's waits: which requests wait for whom, and how the
nodes are."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvd.core.machine import SCHEDULER, Peer
from kvd.core.outbox import Entry, Outbox
from kvd.protocol.messages import (
    Absent,
    Delete,
    Enter,
    FetchPart,
    NodeFact,
    StandBy,
    StatePart,
    Wait,
    WaitNews,
    Waits,
    WantState,
)

ANSWER_S = 1.0  # a node that is well answers a question about waits within this time


class Act(Enum):
    """What other workers have not done with a key. The values are for texts."""

    MAKE = "make", "made"
    PUSH = "push", "pushed"
    DELETE = "delete", "deleted"
    PASS_ON = "pass on", "passed on"

    @property
    def infinitive(self) -> str:
        return self.value[0]

    @property
    def participle(self) -> str:
        return self.value[1]


class Blocked(NamedTuple):
    """The other workers that a request waits for, and what they have not done.

    Attributes:
        key: that they have not pushed or deleted, or worker 0 has not made; or the state that they have not passed on;
            "" at a barrier.
        act: what they have not done with it.
    """

    absent: tuple[Absent, ...]
    key: str = ""
    act: Act = Act.PUSH


class KnownFact(NamedTuple):
    """Where a node runs, and how long it had been silent at that time."""

    fact: NodeFact
    at: float


class _Answers:
    """When a peer was asked and has answered, and the details of its latest answer."""

    def __init__(self) -> None:
        self.asked_at = float("-inf")
        self.answered_at = float("-inf")
        self.waits: dict[int, Wait] = {}


class Holds:
    """Remembers the latest answer of each peer."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._peers: dict[Peer, _Answers] = {}
        self._held_at: dict[int, float] = {}  # open requests, and when their peers said that they wait for others
        self._barriers: dict[str, tuple[int, ...]] = {}
        self._facts: dict[tuple[str, int], KnownFact] = {}

    # ── questions and answers ──

    def asked(self, peer: Peer, now: float) -> None:
        self._peers.setdefault(peer, _Answers()).asked_at = now

    def forget_all_but(self, peers: set[Peer]) -> None:
        """Nothing is open at the others any more."""
        self._peers = {peer: answers for peer, answers in self._peers.items() if peer in peers}
        self._held_at = {request: at for request, at in self._held_at.items() if self._outbox.find(request)}

    def take_waits(self, peer: Peer, waits: Waits, now: float) -> set[int]:
        """The answer of a server. Returns the numbers of the requests that it holds back for other workers."""
        answers = self._peers.setdefault(peer, _Answers())
        answers.answered_at = now
        answers.waits = {wait.request: wait for wait in waits.waits}
        held = set(waits.held)
        for entry in self._outbox.entries():
            if entry.peer == peer and (entry.request in held or not waits.is_all):
                self._held_at[entry.request] = now
        return held

    def take_news(self, news: WaitNews, now: float) -> None:
        """The answer of the scheduler."""
        self._peers.setdefault(SCHEDULER, _Answers()).answered_at = now
        self._barriers = {wait.name: wait.absent for wait in news.barriers}
        for fact in news.nodes:
            self._facts[fact.role, fact.rank] = KnownFact(fact, now)
        for entry in self._outbox.entries():
            message = entry.send.message
            if isinstance(message, Enter | StandBy) and message.name in self._barriers:
                self._held_at[entry.request] = now

    # ── what is known ──

    def is_held(self, entry: Entry, now: float) -> bool:
        """Whether its peer says that it waits for other workers; a peer that was asked just now still has time."""
        answers = self._peers.get(entry.peer)
        held_at = self._held_at.get(entry.request)
        if answers is None or held_at is None:
            return False
        return held_at >= answers.asked_at or now - answers.asked_at < ANSWER_S

    def owes_since(self, entry: Entry) -> float:
        """Since when its peer owes an answer: it was sent then, or its peer said then that it waits for others."""
        return max(entry.sent_at, self._held_at.get(entry.request, entry.sent_at))

    def answers_since_asked(self, peer: Peer) -> bool:
        answers = self._peers.get(peer)
        return answers is not None and answers.answered_at >= answers.asked_at

    def answered_at(self, peer: Peer) -> float:
        """When the peer answered last; -inf: never."""
        answers = self._peers.get(peer)
        return float("-inf") if answers is None else answers.answered_at

    def blocked(self, entry: Entry) -> Blocked:
        """Whom a request that is held waits for. A server names them for the oldest requests; the others wait alike."""
        message = entry.send.message
        if isinstance(message, Enter | StandBy):
            return Blocked(tuple(Absent(rank, 0) for rank in self._barriers.get(message.name, ())))
        answers = self._peers.get(entry.peer)
        waits = {} if answers is None else answers.waits
        wait = waits.get(entry.request) or next(iter(waits.values()), None)
        if wait is None:
            return Blocked(())
        if isinstance(message, WantState | FetchPart | StatePart):
            act = Act.PASS_ON
        else:
            act = Act.DELETE if isinstance(message, Delete) else Act.PUSH if wait.clock else Act.MAKE
        return Blocked(wait.absent, wait.key, act)

    def fact(self, role: str, rank: int) -> KnownFact | None:
        return self._facts.get((role, rank))
