"""What a worker knows of its keys: their specs, its clocks, where their slices are, and the calls that queue there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.core.machine import Row
from kvd.core.membership import ViewState
from kvd.errors import KvdError
from kvd.protocol.messages import MAX_PARTS, SliceId
from kvd.protocol.specs import KeySpec, padded

UNKNOWN, ASKING, READY, LOST = range(4)
HEADER_BUDGET = 48 << 10  # of the 64 KiB of a header, for the parts


@dataclass(slots=True, eq=False)
class WorkerKey:
    """One key, as this worker sees it."""

    name: str
    spec: KeySpec | None = None
    fits: KeySpec | None = None  # the spec of a program's value that was found to fit
    state: int = UNKNOWN
    clock: int = 0
    taken_up: int = 0  # the clock that it had when it was found, or was set back to by `rewind`
    floor: int = 0  # it takes part again from there on: the rounds before were closed without it
    open_pushes: int = 0  # started and not settled
    failing_pushes: int = 0  # of those, refused in part so far: whether in all, is still open
    pulling: list[int] = field(default_factory=list)  # versions (sync) that pulls under way have asked for
    servers: tuple[int, ...] = ()  # the rank that leads each slice
    incarnations: dict[int, int] = field(default_factory=dict)  # of those servers, when the key became ready
    queue: deque[Any] = field(default_factory=deque)  # calls that wait for their turn
    is_publishing: bool = False  # it is made, and may be live
    mine: bool = False  # this incarnation has initialised it
    broken: KvdError | None = None  # part of a push was refused: only rewind goes on

    def holds_back(self, window: int) -> bool:
        """Whether a push has to wait: too many are under way, or one whose clock may still be given back, or its round
        would end a version that is being pulled."""
        return (
            self.open_pushes >= window
            or self.failing_pushes > 0
            or (bool(self.pulling) and min(self.pulling) < self.clock)
        )

    def place(self, spec: KeySpec, view: ViewState, connected: Mapping[int, int]) -> None:
        """Takes the spec, and where the slices are; `connected` maps the ranks of servers to incarnations."""
        self.spec, self.fits = spec, None
        self.servers = tuple(view.server_of(self.name, index) for index in range(spec.num_slices))
        self.incarnations = {rank: connected.get(rank, 0) for rank in sorted(set(self.servers))}

    def lost_servers(self, view: ViewState) -> list[int]:
        """Ranks of servers that were started anew since, and so have lost their part of the key."""
        members = {server.rank: server.incarnation for server in view.servers()}
        return sorted(rank for rank, held in self.incarnations.items() if members.get(rank) != held)


@dataclass(slots=True, eq=False)
class MessagePlan:
    """What of a call goes in one message. A call on the same keys is packed the same way each time."""

    server: int  # its rank
    slice_ids: tuple[SliceId, ...]
    items: tuple[int, ...]  # of the call, that the slice_ids belong to
    ranges: tuple[tuple[int, int], ...]  # offset and bytes of the slices in the values of their items
    rows: tuple[Row, ...]  # from the payload to the values of the items
    nbytes: int  # of the payload
    uses: int = 0
    batch: int = 0  # its number as a batch; 0: it has none yet
    declared_to: int = 0  # the incarnation of the server that was told


@dataclass(slots=True)
class _Box:
    """A message that is being filled."""

    server: int
    slice_ids: list[SliceId] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    filled: int = 0
    header: int = 0

    def takes(self, name: str, nbytes: int, limit: int) -> bool:
        """Whether one more slice fits: small ones share a message, a full slice has one for itself."""
        return (
            len(self.slice_ids) < MAX_PARTS
            and self.filled + nbytes <= limit
            and self.header + 4 * len(name) + 20 <= HEADER_BUDGET
        )

    def add(self, name: str, index: int, item: int, span: tuple[int, int]) -> None:
        self.slice_ids.append(SliceId(name, index))
        self.items.append(item)
        self.ranges.append(span)
        self.offsets.append(self.filled)
        self.filled += padded(span[1])
        self.header += 4 * len(name) + 20

    def plan(self) -> MessagePlan:
        nbytes = self.offsets[-1] + self.ranges[-1][1]
        rows = tuple(
            [Row(start, offset, size) for (start, size), offset in zip(self.ranges, self.offsets, strict=True)]
        )
        slice_ids, items = tuple(self.slice_ids), tuple(self.items)
        return MessagePlan(self.server, slice_ids, items, tuple(self.ranges), rows, nbytes)


def plan_messages(keys: Sequence[WorkerKey], limit: int) -> list[MessagePlan]:
    """Cuts the keys into slices and batches them, in order, into messages of at most `limit` bytes to a server."""
    boxes: list[_Box] = []
    open_: dict[int, _Box] = {}
    for item, key in enumerate(keys):
        assert key.spec is not None
        for index, server in enumerate(key.servers):
            span = key.spec.span(index)
            box = open_.get(server)
            if box is None or not box.takes(key.name, span[1], limit):
                box = open_[server] = _Box(server)
                boxes.append(box)
            box.add(key.name, index, item, span)
    return [box.plan() for box in boxes]
