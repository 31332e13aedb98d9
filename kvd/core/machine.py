"""The interface between the machines and their shell: events in, effects out.

A machine is a deterministic function of its events: the same state and the same event give the same effects. The shell
(`kvd.node.shell.driver`, or the simulator) carries out the effects and reports their results as events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from kvd.core.principals import HOLDER, Principal
from kvd.core.requests import Request
from kvd.errors import KvdError
from kvd.protocol.messages import NO_RUN, Epoch, MergedCoding, Message, PathKind
from kvd.protocol.specs import KeySpec

Buffer: TypeAlias = Any  # memory that machines pass on and never read


# ── peers ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PeerKind(Enum):
    """Which side opened a connection, and to what."""

    SCHEDULER = "scheduler"  # this node connected to the scheduler
    SERVER = "server"  # this node connected to a server
    CALLER = "caller"  # the other end connected to this node, over ZeroMQ
    LINK = "link"  # the other end connected to this node, over a link


class SchedulerPeer(str):
    """The scheduler. There is only `SCHEDULER`."""

    __slots__ = ()
    kind: ClassVar[Literal[PeerKind.SCHEDULER]] = PeerKind.SCHEDULER


class ServerPeer(int):
    """A server, by its incarnation."""

    __slots__ = ()
    kind: ClassVar[Literal[PeerKind.SERVER]] = PeerKind.SERVER


class CallerPeer(bytes):
    """A node that connected to this one over ZeroMQ, by its routing id."""

    __slots__ = ()
    kind: ClassVar[Literal[PeerKind.CALLER]] = PeerKind.CALLER


class LinkPeer(str):
    """A node that connected to this one over a link, by a name that is unique in this process."""

    __slots__ = ()
    kind: ClassVar[Literal[PeerKind.LINK]] = PeerKind.LINK


Peer: TypeAlias = SchedulerPeer | ServerPeer | CallerPeer | LinkPeer
"""The other end of a connection, told apart by `kind`. Every message looks peers up in dictionaries, so each is a plain
value with a tag: it hashes and compares without a Python call."""

SCHEDULER = SchedulerPeer("scheduler")


BEING_OPENED: Final = "a link is being opened"
"""The reason of a path over ZeroMQ that will soon be another one."""


class PeerPath(NamedTuple):
    """How messages travel to a peer, and why not on a faster path."""

    kind: PathKind
    reason: str = ""

    def describe(self) -> str:
        """For people: "KIND", or "KIND: REASON"."""
        return f"{self.kind}: {self.reason}" if self.reason else str(self.kind)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Span(NamedTuple):
    """A range of bytes in a buffer."""

    buffer: Buffer
    offset: int
    nbytes: int


class Gathered(NamedTuple):
    """Whole buffers that lie one after the other where a span names this in place of a buffer.

    Attributes:
        buffers: contiguous, in their order.
        gaps: zeros after each of them; None: there are none.
    """

    buffers: Sequence[Buffer]
    gaps: Sequence[bytes] | None = None


class ScatterList(NamedTuple):
    """Bytes that lie in several buffers. In the concatenation, each span starts at a multiple of 8."""

    spans: tuple[Span, ...]


def spans_of(buffer: Buffer | ScatterList, nbytes: int) -> tuple[Span, ...]:
    """The spans of all `nbytes` bytes of a buffer or scatter list."""
    return buffer.spans if isinstance(buffer, ScatterList) else (Span(buffer, 0, nbytes),)


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Received(NamedTuple):
    """A message arrived. `payload` is None if it has none; otherwise it holds `nbytes` bytes. `principal` holds the key
    of the connection. `fault` says why the payload cannot be decoded."""

    peer: Peer
    sender: int
    epoch: Epoch
    message: Message
    payload: Buffer = None
    nbytes: int = 0
    run: int = NO_RUN
    principal: Principal = HOLDER
    fault: str = ""


class LocalCall(NamedTuple):
    """The program requests something. Exactly one Complete answers it, at `deadline` at the latest.

    `answer_s`: it also ends when a node has owed it an answer for that many seconds and does not say that it waits for
    other workers. None: the program chose the deadline itself, and may do something else after it.
    """

    call: int
    request: Request
    deadline: float
    answer_s: float | None = None


class JobDone(NamedTuple):
    """A job ended: with the result that its effect describes, or with an error."""

    job: int
    result: Any = None
    error: KvdError | None = None
    run: int = NO_RUN


class Persisted(NamedTuple):
    """The record with this token is on stable storage, and with it all that came before."""

    token: int


class PersistFailed(NamedTuple):
    """Records cannot be saved. The shell goes on trying, and Persisted says when that is over."""

    text: str


class PeerLost(NamedTuple):
    """The shell knows for certain that this incarnation is gone: its process on this host ended."""

    incarnation: int
    reason: str


class InvalidFrame(NamedTuple):
    """Frames arrived that are not a message of this protocol."""

    peer: Peer
    text: str


class HandshakeFailed(NamedTuple):
    """The shell knows why a node that this one connected to does not answer: their keys do not fit."""

    peer: Peer
    error: KvdError


class CensusTaken(NamedTuple):
    """The answer to a Census.

    Attributes:
        everyone: every thread and coroutine that has used the store, and is alive, waits inside it without a timeout of
            its own.
        entered: how often any of them has begun to wait so far.
        calls: the open calls that they wait for.
    """

    everyone: bool
    entered: int
    calls: tuple[int, ...]


class Tick(NamedTuple):
    """Time has passed: the machine's deadline is reached, or nothing has happened for a while."""


