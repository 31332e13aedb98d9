"""Every message of the protocol. `kvd.protocol.codec` turns messages into bytes and back, and checks their limits.

Before the fields of its message, a header carries the protocol version, the kind of the message, the sender's
incarnation, the epoch of the newest view that the sender knows, and the run to which view and message belong. Values
travel in a payload frame of their own: the bytes of the parts, in order, each starting at a multiple of 8.

A node may repeat a request at any time, with the same bytes. Every request is answered, and none is carried out twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from kvd.protocol.specs import MAX_DIMENSIONS, MAX_KEY_CHARS, MAX_KEY_NBYTES, MAX_SLICE_BYTES, KeySpec

Kind = TypeVar("Kind")


def _values(message: Any) -> list[object]:
    """Return the values of its fields, in their order."""
    return [getattr(message, name) for name in message.__match_args__]


def _is_equal(message: object, other: object) -> bool:
    return _values(message) == _values(other) if message.__class__ is other.__class__ else NotImplemented


def _hash(message: object) -> int:
    return hash(tuple(_values(message)))


def _shown(message: Any) -> str:
    fields = [f"{name}={getattr(message, name)!r}" for name in message.__match_args__]
    return f"{message.__class__.__qualname__}({', '.join(fields)})"


_SHARED: Final = {"__eq__": _is_equal, "__hash__": _hash, "__repr__": _shown}


@dataclass_transform(frozen_default=True)
def _message(kind: type[Kind]) -> type[Kind]:
    """Make a dataclass that nobody changes. Only type checkers see to that.

    Every process imports all messages when it starts. A frozen class takes five times as long to make, and so does one
    with its own code for equality, hash and repr.
    """
    made = dataclass(slots=True, eq=False, repr=False)(kind)
    for name, function in _SHARED.items():
        setattr(made, name, function)
    return made


class Limit(NamedTuple):
    """The smallest and largest value of a number, or the smallest and largest length of a text or list."""

    low: int
    high: int


BIGGEST = (1 << 62) - 1
ALL_ROWS = -1  # in place of the number of an update
STATE_OF_ROWS = (("state", "of rows"),)  # the slots of a StoreState of a table that brings no rows
LAST_ROW = (1 << 63) - 1
MOST_COUNTED = 1 << 61  # that a peer may claim: who counts on from there always finds a number that a header can carry
MOST_PID = (1 << 31) - 1
MAX_PARTS = 1024
MAX_MEMBERS = 4096  # servers and workers of a run
MAX_SERVERS = 200  # of them
MAX_REPLICATED_WORKERS = 512  # with two copies: what a backup is told of a slice has an entry for each worker
MAX_PAGES = 1024  # messages of one view
MAX_QUIET = 64  # nodes in one HeartbeatAck
MAX_CLAIMED = 1 << 16  # workers or servers that a message may claim; a scheduler says what is wrong from MAX_MEMBERS on
MAX_REPLICAS = 2
MAX_TEXT_CHARS = 1000
MAX_COMPRESSOR_CHARS = 80
SMALL_PUSH_BYTES = 64 << 10
MAX_HELD = 4096  # requests in one Waits
MAX_WAITS = 64  # of them with details
MAX_ABSENT = 16  # workers named for one of these, or for a barrier
MAX_ASKED_ABOUT = 64  # nodes in one WaitReport
MAX_ASKED_BARRIERS = 16
MAX_STUCK_LINES = 32  # of a deadlock
MAX_COUNTED_RANGES = 512  # of shared steps
MAX_LATER_CHANGES = 64  # of hyperparameters that have yet to take effect

Number: TypeAlias = Annotated[int, Limit(0, BIGGEST)]
Signed: TypeAlias = Annotated[int, Limit(-1, BIGGEST)]
Count: TypeAlias = Annotated[int, Limit(0, MOST_COUNTED)]  # what the receiver may count on from
Clock: TypeAlias = Annotated[int, Limit(-1, MOST_COUNTED)]
Size: TypeAlias = Annotated[int, Limit(0, MAX_CLAIMED)]  # the receiver visits every rank
Pid: TypeAlias = Annotated[int, Limit(0, MOST_PID)]
Key: TypeAlias = Annotated[str, Limit(1, MAX_KEY_CHARS)]
Name: TypeAlias = Annotated[str, Limit(0, 64)]
NodeId: TypeAlias = Annotated[str, Limit(0, 128)]
Address: TypeAlias = Annotated[str, Limit(0, 108)]
PublicKey: TypeAlias = Annotated[str, Limit(0, 40)]  # of CURVE, in Z85; "": that of the cluster, or none
Text: TypeAlias = Annotated[str, Limit(0, MAX_TEXT_CHARS)]
Words: TypeAlias = Annotated[str, Limit(0, 80)]
JobName: TypeAlias = Annotated[str, Limit(0, 81)]  # NAME, or for readers NAME@RUN
Token: TypeAlias = Annotated[str, Limit(0, 64)]
Plain: TypeAlias = Annotated[object, "plain data, which its reader checks"]

NO_RANK = -1
NO_STEP = -1
PREPARED = "kvd:prepared"  # the note at this barrier says what an operator has restored for the run
LAST_SNAPSHOT = "kvd:last snapshot"  # the note there: its steps, its time of day, and the steps from one to the next
EXIT_BARRIER = "kvd:exit"  # where the workers of a run meet before they leave
NO_RUN = 0  # the message concerns the cluster, not a run
MAX_RUNS = 64  # listed in a view, those that are gone included
ANY_CLOCK = -1  # in a pull: whatever is committed
NO_KEY = -1  # in a KeyInfo: no such key is live


class Epoch(NamedTuple):
    """The number of a view: the generation grows at each start of the scheduler, the change at each new view in it."""

    generation: Number
    change: Number


NO_VIEW = Epoch(0, 0)  # in the header of a node that knows no view yet


class Part(NamedTuple):
    """One slice of a key in a push or a pull, with the worker's clock for that key."""

    key: Key
    slice_index: Number
    clock: Clock
    creation: Count = 0  # see KeyId


class SliceId(NamedTuple):
    """One slice of a key."""

    key: Key
    slice_index: Number
    creation: Count = 0  # see KeyId


class KeyId(NamedTuple):
    """A key by its name and its creation: a number larger than those of all keys of the name that were deleted.

    What was sent to a deleted key has the creation of that key, so it does not count in its successor of the same name.
    """

    key: Key
    creation: Count


class Made(NamedTuple):
    """Description of a live key."""

    spec: KeySpec
    creation: Number


class NewSlice(NamedTuple):
    """One slice of a key that is to be made."""

    key: Key
    slice_index: Number
    spec: Number  # the place of the key's spec in the specs of the message


class NewKey(NamedTuple):
    """A key whose slices are made."""

    key: Key
    spec: Number  # the place of its spec in the specs of the message


class Settings(NamedTuple):
    """Settings that all nodes of a cluster must agree on.

    In a Join, "" and 0 (-1 for staleness) mean: as the cluster has it.
    """

    mode: Annotated[str, Limit(0, 8)]  # "sync" | "async" | "" (not decided yet)
    merge: Annotated[str, Limit(0, 8)]  # "sum" | "mean" | "weighted" | ""
    staleness: Signed  # -1: unbounded
    rounds_ahead: Number
    slice_bytes: Annotated[int, Limit(0, MAX_SLICE_BYTES)]
    num_workers: Size
    num_servers: Size
    num_shards: Annotated[int, Limit(0, 4096)]
    replicas: Annotated[int, Limit(0, MAX_REPLICAS)] = 1
    quorum: Size = 0  # workers whose contributions a round needs, once it has waited; 0: those of all
    quorum_grace_s: float = 0.0  # how long it waits for the others then
    max_workers: Size = 0  # workers that may take part at a time, as the scheduler was told; 0: num_workers

    @property
    def most_workers(self) -> int:
        """Largest number of workers that may take part at a time."""
        return max(self.num_workers, self.max_workers)

    @property
    def is_elastic(self) -> bool:
        """True if workers may join a running job."""
        return self.max_workers > self.num_workers


