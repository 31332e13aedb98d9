"""What the two façades, blocking and async, stand on: one method per operation, each giving a Handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvd.client.calls.handle import Handle
from kvd.client.calls.memory_budget import Ticket
from kvd.errors import ConfigError
from kvd.optimizer import Optimizer


class StoreType(NamedTuple):
    """What the name of a type means."""

    name: str
    mode: str  # "" for a store in this process; "any": as the cluster has it
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
CAPABILITIES = {"optimizer": True, "compression": False, "row_sparse": False, "bind": True}


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


def store_type(name: str) -> StoreType:
    """The type with this name; ConfigError lists those that there are."""
    kind = TYPES.get(name)
    if kind is None:
        known = ", ".join(other for other in TYPES if other != "dist")
        raise ConfigError(f"no store has the type {name!r}; there are: {known}", setting="type")
    return kind


class Backend(Protocol):
    """A store, in this process or in a cluster. What is wrong with the arguments is raised by the call; what only the
    store can know, such as that there is no such key, by the handle.

    With a ticket a push that finds no room ends at once, see `kvd.client.calls.memory_budget`.
    """

    type: str
    rank: int
    num_workers: int
    num_servers: int
    local_rank: int
    merge: str
    restarted: bool

    def init(self, key: Any, value: Any) -> Handle: ...
    def push(self, key: Any, value: Any, priority: int, samples: int, ticket: Ticket | None = None) -> Handle: ...
    def pull(self, key: Any, out: Any, priority: int) -> Handle: ...
    def bind(self, key: Any) -> Handle: ...
    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any,
        priority: int,
        samples: int,
        *,
        private: bool,
        ticket: Ticket | None = None,
    ) -> Handle: ...
    def broadcast(self, key: Any, value: Any, out: Any, priority: int, ticket: Ticket | None = None) -> Handle: ...
    def flush(self, timeout: float | None) -> Handle: ...
    def barrier(self, name: str, timeout: float | None) -> Handle: ...
    def join(self) -> Handle: ...
    def rewind(self, clock: int) -> Handle: ...
    def clock(self, key: Any) -> Handle: ...
    def version(self, key: Any) -> Handle: ...
    def send_command(self, head: int | str, body: bytes | str) -> Handle: ...
    def set_optimizer(self, optimizer: Optimizer | None) -> Handle: ...
    def update_optimizer(self, changes: dict[str, Any]) -> Handle: ...
    def save_optimizer_states(self, path: Any, dump_optimizer: bool) -> Handle: ...
    def load_optimizer_states(self, path: Any) -> Handle: ...
    def dead_nodes(self, timeout_s: float) -> Sequence[Node]: ...
    def is_scheduler_dead(self, timeout_s: float) -> bool: ...
    def begin_close(self, barrier: bool) -> Handle: ...
    def end_close(self, leaving: Handle) -> None: ...
    def abandon(self, *, failed: bool) -> None: ...
