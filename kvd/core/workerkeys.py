"""What a worker knows of its keys: their specs, its clocks, where their slices are, and the calls that queue there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvd.core.membership import ViewState
from kvd.errors import KvdError
from kvd.protocol.messages import MAX_PARTS, Part
from kvd.protocol.specs import KeySpec, padded, payload_nbytes

UNKNOWN, ASKING, READY, LOST = range(4)
HEADER_BUDGET = 48 << 10  # of the 64 KiB of a header, for the parts


@dataclass(slots=True, eq=False)
class WorkerKey:
    """One key, as this worker sees it."""

    name: str
    spec: KeySpec | None = None
    state: int = UNKNOWN
    clock: int = 0
    open_pushes: int = 0  # started and not settled
    pulling: list[int] = field(default_factory=list)  # versions (sync) that pulls under way have asked for
    servers: tuple[int, ...] = ()  # the rank that leads each slice
    incarnations: dict[int, int] = field(default_factory=dict)  # of those servers, when the key became ready
    queue: deque[Any] = field(default_factory=deque)  # calls that wait for their turn
    mine: bool = False  # this incarnation has initialised it
    broken: KvdError | None = None  # part of a push was refused: only rewind goes on

    def holds_back(self, window: int) -> bool:
        """Whether a push has to wait: too many are under way, or its round would end a version that is being pulled."""
        return self.open_pushes >= window or (bool(self.pulling) and min(self.pulling) < self.clock)

    def place(self, spec: KeySpec, view: ViewState, connected: Mapping[int, int]) -> None:
        """Takes the spec, and where the slices are; `connected` maps the ranks of servers to incarnations."""
        self.spec = spec
        self.servers = tuple(view.server_of(self.name, index) for index in range(spec.num_slices))
        self.incarnations = {rank: connected.get(rank, 0) for rank in sorted(set(self.servers))}

    def lost_servers(self, view: ViewState) -> list[int]:
        """Ranks of servers that were started anew since, and so have lost their part of the key."""
        members = {server.rank: server.incarnation for server in view.servers()}
        return sorted(rank for rank, held in self.incarnations.items() if members.get(rank) != held)


@dataclass(slots=True)
class Batch:
    """The parts that go in one message, and what belongs to each: the item of the call, and the range of the slice."""

    server: int
    parts: list[Part] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    nbytes: int = 0
    header: int = 0

    def takes(self, name: str, nbytes: int, limit: int) -> bool:
        """Whether one more part fits: small ones share a message, a full slice has one for itself."""
        return (
            len(self.parts) < MAX_PARTS
            and self.nbytes + nbytes <= limit
            and self.header + 4 * len(name) + 20 <= HEADER_BUDGET
        )

    def fits(self, versions: int, nbytes: int) -> bool:
        """Whether an answer with so many versions, and a payload of so many bytes, is one to this message."""
        return versions == len(self.parts) and nbytes == payload_nbytes([length for _, length in self.ranges])

    def add(self, part: Part, item: int, span: tuple[int, int]) -> None:
        self.parts.append(part)
        self.items.append(item)
        self.ranges.append(span)
        self.nbytes += padded(span[1])
        self.header += 4 * len(part.key) + 20


def batches(keys: list[tuple[WorkerKey, int, int]], limit: int) -> list[Batch]:
    """Cuts (key, clock, item) into slices and packs them, in order, into messages of at most `limit` bytes a server."""
    full: list[Batch] = []
    open_: dict[int, Batch] = {}
    for key, clock, item in keys:
        assert key.spec is not None
        for index, server in enumerate(key.servers):
            span = key.spec.span(index)
            batch = open_.get(server)
            if batch is None or not batch.takes(key.name, span[1], limit):
                batch = open_[server] = Batch(server)
                full.append(batch)
            batch.add(Part(key.name, index, clock), item, span)
    return full
