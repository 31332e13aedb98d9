"""The result of a handshake, see `kvd.transport.zmq.probe`. Commands describe it, and need no ZeroMQ for that."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """How a handshake went."""

    UNKNOWN_NAME = "no address is known for the host's name"
    REFUSED = "nothing listens there"
    NO_ANSWER = "there is no way to it, or it says nothing"
    SUCCEEDED = "each side accepts the other's key"
    NOT_ZMQ = "something else than ZeroMQ listens there"
    WITHOUT_KEYS = "the other side uses no keys, this one does"
    WITH_KEYS = "the other side uses keys, this one does not"
    OTHER_KEY = "the other side holds another key than the one that this side expects"
    NOT_ADMITTED = "the other side does not let this key in"


class Finding(NamedTuple):
    """What a handshake showed.

    Attributes:
        outcome: how it went.
        detail: without an answer, why, in the words of the system; for `Outcome.NOT_ZMQ`, what listens there.
    """

    outcome: Outcome
    detail: str = ""
