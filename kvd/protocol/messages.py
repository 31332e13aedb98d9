"""Every message, on one page. `kvd.protocol.codec` turns them into bytes and back, and checks the limits named here.

A header carries, before the fields of its message, the protocol version, the kind of the message, the incarnation of
the sender and the newest view number that the sender has. Values travel as a payload frame of their own: the bytes of
the parts, in their order, each starting at a multiple of 8.

A node may ask the same thing again at any time, with the same bytes: every request is answered, and one that was
carried out already is not carried out twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

from kvd.protocol.specs import MAX_DIMENSIONS, MAX_KEY_CHARS, MAX_KEY_NBYTES, MAX_SLICE_BYTES, KeySpec


class Limit(NamedTuple):
    """The smallest and largest value of a number, or of the length of a text, byte string or list."""

    low: int
    high: int


BIGGEST = (1 << 62) - 1
MAX_PARTS = 1024
MAX_MEMBERS = 200
MAX_TEXT_CHARS = 1000
SMALL_PUSH_BYTES = 16 << 10

Number: TypeAlias = Annotated[int, Limit(0, BIGGEST)]
Signed: TypeAlias = Annotated[int, Limit(-1, BIGGEST)]
Key: TypeAlias = Annotated[str, Limit(1, MAX_KEY_CHARS)]
Name: TypeAlias = Annotated[str, Limit(0, 64)]
NodeId: TypeAlias = Annotated[str, Limit(0, 128)]
Address: TypeAlias = Annotated[str, Limit(0, 108)]
Text: TypeAlias = Annotated[str, Limit(0, MAX_TEXT_CHARS)]
Words: TypeAlias = Annotated[str, Limit(0, 80)]
Plain: TypeAlias = Annotated[object, "plain data, checked by whoever reads it"]

NO_RANK = -1
ANY_CLOCK = -1  # in a pull: whatever is committed
UNKNOWN = 0  # a setting that the sender leaves to the cluster


class Epoch(NamedTuple):
    """Which view: the generation grows at each start of the scheduler, the change within it at each new view."""

    generation: Number
    change: Number


class Part(NamedTuple):
    """One slice of a key in a push or a pull. The clock is the worker's for that key."""

    key: Key
    slice_index: Number
    clock: Signed


class SliceId(NamedTuple):
    """One slice of a key."""

    key: Key
    slice_index: Number


class Settings(NamedTuple):
    """What all nodes of a cluster must agree on. Empty texts and zeros in a Join: as the cluster has it."""

    mode: Annotated[str, Limit(0, 8)]  # "sync" | "async" | "" (nobody has said yet)
    merge: Annotated[str, Limit(0, 8)]  # "sum" | "mean" | "weighted" | ""
    staleness: Signed  # -1: unbounded
    rounds_ahead: Number
    slice_bytes: Annotated[int, Limit(0, MAX_SLICE_BYTES)]
    num_workers: Number
    num_servers: Number
    num_shards: Annotated[int, Limit(0, 4096)]


class MemberState(StrEnum):
    """Where a server or worker stands; `kvd.core.scheduler.roster` has the transitions."""

    ACTIVE = "active"  # takes part in the rounds
    DONE = "done"  # left the rounds, still connected
    LEFT = "left"  # went, in good order
    DEAD = "dead"  # declared dead
    GONE = "gone"  # declared dead after it had left the rounds: they do not wait for it


class Departure(StrEnum):
    """How a node leaves."""

    DONE = "done"  # it leaves the rounds and stays connected
    LEFT = "left"  # it goes, in good order
    FAILED = "failed"  # its program ended with an error: as if it had died


class Member(NamedTuple):
    """One server or worker, as the scheduler sees it."""

    role: Annotated[str, Limit(1, 8)]  # "server" | "worker"
    rank: Number
    node_id: NodeId
    incarnation: Number
    address: Address
    state: MemberState
    reason: Words
    last_seen_s: float  # of a dead one: seconds of silence before it was declared


class KeyEntry(NamedTuple):
    """One key in a listing: the part of it that the answering server leads."""

    key: Key
    dtype: Annotated[str, Limit(1, 16)]
    shape: Annotated[tuple[Annotated[int, Limit(0, MAX_KEY_NBYTES)], ...], Limit(0, MAX_DIMENSIONS)]
    slices: Number
    bytes_led: Number
    version: Number  # the smallest over its slices there
    live: bool