class MemberState(StrEnum):
    """State of a server or worker; `kvd.core.scheduler.membership.roster` has the transitions."""

    ACTIVE = "active"  # takes part in rounds
    IDLE = "idle"  # the rounds go on without it until all have come to the point at which it waits
    DONE = "done"  # left the rounds, still connected
    LEFT = "left"  # left the cluster in good order
    DEAD = "dead"  # declared dead
    GONE = "gone"  # declared dead after it left the rounds, which do not wait for it
    LOST = "lost"  # declared dead, and the rounds go on without it
    BACK = "back"  # was lost or late, or has just come; the rounds do not wait for it until it says TakePart
    RETURNING = "returning"  # the rounds wait for it from now on, and it finds out where they are


class Departure(StrEnum):
    """Manner in which a node leaves."""

    DONE = "done"  # it leaves the rounds and stays connected
    LEFT = "left"  # it leaves the cluster in good order
    FAILED = "failed"  # its program ended with an error, which counts as a death
    WITHDRAWN = "withdrawn"  # it gave up joining and has done nothing: its place is as it found it


class Member(NamedTuple):
    """One server or worker, as the scheduler sees it. Only servers are told the incarnations of workers: all others get
    a pseudonym in their place (`kvd.core.pseudonyms`)."""

    role: Annotated[str, Limit(1, 8)]  # "server" | "worker"
    rank: Number
    node_id: NodeId
    incarnation: Number
    address: Address
    state: MemberState
    reason: Words
    last_seen_s: float  # of a dead member: seconds of silence before it was declared dead
    key: PublicKey = ""  # of a server
    principal: Name = ""  # the name of the key under which it joined; "": that of the cluster. Told to servers alone


class RunPhase(StrEnum):
    """State of a run; `kvd.core.scheduler.runs.phase` has the transitions."""

    FORMING = "forming"  # not all of its workers have joined
    RUNNING = "running"
    CLOSING = "closing"  # the exit barrier was passed: its workers are leaving
    ENDED = "ended"  # all workers have left; its values can be read
    FAILED = "failed"  # nobody is left, and somebody died or never came; its program can be started again
    GONE = "gone"  # its values are given up

    @property
    def is_over(self) -> bool:
        """True if no worker of the run is left."""
        return self in (RunPhase.ENDED, RunPhase.FAILED, RunPhase.GONE)


class RunEntry(NamedTuple):
    """One run, in the view of the cluster.

    Attributes:
        job: its name.
        token: what binds processes to it; "" if its first worker had none.
    """

    run: Number
    job: JobName
    token: Token
    phase: RunPhase
    num_workers: Size


class Partition(NamedTuple):
    """The slices of some shards, which stay together: who leads them, and who holds their records too.

    Attributes:
        leader: the rank of the server that serves them.
        backup: the rank of the server that holds every committed record of theirs; NO_RANK if none does.
        syncing: the rank of the server that is to become the backup, and is sent what they are; NO_RANK if none is.
        lineage: the incarnation of the server that began with them empty. Another lineage: what was in them is lost.
        successor: the backup, if the leader is to hand them over to it; else NO_RANK.
    """

    leader: Number
    backup: Signed
    syncing: Signed
    lineage: Number
    successor: Signed = NO_RANK


class TableEntry(NamedTuple):
    """The rows of a table in a listing."""

    rows: Signed  # ANY_ROW: as many as there are ids
    updated: Number  # rows on that server that take memory


class KeyEntry(NamedTuple):
    """One key in a listing: the part of it that the answering server leads."""

    key: Key
    dtype: Annotated[str, Limit(1, 16)]
    shape: Annotated[tuple[Annotated[int, Limit(0, MAX_KEY_NBYTES)], ...], Limit(0, MAX_DIMENSIONS)]
    slices: Number
    bytes_led: Number
    version: Number  # the smallest of its slices on that server
    live: bool
    merge: Annotated[str, Limit(0, 8)] = ""  # its own; "": the cluster's
    table: TableEntry | None = None  # it is a table, and `shape` is that of a row


class Quiet(NamedTuple):
    """A node that has missed heartbeats, and its silence in seconds."""

    role: Annotated[str, Limit(1, 8)]
    rank: Number
    age_s: float


Shape: TypeAlias = Annotated[tuple[Annotated[int, Limit(0, MAX_KEY_NBYTES)], ...], Limit(0, MAX_DIMENSIONS)]
Runs: TypeAlias = Annotated[tuple[RunEntry, ...], Limit(0, MAX_RUNS)]
Partitions: TypeAlias = Annotated[tuple[Partition, ...], Limit(0, MAX_SERVERS)]
Incarnations: TypeAlias = Annotated[tuple[Number, ...], Limit(0, MAX_SERVERS)]
Parts: TypeAlias = Annotated[tuple[Part, ...], Limit(1, MAX_PARTS)]
SliceIds: TypeAlias = Annotated[tuple[SliceId, ...], Limit(1, MAX_PARTS)]
KeyIds: TypeAlias = Annotated[tuple[KeyId, ...], Limit(1, MAX_PARTS)]
Specs: TypeAlias = Annotated[tuple[KeySpec, ...], Limit(1, MAX_PARTS)]

# How a push counts in its round.
ADD = 0  # a gradient or value, merged with the others'
ASSIGN = 1  # replaces the value; only rank 0's is read
ABSENT = 2  # takes part in a round of ASSIGN without a value


class KnownPartitions(NamedTuple):
    """The partitions of a run as a view has them, and the incarnations of the servers there, by rank."""

    partitions: Partitions
    servers: Incarnations


NO_PARTITIONS = KnownPartitions((), ())

# ── membership: any node ↔ scheduler ──────────────────────────────────────────────────────────────────────────────────


@_message
class Join:
    """I want to join. Repeated until it is answered, and sent again after a restarted scheduler forgot the sender."""

    KIND: ClassVar[int] = 1
    request: Number
    role: Annotated[str, Limit(1, 8)]  # "server" | "worker" | "observer"
    node_id: NodeId
    address: Address  # where a server listens
    host: Name  # nodes with the same text run on the same kernel
    pid: Pid
    rank: Signed  # the rank that the node had, or prefers
    settings: Settings
    host_name: Name = ""  # for people
    job: JobName = ""  # whose run a worker or an observer wants; the header names the run of one that has joined before
    token: Token = ""
    operator: bool = False  # a worker for one command: it acts in the newest run of the job, even if that has ended
    runs: Runs = ()  # those that a server knows, for a scheduler without its record
    key: PublicKey = ""  # that a server proves to hold to those who connect to it
    partitions: KnownPartitions = NO_PARTITIONS  # what a server knows of them, for a scheduler without its record


@_message
class Welcome:
    """You joined, with this rank. `predecessor` is how the rank's earlier holder ended; None if there was none, and
    BACK if the rounds go on without this rank so far, whoever had it."""

    KIND: ClassVar[int] = 2
    request: Number
    rank: Signed
    predecessor: MemberState | None


