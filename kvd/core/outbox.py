"""The requests that a node has sent or will send: peer queues by priority, credit, and retries of the same bytes.

This is where a worker's gradient waits for credit. Every other node has a queue. Requests leave it by priority, and in
the order of `add` within one priority; a push never overtakes an earlier push of the same slice. The credit bounds the
payload in flight to one peer. A push returns its credit when the server has staged it; small pushes take none, and a
server answers Staged to them only when it is asked with a probe. A request that is not answered in time is sent again:
the same message, or a probe without the bytes once the server is known to have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from heapq import heappop, heappush
from typing import Any

from kvd.core.machine import Buffer, Peer, Received, Send, Span
from kvd.protocol.messages import SMALL_PUSH_BYTES, SliceId

RETRY_FIRST_S = 2.0
RETRY_LIMIT_S = 15.0
RETRY_SOON_S = 0.05
RETRY_SOON_LIMIT = 20  # the pauses between retries grow so far
NEVER_SENT = float("-inf")


class EntryState(StrEnum):
    """How far a request has come."""

    QUEUED = auto()  # waits in its peer's queue, or behind an earlier push of its slices
    SENT = auto()  # on its way; its payload holds credit
    STAGED = auto()  # the server has the bytes; the answer is still to come
    SETTLED = auto()  # answered, or given up


# Back from STAGED to SENT: the peer has lost the bytes. Back to QUEUED: another peer takes its place.
ENTRY_TRANSITIONS: dict[EntryState, frozenset[EntryState]] = {
    EntryState.QUEUED: frozenset({EntryState.SENT, EntryState.SETTLED}),
    EntryState.SENT: frozenset({EntryState.STAGED, EntryState.SETTLED, EntryState.QUEUED}),
    EntryState.STAGED: frozenset({EntryState.SENT, EntryState.SETTLED, EntryState.QUEUED}),
    EntryState.SETTLED: frozenset(),
}
QUEUED, SENT, STAGED, SETTLED = EntryState  # the hot path compares: one look-up instead of two


class Entry:
    """One request, from `add` until it is answered.

    Its message is made when somebody needs it first: a shell may have sent the same bytes from a frame of its own.

    Args:
        send: the message, the same in every retry. None: `make` makes it.
        answered: takes the answer.
        nbytes: of the payload: the part of the credit that it takes.
        pushes: the slices that it pushes.
        topic: what it is about, for the part that made it.
        call: the call that it belongs to; it is one of its `entries` until it is settled. None: it stands alone.
        peer, request: of a message that is not made yet.

    Attributes:
        peer: the node that it goes to; another one after `Outbox.redirect`.
        request: the number of its message.
        is_small: a push without credit, which no Staged answers unless a probe asks for it.
        blocked: earlier pushes of its slices that are not sent yet.
        followers: later pushes that this one blocks.
        sent_at: when it was sent to its peer the first time.

    Invariants:
        It holds credit (`nbytes`) exactly while it is SENT.
        It is in its peer's queue exactly while it is QUEUED and `blocked` is 0.
    """

    # What an instance does not set, the class has.
    is_small = False
    blocked = 0
    followers: Sequence[Entry] = ()
    attempts = 0
    retry_at = 0.0
    sent_at = NEVER_SENT

    def __init__(
        self,
        send: Send | None,
        answered: Callable[[Received], None],
        nbytes: int = 0,
        priority: int = 0,
        pushes: tuple[SliceId, ...] = (),
        topic: Any = None,
        call: Any = None,
        peer: Peer | None = None,
        request: int = 0,
        make: Callable[[Entry], Send] | None = None,
        *,
        state: EntryState = QUEUED,
    ) -> None:
        if send is not None:
            message: Any = send.message
            peer, request = send.peer, message.request
        assert peer is not None
        self._send = send
        self._make = make
        self.peer: Peer = peer
        self.request = request
        self.answered = answered
        self.nbytes = nbytes
        self.priority = priority
        self.pushes = pushes
        self.topic = topic
        self.call = call
        self.state = state

    @property
    def send(self) -> Send:
        """The message to its peer."""
        if self._send is None:
            assert self._make is not None
            self._send = self._make(self)
        return self._send

    def send_to(self, peer: Peer) -> None:
        """Address another peer."""
        self.peer = peer
        if self._send is not None:
            self._send = self._send._replace(peer=peer)

    def replace_payload(self, payload: tuple[Span, ...]) -> None:
        """Send these bytes from now on, which are the same."""
        self._send = self.send._replace(payload=payload)

    @property
    def was_sent(self) -> bool:
        """Whether it has left this node, to whichever peer."""
        return self.sent_at > NEVER_SENT

    def move_to(self, state: EntryState) -> None:
        """Changes the state, as ENTRY_TRANSITIONS allows."""
        if state not in ENTRY_TRANSITIONS[self.state]:
            raise RuntimeError(f"a request cannot become {state} when it is {self.state}: this is a bug in kvd")
        self.state = state


@dataclass(slots=True)
class _PeerQueue:
    """What waits for one peer, and how much of its credit is taken."""

    credit: int
    in_flight: int = 0
    ready: list[tuple[int, int, Entry]] = field(default_factory=list)  # a heap by priority and number


class Outbox:
    """The queues to all peers.

    Args:
        credit_bytes: bounds the payload in flight to one peer. A payload that is larger goes alone.
        small_push_bytes: pushes of up to this many bytes take no credit.

    Attributes:
        unstaged: the pushes whose bytes may not have arrived.
        activity: grows whenever a request is added or settled.
        open: the requests that are not settled, by number. Only the outbox changes it.
        queued: requests in the queues of peers, some of which may be settled: without any, `pump` has nothing to send.
        credit_bytes, small_push_bytes: as they were given.
    """

    def __init__(self, credit_bytes: int, small_push_bytes: int = SMALL_PUSH_BYTES) -> None:
        self.unstaged = 0
        self.activity = 0
        self.queued = 0
        self.open: dict[int, Entry] = {}
        self.credit_bytes = credit_bytes
        self.small_push_bytes = small_push_bytes
        self._asks_staged = False  # a call waits until all pushes are staged
        self._queues: dict[Peer, _PeerQueue] = {}
        self._tails: dict[SliceId, Entry] = {}  # the last unsent push of a slice
        self._retries: list[tuple[float, int]] = []  # a heap of times and requests
        self._missed: set[int] = set()  # requests that a peer cannot take yet, or does not have: sent whole next

    def __len__(self) -> int:
        return len(self.open)

    def entries(self) -> Iterator[Entry]:
        return iter(list(self.open.values()))

    def find(self, request: int) -> Entry | None:
        return self.open.get(request)

    def add(self, entry: Entry, leaves_at: float | None = None) -> None:
        """Queues a request; a push behind the earlier pushes of its slices. Requests are numbered in this order.

        Args:
            leaves_at: the present time, if the caller sends its bytes: it is SENT afterwards, unless others leave
                before it or it waits for credit.
        """
        self.activity += 1
        self.open[entry.request] = entry
        if entry.call is not None:
            entry.call.entries.add(entry)
        if entry.pushes:
            self.unstaged += 1
            if entry.nbytes <= self.small_push_bytes:
                entry.is_small, entry.nbytes = True, 0
        if leaves_at is not None and not self._asks_staged:
            queue = self._queues.get(entry.peer)
            if queue is None:
                queue = self._queues[entry.peer] = _PeerQueue(self.credit_bytes)
            has_credit = not queue.in_flight or queue.in_flight + entry.nbytes <= queue.credit
            if has_credit and not queue.ready:  # so no earlier push of its slices waits
                queue.in_flight += entry.nbytes
                entry.state = SENT
                entry.sent_at = leaves_at
                entry.retry_at = at = leaves_at + RETRY_FIRST_S
                heappush(self._retries, (at, entry.request))
                return
        self._enqueue(entry)

    def pump(self, now: float) -> list[Send]:
        """The sends that the credit allows now."""
        sends = []
        for queue in self._queues.values():
            while queue.ready:
                entry = queue.ready[0][2]
                queued = entry.state is QUEUED
                if queued and queue.in_flight and queue.in_flight + entry.nbytes > queue.credit:
                    break
                self.queued -= 1
                heappop(queue.ready)  # before it is sent: that may put its followers in front of it
                if queued:
                    queue.in_flight += entry.nbytes
                    sends.append(self._sent(entry, now))
                    if self._asks_staged and entry.is_small:
                        sends.append(_probe(entry))
        return sends

    def ask_staged(self) -> list[Send]:
        """Probes for the small pushes in flight. From now on each small push gets one, until `stop_asking_staged`."""
        self._asks_staged = True
        return [_probe(entry) for entry in self.open.values() if entry.is_small and entry.state is SENT]

    def stop_asking_staged(self) -> None:
        self._asks_staged = False

    def mark_staged(self, entry: Entry, now: float) -> None:
        """The server has the bytes: the credit comes back, and from now on a probe is enough."""
        if entry.state is SENT:
            self._return_credit(entry)
            entry.move_to(STAGED)
            entry.attempts = 0
            self._retry_at(entry, now + RETRY_FIRST_S)

    def settle(self, entry: Entry) -> None:
        """The request is answered, or given up. Nothing happens if it was before."""
        state = entry.state
        if state is SETTLED:
            return
        if state is QUEUED:
            self._leave_queue(entry)
        elif state is SENT:
            self._queues[entry.peer].in_flight -= entry.nbytes
        if entry.pushes and state is not STAGED:
            self.unstaged -= 1
        entry.state = SETTLED
        self.activity += 1
        self.open.pop(entry.request, None)
        retries = self._retries
        while retries and retries[0][1] not in self.open:  # mostly its own: requests are answered in their order
            heappop(retries)
        if self._missed:
            self._missed.discard(entry.request)
        if entry.call is not None:
            entry.call.entries.discard(entry)

    def settle_all(self) -> None:
        """Gives everything up: this node sends nothing more."""
        for entry in self.entries():
            self.settle(entry)

    def redirect(self, peer_for: Callable[[Entry], Peer]) -> list[Entry]:
        """Others take the place of some peers: what is open at these begins again at the others, with the same numbers
        and bytes, in the order of `add`. Answers of the old peers do not count any more.

        Args:
            peer_for: gives the peer that a request is for now. Pushes of one slice have the same one.

        Returns:
            The requests that have another peer now.
        """
        moved = []
        for entry in self.open.values():
            peer = peer_for(entry)
            if peer != entry.peer:
                self._take_back(entry)
                entry.send_to(peer)
                moved.append(entry)
        if moved:
            self.activity += 1
            self._tails.clear()
            for queue in self._queues.values():
                queue.ready.clear()
            self.queued = 0
            for entry in self.open.values():
                if entry.state is QUEUED:
                    entry.blocked, entry.followers = 0, ()
                    self._enqueue(entry)
        return moved

    def retry_soon(self, entry: Entry, now: float, most_attempts: int | None = None) -> None:
        """The peer did not take the request: the whole message goes again soon.

        Args:
            most_attempts: so many are counted at most: the pauses grow no further, and there is no end to them.
        """
        if entry.state is STAGED:
            entry.move_to(SENT)
            self._queues[entry.peer].in_flight += entry.nbytes
            if entry.pushes:
                self.unstaged += 1
        entry.attempts += 1
        self._missed.add(entry.request)
        if most_attempts is not None:
            entry.attempts = min(entry.attempts, most_attempts)
        self._retry_at(entry, now + RETRY_SOON_S * min(entry.attempts, RETRY_SOON_LIMIT))

    def due(self, now: float) -> list[Send]:
        """The retries that are due."""
        sends = []
        while self._retries and self._retries[0][0] <= now:
            at, request = heappop(self._retries)
            entry = self.open.get(request)
            if entry is None or entry.retry_at != at or entry.state is QUEUED:
                continue
            entry.attempts += 1
            self._retry_at(entry, now + min(RETRY_FIRST_S * 2 ** min(entry.attempts, 8), RETRY_LIMIT_S))
            sends += self._again(entry)
        return sends

    def _again(self, entry: Entry) -> list[Send]:
        """The retry of a request. That a push of many bytes is not answered mostly means that its bytes wait in front
        of a busy peer: more of them would keep it busy for ever. A probe comes after them on the same connection, and
        is answered with NotYet if they were lost."""
        may_be_there = entry.pushes and not entry.is_small and entry.request not in self._missed
        self._missed.discard(entry.request)
        if may_be_there or (entry.state is STAGED and entry.pushes):
            return [_probe(entry)]
        if self._asks_staged and entry.is_small:
            return [entry.send, _probe(entry)]
        return [entry.send]

    def replace_sources(self, copies: Mapping[int, Buffer]) -> None:
        """From now on what lay in the buffer with this `id` is sent from its copy."""
        for entry in self.open.values():
            payload = entry.send.payload
            if any(id(span.buffer) in copies for span in payload):
                spans = [span._replace(buffer=copies.get(id(span.buffer), span.buffer)) for span in payload]
                entry.replace_payload(tuple(spans))

    def next_deadline(self) -> float | None:
        """When the next retry is due."""
        while self._retries:
            at, request = self._retries[0]
            entry = self.open.get(request)
            if entry is not None and entry.retry_at == at:
                return at
            heappop(self._retries)
        return None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken: those of `Entry`, and

        a peer's credit in use is the sum of the payloads that are SENT to it
        a request that is SENT or STAGED has a retry to come
        `unstaged` counts the pushes that are QUEUED or SENT
        """
        in_flight = dict.fromkeys(self._queues, 0)
        ready = {request for queue in self._queues.values() for _, request, _ in queue.ready}
        retries = set(self._retries)
        unstaged = 0
        for request, entry in self.open.items():
            state = entry.state
            assert state is not SETTLED, f"request {request} is settled, but still open"
            assert (request in ready) == (state is QUEUED and not entry.blocked), (
                f"request {request} is {state}: {ready}"
            )
            assert entry.call is None or entry in entry.call.entries, f"the call of request {request} lost it"
            assert state is QUEUED or (entry.retry_at, request) in retries, f"request {request} is never sent again"
            unstaged += bool(entry.pushes) and state is not STAGED
            if state is SENT:
                in_flight[entry.peer] += entry.nbytes
        queued = sum(len(queue.ready) for queue in self._queues.values())
        assert queued == self.queued, f"{queued} requests are in queues, {self.queued} are counted"
        assert unstaged == self.unstaged, f"{unstaged} pushes are not staged, {self.unstaged} are counted"
        for peer, queue in self._queues.items():
            assert queue.in_flight == in_flight[peer], f"{in_flight[peer]} bytes are in flight: {queue}"

    # ── the steps of one request ──

    def _enqueue(self, entry: Entry) -> None:
        """Puts a request behind the earlier pushes of its slices, or into the queue of its peer."""
        for slice_id in entry.pushes:
            earlier = self._tails.get(slice_id)
            if earlier is not None:
                earlier.followers = [*earlier.followers, entry]
                entry.blocked += 1
            self._tails[slice_id] = entry
        if not entry.blocked:
            self._make_ready(entry)

    def _take_back(self, entry: Entry) -> None:
        """Whatever its peer has of the request does not count."""
        if entry.state is QUEUED:
            return
        if entry.state is SENT:
            self._queues[entry.peer].in_flight -= entry.nbytes
        elif entry.pushes:
            self.unstaged += 1
        entry.move_to(QUEUED)
        entry.attempts, entry.retry_at = 0, 0.0
        self._missed.discard(entry.request)

    def _make_ready(self, entry: Entry) -> None:
        queue = self._queues.get(entry.peer)
        if queue is None:
            queue = self._queues[entry.peer] = _PeerQueue(self.credit_bytes)
        self.queued += 1
        heappush(queue.ready, (-entry.priority, entry.request, entry))

    def _sent(self, entry: Entry, now: float) -> Send:
        """A request that was QUEUED leaves."""
        entry.state = SENT
        entry.sent_at = now
        self._leave_queue(entry)
        entry.retry_at = at = now + RETRY_FIRST_S
        heappush(self._retries, (at, entry.request))
        return entry.send

    def _leave_queue(self, entry: Entry) -> None:
        """Lets the later pushes of its slices go."""
        for slice_id in entry.pushes:
            if self._tails.get(slice_id) is entry:
                del self._tails[slice_id]
        if entry.followers:
            for follower in entry.followers:
                follower.blocked -= 1
                if follower.blocked == 0 and follower.state is QUEUED:
                    self._make_ready(follower)
            entry.followers = ()

    def _return_credit(self, entry: Entry) -> None:
        self._queues[entry.peer].in_flight -= entry.nbytes
        if entry.pushes:
            self.unstaged -= 1

    def _retry_at(self, entry: Entry, at: float) -> None:
        entry.retry_at = at
        heappush(self._retries, (at, entry.request))


def _probe(entry: Entry) -> Send:
    """Asks what became of a push, without its bytes."""
    message: Any = entry.send.message
    return Send(entry.peer, replace(message, probe=True))
