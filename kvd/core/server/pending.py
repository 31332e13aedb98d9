"""Open pushes and pulls of a server. A request that arrives again joins the one that is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.core.machine import Peer, Span
from kvd.core.shares import Shares
from kvd.protocol.messages import Coding

MAX_PENDING = 1 << 18
FEW = 256  # requests that each peer may have open, as long as there is room at all


@dataclass(slots=True, eq=False)
class Pending:
    """A push or pull of several slices that is answered when the last of them is settled."""

    peer: Peer
    sender: int
    request: int
    push: bool
    pull: bool
    remaining: int
    spans: list[tuple[Span, ...]] = field(default_factory=list)  # of each of its slices, or one for all of a group
    versions: list[int] = field(default_factory=list)
    counts: bool = True  # so far; a push that does not count in one of its slices is told so
    closed: bool = False  # answered, or refused
    asked_first: Peer | None = None  # where it was asked first, if that was elsewhere
    opened_by: Peer | None = None  # whose share it takes, while it is open
    row_ids: Span | None = None  # of a table: only these rows are wanted
    takes: str = ""  # the value of its one slice may come as a compressor of this name made it
    coding: Coding | None = None  # it comes so

    def asked_again(self, peer: Peer) -> None:
        """It came again, perhaps from elsewhere: the sender has a new connection, or somebody repeats its frames. The
        answer goes to both, so that a stranger who repeats frames cannot keep the answer from the sender."""
        if self.asked_first is None and peer != self.peer:
            self.asked_first = self.peer
        self.peer = peer

    def widen(self, count: int) -> None:
        """It was about one group, whose `count` slices go their own ways from now on."""
        self.remaining = count
        self.spans = [()] * count
        self.versions = [0] * count

    @property
    def is_of_many(self) -> bool:
        """It is about several slices, each of which goes its own way."""
        return len(self.versions) > 1

    def peers(self) -> list[Peer]:
        """Where the answer goes."""
        return [self.peer] if self.asked_first in (None, self.peer) else [self.asked_first, self.peer]


class PendingTable:
    """Open requests by sender and number.

    Attributes:
        row_ids_nbytes: of the row ids that they brought.
    """

    def __init__(self) -> None:
        self.row_ids_nbytes = 0
        self._open: dict[tuple[int, int], Pending] = {}
        self._places = Shares(FEW)  # that peers take

    def __len__(self) -> int:
        return len(self._open)

    def is_full_for(self, peer: Peer) -> bool:
        """Whether this peer may open no more requests. One peer cannot keep the others out."""
        return not self._places.has_room(peer, 1, MAX_PENDING)

    def open(self, pending: Pending) -> None:
        self._open[pending.sender, pending.request] = pending
        self.row_ids_nbytes += 0 if pending.row_ids is None else pending.row_ids.nbytes
        pending.opened_by = pending.peer
        self._places.take(pending.peer, 1)

    def open_new(self, pending: Pending) -> bool:
        """`open` for a push. False: this request is open already, or its peer may open no more."""
        name, peer = (pending.sender, pending.request), pending.peer
        if name in self._open or not self._places.take_if_room(peer, 1, MAX_PENDING):
            return False
        self._open[name] = pending
        pending.opened_by = peer
        return True

    def find(self, sender: int, request: int) -> Pending | None:
        return self._open.get((sender, request))

    def close(self, pending: Pending) -> None:
        peer, ids = pending.opened_by, pending.row_ids
        pending.closed = True
        pending.spans, pending.row_ids = [], None
        if self._open.pop((pending.sender, pending.request), None) is not None and peer is not None:
            self._places.give_back(peer, 1)
            self.row_ids_nbytes -= 0 if ids is None else ids.nbytes

    def drop_sender(self, sender: int) -> None:
        """The sender is gone for good: nobody waits for the answers."""
        for pending in [entry for entry in self._open.values() if entry.sender == sender]:
            self.close(pending)

    def validate(self, missing: Mapping[tuple[int, int], int]) -> None:
        """Raises AssertionError unless `missing` has the parts that each open request waits for, and no others, and the
        shares of the peers and the row ids are counted."""
        expected = {name: pending.remaining for name, pending in self._open.items()}
        self._places.validate(Counter(pending.opened_by for pending in self._open.values()))
        ids = [pending.row_ids.nbytes for pending in self._open.values() if pending.row_ids is not None]
        assert self.row_ids_nbytes == sum(ids), f"{self.row_ids_nbytes} bytes of row ids are counted, not {sum(ids)}"
        assert missing == expected, f"requests wait for {dict(missing)}, and their answers lack {expected}"