Event: TypeAlias = (
    Received
    | LocalCall
    | JobDone
    | Persisted
    | PersistFailed
    | PeerLost
    | InvalidFrame
    | HandshakeFailed
    | CensusTaken
    | Tick
)


# ── effects ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Send(NamedTuple):
    """Send a message. The bytes of the spans are its payload; each span starts there at a multiple of 8."""

    peer: Peer
    message: Message
    payload: tuple[Span, ...] = ()


class Connect(NamedTuple):
    """Open a connection; its name is `peer` from now on. The other end has to prove that it holds `key`, a public key
    in Z85; "": the key that this node was started with."""

    peer: Peer
    address: str
    key: str = ""


class Disconnect(NamedTuple):
    peer: Peer


class Contribution(NamedTuple):
    """What one worker pushed for one round of one slice."""

    rank: int
    clock: int
    span: Span | None  # None: the worker takes part without a value (ABSENT)
    samples: int
    how: int
    step: int = 0  # of the worker, when it pushed this
    place: int = 0  # where the program of the worker is, see `kvd.core.places`
    coding: MergedCoding | None = None  # how it travelled, if what it is merged into may become that as well

    def part(self, offset: int, nbytes: int) -> Contribution:
        """The contribution to `nbytes` of its bytes, from `offset` on."""
        if self.span is None:
            return self
        return self._replace(span=Span(self.span.buffer, self.span.offset + offset, nbytes))


class Extent(NamedTuple):
    """Where a slice lies in the bytes of its group."""

    key: str
    slice_index: int
    offset: int
    nbytes: int


class FirstBytes(NamedTuple):
    """A slice that is to be made, and the received bytes that it starts with; a part of a table has the spec of its key
    in place of bytes. `is_copied`: it is made of the rows that LoadRows has loaded."""

    key: str
    slice_index: int
    dtype: str
    source: Span
    table: KeySpec | None = None
    is_copied: bool = False


class TableVersion(NamedTuple):
    """A version of a part of a table: what stands in place of the buffer of its bytes.

    Attributes:
        number: grows by one with each update of the part, from 0 on.
        rows: those that take memory.
        nbytes: the memory that the part takes.
    """

    number: int
    rows: int
    nbytes: int


class Encoding(NamedTuple):
    """How the merged gradient that makes this version is encoded."""

    coding: MergedCoding
    version: int


class EncodedValue(NamedTuple):
    """The bytes that the value of a slice was decoded from, and the compressor (`kvd.compression.to_wire`) that made
    them."""

    method: Any
    span: Span


class Create(NamedTuple):
    """Make the first version of each of these slices. Its JobDone has a list of their buffers; of a part of a table, a
    TableVersion."""

    job: int
    slices: tuple[FirstBytes, ...]