@_message
class View:
    """The newest picture of the cluster; the header has its epoch. `shards` maps each shard to the number of its
    partition. With one replica `partitions` is empty: the server of rank n leads partition n.

    Servers get all of it, the others what `kvd.core.pseudonyms.public_view` leaves.

    One with many members comes in several messages, which differ in their members; only the first one has the rest.
    """

    KIND: ClassVar[int] = 3
    settings: Settings
    members: Annotated[tuple[Member, ...], Limit(0, MAX_MEMBERS)]
    shards: Annotated[tuple[Number, ...], Limit(0, 4096)]
    runs: Runs = ()  # in the view of the cluster, for servers: all runs
    partitions: Partitions = ()
    page: Annotated[int, Limit(0, MAX_PAGES - 1)] = 0
    pages: Annotated[int, Limit(1, MAX_PAGES)] = 1


@_message
class ViewChange:
    """Changes between an earlier view of the same generation, `base`, and the view of the header.

    Who knows that one, or one between the two, knows the newest with this. Anyone else says Heartbeat at once, and gets
    what it lacks.

    Attributes:
        members: those that are new or have changed.
        left: places that nobody has taken any more.
        partitions: those that have changed, each with its number.
        runs: all runs, if `has_runs`; otherwise they are the same.
    """

    KIND: ClassVar[int] = 138
    base: Count
    members: Annotated[tuple[Member, ...], Limit(0, MAX_MEMBERS)] = ()
    left: Annotated[tuple[NodeName, ...], Limit(0, MAX_MEMBERS)] = ()
    partitions: Annotated[tuple[tuple[Number, Partition], ...], Limit(0, MAX_SERVERS)] = ()
    has_runs: bool = False
    runs: Runs = ()


@_message
class Heartbeat:
    """I am alive."""

    KIND: ClassVar[int] = 4
    role: Annotated[str, Limit(1, 8)]
    rank: Number


@_message
class HeartbeatAck:
    """So am I. These nodes have been quiet, the longest silence first. Say it again in so many seconds; 0: as often as
    you were told at your start."""

    KIND: ClassVar[int] = 5
    quiet: Annotated[tuple[Quiet, ...], Limit(0, MAX_QUIET)]
    interval_s: float = 0.0


@_message
class Leave:
    """I leave. Answered with Done once the view says so."""

    KIND: ClassVar[int] = 6
    request: Number
    departure: Departure


class Taking(Enum):
    """Announcement of a worker that was lost or late, or has just joined, about the rounds."""

    OUT = 0  # they are to go on without me after all
    IN = 1  # they are to wait for me
    ARRIVED = 2  # I know where they are


@_message
class TakePart:
    """I was lost and am back, or I was late, or I have just come. Answered with Done once the view says so."""

    KIND: ClassVar[int] = 100
    request: Number
    taking: Taking
    place: Number = 0  # with ARRIVED: where my program goes on; earlier barriers do not wait for me


class Standing(Enum):
    """State of a worker relative to a named point."""

    WAITS = 0  # it has come there, and the rounds are to go on without it until all have
    ASKS = 1  # its predecessor has passed it
    KNOWS = 2  # it has passed it itself, and tells a scheduler that may have lost its record


@_message
class StandBy:
    """My loops have made so many steps up to this point (KNOWS: so many had been made by all). Answered with Together
    when all workers have come there; at once if they had, or if I tell."""

    KIND: ClassVar[int] = 105
    request: Number
    name: Key
    generation: Count
    steps: Count
    standing: Standing


@_message
class Together:
    """All workers have come to the point, and take part again. The next loop of each begins with step `steps`: the
    most that any has made. `waited`: the rounds went on without the receiver, this very process, until then."""

    KIND: ClassVar[int] = 106
    request: Number
    steps: Count
    waited: bool


@_message
class Late:
    """A round that I lead has had a quorum for the time of grace, and still waits for these ranks: let the rounds go on
    without them. That is so in the view of the header, and counts only if this is the newest one.

    Answered with Done once the view says so, or if the scheduler knows better.
    """

    KIND: ClassVar[int] = 108
    request: Number
    ranks: Annotated[tuple[Number, ...], Limit(1, MAX_MEMBERS)]


@_message
class Enter:
    """I have reached this barrier. Answered when all have, or cannot; the same request always gets the same answer."""

    KIND: ClassVar[int] = 7
    request: Number
    name: Key
    generation: Count
    place: Number = 0  # where my program is; those who came in at a later one are not waited for. 0: all are


@_message
class Say:
    """Note for all workers that pass this barrier, if it arrives before the release.

    Answered with Done once it is saved; a generation has one note, the latest.
    """

    KIND: ClassVar[int] = 12
    request: Number
    name: Key
    generation: Count
    note: Text


@_message
class Listen:
    """Has this barrier been released, and what was said at it? Answered with Said."""

    KIND: ClassVar[int] = 13
    request: Number
    name: Key
    generation: Count


@_message
class Said:
    """The note is empty if nothing was said, or if that is forgotten: only those of the generation that is open and of
    the one before are kept."""

    KIND: ClassVar[int] = 14
    request: Number
    released: bool
    note: Text


@_message
class Synced:
    """I lead this partition, and the server of this incarnation, which the view names as syncing, has all of it now.

    Answered with Done once the view names it as the backup, or if the view has gone another way.
    """

    KIND: ClassVar[int] = 15
    request: Number
    partition: Number
    incarnation: Number


@_message
class OutOfSync:
    """The server of this incarnation does not hold this partition any more: do not let it lead. From the leader, or
    from that server. Answered with Done once the view says so."""

    KIND: ClassVar[int] = 21
    request: Number
    partition: Number
    incarnation: Number


@_message
class HandedOver:
    """I lead this partition, and change nothing of it any more. The server of this incarnation, which the view names as
    my successor, has all that I have: let it lead, with me as its backup.

    Answered with Done once the view says so, or if the view has gone another way.
    """

    KIND: ClassVar[int] = 24
    request: Number
    partition: Number
    incarnation: Number


@_message
class StatusQuery:
    """Query for the state of any node; answered with StatusReport and a payload of JSON."""

    KIND: ClassVar[int] = 8
    request: Number


@_message
class StatusReport:
    KIND: ClassVar[int] = 9
    request: Number


@_message
class EndRun:
    """End the newest run of this job, and give up its values."""

    KIND: ClassVar[int] = 10
    request: Number
    job: JobName


@_message
class Shutdown:
    """End this daemon. The scheduler passes it on to the servers first. Without `force`, it refuses if a run lives."""

    KIND: ClassVar[int] = 11
    request: Number
    force: bool


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@_message
class Done:
    """Carried out. For a push: committed."""

    KIND: ClassVar[int] = 16
    request: Number


class NotYetReason(Enum):
    """Reason for refusing a request for now. Its sender removes the cause if it can, and sends the request again."""

    NOT_JOINED = 1  # the scheduler does not know the node: join again
    NOT_ATTACHED = 2  # the server does not know the sender as a worker: attach first
    UNKNOWN_BATCH = 3  # the server does not know the batch, or has forgotten it: declare it
    OUT_OF_TURN = 4  # a push whose clock is not the next one; `next_clock` is
    UPDATING = 5  # an update that concerns the request is in progress
    BUSY = 6  # too many requests are waiting
    ELSEWHERE = 7  # another server leads these slices, or will: a newer view is on its way


@_message
class NotYet:
    """Neither carried out nor refused: send the same request again soon."""

    KIND: ClassVar[int] = 18
    request: Number
    reason: NotYetReason
    text: Text
    key: Annotated[str, Limit(0, MAX_KEY_CHARS)] = ""
    next_clock: Number = 0  # for OUT_OF_TURN: the clock that the server takes next


