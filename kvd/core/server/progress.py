"""How far one worker has come with one slice, as its server sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.protocol.messages import ErrorCode


class PushRequest(NamedTuple):
    """One push message: its sender's incarnation and its number. The numbers of a sender grow."""

    sender: int
    number: int


class Refusal(NamedTuple):
    """What a worker was told of a push that was refused for good."""

    push: PushRequest
    error: ErrorCode
    text: str


@dataclass(slots=True)
class WorkerProgress:
    """The clocks of one rank in one slice, and the fate of its latest pushes.

    A clock numbers the pushes of a rank to a key, from 1 on. A push is *staged* when the server has its bytes,
    *counted* when its round is closed, and *committed* when every in-sync replica holds the record. In sync mode all
    workers share the rounds, so `counted` and `committed` are facts of the slice (`SliceLog.closed`,
    `SliceLog.version`), and stay 0 here.

    Invariants, checked by `validate`:
        async: 0 ≤ committed ≤ counted ≤ staged
        sync:  0 = committed = counted, 0 ≤ skipped ≤ staged

    Attributes:
        staged: the newest clock whose bytes are here, or that the rank was moved to.
        counted: async: the newest clock in a closed round.
        committed: async: the newest clock in a committed round.
        skipped: sync: the rounds up to this clock closed without the rank; its own pushes come after it.
        last_request: the latest push that was taken. An earlier one that still arrives was given up by its sender.
        last_refusal: the latest push that was refused for good. Its sender may use the clock for another push, so this
            one must not take it when it comes again.
    """

    staged: int = 0
    counted: int = 0
    committed: int = 0
    skipped: int = 0
    last_request: PushRequest | None = field(default=None, compare=False)
    last_refusal: Refusal | None = None

    def refusal_of(self, push: PushRequest) -> Refusal | None:
        """What the sender was told of this push, or of a later one with the same or a later clock."""
        told = self.last_refusal
        if told is None or told.push.sender != push.sender or push.number > told.push.number:
            return None
        return told

    def is_outdated(self, push: PushRequest) -> bool:
        """Whether the server took a later push of the same sender: this one was given up, but still arrived."""
        last = self.last_request
        return last is not None and last.sender == push.sender and push.number < last.number

    def refuse(self, refusal: Refusal) -> None:
        """Remembers the refusal, unless a later push of the same sender was refused already."""
        if self.refusal_of(refusal.push) is None:
            self.last_refusal = refusal

    def take_later_request(self, other: WorkerProgress) -> None:
        """Of both, keeps the later push of the same sender."""
        mine, theirs = self.last_request, other.last_request
        if theirs is not None and (mine is None or (mine.sender == theirs.sender and mine.number < theirs.number)):
            self.last_request = theirs

    def validate(self, *, sync: bool) -> None:
        """Raises AssertionError if an invariant is broken."""
        if sync:
            assert self.counted == self.committed == 0, f"rounds are shared in sync mode: {self}"
            assert 0 <= self.skipped <= self.staged, f"skipped rounds lie before staged ones: {self}"
        else:
            assert 0 <= self.committed <= self.counted <= self.staged, f"committed ≤ counted ≤ staged: {self}"


NO_PROGRESS = WorkerProgress()  # of a rank that has never pushed; only read
