"""How far one worker has come with one slice, as its server sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.machine import Buffer, ScatterList
from kvd.core.places import START
from kvd.protocol.messages import ErrorCode

NEVER_PULLED = -1


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
        begun ≤ staged, trained ≤ staged

    Attributes:
        staged: the newest clock whose bytes are here, or that the rank was moved to.
        counted: async: the newest clock in a closed round.
        committed: async: the newest clock in a committed round.
        skipped: sync: the rounds up to this clock closed without the rank; its own pushes come after it.
        place: where the rank's program was when it made its latest push, see `kvd.core.places`.
        begun: the clock before the first push that was made there.
        trained: the clock of the first contribution that was pushed there; 0: there were only broadcasts.
        pulled: async: the version that the rank was sent last; NEVER_PULLED if none was. Its backup does not know.
        apart: of a group, the versions of the slices that the rank was sent one by one since then, by their positions.
        kept: the bytes of `pulled`, if the optimizer needs them.
        last_request: the latest push that was taken. An earlier one that still arrives was given up by its sender.
        last_refusal: the latest push that was refused for good. Its sender may use the clock for another push, so this
            one must not take it when it comes again.
    """

    staged: int = 0
    counted: int = 0
    committed: int = 0
    skipped: int = 0
    place: int = 0
    begun: int = 0
    trained: int = field(default=0, compare=False)
    pulled: int = field(default=NEVER_PULLED, compare=False)
    apart: dict[int, int] | None = field(default=None, compare=False, repr=False)
    kept: Buffer | ScatterList | None = field(default=None, compare=False, repr=False)
    last_request: PushRequest | None = field(default=None, compare=False)
    last_refusal: Refusal | None = None

    def come_to(self, place: int, clock: int, *, is_contribution: bool) -> None:
        """The push of `clock` is staged, and was made at `place`."""
        if place != self.place:
            self.place, self.begun, self.trained = place, clock - 1, 0
        if is_contribution and not self.trained:
            self.trained = clock

    def fall_back(self, clock: int) -> None:
        """What was staged after `clock` is forgotten."""
        self.staged = clock
        self.begun = min(self.begun, clock)
        if self.trained > clock:
            self.trained = 0

    def skip_to(self, clock: int) -> None:
        """The rank's next push is the one after `clock`. If it has made none at its place, a successor that makes that
        step again begins there, too; a program that begins again at START has no step to make again."""
        if self.begun == self.staged and self.place != START:
            self.begun = clock
        self.staged = clock

    def move_to(self, place: int) -> None:
        """The rank has come to this place without a push; at START its program begins again."""
        self.place, self.begun, self.trained = place, 0 if place == START else self.staged, 0

    def begun_at(self, place: int, counted: int) -> int:
        """The clock at which the rank came to this place, or `counted`, its newest, if it made no push there."""
        return min(self.begun, counted) if place == self.place else counted

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
        """Of both, keeps the later push of the same sender, the older version that was pulled, and whether one has
        contributed at the place of both."""
        mine, theirs = self.last_request, other.last_request
        if theirs is not None and (mine is None or (mine.sender == theirs.sender and mine.number < theirs.number)):
            self.last_request = theirs
        self.pulled = min(self.pulled, other.pulled)
        self.trained = self.trained or other.trained

    def validate(self, *, sync: bool) -> None:
        """Raises AssertionError if an invariant is broken."""
        if sync:
            assert self.counted == self.committed == 0, f"rounds are shared in sync mode: {self}"
            assert 0 <= self.skipped <= self.staged, f"skipped rounds lie before staged ones: {self}"
        else:
            assert 0 <= self.committed <= self.counted <= self.staged, f"committed ≤ counted ≤ staged: {self}"
        assert 0 <= self.begun <= self.staged, f"the place begins after its pushes: {self}"
        assert 0 <= self.trained <= self.staged, f"a contribution is noted that is not staged: {self}"


NO_PROGRESS = WorkerProgress()  # of a rank that has never pushed; only read