class ErrorCode(Enum):
    """Error code of a refusal; `kvd.core.refusals` maps codes to the classes of `kvd.errors` and back."""

    REMOTE_ERROR = 1
    PROTOCOL_ERROR = 2
    CONFIG_ERROR = 3
    NOT_ALLOWED = 4
    KEY_NOT_FOUND = 5
    KEY_EXISTS = 6
    SHAPE_MISMATCH = 7
    DTYPE_MISMATCH = 8
    NODE_LOST = 9
    BARRIER_BROKEN = 10
    REPLACED = 11  # another incarnation has the sender's rank: the sender must stop
    JOB_ENDED = 12  # the sender's run has ended
    JOB_BUSY = 13  # another program's run of the job is alive


class Taken(Enum):
    """Part of a refused push that the server accepted."""

    NOTHING = 0  # the push's clock is free again
    PART = 1  # some slices took it, now or when it was sent before
    KEPT = 2  # all of it: only the caller is told not to wait, and the push is answered again later


class NodeName(NamedTuple):
    """A server or worker by its role and rank."""

    role: Annotated[str, Limit(1, 8)]
    rank: Number


@_message
class Refused:
    """Not carried out, now or ever. With `places`, that is so for these entries of the request's list alone."""

    KIND: ClassVar[int] = 17
    request: Number
    error: ErrorCode
    text: Text
    key: Annotated[str, Limit(0, MAX_KEY_CHARS)] = ""  # for CONFIG_ERROR: the setting
    taken: Taken = Taken.NOTHING
    nodes: Annotated[tuple[NodeName, ...], Limit(0, MAX_MEMBERS)] = ()  # for NODE_LOST and BARRIER_BROKEN
    last_seen_s: float = 0.0  # for NODE_LOST: seconds of silence before the node was declared dead
    places: Annotated[tuple[Number, ...], Limit(0, MAX_PARTS)] = ()  # error, text and key are those of the first


# ── values: worker ↔ server ───────────────────────────────────────────────────────────────────────────────────────────


class PathKind(StrEnum):
    """Path of messages between two nodes."""

    UNKNOWN = ""
    SHARED_MEMORY = "shared memory"  # over a link, large payloads by reference
    UNIX_SOCKET = "unix socket"  # over a link, all payloads inline
    SEALED_TCP = "encrypted tcp"  # over a link between hosts
    PLAIN_TCP = "tcp"  # the same in a cluster without keys
    ZMQ = "zmq"


WITHIN_HOST = frozenset({PathKind.SHARED_MEMORY, PathKind.UNIX_SOCKET})
OVER_LINKS = WITHIN_HOST | {PathKind.SEALED_TCP, PathKind.PLAIN_TCP}


@_message
class Attach:
    """First message to a server: I am `rank`, my messages travel by `path`; drop what my predecessor had staged.

    Answered with Done, or with Clocks if an earlier incarnation of this rank pushed there or, as rank 0, made keys.
    """

    KIND: ClassVar[int] = 32
    request: Number
    rank: Number
    path: PathKind = PathKind.UNKNOWN
    path_reason: Text = ""  # why not by a faster path, for people


@_message
class Init:
    """Slices of new keys, with their values as payload. Answered with Done, or Refused with the places of some."""

    KIND: ClassVar[int] = 33
    request: Number
    specs: Specs
    slices: Annotated[tuple[NewSlice, ...], Limit(1, MAX_PARTS)]
    creation: Count = 0  # of all these keys; if it is not large enough, the answer is Outdated


@_message
class Publish:
    """All slices of these keys are stored: they are live. To the server of their slices 0, which answers the waiting
    Lookups. Answered like Init."""

    KIND: ClassVar[int] = 34
    request: Number
    specs: Specs
    keys: Annotated[tuple[NewKey, ...], Limit(1, MAX_PARTS)]
    creation: Count = 0


@_message
class Lookup:
    """Query for keys, to the server of their slices 0. With `wait`, answered when all of them are live."""

    KIND: ClassVar[int] = 35
    request: Number
    keys: Annotated[tuple[Key, ...], Limit(1, MAX_PARTS)]
    wait: bool


@_message
class KeyInfo:
    """Answer to a Lookup: for each key, the index of its description in `made`; NO_KEY if it is not live.

    There may be fewer entries than keys: the rest did not fit, and is asked for again.
    """

    KIND: ClassVar[int] = 36
    request: Number
    made: Annotated[tuple[Made, ...], Limit(0, MAX_PARTS)]
    keys: Annotated[tuple[Annotated[int, Limit(-1, MAX_PARTS)], ...], Limit(1, MAX_PARTS)]


@_message
class Outdated:
    """Nothing of the Init was carried out: keys have been deleted here. Make these with at least this creation."""

    KIND: ClassVar[int] = 72
    request: Number
    creation: Number


@_message
class Delete:
    """My rank deletes these keys. To the server of their slices 0, where they are gone once all ranks have said so.

    Answered with Done when all of them are gone there.
    """

    KIND: ClassVar[int] = 73
    request: Number
    keys: KeyIds


@_message
class Drop:
    """These keys are gone where their slices 0 were: drop their other slices. Answered with Done."""

    KIND: ClassVar[int] = 74
    request: Number
    keys: KeyIds


@_message
class ClockQuery:
    """Query for the clock of the sender's rank in led slices of a key, and for the start of `place`."""

    KIND: ClassVar[int] = 37
    request: Number
    key: Key
    place: Count = 0


@_message
class Clocks:
    """The smallest and largest clock that the server counts for the rank, and the committed versions.

    `place` is the newest place of the rank, in these slices. `begun`, in the answer to a ClockQuery, is the clock at
    which the rank came to the place that was asked for. `trained`, in the answer to an Attach, says whether a
    contribution that the rank pushed at its newest place has counted. `passed_by`: rounds have closed here without the
    rank since its latest push, as they do while it waits at a point.
    """

    KIND: ClassVar[int] = 38
    request: Number
    lowest: Number
    highest: Number
    oldest_version: Number
    newest_version: Number
    place: Number = 0
    begun: Number = 0
    trained: bool = False
    passed_by: bool = False


@_message
class Activate:
    """My rank had left. After `clock`, it takes part in the rounds of this key again."""

    KIND: ClassVar[int] = 39
    request: Number
    key: Key
    clock: Count
    creation: Count = 0


@_message
class WhereAre:
    """Query for the newest place at which any worker has pushed to slices that the receiver leads.

    Answered with TheyAre.

    With `frozen`, the answer comes when your rounds wait for my rank, in the view that I know or a later one.
    """

    KIND: ClassVar[int] = 102
    request: Number
    frozen: bool = False


@_message
class TheyAre:
    """The newest place at which any worker has pushed, and the newest of my own rank."""

    KIND: ClassVar[int] = 103
    request: Number
    place: Count
    own: Count


@_message
class StepInto:
    """My rank takes part again: in a slice that the loop beginning with step `first` pushes, from its step `step` on
    (numbers among the steps of all loops), in all others from their next rounds on. In asynchronous training it goes on
    with as many pushes as any rank has made. With `is_past_loop` the loop ends before `step`, and my program goes on
    behind it. Answered with Done, when your rounds wait for my rank, in the view that I know or a later one."""

    KIND: ClassVar[int] = 104
    request: Number
    first: Count
    step: Count
    is_past_loop: bool = False


