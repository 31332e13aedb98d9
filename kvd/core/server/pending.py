"""Open pushes and pulls of a server. A request that arrives again joins the one that is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.core.machine import Peer, Span

MAX_PENDING = 1 << 18


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
    closed: bool = False  # answered, or refused
    asked_first: Peer | None = None  # where it was asked first, if that was elsewhere

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
    """Open requests by sender and number."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Pending] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MAX_PENDING

    def open(self, pending: Pending) -> None:
        self._open[pending.sender, pending.request] = pending

    def find(self, sender: int, request: int) -> Pending | None:
        return self._open.get((sender, request))

    def close(self, pending: Pending) -> None:
        pending.closed = True
        pending.spans = []
        self._open.pop((pending.sender, pending.request), None)

    def drop_sender(self, sender: int) -> None:
        """The sender is gone for good: nobody waits for the answers."""
        for pending in [entry for entry in self._open.values() if entry.sender == sender]:
            self.close(pending)

    def validate(self, missing: Mapping[tuple[int, int], int]) -> None:
        """Raises AssertionError unless `missing` has the parts that each open request waits for, and no others."""
        expected = {name: pending.remaining for name, pending in self._open.items()}
        assert missing == expected, f"requests wait for {dict(missing)}, and their answers lack {expected}"
