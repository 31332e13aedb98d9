"""What a program can ask of its worker machine (`LocalCall.request`), and the result of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvd.protocol.messages import Captured, CaptureWhen, Departure, MergedForm, SliceId, Surveyed
from kvd.protocol.specs import KeySpec


class Encoded(NamedTuple):
    """The encoded slices of a value: what decodes them (`kvd.protocol.messages.Coding`), the offset and size in bytes
    of each, and what may become of the values that they are merged into."""

    method: Any
    ranges: tuple[tuple[int, int], ...]
    merged: MergedForm = MergedForm.PLAIN


class TakenForm(NamedTuple):
    """The form in which pulled values may come: the name of a compressor, and the keys of which specs."""

    compressor: str
    fits: Callable[[KeySpec], bool]


class Item(NamedTuple):
    """One key in a call: the buffer that its bytes are read from, and the one that its value is written to.

    A None target: the value is not wanted. A None spec: the shape and dtype are not checked. With `encoded`, the source
    holds the slices of a value of this spec as a compressor made them. With `ranges`, the key is a table, and these are
    the offset and size in bytes of what goes to each of its parts: the ids and rows that are pushed, or the ids whose
    rows are wanted. The target takes the rows of all parts, one after the other. With `pages`, the key is a table that
    is made, and these are for each of its parts the offset and size of the pieces of rows that it begins with.
    """

    key: str
    spec: KeySpec | None
    source: Any = None
    target: Any = None
    encoded: Encoded | None = None
    ranges: tuple[tuple[int, int], ...] | None = None
    pages: tuple[tuple[tuple[int, int], ...], ...] = ()


class ListedKeys:
    """The keys of a list that calls repeat, and the specs of its values. Calls on the same object are calls on the same
    list.

    Attributes:
        names: each once.
        specs: one per name.
    """

    __slots__ = ("names", "specs")

    def __init__(self, names: Sequence[str], specs: Sequence[KeySpec]) -> None:
        self.names = tuple(names)
        self.specs = tuple(specs)


class Listed(Protocol):
    """What one call brings for the keys of a list, told as a whole in place of an item for each.

    Attributes:
        keys: the list.
        sources: the values that are pushed, one per key: whole, contiguous buffers. None: nothing is pushed.
        targets: the same for those that are pulled.
    """

    @property
    def keys(self) -> ListedKeys: ...

    @property
    def sources(self) -> Sequence[Any] | None: ...

    @property
    def targets(self) -> Sequence[Any] | None: ...

    def items(self) -> tuple[Item, ...]:
        """The same as items. Any thread may ask, and gets the same objects each time."""


class Versions(NamedTuple):
    """The oldest and the newest version among the slices that were pulled for an item."""

    oldest: int
    newest: int


class UncountedVersions(list["Versions | None"]):
    """The result of a push that does not count, or not in all slices."""


@dataclass(frozen=True, slots=True)
class JoinCluster:
    """The result is the rank, when all servers are active and know this node, and all workers have joined.

    A worker has joined when its rank has been taken once, whatever became of it since. An observer only waits for a
    view.

    Attributes:
        wait_for_workers: False: do not wait for the other workers, and take part in nothing that needs them.
    """

    wait_for_workers: bool = True


@dataclass(frozen=True, slots=True)
class InitKeys:
    """Rank 0 makes the keys and publishes them; the others wait until they are live. The result is None."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class DeleteKeys:
    """Completes when the keys are gone, which they are once every worker that takes part has deleted them."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DescribeKey:
    """The result is the KeySpec of a live key. With `wait`, the call waits until the key is live."""

    key: str
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """Push, pull, or both: the sources of the items are pushed, their targets take what is pulled.

    It completes when every push is committed and every value is copied. The result is a list with the Versions of each
    item, None where nothing was pulled. It is an UncountedVersions if a slice of a push does not count, since the
    rounds went on without this worker.
    """

    items: tuple[Item, ...]
    push: bool
    pull: bool
    priority: int = 0
    samples: int = 1
    how: int = 0  # ADD, ASSIGN or ABSENT
    any_version: bool = False  # pull the newest version, without waiting for the own pushes
    at_version: int | None = None  # with any_version: pull exactly this one, which was there
    place: int = 0  # where the program is, see `kvd.core.places`
    cast: bool = False  # sources may have other floating dtypes than their keys; targets take the dtypes of the keys
    some_encoded: bool = False  # sources of some items are encoded
    sets_out: Callable[[Sequence[int]], None] | None = None  # gets the clocks of a push, one per item, as it sets out
    some_rows: bool = False  # some items are rows of tables
    takes: TakenForm | None = None  # without a push
    finds: Callable[[Sequence[KeySpec]], None] | None = None  # gets the specs of the keys, one per item, as it starts
    whole: Any = None  # the sources side by side, as in a message that has all of them
    in_few: bool = False  # in as few messages as there can be: others are under way meanwhile


class ListTransfer(NamedTuple):
    """A Transfer on the keys of a list; in place of items it has these."""

    listed: Listed
    transfer: Transfer

    def in_full(self) -> Transfer:
        """The same call with items."""
        return replace(self.transfer, items=self.listed.items())


@dataclass(frozen=True, slots=True)
class Survey:
    """Which steps of these keys the servers have. The result is a list of Surveyed: answers of the servers.

    Attributes:
        items: the keys; none: all that the servers lead.
    """

    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Sync: the targets of the items take the values of one step. It completes when all are there: the result is a
    list with the Versions of each item; or at once with None, when a server does not have that step any more.

    Attributes:
        number: grows from one Read of this node to the next. The servers forget those before.
        step: see `kvd.core.server.readings`.
        is_over: nothing more of this step will be pushed.
    """

    items: tuple[Item, ...]
    number: int
    step: int
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class StopReading:
    """Ends the Read of this number with None, unless values of it have come since it was to be ended before.

    The result is whether it was ended.
    """

    number: int