class Apply(NamedTuple):
    """Merge the contributions in their order and update a group: slices that lie side by side, alike in every buffer.

    Its JobDone has the buffer of the new version; with `keeps_merged` a pair, that buffer and a span of the merged
    gradient. The number and layout of a group never change.

    A merged gradient is in the dtype that contributions are summed in, float32 for float16 and bfloat16, element by
    element as in the group; what lies between two slices there does not matter. There is one only with an optimizer
    or an `encoding`, and without `assign`; of a part of a table always, which is its merged rows with their ids.

    With `encoding` there is no optimizer, and the group is one slice. The merged gradient is encoded, and the new
    version is what that decodes into. The JobDone has a triple, those two and an EncodedValue; None for the last one:
    this compressor encodes no merged values. What is left over belongs to the state of the slice, for the next version
    that is merged, with or without `encoding`.

    `pulled`: the version that the one contribution was calculated from, where the optimizer compensates for delays.
    What it makes of the contribution is the merged gradient then.

    A part of a table is a group of its own, and its version is a TableVersion. What each contribution has is row ids
    and rows, see `kvd.protocol.messages.Push`. Its jobs run in the order in which they were started, and the shell
    keeps what it needs to read the last three versions: the one that is committed next, the current and the previous.
    """

    job: int
    group: int
    layout: tuple[Extent, ...]
    dtype: str
    nbytes: int
    current: Buffer | ScatterList
    contributions: tuple[Contribution, ...]
    assign: bool  # the first contribution's value becomes the stored one
    merge: str
    optimizer: object  # None: the merged value replaces the stored one
    keeps_merged: bool = False
    is_merged: bool = False  # the one contribution with a span is such a merged gradient, of another server
    pulled: Buffer | ScatterList | None = None
    encoding: Encoding | None = None
    is_final: bool = False  # the one contribution is the new version, of another server: nothing is left over to add


class ReadRows(NamedTuple):
    """Read rows of a part of a table at a version, for several who want some. Its JobDone has a tuple, for each of them
    a span with the rows in the order of the ids, or the KvdError of what cannot be read.

    Attributes:
        ids: of each of them, int64.
    """

    job: int
    key: str
    slice_index: int
    version: TableVersion
    ids: tuple[Span, ...]

    @property
    def ids_nbytes(self) -> int:
        return sum([span.nbytes for span in self.ids])


class ListRows(NamedTuple):
    """List rows of a part of a table. Its JobDone has (version, more, span): a number, whether there are more rows than
    those of the span, and ids as int64, ascending.

    Attributes:
        since: those that were updated after this update; ALL_ROWS: those that take memory.
        after: only ids above this one.
        evicted: those that were evicted after `since` instead.
        most: so many at most.
    """

    job: int
    key: str
    slice_index: int
    since: int
    after: int
    evicted: bool
    most: int


class ReadPart(NamedTuple):
    """Read a piece of a part of a table that rests, to send it to another server. Its JobDone has a span, and where the
    next piece begins; None: this was the last.

    Attributes:
        position: where it begins: 0, or what the job before has said.
        nbytes: its size, about.
    """

    job: int
    key: str
    slice_index: int
    position: int
    nbytes: int


class KeepRows(NamedTuple):
    """Copy the rows of a part of a table, with what the optimizer keeps of them. Its JobDone has a KeptRows."""

    job: int
    key: str
    slice_index: int


class KeptRows(NamedTuple):
    """Rows of a table as they were.

    Attributes:
        rows: what the shell knows them by; they are forgotten with it.
        nbytes: their memory.
    """

    rows: Buffer
    nbytes: int


class ReadStored(NamedTuple):
    """Read rows of a part of a table, with what the optimizer keeps of them. Its JobDone has a span: a piece
    (`kvd.tables.stored_rows`), which says how many rows come after it.

    Attributes:
        kept: rows as they were; None: those that there are.
        first: the first of them, counted in the order in which they lie.
        nbytes: of the rows, about.
    """

    job: int
    key: str
    slice_index: int
    first: int
    nbytes: int
    kept: KeptRows | None = None


class LoadRows(NamedTuple):
    """Take a piece of a part of a table, from which Create makes the part when all are here. Pieces come in their
    order; one that came before changes nothing. Its JobDone has the bytes that they take so far.

    Attributes:
        spec: of the key.
    """

    job: int
    key: str
    slice_index: int
    spec: KeySpec
    piece: Span


class Export(NamedTuple):
    """Read the optimizer's state of a slice. Its JobDone has (step, ((name, dtype), …), (span, …))."""

    job: int
    key: str
    slice_index: int


class Whole(NamedTuple):
    """A slice, and the bytes of its version."""

    key: str
    slice_index: int
    span: Span


class Checksums(NamedTuple):
    """Calculate a checksum of each slice: its bytes, and the state of its optimizer. Its JobDone has the checksums, and
    how many bytes were read."""

    job: int
    slices: tuple[Whole, ...]


