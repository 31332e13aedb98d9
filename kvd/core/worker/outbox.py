"""What a worker has asked and is not done with: queues by priority, credit, and retries of the same bytes.

Every other node has a lane. Entries leave a lane by priority, first in first out within one; a push never overtakes an
earlier push of the same slice. Bytes on their way are bounded by the lane's credit, which a push gives back when the
server has staged it; small pushes take none, and a server says of them only when asked whether it has them. Whatever is
not answered in time is sent again: the same message, or, when the server is known to have the bytes, a probe without
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from kvd.core.machine import Buffer, Peer, Received, Send, Span
from kvd.protocol.messages import SMALL_PUSH_BYTES, SliceId

RETRY_FIRST_S = 2.0
RETRY_LIMIT_S = 15.0
RETRY_SOON_S = 0.05

QUEUED, SENT, STAGED, SETTLED = range(4)


@dataclass(slots=True, eq=False)
class Entry:
    """One request on its way."""

    peer: Peer
    message: Any
    answered: Callable[[Entry, Received], None]
    payload: tuple[Span, ...] = ()
    nbytes: int = 0  # of the payload: what it takes of the credit
    priority: int = 0
    pushes: tuple[SliceId, ...] = ()  # the slices that it pushes
    plan: Any = None  # the batch that its message names, for whoever made it
    is_small: bool = False  # a push without credit, of which no Staged is to be expected
    state: int = QUEUED
    order: int = 0
    blocked: int = 0  # earlier pushes of its slices that are not sent yet
    followers: list[Entry] = field(default_factory=list)
    attempts: int = 0
    retry_at: float = 0.0

    @property
    def request(self) -> int:
        number: int = self.message.request
        return number

    @property
    def is_push(self) -> bool:
        return bool(self.pushes)


@dataclass(slots=True)
class _Lane:
    credit: int
    in_flight: int = 0
    ready: list[tuple[int, int, Entry]] = field(default_factory=list)


class Outbox:
    """All lanes of a worker. `credit_bytes` bounds the payload on its way to one server, but for small pushes."""

    def __init__(self, credit_bytes: int, small_push_bytes: int = SMALL_PUSH_BYTES) -> None:
        self._credit_bytes = credit_bytes
        self._small_push_bytes = small_push_bytes
        self.asks_staged = False  # somebody waits until all pushes are staged
        self._lanes: dict[Peer, _Lane] = {}
        self._entries: dict[int, Entry] = {}
        self._tails: dict[SliceId, Entry] = {}  # the last unsent push of a slice
        self._retries: list[tuple[float, int]] = []
        self._order = 0
        self.unstaged = 0  # pushes whose bytes may not have arrived

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def find(self, request: int) -> Entry | None:
        return self._entries.get(request)

    def add(self, entry: Entry) -> None:
        """Puts the entry into its lane; a push behind the earlier pushes of its slices."""
        self._order += 1
        entry.order = self._order
        self._entries[entry.request] = entry
        if entry.pushes:
            self.unstaged += 1
            if entry.nbytes <= self._small_push_bytes:
                entry.is_small, entry.nbytes = True, 0
            for place in entry.pushes:
                earlier = self._tails.get(place)
                if earlier is not None:
                    earlier.followers.append(entry)
                    entry.blocked += 1
                self._tails[place] = entry
        if entry.blocked == 0:
            self._make_ready(entry)

    def pump(self, now: float) -> list[Send]:
        """The sends that the credit allows now."""
        sends = []
        for lane in self._lanes.values():
            while lane.ready:
                entry = lane.ready[0][2]
                queued = entry.state == QUEUED
                if queued and lane.in_flight and lane.in_flight + entry.nbytes > lane.credit:
                    break
                heappop(lane.ready)  # before it is sent: that may put its followers in front of it
                if queued:
                    lane.in_flight += entry.nbytes
                    sends.append(self._sent(entry, now))
                    if self.asks_staged and entry.is_small:
                        sends.append(_probe(entry))
        return sends

    def ask_staged(self) -> list[Send]:
        """Probes of the small pushes that are on their way; from now on each gets one, until `asks_staged` is unset."""
        self.asks_staged = True
        return [_probe(entry) for entry in self._entries.values() if entry.is_small and entry.state == SENT]

    def staged(self, entry: Entry, now: float) -> None:
        """The server has the bytes: the credit comes back, and from now on a probe is enough."""
        if entry.state == SENT:
            self._return_credit(entry)
            entry.state = STAGED
            entry.attempts = 0
            self._retry_at(entry, now + RETRY_FIRST_S)

    def settled(self, entry: Entry) -> None:
        """The entry is answered for good, or given up."""
        if entry.state == QUEUED:
            self._leave_queue(entry)
            if entry.is_push:
                self.unstaged -= 1
        elif entry.state == SENT:
            self._return_credit(entry)
        entry.state = SETTLED
        self._entries.pop(entry.request, None)

    def again(self, entry: Entry, now: float) -> None:
        """The server did not take it: send the whole soon."""
        if entry.state == STAGED:
            entry.state = SENT
            self._lanes[entry.peer].in_flight += entry.nbytes
            self.unstaged += entry.is_push
        entry.attempts += 1
        self._retry_at(entry, now + RETRY_SOON_S * min(entry.attempts, 20))

    def due(self, now: float) -> list[Send]:
        """The sends that are due again."""
        sends = []
        while self._retries and self._retries[0][0] <= now:
            at, request = heappop(self._retries)
            entry = self._entries.get(request)
            if entry is None or entry.retry_at != at or entry.state == QUEUED:
                continue
            entry.attempts += 1
            self._retry_at(entry, now + min(RETRY_FIRST_S * 2 ** min(entry.attempts, 8), RETRY_LIMIT_S))
            if entry.state == STAGED and entry.is_push:
                sends.append(_probe(entry))
            else:
                sends.append(Send(entry.peer, entry.message, entry.payload))
                if self.asks_staged and entry.is_small:
                    sends.append(_probe(entry))
        return sends

    def replace_sources(self, copies: Mapping[int, Buffer]) -> None:
        """Sends from a copy from now on what lay in the buffer with this `id`."""
        for entry in self._entries.values():
            if any(id(span.buffer) in copies for span in entry.payload):
                entry.payload = tuple(
                    [span._replace(buffer=copies.get(id(span.buffer), span.buffer)) for span in entry.payload]
                )

    def next_deadline(self) -> float | None:
        """When a retry is due, at the earliest."""
        while self._retries:
            at, request = self._retries[0]
            entry = self._entries.get(request)
            if entry is not None and entry.retry_at == at:
                return at
            heappop(self._retries)
        return None

    # ── the ways of an entry ──

    def _make_ready(self, entry: Entry) -> None:
        lane = self._lanes.get(entry.peer)
        if lane is None:
            lane = self._lanes[entry.peer] = _Lane(self._credit_bytes)
        heappush(lane.ready, (-entry.priority, entry.order, entry))

    def _sent(self, entry: Entry, now: float) -> Send:
        entry.state = SENT
        self._leave_queue(entry)
        self._retry_at(entry, now + RETRY_FIRST_S)
        return Send(entry.peer, entry.message, entry.payload)

    def _leave_queue(self, entry: Entry) -> None:
        """Lets the later pushes of its slices go."""
        if entry.pushes:
            for place in entry.pushes:
                if self._tails.get(place) is entry:
                    del self._tails[place]
        for follower in entry.followers:
            follower.blocked -= 1
            if follower.blocked == 0 and follower.state == QUEUED:
                self._make_ready(follower)
        entry.followers = []

    def _return_credit(self, entry: Entry) -> None:
        self._lanes[entry.peer].in_flight -= entry.nbytes
        if entry.is_push:
            self.unstaged -= 1

    def _retry_at(self, entry: Entry, at: float) -> None:
        entry.retry_at = at
        heappush(self._retries, (at, entry.request))


def _probe(entry: Entry) -> Send:
    """Asks what became of a push, without its bytes."""
    return Send(entry.peer, replace(entry.message, probe=True))
