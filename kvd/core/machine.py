"""The interface between the machines and their shell: events go in, effects come out.

A machine is a deterministic function of its events: the same state and the same event give the same effects. The shell
(`kvd.node.driver`, or the simulator) carries the effects out and reports what came of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvd.core.requests import Request
from kvd.errors import KvdError
from kvd.protocol.messages import Epoch, Message

Peer: TypeAlias = Hashable  # how the transport names the other end of a connection
Buffer: TypeAlias = Any  # memory that the machine passes on and never looks into

SCHEDULER: Peer = "scheduler"


class Span(NamedTuple):
    """A range of bytes in a buffer."""

    buffer: Buffer
    offset: int
    nbytes: int


class ScatterList(NamedTuple):
    """Bytes that lie in several buffers; in the whole, each span starts at a multiple of 8."""

    spans: tuple[Span, ...]


def spans_of(buffer: Buffer | ScatterList, nbytes: int) -> tuple[Span, ...]:
    """All `nbytes` bytes of a buffer, or of a rope."""
    return buffer.spans if isinstance(buffer, ScatterList) else (Span(buffer, 0, nbytes),)


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Received(NamedTuple):
    """A message arrived, with its payload of `nbytes` bytes if it had one."""

    peer: Peer
    sender: int
    epoch: Epoch
    message: Message
    payload: Buffer = None
    nbytes: int = 0


class LocalCall(NamedTuple):
    """The program asks for something; it is answered by exactly one Complete, at `deadline` at the latest."""

    call: int
    request: Request
    deadline: float


class JobDone(NamedTuple):
    """What a job gave: a buffer, bytes, or whatever the job is said to give; or the error that it ended with."""

    job: int
    result: Any = None
    error: KvdError | None = None


class Persisted(NamedTuple):
    """The record with this token is on stable storage."""

    token: int


class PeerLost(NamedTuple):
    """The shell knows for certain that this incarnation is gone (its process ended on this host)."""

    incarnation: int
    reason: str


class InvalidFrame(NamedTuple):
    """Frames arrived that are no message of this protocol."""

    peer: Peer
    text: str


class Tick(NamedTuple):
    """Time has passed: the deadline of the machine is reached, or nothing happened for a while."""


Event: TypeAlias = Received | LocalCall | JobDone | Persisted | PeerLost | InvalidFrame | Tick


# ── effects ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Send(NamedTuple):
    """Send a message, with the bytes of the spans as payload, each starting at a multiple of 8."""

    peer: Peer
    message: Message
    payload: tuple[Span, ...] = ()


class Connect(NamedTuple):
    """Open a connection that is called `peer` from now on."""

    peer: Peer
    address: str


class Disconnect(NamedTuple):
    peer: Peer


class Contribution(NamedTuple):
    """What one worker pushed for one round of one slice."""

    rank: int
    clock: int
    span: Span | None  # None: takes part without a value (ABSENT)
    samples: int
    how: int

    def part(self, offset: int, nbytes: int) -> Contribution:
        """The same for a range of the bytes."""
        if self.span is None:
            return self
        return self._replace(span=Span(self.span.buffer, self.span.offset + offset, nbytes))


class Extent(NamedTuple):
    """Where a slice lies in the bytes of its group."""

    key: str
    slice_index: int
    offset: int
    nbytes: int


class Create(NamedTuple):
    """Make the first version of a slice from received bytes. Its JobDone brings the buffer."""

    job: int
    key: str
    slice_index: int
    dtype: str
    source: Span


class Apply(NamedTuple):
    """Merge the contributions in their order and update a group: slices that lie side by side, in every buffer alike.

    Its JobDone brings the buffer of the new version. A group has the same number and layout each time.
    """

    job: int
    group: int
    layout: tuple[Extent, ...]
    dtype: str
    nbytes: int
    current: Buffer | ScatterList
    contributions: tuple[Contribution, ...]
    assign: bool  # take the first contribution's value as it is
    merge: str
    optimizer: object  # in wire form; None: the merged value replaces the stored one


class Export(NamedTuple):
    """The optimizer's state of a slice: JobDone brings (step, ((name, dtype), …), (span, …))."""

    job: int
    key: str
    slice_index: int


class Load(NamedTuple):
    """Replace the optimizer's state of a slice."""

    job: int
    key: str
    slice_index: int
    step: int
    slots: tuple[tuple[str, str], ...]
    source: Span


class ResetState(NamedTuple):
    """Forget the optimizer's state of every slice (another optimizer is set). Carried out at once, no JobDone."""


class Run(NamedTuple):
    """Run the controller registered for `head`: JobDone brings its answer in bytes, or its error."""

    job: int
    head: str
    body: Span


class Persist(NamedTuple):
    """Put the record on stable storage, in place of the one before; then Persisted(token)."""

    token: int
    record: Mapping[str, object]


class Row(NamedTuple):
    """A range to copy."""

    start: int  # in the target
    offset: int  # in the source
    nbytes: int


class Copy(NamedTuple):
    """Copy received bytes into memory that a local call named: each row to its target, None for what nobody wants."""

    source: Buffer
    targets: tuple[Buffer | None, ...]
    rows: tuple[Row, ...]


class Complete(NamedTuple):
    """A local call is answered."""

    call: int
    result: Any = None
    error: KvdError | None = None


class Halt(NamedTuple):
    """The node cannot go on: it was refused, or another process has its place."""

    error: KvdError


class LogEntry(NamedTuple):
    """Why something was decided, for the log. `level` is "debug", "info", "warning" or "error"."""

    level: str
    text: str
    fields: Mapping[str, object] = {}


Job: TypeAlias = Create | Apply | Export | Load | Run
Effect: TypeAlias = Send | Connect | Disconnect | Job | ResetState | Persist | Copy | Complete | Halt | LogEntry


class Machine(Protocol):
    """One role."""

    incarnation: int

    @property
    def epoch(self) -> Epoch:
        """The newest view that the machine knows; it goes into every header."""

    def step(self, event: Event, now: float) -> list[Effect]:
        """Takes one event at the time `now`, in seconds of a clock that never goes back."""

    def next_deadline(self) -> float | None:
        """When the machine wants a Tick if nothing else happens."""

    def explain(self, now: float) -> dict[str, object]:
        """What `kvd status` shows: plain data, ready for JSON."""

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken; for simulators and tests."""
