"""How a worker gives the state of its program, or takes that of another worker, step by step.

`give` and `take` are scripts: generators that yield requests (`Begin`) and calls to wait for (`Await`). The client
runs them on the thread of the program, the simulator in its programs. What servers do is in `kvd.core.server.healing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

from kvd.core.requests import Control
from kvd.errors import KvdError, ProtocolError
from kvd.protocol.messages import (
    PARTS_AHEAD,
    STATE_PART_BYTES,
    Done,
    FetchPart,
    GiveState,
    Gone,
    OfferState,
    StateGiven,
    StateGone,
    StatePart,
    WantState,
)


class Begin(NamedTuple):
    """Makes a call, and goes on with what stands for it."""

    request: Control


class Await(NamedTuple):
    """Waits for a call, and goes on with its result; its error is raised."""

    call: Any


class PartRead(NamedTuple):
    """Bytes of a state: a buffer that stays as it is until the part is sent, their number, and their CRC-32."""

    buffer: Any
    nbytes: int
    checksum: int


Script: TypeAlias = Generator[Begin | Await, Any, Any]


def offer_of(made: int, home: int) -> Control:
    """The offer of the state after so many steps, to the leader of the partition `home`; NO_STATE: of none."""
    return Control((OfferState(0, made),), partitions=(home,))


def give(told: GiveState, home: int, size: tuple[int, int], read: Callable[[int], PartRead]) -> Script:
    """Sends the parts of the state to those who take it, until they have it, or want it no more.

    Args:
        home: the first partition.
        size: the number of parts, and the bytes of the head.
        read: gives a part by its number; its buffer may be that of the part `PARTS_AHEAD` before it.
    """
    parts, head_nbytes = size
    under_way: deque[Any] = deque()

    def taken() -> Script:
        """Whether the oldest part under way was taken."""
        try:
            ((answer, _, _),) = yield Await(under_way.popleft())
        except KvdError:
            return False
        return isinstance(answer, Done)

    goes_on = True
    for part in range(parts):
        if goes_on and len(under_way) == PARTS_AHEAD:
            goes_on = yield from taken()
        if not goes_on:
            break
        found = read(part)
        message = StatePart(0, told.transfer, part, parts, head_nbytes, found.checksum)
        request = Control((message,), payload=found.buffer, nbytes=found.nbytes, partitions=(home,))
        under_way.append((yield Begin(request)))
    while under_way:  # its buffers are read until then
        yield from taken()


def take(
    made: int,
    home: int,
    begin: Callable[[StateGiven], None],
    write: Callable[[StatePart, Any], None],
    *,
    has_pushed: bool,
    restored: bool = False,
) -> Script:
    """Gets the state after so many steps, and returns None; or why nobody gives it.

    Args:
        home: the first partition.
        has_pushed: see `kvd.protocol.messages.WantState`; so is `restored`.
        begin: a transfer begins; those before it have ended before they were complete.
        write: takes the parts in their order, with their bytes.
    """
    while True:
        wish = Control((WantState(0, made, has_pushed, restored),), partitions=(home,))
        ((answer, _, _),) = yield Await((yield Begin(wish)))
        if isinstance(answer, StateGone) and answer.why is not Gone.AGAIN:
            return answer
        if isinstance(answer, StateGiven):
            begin(answer)
            is_whole = yield from _fetch(answer, home, write)
            if is_whole:
                return None


def _fetch(given: StateGiven, home: int, write: Callable[[StatePart, Any], None]) -> Script:
    """Fetches all parts. Returns whether it has got them; not if the transfer has ended before."""
    under_way: deque[Any] = deque()
    asked = 0
    try:
        for part in range(given.num_parts):
            while asked < min(given.num_parts, part + PARTS_AHEAD):
                under_way.append((yield Begin(_fetching(given, asked, part, home))))
                asked += 1
            ((answer, payload, nbytes),) = yield Await(under_way.popleft())
            if not isinstance(answer, StatePart):
                while under_way:
                    yield Await(under_way.popleft())
                return False
            if answer.part != part or not 0 < nbytes <= STATE_PART_BYTES:
                raise ProtocolError(f"part {answer.part} of a state arrived, with {nbytes} bytes, where {part} was due")
            write(answer, payload)
    except GeneratorExit:
        raise
    except BaseException:
        yield Begin(_fetching(given, given.num_parts, given.num_parts, home))  # the giver waits no more for this worker
        raise
    yield Await((yield Begin(_fetching(given, given.num_parts, given.num_parts, home))))
    return True


def _fetching(given: StateGiven, part: int, have: int, home: int) -> Control:
    return Control((FetchPart(0, given.transfer, part, have),), partitions=(home,))