class Quiet(NamedTuple):
    """A node that has not been heard for a while, and for how long."""

    role: Annotated[str, Limit(1, 8)]
    rank: Number
    age_s: float


Shape: TypeAlias = Annotated[tuple[Annotated[int, Limit(0, MAX_KEY_NBYTES)], ...], Limit(0, MAX_DIMENSIONS)]
Parts: TypeAlias = Annotated[tuple[Part, ...], Limit(1, MAX_PARTS)]
SliceIds: TypeAlias = Annotated[tuple[SliceId, ...], Limit(1, MAX_PARTS)]

# How a push counts in its round.
ADD = 0  # a gradient or value, merged with the others'
ASSIGN = 1  # replaces the value; only rank 0's is read
ABSENT = 2  # takes part in a round of ASSIGN and brings nothing


# ── membership: any node ↔ scheduler ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Join:
    """I am here. Sent until the answer comes; again if the scheduler forgot me (it was restarted)."""

    KIND: ClassVar[int] = 1
    request: Number
    role: Annotated[str, Limit(1, 8)]  # "server" | "worker" | "observer"
    node_id: NodeId
    address: Address  # where a server listens
    host: Name  # nodes with the same text share a kernel
    pid: Number
    rank: Signed  # the rank it had, or would like
    settings: Settings


@dataclass(frozen=True, slots=True)
class Welcome:
    """You are in, with this rank. `predecessor` is the last state of the rank's earlier holder, "" if there is none."""

    KIND: ClassVar[int] = 2
    request: Number
    rank: Signed
    predecessor: Annotated[str, Limit(0, 8)]