class MergedForm(Enum):
    """Treatment of a round's merged value if no optimizer is applied to it."""

    PLAIN = 0  # it is the new value
    ENCODED = 1  # it is encoded, and the new value is what that decodes into
    FED_BACK = 2  # the same, and what is left over is added to that of the next round


class Coding(NamedTuple):
    """Encoding of a slice in transit: its elements in another dtype, or the bytes of a compressor.

    `method` is the name of that dtype, or what `kvd.compression.to_wire` gives. The receiver makes `size` elements of
    the dtype `wanted` of it, which is that of the key.

    Of a push, `merged` says whether the server may encode what it merges of the round, too. Such a push takes the value
    in that form.
    """

    method: Plain
    wanted: Annotated[str, Limit(1, 16)]
    size: Annotated[int, Limit(0, MAX_SLICE_BYTES)]
    merged: MergedForm = MergedForm.PLAIN


@_message
class CompressorQuery:
    """Do you know this compressor (`kvd.compression.to_wire`)? Answered with Done, or Refused."""

    KIND: ClassVar[int] = 115
    request: Number
    compressor: Plain


@_message
class ComeTo:
    """The program of my rank has come to this place, and all its pushes have counted. Answered with Done."""

    KIND: ClassVar[int] = 64
    request: Number
    place: Count


class StepsLeft(Enum):
    """Availability of steps in a shared loop."""

    SOME = 0  # its next step
    OTHERS = 1  # none now: others make the last ones, and may die
    NONE = 2  # all are done


@_message
class TakeStep:
    """Request for the next step of a shared loop, to the server of rank 0. The step `done` has counted.

    `first` is the number of the loop's first step among the steps of all loops, `total` the number of its steps.
    """

    KIND: ClassVar[int] = 65
    request: Number
    first: Count
    total: Count
    done: Clock


@_message
class StepIs:
    """The step that you make next, from 0 on; NO_STEP if there is none. Workers of these ranks make the last ones."""

    KIND: ClassVar[int] = 66
    request: Number
    left: StepsLeft
    step: Signed
    held_by: Annotated[tuple[Number, ...], Limit(0, MAX_MEMBERS)] = ()


@_message
class Rest:
    """I have no step to make: until I push again, bounded staleness does not wait for me. Answered with Done."""

    KIND: ClassVar[int] = 67
    request: Number


@_message
class Push:
    """Contributions, with their bytes as payload. Answered with Staged (returns the credit), then with Done at commit.

    With `pull`, Values takes the place of Done. A `probe` has no payload: it asks what became of an earlier push. A
    push of at most SMALL_PUSH_BYTES takes no credit, and only a probe of it is answered with Staged. With
    `coding` the push has one part, which the server decodes. To a part of a table the push has one part as well: its
    payload is the ids of n ≥ 0 rows, as int64, ascending and each once, and then the rows in the same order.

    `step` is the sender's step (`kvd.core.worker.steps`); its pushes of steps up to `settled` are committed.
    `place` is where its program is (`kvd.core.places`).
    """

    KIND: ClassVar[int] = 40
    request: Number
    parts: Parts
    how: Annotated[int, Limit(0, 2)]
    samples: Number
    pull: bool
    probe: bool = False
    coding: Coding | None = None
    step: Count = 0
    settled: Count = 0
    place: Count = 0


@_message
class Staged:
    """The server has the bytes of this push."""

    KIND: ClassVar[int] = 41
    request: Number


@_message
class Pull:
    """Send these slices: exactly version `clock` in sync mode, not before my push `clock` in async, or ANY_CLOCK.

    With `takes`, the name of a compressor, there is one part, and its value may come as such a compressor made it."""

    KIND: ClassVar[int] = 42
    request: Number
    parts: Parts
    takes: Annotated[str, Limit(0, MAX_COMPRESSOR_CHARS)] = ""


@_message
class PullRows:
    """Send these rows of a part of a table. The payload is their ids, as int64, in any order. It waits for its version
    as Pull does, and is answered with Values: the rows in the order of the ids."""

    KIND: ClassVar[int] = 120
    request: Number
    part: Part


@_message
class ListRows:
    """Say which rows of a part of a table were updated after an update, or with ALL_ROWS, which ones take memory; with
    `evicted`, which were evicted after it. In order, from the first one after `after`. Answered with RowList."""

    KIND: ClassVar[int] = 126
    request: Number
    key: Key
    index: Number
    since: Annotated[int, Limit(ALL_ROWS, BIGGEST)]
    after: Annotated[int, Limit(-1, LAST_ROW)]
    evicted: bool


@_message
class RowList:
    """Row ids as payload, int64 and ascending, and the version of the part; `more`: there are more of them."""

    KIND: ClassVar[int] = 127
    request: Number
    version: Number
    more: bool


@_message
class Values:
    """The requested slices, in order, as payload, and their versions; a batch may have one version for all slices.

    With `coding` it is one slice, which the receiver decodes."""

    KIND: ClassVar[int] = 43
    request: Number
    versions: Annotated[tuple[Number, ...], Limit(1, MAX_PARTS)]
    coding: Coding | None = None


@_message
class Uncounted:
    """The answer to a push of which a slice does not count, in place of Done or Values: the rounds went on without its
    worker. The payload has the values that were asked for; where a slice does not count, the newest."""

    KIND: ClassVar[int] = 101
    request: Number
    versions: Annotated[tuple[Number, ...], Limit(0, MAX_PARTS)] = ()


@_message
class DeclareBatch:
    """I push and pull these slices together from now on, under the number `batch`."""

    KIND: ClassVar[int] = 44
    request: Number
    batch: Number
    slice_ids: SliceIds


@_message
class PushBatch:
    """Like Push, for all slices of a batch, which have the same clock."""

    KIND: ClassVar[int] = 45
    request: Number
    batch: Number
    clock: Count
    how: Annotated[int, Limit(0, 2)]
    samples: Number
    pull: bool
    probe: bool = False
    step: Count = 0
    settled: Count = 0
    place: Count = 0


@_message
class PullBatch:
    """Like Pull, for all slices of a batch."""

    KIND: ClassVar[int] = 46
    request: Number
    batch: Number
    clock: Clock


# ── control: worker or observer ↔ server ──────────────────────────────────────────────────────────────────────────────


@_message
class SetOptimizer:
    """Use this optimizer (`kvd.optimizer.to_wire`) for all keys; setting it again changes nothing. None: assign.

    `loaded`: one worker has it from a file, and speaks for all. `is_trial`: only say whether it could be used, so that
    all servers are asked before the first one uses it.
    """

    KIND: ClassVar[int] = 48
    request: Number
    optimizer: Plain
    loaded: bool = False
    is_trial: bool = False


@_message
class UpdateOptimizer:
    """Change these hyperparameters from the sender's next clock on, and keep the optimizer's state."""

    KIND: ClassVar[int] = 49
    request: Number
    changes: Plain


@_message
class OptimizerQuery:
    """Query for the current optimizer. Answered with OptimizerIs."""

    KIND: ClassVar[int] = 50
    request: Number


@_message
class OptimizerIs:
    KIND: ClassVar[int] = 51
    request: Number
    optimizer: Plain


@_message
class FetchState:
    """Send the optimizer's state for one slice; of a part of a table its rows from this one on, with what the optimizer
    keeps of them. Answered with State."""

    KIND: ClassVar[int] = 52
    request: Number
    key: Key
    index: Number
    first: Count = 0


