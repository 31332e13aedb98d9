"""What a server remembers of the pushes of a batch that one worker makes again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvd.core.machine import Buffer, Contribution, Peer, Received, Span
from kvd.core.server.groups import FusedGroup
from kvd.core.server.pending import Pending
from kvd.protocol.fixed import PushNumbers
from kvd.protocol.messages import ADD, PushBatch

NO_NUMBERS = PushNumbers(0, 0, 0, False, 0, 0, 0)


@dataclass(slots=True, eq=False)
class RepeatedPush:
    """What all pushes of the batch have in common, and the one that is held (`kvd.core.server.express`).

    Attributes:
        event: one of them as it came, without its bytes.
        peer, sender: its connection and its worker.
        rank: of the worker.
        group: what they push.
        numbers: of the message that is held.
        payload: its bytes, as many as the group has.
        source: where its answer goes; only the shell looks at it.
    """

    event: Received
    rank: int
    group: FusedGroup
    peer: Peer
    sender: int
    numbers: PushNumbers = NO_NUMBERS
    payload: Buffer = None
    source: Any = None

    @classmethod
    def of(cls, event: Received, rank: int, group: FusedGroup) -> RepeatedPush:
        """Remembers this one, and those that are like it."""
        return cls(event._replace(payload=None, nbytes=0), rank, group, event.peer, event.sender)

    def contribution(self) -> Contribution:
        """What is held, as a part of its round."""
        _, _, clock, _, step, _, place = self.numbers
        return Contribution(self.rank, clock, Span(self.payload, 0, self.group.nbytes), 1, ADD, step, place)

    def received(self) -> tuple[Received, PushBatch]:
        """What is held, as it would have come the general way."""
        request, batch, clock, pull, step, settled, place = self.numbers
        push = PushBatch(request, batch, clock, ADD, 1, pull, False, step, settled, place)
        return self.event._replace(message=push, payload=self.payload, nbytes=self.group.nbytes), push

    def pending(self) -> Pending:
        """What is held, as a request that waits for its round."""
        return Pending(self.peer, self.sender, self.numbers.request, True, self.numbers.pull, 1)
