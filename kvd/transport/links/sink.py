"""Where what arrives by links goes."""

from __future__ import annotations

from kvd.transport.base import OnGarbage, OnMessage
from kvd.transport.links.write_coalescing import Holding


class Sink:
    """Where the messages of all links go. The transport sets it when it starts.

    Attributes:
        holding: whether messages without a payload wait a moment before they are written.
    """

    def __init__(self) -> None:
        self.holding = Holding()

    on_message: OnMessage = staticmethod(lambda peer, header, payload, principal: None)
    on_garbage: OnGarbage = staticmethod(lambda peer, text: None)
