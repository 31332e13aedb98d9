"""What the façades stand on: a store as parts by subject, in this process or in a cluster, each call giving a Handle.

What is wrong with the arguments is raised by the call; what only the store can know, such as that a key does not exist,
by the handle. `kvd.client.local` and `kvd.client.cluster` implement the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvd.client.calls.bound_arrays import BoundList
from kvd.client.calls.handle import Handle
from kvd.client.calls.healing import Healing
from kvd.client.calls.keys import KeyList
from kvd.client.calls.memory_budget import Reservation
from kvd.client.calls.merging import MergeChoice
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.values import Array
from kvd.errors import ConfigError, KvdError
from kvd.optimizer import Optimizer

Updater = Callable[[Any, Array, Array], None]  # of the key as the program wrote it, what came, what is stored


class StoreType(NamedTuple):
    """What the name of a type means."""

    name: str
    mode: str  # "" for a store in this process; "any": the mode of the cluster
    on_device: bool


TYPES: dict[str, StoreType] = {
    entry.name: entry
    for entry in (
        StoreType("local", "", False),
        StoreType("device", "", True),
        StoreType("dist", "any", False),
        StoreType("dist_sync", "sync", False),
        StoreType("dist_async", "async", False),
        StoreType("dist_device_sync", "sync", True),
        StoreType("dist_device_async", "async", True),
    )
}


#: What MXNet and BytePS call types that do the same.
ALIASES: dict[str, str] = {
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "local_allreduce_device": "device",
    "nccl": "device",
    "byteps": "dist_sync",
    "horovod": "dist_sync",
}


#: In these, `pushpull` makes a key that is new, of zeros, as BytePS and Horovod declare a tensor when it is first used.
DECLARING_TYPES = frozenset({"byteps", "horovod"})


def store_type(name: object, others: Sequence[str] = ()) -> StoreType:
    """The type with this name, in upper or lower case, or with this name in MXNet, which it keeps.

    Args:
        others: what else there is, for the text of the error.

    Raises:
        ConfigError: there is none; it lists the types.
    """
    kind = None
    if isinstance(name, str):
        lower = name.lower()
        kind = TYPES.get(ALIASES.get(lower, lower))
        if kind is not None and lower in ALIASES:
            return kind._replace(name=lower)
    if kind is None:
        known = ", ".join(other for other in TYPES if other != "dist")
        also = ", ".join([*others, *(f"{alias} ({meaning})" for alias, meaning in ALIASES.items())])
        raise ConfigError(f"no store has the type {name!r:.80}; there are: {known}; also: {also}", setting="type")
    return kind


class StoreFacts(NamedTuple):
    """What is known of a store from its creation on.

    Attributes:
        type: the name of its type.
        rank: the number of this worker.
        local_rank: its number on this host.
        merge: "sum", "mean" or "weighted"; "" where there are no rounds.
        restarted: whether this worker took the place of one that died.
        distributed: whether the store belongs to a cluster.
        versioned: whether a pull gives exactly the version of this worker's clock, so that all slices of a value are of
            one round (synchronous stores, and those in this process). Otherwise they may be of several.
        round_timeout_s: how long its calls wait for other workers, in seconds.
        job: the name of the job; "" without a cluster.
        viewed_nbytes: the largest value that is not copied where calls have `copy=False`, in bytes; 0: all are.
        taking_part: gives the ranks of the workers that take part, where that may change.
    """

    type: str
    rank: int
    local_rank: int
    num_workers: int
    num_servers: int
    merge: str
    restarted: bool
    distributed: bool
    versioned: bool
    round_timeout_s: float
    job: str = ""
    viewed_nbytes: int = 0
    taking_part: Callable[[], tuple[int, ...]] | None = None


class Node(NamedTuple):
    """A server or worker that is dead.

    Attributes:
        role: ``"server"`` or ``"worker"``.
        rank: its number within the role.
        node_id: its stable name.
        reason: why the scheduler declared it dead.
        last_seen_s: seconds of silence before that.
    """

    role: str
    rank: int
    node_id: str
    reason: str
    last_seen_s: float


class Values(Protocol):
    """Keys and their values.

    A push that finds no room in the memory budget waits in its thread; with a reservation it raises at once, see
    `kvd.client.calls.memory_budget`.
    """

    def init(self, key: Any, value: Any, merge: MergeChoice = None, *, gradients: bool = False) -> Handle:
        """`gradients`: the keys merge gradients of weights that the workers keep, of which these are the first ones."""

    def push(
        self, key: Any, value: Any, priority: int, samples: int, reservation: Reservation | None, cast: bool = False
    ) -> Handle:
        """`cast`: the value may have another floating dtype than the key, to which it is converted."""

    def pull(self, key: Any, out: Any, priority: int, cast: bool = False, view: bool = False) -> Handle:
        """`cast`: the value is converted to the floating dtype of `out`. `view`: the arrays are read-only, over the
        memory of their server where that can be; `out` is None."""

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any,
        priority: int,
        samples: int,
        copy: bool,
        reservation: Reservation | None,
        cast: bool = False,
        view: bool = False,
    ) -> Handle:
        """`copy`: the program may write to the value as soon as this returns. `cast`, `view`: as in push and pull."""

    def pushpull_and_wait(
        self, key: Any, value: Any, out: Any, priority: int, samples: int, cast: bool = False, view: bool = False
    ) -> Any:
        """The result of `pushpull`; the program writes to the value only when this has returned."""

    def pushpull_bound(self, bound: BoundList, targets: Callable[[], Sequence[Array]], priority: int) -> Handle:
        """Push bound gradients, and pull the values into the targets when the handle is waited for, not before.

        Args:
            bound: as `Binding.gradients` gave it.
            targets: called then; gives contiguous writable memory of the size of each key, as uint8, none of it twice.
        """


class Tables(Protocol):
    """Keys of which a call names rows. `Values` makes them, and pushes to them."""

    def row_sparse_pull(self, key: Any, row_ids: Any, out: Any, priority: int) -> Handle: ...

    def export_table(self, key: Any, path: Any, since: Any) -> Handle: ...

    def unknown(self, key: Any, value: Any, *, takes_pairs: bool = True) -> Handle | None:
        """Finds out which keys of a call are tables, if that matters for a push of this value (None: for a pull of
        rows), so that the call does not wait for it. None: it is known.

        Args:
            takes_pairs: the call reads two arrays as row ids and rows if the key is a table; else, as of two devices.
        """


class Assignments(Protocol):
    """Values that one worker has and all take."""

    def broadcast(self, key: Any, value: Any, out: Any, priority: int, reservation: Reservation | None) -> Handle: ...

    def assign(self, values: Mapping[str, Array], absent: Sequence[str]) -> None:
        """Sends values that replace the stored ones, and says for the keys in `absent` that this worker has none.

        The arrays, uint8, must not be changed afterwards. Errors are raised by the next call on these keys, by `flush`
        or by `close`.
        """

    def keep_error(self, names: Sequence[str], error: KvdError) -> None:
        """Raise the error at the next call on these keys, at `flush` or at `close`."""

    def has_assigned(self, key: str) -> bool:
        """Whether this process has taken part in a round of the key; a predecessor that died does not count."""


class Deletion(Protocol):
    """The end of keys."""

    def delete(self, key: Any) -> Handle: ...


class Binding(Protocol):
    """Arrays that a program keeps for a key."""

    def bind(self, key: Any) -> Handle: ...

    def gradients(self, keys: KeyList) -> Handle:
        """Gives a `BoundList` of the gradients that `bind` gives for a list of keys. Nothing is pulled, and weights
        take no memory."""

    def is_bound(self, name: str) -> bool:
        """Whether this process has arrays of the key, and the store is open."""


class Rounds(Protocol):
    """Where this worker is in its rounds, and where it meets the others."""

    def flush(self, timeout: float | None) -> Handle: ...
    def barrier(self, name: str, timeout: float | None) -> Handle: ...

    def meet(self, name: str, says: str | None) -> Handle:
        """Meet all workers, as at a barrier. Gives the note that one of them left there, "" if nobody left one or it is
        forgotten. A restarted worker passes, and gets the latest note.

        Args:
            says: the note, of at most `MAX_TEXT_CHARS`; None: this worker leaves none. Of several, one counts.
        """

    def join(self, until: object = None) -> Handle: ...
    def rewind(self, clock: int) -> Handle: ...
    def resume(self) -> Handle: ...
    def clock(self, key: Any) -> Handle: ...
    def version(self, key: Any) -> Handle: ...


class SentHyperparameters(NamedTuple):
    """What a program that shares the optimizer of the servers knows of its hyperparameters.

    Attributes:
        of: the optimizer that this process had set by then; None: none.
        sent: the same with the hyperparameters that some worker sent last; None: nobody here knows.
        sender: the rank of the worker that was to send them.
    """

    of: Optimizer | None
    sent: Optimizer | None
    sender: int


class Updates(Protocol):
    """How values are updated.

    Attributes:
        last_sent: for programs in which several parts share the optimizer; None: they have sent nothing.
    """

    last_sent: SentHyperparameters | None

    @property
    def last_set(self) -> Optimizer | None:
        """The optimizer that this process has set last; None: it has set none."""

    def current(self) -> Handle:
        """Gives the optimizer that updates the values, with the latest changes; None: there is none."""

    def set_optimizer(self, optimizer: Optimizer | None) -> Handle: ...
    def set_gradient_compression(self, params: object) -> Handle: ...
    def set_updater(self, updater: Updater | None) -> None: ...
    def update_optimizer(self, changes: dict[str, Any]) -> Handle: ...
    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle: ...
    def load_optimizer_states(self, path: Any) -> Handle: ...


class Snapshots(Protocol):
    """The whole store, to disk and back."""

    def snapshot(self, path: Any) -> Handle: ...
    def snapshot_async(self, path: Any) -> Handle:
        """Gives, when the state has been read, the handle of the writing."""

    def restore(self, path: Any, missing_ok: bool, or_older: bool) -> Handle:
        """Gives how many steps of its loops the program had made; None: there is no snapshot."""

    def begin_run(self) -> Handle:
        """What the settings want before the program does anything: the newest snapshot of the job becomes the state of
        a new run, and the next ones have their folder. Gives the same."""


class Nodes(Protocol):
    """The other nodes of the cluster; there are none without a cluster."""

    def send_command(self, head: int | str, body: bytes | str) -> Handle: ...

    def dead_nodes(self, timeout_s: float) -> Sequence[Node]:
        """The servers and workers that are declared dead, or silent for more than `timeout_s` (0: only the former)."""

    def is_scheduler_dead(self, timeout_s: float) -> bool: ...

    def most_nodes(self) -> Mapping[str, int]:
        """The highest possible number of servers and of workers, by role; more workers may join up to that number."""

    def push_staleness(self) -> Handle:
        """Gives the `Staleness` of each worker whose pushes the servers have measured."""

    def late_workers(self) -> tuple[str, ...]:
        """The workers that the servers wait for, such as ``"worker 1"``; empty if no server can say. Blocks."""

    def gone_workers(self) -> dict[int, bool]:
        """The ranks that write nothing any more: True for one that died, False for one that left the rounds."""


class Closing(Protocol):
    """How a store ends: `end_close(begin_close(…))`, `abandon` at once, or `withdraw` before it was used."""

    def begin_close(self, barrier: bool) -> Handle: ...
    def end_close(self, leaving: Handle) -> None: ...
    def abandon(self, *, failed: bool) -> None: ...
    def withdraw(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """A store, without the form in which a façade offers it."""

    facts: StoreFacts
    values: Values
    tables: Tables
    assignments: Assignments
    deletion: Deletion
    binding: Binding
    rounds: Rounds
    steps: ProgramSteps
    updates: Updates
    snapshots: Snapshots
    nodes: Nodes
    closing: Closing
    healing: Healing