@dataclass(frozen=True, slots=True)
class View:
    """The newest picture of the cluster; its number is the header's. `shards` maps a shard to its server's rank."""

    KIND: ClassVar[int] = 3
    settings: Settings
    members: Annotated[tuple[Member, ...], Limit(0, MAX_MEMBERS)]
    shards: Annotated[tuple[Number, ...], Limit(0, 4096)]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live."""

    KIND: ClassVar[int] = 4
    role: Annotated[str, Limit(1, 8)]
    rank: Number


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """So do I; these have been quiet."""

    KIND: ClassVar[int] = 5
    quiet: Annotated[tuple[Quiet, ...], Limit(0, MAX_MEMBERS)]


@dataclass(frozen=True, slots=True)
class Leave:
    """I leave. Answered by Done when the view says so."""

    KIND: ClassVar[int] = 6
    request: Number
    departure: Departure


@dataclass(frozen=True, slots=True)
class Enter:
    """I am at this barrier. Answered when all are; a settled generation gives the same answer for ever."""

    KIND: ClassVar[int] = 7
    request: Number
    name: Key
    generation: Number


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """What is up? To any node; answered by StatusReport with a payload of JSON."""

    KIND: ClassVar[int] = 8
    request: Number


@dataclass(frozen=True, slots=True)
class StatusReport:
    KIND: ClassVar[int] = 9
    request: Number


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Done:
    """Carried out. For a push: committed."""

    KIND: ClassVar[int] = 16
    request: Number


class NotYetReason(Enum):
    """Why a request cannot be taken now. Its sender puts that right where it can, and sends the request again."""

    NOT_JOINED = 1  # the scheduler does not know the node: join again
    NOT_ATTACHED = 2  # the server does not know the sender as a worker: attach first
    UNKNOWN_BATCH = 3  # the server does not know the batch, or has forgotten it: declare it
    OUT_OF_TURN = 4  # a push whose clock is not the next one; `next_clock` is
    UPDATING = 5  # an update that concerns the request is under way
    BUSY = 6  # too many requests wait


@dataclass(frozen=True, slots=True)
class NotYet:
    """Not carried out, and not refused either: send the same request again, soon."""

    KIND: ClassVar[int] = 18
    request: Number
    reason: NotYetReason
    text: Text
    key: Annotated[str, Limit(0, MAX_KEY_CHARS)] = ""
    next_clock: Number = 0  # of OUT_OF_TURN: the clock that the server takes next; 0 otherwise


class ErrorCode(Enum):
    """Which error a refusal stands for; `kvd.core.refusals` maps codes to the classes of `kvd.errors` and back."""

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
    REPLACED = 11  # another incarnation has the sender's place: the sender must stop


class Taken(Enum):
    """What a server took of a push that it refuses."""

    NOTHING = 0  # its clock is free again
    PART = 1  # some slices of the message took it, or took it when it came before


class NodeName(NamedTuple):
    """A server or worker by its role and rank."""

    role: Annotated[str, Limit(1, 8)]
    rank: Number


@dataclass(frozen=True, slots=True)
class Refused:
    """Not carried out, for good."""

    KIND: ClassVar[int] = 17
    request: Number
    error: ErrorCode
    text: Text
    key: Annotated[str, Limit(0, MAX_KEY_CHARS)] = ""  # of CONFIG_ERROR: the setting
    taken: Taken = Taken.NOTHING
    nodes: Annotated[tuple[NodeName, ...], Limit(0, MAX_MEMBERS)] = ()  # of NODE_LOST and BARRIER_BROKEN
    last_seen_s: float = 0.0  # of NODE_LOST: seconds of silence before the node was declared dead


# ── values: worker ↔ server ───────────────────────────────────────────────────────────────────────────────────────────


class PathKind(StrEnum):
    """How messages travel between two nodes."""

    UNKNOWN = ""
    SHARED_MEMORY = "shared memory"  # over a link, large payloads by reference
    UNIX_SOCKET = "unix socket"  # over a link, all payloads inline
    ZMQ = "zmq"


@dataclass(frozen=True, slots=True)
class Attach:
    """First message to a server: drop what my predecessor had staged; I am `rank`, and my messages travel by `path`.

    Answered with Done, or with Clocks if this rank had pushed or, as rank 0, made keys there before this incarnation
    came.
    """

    KIND: ClassVar[int] = 32
    request: Number
    rank: Number
    path: PathKind = PathKind.UNKNOWN
    path_reason: Text = ""  # why not by a faster path, for people


@dataclass(frozen=True, slots=True)
class Init:
    """One slice of a new key, with its payload."""

    KIND: ClassVar[int] = 33
    request: Number
    key: Key
    spec: KeySpec
    index: Number


@dataclass(frozen=True, slots=True)
class Publish:
    """All slices of the key are in place: it is live. To the server of slice 0, which answers the waiting Lookups."""

    KIND: ClassVar[int] = 34
    request: Number
    key: Key
    spec: KeySpec


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is this key? To the server of its slice 0. With `wait`, the answer comes when the key is live."""

    KIND: ClassVar[int] = 35
    request: Number
    key: Key
    wait: bool


@dataclass(frozen=True, slots=True)
class KeyInfo:
    KIND: ClassVar[int] = 36
    request: Number
    spec: KeySpec
    publisher: Number  # the incarnation that published it


@dataclass(frozen=True, slots=True)
class ClockQuery:
    """Where does my rank stand in the slices of this key that you lead?"""

    KIND: ClassVar[int] = 37
    request: Number
    key: Key


@dataclass(frozen=True, slots=True)
class Clocks:
    """The smallest and the largest clock that counts there, and the versions committed."""

    KIND: ClassVar[int] = 38
    request: Number
    lowest: Number
    highest: Number
    oldest_version: Number
    newest_version: Number


@dataclass(frozen=True, slots=True)
class Activate:
    """My rank, which had left, takes part again in the rounds of this key after `clock`."""

    KIND: ClassVar[int] = 39
    request: Number
    key: Key
    clock: Number


@dataclass(frozen=True, slots=True)
class Push:
    """Contributions, with their bytes as payload. Answered by Staged (the credit comes back), then by Done at commit.

    With `pull`, by Values instead of Done. A `probe` has no payload: it asks what became of an earlier one. A push of
    at most SMALL_PUSH_BYTES takes no credit, and only a probe of it is answered by Staged.
    """

    KIND: ClassVar[int] = 40
    request: Number
    parts: Parts
    how: Annotated[int, Limit(0, 2)]
    samples: Number
    pull: bool
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """The server has the bytes of that push."""

    KIND: ClassVar[int] = 41
    request: Number


@dataclass(frozen=True, slots=True)
class Pull:
    """Give me these slices: exactly version `clock` in sync, not before my push `clock` in async, or ANY_CLOCK."""

    KIND: ClassVar[int] = 42
    request: Number
    parts: Parts


