"""What a program can ask of its worker machine (`LocalCall.request`), and what it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kvd.protocol.messages import Departure
from kvd.protocol.specs import KeySpec


class Item(NamedTuple):
    """One key in a call: the buffer to read its bytes from, the buffer to write its new value to (None: not asked)."""

    key: str
    spec: KeySpec | None
    source: Any = None
    target: Any = None


class Versions(NamedTuple):
    """The oldest and the newest version among the slices that were pulled for an item."""

    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class JoinCluster:
    """Answered with the rank, when all servers are there and know this node; an observer's at the first view."""


@dataclass(frozen=True, slots=True)
class InitKeys:
    """Rank 0: make the keys and publish them; the others: wait until they are live. Answered with None."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class DescribeKey:
    """Answered with the KeySpec of a live key; with `wait`, when it becomes live."""

    key: str
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """Push, pull, or both: what an item has a source for is pushed, what it has a target for is pulled.

    Answered with the Versions pulled, one per item (None where nothing was), when all is committed and copied.
    """

    items: tuple[Item, ...]
    push: bool
    pull: bool
    priority: int = 0
    samples: int = 1
    how: int = 0  # ADD, ASSIGN, ABSENT
    any_version: bool = False


@dataclass(frozen=True, slots=True)
class TakeBack:
    """The program writes to the memory of an earlier Transfer again: the call ends, if it has not, and what is still to
    be sent of it is sent from the copies. Answered at once.

    Attributes:
        copies: each source, and a copy of it.
    """

    copies: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Answered when every push before it is settled, including those whose calls timed out."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Answered when all workers that have not left are there.

    Attributes:
        passed: at once, with no word to anyone: the predecessor has passed it.
    """

    name: str
    passed: bool = False


@dataclass(frozen=True, slots=True)
class LeaveRounds:
    """Leave the rounds and stay (DONE), go (LEFT), or go and be waited for as after a death (FAILED)."""

    departure: Departure


@dataclass(frozen=True, slots=True)
class Rewind:
    """Set the clock of every key back to `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class ClockOf:
    """Answered with the clock of this worker for the key."""

    key: str


@dataclass(frozen=True, slots=True)
class Control:
    """One message to every server (`servers` None) or to some; answered with the answers in rank order.

    An answer is (message, payload). `staged_first`: only when all earlier pushes have reached their servers.
    """

    messages: tuple[Any, ...]  # one for all servers, or one per entry of `servers`; their `request` is filled in
    servers: tuple[int, ...] | None = None
    payload: Any = None
    nbytes: int = 0
    staged_first: bool = False


@dataclass(frozen=True, slots=True)
class SliceControl:
    """One message per slice of a key, to the servers that lead them; answered with the answers in slice order."""

    key: str
    messages: tuple[Any, ...]
    payloads: tuple[Any, ...] = ()
    nbytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Answered with the payload of the scheduler's StatusReport."""


Request: TypeAlias = (
    JoinCluster
    | InitKeys
    | DescribeKey
    | Transfer
    | TakeBack
    | Flush
    | Barrier
    | LeaveRounds
    | Rewind
    | ClockOf
    | Control
    | SliceControl
    | SchedulerStatus
)