class Load(NamedTuple):
    """Replace the optimizer's state of a slice. The source of a part of a table is a piece of rows, as ReadStored gives
    it: these are put in place of those of their ids, and the JobDone has the next TableVersion."""

    job: int
    key: str
    slice_index: int
    step: int
    slots: tuple[tuple[str, str], ...]
    source: Span


class ResetState(NamedTuple):
    """The optimizer's state of these slices (key and index) starts over: another optimizer is set for them. Takes
    effect at once, without JobDone."""

    slices: tuple[tuple[str, int], ...]


class ForgetState(NamedTuple):
    """Forget what is kept besides the bytes of these slices (key and index), and what was loaded to make them: they are
    deleted. Takes effect at once, without JobDone."""

    slices: tuple[tuple[str, int], ...]


class Run(NamedTuple):
    """Run the controller registered for `head`. Its JobDone has the answer in bytes, or the error."""

    job: int
    head: str
    body: Span


class Persist(NamedTuple):
    """Replace the record on stable storage by this one; then comes Persisted(token)."""

    token: int
    record: Mapping[str, object]


class Unsaved(NamedTuple):
    """What one machine of a scheduler records has changed: the next Persist has it. Once that is saved, the machine
    is told Persisted(token)."""

    token: int


class Row(NamedTuple):
    """A range to copy."""

    start: int  # in the target
    offset: int  # in the source
    nbytes: int


class Copy(NamedTuple):
    """Copy received bytes into memory that a local call named: each row to its target, or nowhere if that is None."""

    source: Buffer
    targets: tuple[Buffer | None, ...]
    rows: tuple[Row, ...]


class Scatter(NamedTuple):
    """Copy received bytes into whole buffers that a local call named, one after the other.

    Attributes:
        targets: contiguous, each of which takes as many bytes as it has.
        nbytes: of each of them.
        gaps: bytes after each of them that go nowhere; None: there are none.
    """

    source: Buffer
    targets: Sequence[Buffer]
    nbytes: Sequence[int]
    gaps: Sequence[bytes] | None = None


class Census(NamedTuple):
    """Look which of the program's threads wait inside the store; then comes CensusTaken."""


class Complete(NamedTuple):
    """A local call is answered."""

    call: int
    result: Any = None
    error: KvdError | None = None


class Halt(NamedTuple):
    """The node cannot go on: it was refused, or another process has its rank."""

    error: KvdError


class Stop(NamedTuple):
    """The node was asked to end in good order."""

    reason: str


class DropRun(NamedTuple):
    """The values of this run are given up: forget what its jobs have left."""

    run: int


class LogEntry(NamedTuple):
    """A decision and its reason, for the log. `level` is "debug", "info", "warning" or "error"."""

    level: str
    text: str
    fields: Mapping[str, object] = {}


Job: TypeAlias = (
    Create | Apply | ReadRows | ListRows | ReadPart | KeepRows | ReadStored | LoadRows | Export | Checksums | Load | Run
)
Local: TypeAlias = Copy | Scatter | Census | Complete | Halt | Stop | DropRun | LogEntry
OfOneRun: TypeAlias = Send | Connect | Disconnect | Job | ResetState | ForgetState | Persist | Unsaved | Local


class InRun(NamedTuple):
    """What a machine that serves several runs does for one of them; NO_RUN: for the cluster.

    `epoch` is that of the run's view: it goes into the header of each message.
    """

    run: int
    epoch: Epoch
    effects: Sequence[OfOneRun]


Effect: TypeAlias = OfOneRun | InRun


class Machine(Protocol):
    """One role."""

    @property
    def incarnation(self) -> int:
        """The number of this process, which goes into every header."""

    @property
    def run(self) -> int:
        """The run that its messages belong to, except those in an InRun."""

    @property
    def epoch(self) -> Epoch:
        """That of the newest view that the machine knows; it goes into every header, except of those in an InRun."""

    def step(self, event: Event, now: float) -> list[Effect]:
        """Handles one event at the time `now`, in seconds of a clock that never goes back."""

    def next_deadline(self) -> float | None:
        """When the machine needs a Tick if nothing else happens; None: never."""

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        """What `kvd status` shows of a run, as plain data ready for JSON. A machine of one run shows that."""

    def validate(self) -> None:
        """Raises AssertionError if an invariant of the state is broken. For simulators and tests."""