@dataclass(frozen=True, slots=True)
class Values:
    """The slices asked for, in order, as payload, and the version of each; of a batch, perhaps one for all of them."""

    KIND: ClassVar[int] = 43
    request: Number
    versions: Annotated[tuple[Number, ...], Limit(1, MAX_PARTS)]


@dataclass(frozen=True, slots=True)
class DeclareBatch:
    """I shall move these slices together again and again: from now on I call them `batch`."""

    KIND: ClassVar[int] = 44
    request: Number
    batch: Number
    slice_ids: SliceIds


@dataclass(frozen=True, slots=True)
class PushBatch:
    """As Push, of all slices of a batch, which have the same clock."""

    KIND: ClassVar[int] = 45
    request: Number
    batch: Number
    clock: Number
    how: Annotated[int, Limit(0, 2)]
    samples: Number
    pull: bool
    probe: bool = False


@dataclass(frozen=True, slots=True)
class PullBatch:
    """As Pull, of all slices of a batch."""

    KIND: ClassVar[int] = 46
    request: Number
    batch: Number
    clock: Signed


# ── control: worker or observer ↔ server ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SetOptimizer:
    """Use this optimizer (`kvd.optimizer.to_wire`) for all keys; the same one again changes nothing. None: assign."""

    KIND: ClassVar[int] = 48
    request: Number
    optimizer: Plain


@dataclass(frozen=True, slots=True)
class UpdateOptimizer:
    """Change these hyperparameters from the sender's next clock on; the state stays."""

    KIND: ClassVar[int] = 49
    request: Number
    changes: Plain


@dataclass(frozen=True, slots=True)
class OptimizerQuery:
    """Which optimizer is set? Answered by OptimizerIs."""

    KIND: ClassVar[int] = 50
    request: Number


@dataclass(frozen=True, slots=True)
class OptimizerIs:
    KIND: ClassVar[int] = 51
    request: Number
    optimizer: Plain


@dataclass(frozen=True, slots=True)
class FetchState:
    """The optimizer's state for one slice, please."""

    KIND: ClassVar[int] = 52
    request: Number
    key: Key
    index: Number


@dataclass(frozen=True, slots=True)
class State:
    """Updates made, and the named arrays of the state, one after the other as payload, each as (name, dtype)."""

    KIND: ClassVar[int] = 53
    request: Number
    step: Number
    slots: Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)]


@dataclass(frozen=True, slots=True)
class StoreState:
    """Take this as the optimizer's state for one slice. The payload is as in State."""

    KIND: ClassVar[int] = 54
    request: Number
    key: Key
    index: Number
    step: Number
    slots: Annotated[tuple[tuple[Name, Name], ...], Limit(0, 16)]


@dataclass(frozen=True, slots=True)
class Command:
    """Run the controller that is registered for `head`; the body is the payload. Answered by CommandResult."""

    KIND: ClassVar[int] = 55
    request: Number
    head: Key


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The controller's answer, as payload."""

    KIND: ClassVar[int] = 56
    request: Number


@dataclass(frozen=True, slots=True)
class ListKeys:
    """The keys of which you lead a part, in order, after this one."""

    KIND: ClassVar[int] = 57
    request: Number
    after: Annotated[str, Limit(0, MAX_KEY_CHARS)]


@dataclass(frozen=True, slots=True)
class KeyList:
    KIND: ClassVar[int] = 58
    request: Number
    entries: Annotated[tuple[KeyEntry, ...], Limit(0, 100)]
    more: bool


Message: TypeAlias = (
    Join
    | Welcome
    | View
    | Heartbeat
    | HeartbeatAck
    | Leave
    | Enter
    | StatusQuery
    | StatusReport
    | Done
    | NotYet
    | Refused
    | Attach
    | Init
    | Publish
    | Lookup
    | KeyInfo
    | ClockQuery
    | Clocks
    | Activate
    | Push
    | Staged
    | Pull
    | Values
    | DeclareBatch
    | PushBatch
    | PullBatch
    | SetOptimizer
    | UpdateOptimizer
    | OptimizerQuery
    | OptimizerIs
    | FetchState
    | State
    | StoreState
    | Command
    | CommandResult
    | ListKeys
    | KeyList
)