class CapturedPart(NamedTuple):
    """Some slices of a capture, with what their server has answered: Captured, or Surveyed if it was too late."""

    partition: int
    slice_ids: tuple[SliceId, ...]
    answer: Captured | Surveyed


@dataclass(frozen=True, slots=True)
class Capture:
    """Have the slices of these keys kept by their servers, as they are at a moment. The result is a list of
    CapturedPart. It stays open until all servers have answered, which CaptureDone brings about.

    Attributes:
        number: grows from one capture of this node to the next.
        step, when: see `kvd.protocol.messages.Capture`.
    """

    items: tuple[Item, ...]
    number: int
    step: int
    when: CaptureWhen


@dataclass(frozen=True, slots=True)
class TakeBack:
    """The program takes back memory that an earlier Transfer pushes from.

    That call ends if it has not ended yet, and the rest of it is sent from the copies. Completes at once.

    Attributes:
        copies: each source, and a copy of it.
    """

    copies: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Completes when every push before it is settled, including those whose calls timed out.

    Attributes:
        kept: wait also for pushes whose callers were told not to wait, though the servers keep them.
        past_deaths: wait also for pushes whose rounds lack a worker that died, since it may be restarted; otherwise the
            flush ends with NodeLost as soon as a server says so.
    """

    kept: bool = True
    past_deaths: bool = True


@dataclass(frozen=True, slots=True)
class Barrier:
    """Completes when all workers that have not left have entered the barrier.

    Attributes:
        passed: the predecessor has passed this barrier: count it, and complete at once.
        says: a note for those who listen.
        listens: the result is the note of this barrier, "" if there is none; otherwise the result is None.
        place: where the program is (`kvd.core.places`): workers that came in at a later place are not waited for; 0:
            all are.
    """

    name: str
    passed: bool = False
    says: str | None = None
    listens: bool = False
    place: int = 0


@dataclass(frozen=True, slots=True)
class SaidAt:
    """The result is the note of the barrier that this worker enters next under this name, if that one has been released
    (a predecessor may have passed it); None: it has not."""

    name: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Leaves a note at the barrier of this name, which nobody enters. The result is None, once it is saved."""

    name: str
    note: str


