"""Delivery of what arrives on links: the callbacks for messages, and the state of one link."""

from __future__ import annotations

from typing import Protocol

from kvd.transport.base import OnGarbage, OnMessage
from kvd.transport.links.write_coalescing import WriteCoalescing


class Sink:
    """Callbacks for data received on links. The transport sets them when it starts.

    Attributes:
        holding: whether messages without a payload wait a moment before they are written.
    """

    def __init__(self) -> None:
        self.holding = WriteCoalescing()

    on_message: OnMessage = staticmethod(lambda peer, header, payload, principal: None)
    on_garbage: OnGarbage = staticmethod(lambda peer, text: None)


class RepeatedFrames(Protocol):
    """Takes INLINE frames of one size, without releases, that begin alike.

    Attributes:
        head: what they begin with.
        rest_nbytes: of each, behind that.
    """

    head: bytes
    rest_nbytes: int

    def take_all(self, rests: list[bytes]) -> None:
        """What each of these frames has behind `head`, which follow one another and were read together. It does not
        raise."""


class Delivery:
    """Delivery of the frames of one link. Belongs to the thread that reads the link.

    Attributes:
        sink: takes messages.
        repeated: takes the frames that begin alike, in place of the sink; None: nobody does.
        is_greeted: whether the other side has sent its HELLO, which comes first.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.repeated: RepeatedFrames | None = None
        self.is_greeted = False