@_message
class State:
    """Optimizer state: the number of updates, and (name, dtype) of each array; the arrays follow as payload.

    For a part of a table everything is in the payload, a piece (`kvd.tables.stored_rows`).
    """

    KIND: ClassVar[int] = 53
    request: Number
    step: Number
    slots: Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)]


@_message
class StoreState:
    """Replace the optimizer's state for one slice; in a part of a table, which nobody has pushed to, put rows. The
    payload is as in State. With STATE_OF_ROWS as the slots, the part gets what the optimizer keeps of rows, and the
    rows in the payload have no elements; `step` is how many rows came before these, and with 0 it forgets what it has
    kept."""

    KIND: ClassVar[int] = 54
    request: Number
    key: Key
    index: Number
    step: Count
    slots: Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)]
    creation: Count = 0


@_message
class Command:
    """Run the controller registered for `head`; the body is the payload. Answered with CommandResult."""

    KIND: ClassVar[int] = 55
    request: Number
    head: Key


@_message
class CommandResult:
    """The controller's answer, as payload."""

    KIND: ClassVar[int] = 56
    request: Number


@_message
class ListKeys:
    """List the keys of which you lead a part, in order, from the first one after `after`."""

    KIND: ClassVar[int] = 57
    request: Number
    after: Annotated[str, Limit(0, MAX_KEY_CHARS)]


@_message
class KeyList:
    KIND: ClassVar[int] = 58
    request: Number
    entries: Annotated[tuple[KeyEntry, ...], Limit(0, 100)]
    more: bool


# ── states of programs: a worker that has one ↔ the first partition's leader ↔ a worker that lacks one ────────────────


NO_STATE = -1  # in an OfferState: I cannot be asked for one any more
MAX_STATE_PARTS = 1 << 20  # of one state
STATE_PART_BYTES = 4 << 20  # of a part, at most
PARTS_AHEAD = 4  # parts of a state that have left its owner, and that not all takers have


class Gone(Enum):
    """Reason why a worker gets no state, or gives it no more."""

    AGAIN = 0  # the transfer is over, or was never known here: ask again
    FIRST = 1  # no round counts yet, and the state that the receiver has begun with is everyone's
    LOST = 2  # no worker that lives has it
    OVER = 3  # the same, and all others have left in good order
    PASSED = 4  # the rounds went on without the receiver meanwhile, and its next step needs another one


@_message
class OfferState:
    """My program waits in the store, and its state is that after `made` steps. To the leader of the first partition.

    Answered with GiveState when a worker lacks that state, or with Done once I offer another one, or NO_STATE.
    """

    KIND: ClassVar[int] = 130
    request: Number
    made: Signed


@_message
class GiveState:
    """Send the parts of your state, under the number of this transfer, to these ranks."""

    KIND: ClassVar[int] = 131
    request: Number
    transfer: Number
    takers: Annotated[tuple[Number, ...], Limit(1, MAX_MEMBERS)]


@_message
class WantState:
    """My program needs the state after `made` steps. To the leader of the first partition, which answers with
    StateGiven when another worker gives it, or with StateGone. `has_pushed`: an earlier process of my rank has pushed
    in a loop over steps, so rounds may count for which gradients of the first state were pushed. `restored`: the
    run began with this state, which worker 0 has from a snapshot."""

    KIND: ClassVar[int] = 132
    request: Number
    made: Count
    has_pushed: bool = False
    restored: bool = False


@_message
class StateGiven:
    """The worker of this rank gives you the state, in so many parts: fetch them. The first `head_nbytes` of all bytes
    say what the state consists of."""

    KIND: ClassVar[int] = 133
    request: Number
    transfer: Number
    donor: Number
    num_parts: Annotated[int, Limit(1, MAX_STATE_PARTS)]
    head_nbytes: Number


@_message
class StatePart:
    """One part of a state, as payload, with its CRC-32. From the worker that gives it, answered with Done when all who
    take it have it, or with StateGone; and from the server, as the answer to FetchPart."""

    KIND: ClassVar[int] = 134
    request: Number
    transfer: Number
    part: Number
    num_parts: Annotated[int, Limit(1, MAX_STATE_PARTS)]
    head_nbytes: Number
    checksum: Number


@_message
class FetchPart:
    """Send me this part. I have all before `have`; with `have` = `part` = the number of all, the transfer has ended for
    me. Answered with StatePart, with Done at the end, or with StateGone."""

    KIND: ClassVar[int] = 135
    request: Number
    transfer: Number
    part: Number
    have: Number


@_message
class StateGone:
    """The answer to WantState, FetchPart or StatePart if there is nothing to take or give. `others`: with FIRST, how
    many workers want the receiver's state."""

    KIND: ClassVar[int] = 136
    request: Number
    why: Gone
    others: Size = 0


# ── waits: worker ↔ server, worker ↔ scheduler ────────────────────────────────────────────────────────────────────────


class Absent(NamedTuple):
    """A worker that others wait for, and the newest of its pushes that the server has; 0: none."""

    rank: Number
    clock: Number


class Wait(NamedTuple):
    """Wait of an open request: for pushes of the key, or its deletion; with clock 0, for its creation by worker 0.

    For a state that is passed on, `key` identifies it.
    """

    request: Number
    key: Key
    clock: Number  # of the request
    absent: Annotated[tuple[Absent, ...], Limit(1, MAX_ABSENT)]


class BarrierWait(NamedTuple):
    """A barrier that the receiver has entered, and workers that have not; the first MAX_ABSENT of them."""

    name: Key
    absent: Annotated[tuple[Number, ...], Limit(1, MAX_ABSENT)]


class NodeFact(NamedTuple):
    """Location of a node, and its last sign of life."""

    role: Annotated[str, Limit(1, 8)]
    rank: Number
    host_name: Name
    pid: Pid
    heard_s: float  # seconds ago
    ended: Words  # how its process ended; "" if nothing is known of that


@_message
class WaitQuery:
    """Query for the waits of the sender's open requests, to a server; answered with Waits.

    It is not repeated: the next one is sent instead.
    """

    KIND: ClassVar[int] = 60
    request: Number


@_message
class Waits:
    """`held` are your open requests that wait for nothing but other workers, the oldest first; `waits` says more."""

    KIND: ClassVar[int] = 61
    request: Number
    held: Annotated[tuple[Number, ...], Limit(0, MAX_HELD)]
    waits: Annotated[tuple[Wait, ...], Limit(0, MAX_WAITS)]
    is_all: bool  # all that wait so are in `held`


@_message
class WaitReport:
    """My calls wait for these nodes, and at these barriers: tell me more. To the scheduler; answered with WaitNews.

    If `blocked`, this worker does nothing more unless another worker does: all that it has sent is at the servers and
    waits there for others, and so do all threads of its program that use the store. The stamp is then the same as in
    the report before, unless anything has happened in between. `check` is from the latest WaitNews that came before
    this worker looked.
    """

    KIND: ClassVar[int] = 62
    request: Number
    nodes: Annotated[tuple[NodeName, ...], Limit(0, MAX_ASKED_ABOUT)]
    barriers: Annotated[tuple[Key, ...], Limit(0, MAX_ASKED_BARRIERS)]
    blocked: bool
    stamp: Number
    check: Number
    lines: Annotated[tuple[Text, ...], Limit(0, 4)]  # what the blocked calls wait for, for people