@dataclass(frozen=True, slots=True)
class ToldAt:
    """The result is the latest note that was left with `Tell`; "" if there is none, or if it is forgotten."""

    name: str


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the rounds and stay (DONE), leave the cluster (LEFT), or go and be waited for as after a death (FAILED)."""

    departure: Departure


@dataclass(frozen=True, slots=True)
class Rewind:
    """Set the clock of every key back to `clock`. NotAllowed while pushes are open."""

    clock: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after all that counted of a predecessor. NotAllowed while pushes are open."""


@dataclass(frozen=True, slots=True)
class PassOver:
    """The step in which the predecessor stopped has counted as a whole, and is not made again: go on after it. All keys
    of the step are known. NotAllowed while pushes are open."""


class Loop(NamedTuple):
    """A loop over steps: the number of its first step, and of the one after its last, among those of all loops."""

    first: int
    end: int


class Return(Enum):
    """What became of a TakePartAgain."""

    NOW = "the rounds wait for this worker again"
    LATER = "the others have yet to get past the loop's first step, or it was lost once more: ask again"
    OVER = "the others are past the loop"
    NOT_LOST = "nobody went on without this worker"


class Returned(NamedTuple):
    """The result of a TakePartAgain.

    Attributes:
        step: NOW, in a loop: the number of the step that this worker makes next, among those of all loops.
    """

    how: Return
    step: int = 0


@dataclass(frozen=True, slots=True)
class TakePartAgain:
    """The others went on without this worker, which is back. The result is a Returned.

    NotAllowed while pushes are open.

    Attributes:
        loop: the loop over steps in which the program is; None: it is in none.
    """

    loop: Loop | None = None


@dataclass(frozen=True, slots=True)
class StandBy:
    """Wait until all workers have come to this point; the rounds go on without this one meanwhile. The result is the
    number of the step with which the next loops of all begin. NotAllowed while pushes are open.

    Attributes:
        steps: how many steps the loops of this program have made.
    """

    name: str
    steps: int = 0


@dataclass(frozen=True, slots=True)
class ComeTo:
    """The program has come to this place, see `kvd.core.places`; all its pushes are settled. Servers remember it."""

    place: int


@dataclass(frozen=True, slots=True)
class ClockOf:
    """The result is the clock of this worker for the key."""

    key: str


@dataclass(frozen=True, slots=True)
class Control:
    """One message to every server, or to some. The result is a list of their answers, in the order of the servers.

    An answer is (message, payload, bytes of the payload).
    """

    messages: tuple[Any, ...]  # one for all servers, or one per server that is named; their `request` is filled in
    servers: tuple[int, ...] | None = None  # their ranks; None: all
    payload: Any = None  # goes with each message
    nbytes: int = 0
    staged_first: bool = False  # wait until all earlier pushes have reached their servers
    partitions: tuple[int, ...] | None = None  # in place of `servers`: the leaders of these, whoever they are


@dataclass(frozen=True, slots=True)
class SliceControl:
    """Messages that name slices of a key by `index`, to the servers that lead them. The result is like Control's."""

    key: str
    messages: tuple[Any, ...]
    payloads: tuple[Any, ...] = ()
    nbytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """The result is the payload of the scheduler's StatusReport, and its size in bytes."""


@dataclass(frozen=True, slots=True)
class TellScheduler:
    """One message to the scheduler, whose `request` is filled in. The result is None, once it has answered."""

    message: Any


Request: TypeAlias = (
    JoinCluster
    | InitKeys
    | DeleteKeys
    | DescribeKey
    | Transfer
    | ListTransfer
    | Survey
    | Read
    | StopReading
    | Capture
    | TakeBack
    | Flush
    | Barrier
    | SaidAt
    | Tell
    | ToldAt
    | Depart
    | Rewind
    | Resume
    | TakePartAgain
    | StandBy
    | PassOver
    | ComeTo
    | ClockOf
    | Control
    | SliceControl
    | SchedulerStatus
    | TellScheduler
)
