"""The requests that a server has not answered yet: one that is sent again is neither done nor answered twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kvd.core.machine import Peer, Span

MAX_REMEMBERED = 256  # answers of commands kept per incarnation
MAX_SENDERS = 1024  # incarnations whose answers are kept; those of the command line come and go unannounced


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
        """It came once more, perhaps from elsewhere: the sender has a new connection, or somebody repeats its frames.
        The answer goes to both, so that whoever repeats them keeps no answer from the sender."""
        if self.asked_first is None and peer != self.peer:
            self.asked_first = self.peer
        self.peer = peer

    def widen(self, count: int) -> None:
        """It was about one group, whose `count` slices go their own ways now."""
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

    def open(self, pending: Pending) -> None:
        self._open[pending.sender, pending.request] = pending

    def find(self, sender: int, request: int) -> Pending | None:
        return self._open.get((sender, request))

    def close(self, pending: Pending) -> None:
        pending.closed = True
        pending.spans = []
        self._open.pop((pending.sender, pending.request), None)

    def drop_sender(self, sender: int) -> None:
        """The sender is gone for good: nobody waits for these answers."""
        for pending in [entry for entry in self._open.values() if entry.sender == sender]:
            self.close(pending)


class Answers:
    """The answers of commands, which must not be carried out twice. The oldest of a sender are forgotten, and so are
    the senders that have been silent for longest."""

    def __init__(self) -> None:
        self._by_sender: OrderedDict[int, OrderedDict[int, Any]] = OrderedDict()

    def start(self, sender: int, request: int) -> bool:
        """True if the command is new; it is running from now on."""
        answers = self._by_sender.setdefault(sender, OrderedDict())
        self._by_sender.move_to_end(sender)
        while len(self._by_sender) > MAX_SENDERS:
            self._by_sender.popitem(last=False)
        if request in answers:
            return False
        answers[request] = None
        while len(answers) > MAX_REMEMBERED:
            answers.popitem(last=False)
        return True

    def finish(self, sender: int, request: int, answer: Any) -> None:
        answers = self._by_sender.get(sender)
        if answers is not None and request in answers:
            answers[request] = answer

    def find(self, sender: int, request: int) -> Any:
        """The answer, or None while the command runs."""
        answers = self._by_sender.get(sender)
        return None if answers is None else answers.get(request)

    def drop_sender(self, sender: int) -> None:
        self._by_sender.pop(sender, None)