@_message
class WaitNews:
    """The answer to a WaitReport. With request 0, it comes unasked, and has one of two meanings.

    `check` (not 0): all workers seem to be blocked; look again, and send another report with this number.
    `deadlock`: they are, by these texts for people. It holds while your stamp is still `stamp`.
    """

    KIND: ClassVar[int] = 63
    request: Number
    nodes: Annotated[tuple[NodeFact, ...], Limit(0, MAX_ASKED_ABOUT)] = ()
    barriers: Annotated[tuple[BarrierWait, ...], Limit(0, MAX_ASKED_BARRIERS)] = ()
    check: Number = 0
    stamp: Number = 0
    deadlock: Annotated[tuple[Text, ...], Limit(0, MAX_STUCK_LINES)] = ()


# ── readers: observer ↔ server ────────────────────────────────────────────────────────────────────────────────────────


@_message
class Survey:
    """Query for the available steps of these slices. No slices: all that the receiver leads. Answered with Surveyed."""

    KIND: ClassVar[int] = 68
    request: Number
    slice_ids: Annotated[tuple[SliceId, ...], Limit(0, MAX_PARTS)]


@_message
class Surveyed:
    """The steps of the newest versions of the slices, from `lowest` to `highest`.

    Every slice still has its version for the steps from `kept` on. `level`: each slice was pushed to in every step.
    Nothing more is pushed in the steps up to `over`. Also answers a ReadSlices for a step that is not kept any more.
    """

    KIND: ClassVar[int] = 69
    request: Number
    lowest: Number
    highest: Number
    kept: Number
    level: bool
    over: Number


@_message
class ReadSlices:
    """Send what these slices were after this step, when it is complete. Answered with Values, or with Surveyed.

    `number` is that of the sender's read: messages of earlier ones are forgotten. With `is_over`, nothing more of the
    step is to come.
    """

    KIND: ClassVar[int] = 70
    request: Number
    number: Count
    step: Count
    is_over: bool
    slice_ids: SliceIds


@_message
class ReadDone:
    """My read of this number has ended: what you sent for it is not in use any more."""

    KIND: ClassVar[int] = 71
    request: Number
    number: Count


# ── captures: operator ↔ server ───────────────────────────────────────────────────────────────────────────────────────


class CaptureWhen(Enum):
    """At which moment a slice is captured. All but the first name a step, in asynchronous training a version."""

    AS_IT_IS = 0  # now, whatever its step is
    COMPLETE = 1  # as soon as nothing more of the step is to come
    OVER = 2  # the same, and the sender knows that nothing more of the step is to come
    BEFORE_NEXT = 3  # just before its first round of a later step


class CapturedSlice(NamedTuple):
    """Metadata of a slice.

    Attributes:
        updates: how many its optimizer has made.
        slots, optimizer: places in the lists of the message.
    """

    version: Count
    step: Count
    updates: Count
    slots: Number
    optimizer: Number


class Reached(NamedTuple):
    """Position of a rank's program: see `kvd.core.places`."""

    rank: Number
    place: Count


@_message
class Capture:
    """Keep these slices, with the states of their optimizers, as they are at a moment, until CaptureDone.

    `number` is that of the sender's capture; what is kept of earlier ones is forgotten. Answered with Captured when all
    slices are there; with Surveyed if one of them is past that step already, or if the capture has ended.
    """

    KIND: ClassVar[int] = 95
    request: Number
    number: Count
    step: Count
    when: CaptureWhen
    slice_ids: SliceIds


@_message
class Captured:
    """The slices of a Capture, in order. `slots` has the (name, dtype) of each array of a state, as in State.

    `reached` says how far the ranks had come whose pushes are in the slices.
    """

    KIND: ClassVar[int] = 96
    request: Number
    slots: Annotated[tuple[Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)], ...], Limit(1, MAX_PARTS)]
    optimizers: Annotated[tuple[Plain, ...], Limit(1, MAX_PARTS)]
    kept: Annotated[tuple[CapturedSlice, ...], Limit(1, MAX_PARTS)]
    reached: Annotated[tuple[Reached, ...], Limit(0, MAX_MEMBERS)]


@_message
class FetchCaptured:
    """Send these slices of my capture: for each its bytes, and then the arrays of its state; of one part of a table its
    rows from this one on (`kvd.tables.stored_rows`). Answered with Values, or with Surveyed if they are not kept
    here."""

    KIND: ClassVar[int] = 97
    request: Number
    number: Count
    slice_ids: SliceIds
    first: Count = 0


@_message
class CaptureDone:
    """My capture of this number has ended: forget what you keep of it."""

    KIND: ClassVar[int] = 98
    request: Number
    number: Count


# ── records: the leader of a partition → its backup ───────────────────────────────────────────────────────────────────


NO_PLACE = -1


class Given(NamedTuple):
    """Contribution of a worker to a round, without its bytes: see Push."""

    rank: Number
    clock: Count
    samples: Number
    how: Annotated[int, Limit(0, 2)]
    step: Count
    place: Count


class RankProgress(NamedTuple):
    """Progress of a rank with a slice: the fields of `kvd.core.server.progress.WorkerProgress`."""

    rank: Number
    staged: Count
    counted: Count
    committed: Count
    skipped: Count
    place: Count
    begun: Count
    trained: Count


class LaterChange(NamedTuple):
    """Hyperparameters that change with a round."""

    from_round: Count
    changes: Plain


class Origin(NamedTuple):
    """Requests that produced the current slice: the Init, and the latest StoreState; 0 if there was none."""

    creator: Number
    init: Number
    loaded_by: Number
    loaded: Number


class OptimizerUse(NamedTuple):
    """Optimizer of a slice, and its state.

    Attributes:
        optimizer: its place in the optimizers of the message.
        generation: of the optimizer, see Hold.
        step, slots: the state, as in State.
    """

    optimizer: Number
    generation: Count
    changes: Annotated[tuple[LaterChange, ...], Limit(0, MAX_LATER_CHANGES)]
    step: Count
    slots: Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)]


class SliceImage(NamedTuple):
    """All that there is to know of a slice besides bytes.

    Attributes:
        spec: its place in the specs of the message.
        version, step, previous_step, newest: see `kvd.core.server.rounds.SliceLog`.
        has_previous: whether the version before is kept.
        counted_steps: the ranges, from a step to before another, of shared steps that have counted.
        updates: of a part of a table: those that were made.
        updates_before: those of the version before.
    """

    key: Key
    slice_index: Number
    creation: Count
    spec: Number
    origin: Origin
    use: OptimizerUse
    version: Count
    step: Count
    previous_step: Count
    has_previous: bool
    progress: Annotated[tuple[RankProgress, ...], Limit(0, MAX_MEMBERS)]
    counted_steps: Annotated[tuple[tuple[Count, Count], ...], Limit(0, MAX_COUNTED_RANGES)]
    newest: tuple[Count, Count]
    updates: Count = 0
    updates_before: Count = 0


class LaterSlice(NamedTuple):
    """A slice whose hyperparameters change with a round."""

    key: Key
    slice_index: Number
    creation: Count
    from_round: Count


class HeldStep(NamedTuple):
    """The shared step that a rank makes."""

    rank: Number
    step: Count


@_message
class StartHolding:
    """Forget what you hold of this partition: what follows is all of it. Answered with Done.

    `creation`: keys that are made from now on have at least this creation.
    """

    KIND: ClassVar[int] = 90
    request: Number
    partition: Number
    creation: Count


@_message
class Install:
    """Hold these slices as they are: new ones, or those of a partition that you are to hold from now on.

    The payload has, for each image, the bytes of its version, of the one before if there is one, and the arrays of its
    optimizer's state; of a part of a table nothing: its rows came before, with InstallRows, if it was ever updated.
    Answered with Done, or Refused with the places of those that do not fit.
    """

    KIND: ClassVar[int] = 80
    request: Number
    partition: Number
    specs: Specs
    optimizers: Annotated[tuple[Plain, ...], Limit(1, MAX_PARTS)]
    images: Annotated[tuple[SliceImage, ...], Limit(1, MAX_PARTS)]


