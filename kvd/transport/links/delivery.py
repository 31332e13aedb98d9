"""Where the frames of one link go."""

from __future__ import annotations

from typing import Protocol

from kvd.transport.links.sink import Sink


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
    """Belongs to the thread that reads the link.

    Attributes:
        sink: takes messages.
        repeated: takes the frames that begin alike, in place of the sink; None: nobody does.
        is_greeted: whether the other side has sent its HELLO, which comes first.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.repeated: RepeatedFrames | None = None
        self.is_greeted = False