class MergedCoding(NamedTuple):
    """Encoding of a merged value: a compressor from `kvd.compression.to_wire`, and its error feedback.

    With error feedback, the residual is added to the merged value of the next round.
    """

    method: Plain
    feeds_back: bool


@_message
class InstallRows:
    """Keep this piece of a part of a table, the payload (`kvd.tables.copies`), until an Install makes the part of all
    its pieces. They come in their order. Answered with Done."""

    KIND: ClassVar[int] = 121
    request: Number
    partition: Number
    part: SliceId
    spec: KeySpec


@_message
class Hold:
    """Hold the record that makes this version of these slices, which are updated as one. Answered with Done.

    The payload is the merged gradient in the dtype in which it was summed (`is_gradient`), which the optimizer is
    applied to, or which is encoded as `coding` says; or the new value; or nothing, if the bytes stay as they are. Of a
    part of a table it is the merged rows, as in a Push; those of so many HoldRows belong to the round as well
    (`rows_before`). `generation` counts the optimizers that were set: with another one than before, the optimizer's
    state starts over.
    """

    KIND: ClassVar[int] = 81
    request: Number
    partition: Number
    slice_ids: SliceIds
    version: Count
    given: Annotated[tuple[Given, ...], Limit(0, MAX_MEMBERS)]
    is_gradient: bool
    optimizer: Plain
    generation: Count
    rows_before: Count = 0
    coding: MergedCoding | None = None


@_message
class HoldRows:
    """Keep these merged rows of a round of a part of a table until the Hold comes that makes this version. The payload
    is as in a Push. Answered with Done.

    Attributes:
        place: among those of the round, from 0 on.
    """

    KIND: ClassVar[int] = 122
    request: Number
    partition: Number
    part: SliceId
    version: Count
    place: Number


@_message
class HoldPublished:
    """These keys, whose slices 0 you hold, are live. Answered with Done."""

    KIND: ClassVar[int] = 82
    request: Number
    partition: Number
    keys: KeyIds


@_message
class HoldDropped:
    """These keys are gone. Answered with Done."""

    KIND: ClassVar[int] = 83
    request: Number
    partition: Number
    keys: KeyIds


@_message
class HoldActivated:
    """This rank takes part again in the rounds of the key after `clock`. `closed` rounds of the slice were closed.
    Its program goes on at `place`; NO_PLACE: wherever it was.

    Answered with Done, or with NotYet as long as records of these rounds are on their way.
    """

    KIND: ClassVar[int] = 84
    request: Number
    partition: Number
    slice_id: SliceId
    closed: Count
    rank: Number
    clock: Count
    place: Signed = NO_PLACE


@_message
class HoldPlace:
    """The program of this rank has come to this place, and all its pushes have counted. Answered with Done."""

    KIND: ClassVar[int] = 85
    request: Number
    partition: Number
    rank: Number
    place: Count


@_message
class HoldChange:
    """These hyperparameters change with a round, for the slices that are updated with these. Answered with Done."""

    KIND: ClassVar[int] = 86
    request: Number
    partition: Number
    changes: Plain
    slices: Annotated[tuple[LaterSlice, ...], Limit(1, MAX_PARTS)]


@_message
class HoldState:
    """The optimizer's state of this slice was replaced, by the StoreState `loaded` of `loaded_by`. The payload is as
    in State. Answered with Done."""

    KIND: ClassVar[int] = 87
    request: Number
    partition: Number
    slice_id: SliceId
    loaded_by: Number
    loaded: Number
    step: Count
    slots: Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)]


@_message
class HoldOptimizer:
    """This optimizer is used from now on for all slices of the partition, each with a new state. Answered with Done.

    `as_set` is what the workers have set: their hyperparameters may have changed since.
    """

    KIND: ClassVar[int] = 88
    request: Number
    partition: Number
    optimizer: Plain
    as_set: Plain
    generation: Count


@_message
class HoldReady:
    """I am about to hand this partition to you. Answered with Done when you have applied all records of it, and could
    lead it as it is."""

    KIND: ClassVar[int] = 25
    request: Number
    partition: Number


class CheckedSlice(NamedTuple):
    """State of a slice at its leader.

    Attributes:
        loaded_by, loaded: as in Origin: another state of its optimizer was stored since, or not yet, if they differ.
        checksum: a CRC-32 of its bytes, and of its optimizer's state.
    """

    key: Key
    slice_index: Number
    creation: Count
    loaded_by: Number
    loaded: Number
    checksum: Annotated[int, Limit(0, (1 << 32) - 1)]


@_message
class Compare:
    """At this version, and with the optimizer of this generation, I have this of slices that you hold as well.

    Answered with Done if you have the same, or cannot tell any more, as you are at another version, or they are gone.
    Refused with DIFFERS if not: then what you hold is not a copy.
    """

    KIND: ClassVar[int] = 112
    request: Number
    partition: Number
    version: Count
    generation: Count
    slices: Annotated[tuple[CheckedSlice, ...], Limit(1, MAX_PARTS)]


@_message
class HoldLoop:
    """Progress of the workers in a shared loop; see TakeStep. Answered with Done."""

    KIND: ClassVar[int] = 89
    request: Number
    partition: Number
    first: Count
    total: Count
    opened_by: Number
    given: Count
    held: Annotated[tuple[HeldStep, ...], Limit(0, MAX_MEMBERS)]
    returned: Annotated[tuple[Count, ...], Limit(0, MAX_MEMBERS)]


Message: TypeAlias = (
    Join
    | Welcome
    | View
    | ViewChange
    | Heartbeat
    | HeartbeatAck
    | Leave
    | TakePart
    | StandBy
    | Together
    | Enter
    | Say
    | Listen
    | Said
    | StatusQuery
    | StatusReport
    | EndRun
    | Shutdown
    | Done
    | NotYet
    | Refused
    | Attach
    | Init
    | Publish
    | Lookup
    | KeyInfo
    | Outdated
    | Delete
    | Drop
    | ClockQuery
    | Clocks
    | Activate
    | WhereAre
    | TheyAre
    | StepInto
    | ComeTo
    | TakeStep
    | StepIs
    | Rest
    | Push
    | Staged
    | Pull
    | PullRows
    | ListRows
    | RowList
    | Values
    | Uncounted
    | DeclareBatch
    | PushBatch
    | PullBatch
    | SetOptimizer
    | UpdateOptimizer
    | OptimizerQuery
    | CompressorQuery
    | OptimizerIs
    | FetchState
    | State
    | StoreState
    | Command
    | CommandResult
    | ListKeys
    | KeyList
    | OfferState
    | GiveState
    | WantState
    | StateGiven
    | StatePart
    | FetchPart
    | StateGone
    | WaitQuery
    | Waits
    | WaitReport
    | WaitNews
    | Survey
    | Surveyed
    | ReadSlices
    | ReadDone
    | Capture
    | Captured
    | FetchCaptured
    | CaptureDone
    | Synced
    | OutOfSync
    | HandedOver
    | Late
    | StartHolding
    | Install
    | InstallRows
    | Hold
    | HoldRows
    | HoldPublished
    | HoldDropped
    | HoldActivated
    | HoldPlace
    | HoldChange
    | HoldState
    | HoldOptimizer
    | HoldLoop
    | HoldReady
    | Compare
)
