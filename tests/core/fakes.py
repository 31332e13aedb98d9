"""What the tests of the machines share: settings, views, and a way to look at effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar

from kvd.core.machine import SCHEDULER, Copy, Effect, PeerKind, Received, Send, Span
from kvd.core.placement import initial_shards
from kvd.core.session import Identity, SchedulerSession
from kvd.protocol.messages import (
    Epoch,
    Init,
    KeyInfo,
    Lookup,
    Made,
    Member,
    MemberState,
    NewKey,
    NewSlice,
    Publish,
    Settings,
    View,
    Welcome,
)
from kvd.protocol.specs import KeySpec

T = TypeVar("T")

SLICE = 4096
SCHEDULER_ID = 1


class NodePeer(int):
    """The connection of a node to the machine that is tested, by the incarnation of the node."""

    __slots__ = ()
    kind: ClassVar[PeerKind] = PeerKind.CALLER


def cluster(workers: int = 2, servers: int = 1, **changes: Any) -> Settings:
    """The settings of a cluster in sync mode, with small slices."""
    return Settings("sync", "sum", -1, 2, SLICE, workers, servers, 8)._replace(**changes)


OPEN = Settings("", "", -1, 0, 0, 0, 0, 0, 0)  # a node that insists on nothing


def server_id(rank: int, life: int = 0) -> int:
    return 1000 + 100 * life + rank


def worker_id(rank: int, life: int = 0) -> int:
    return 5000 + 100 * life + rank


def member(role: str, rank: int, state: str = "active", life: int = 0, last_seen_s: float = 0.0) -> Member:
    incarnation = server_id(rank, life) if role == "server" else worker_id(rank, life)
    reason = "no heartbeat" if state == "dead" else ""
    address = f"tcp://{role}{rank}" if role == "server" else ""
    return Member(role, rank, f"{role}-{rank}", incarnation, address, MemberState(state), reason, last_seen_s)


def members(workers: int = 2, servers: int = 1) -> list[Member]:
    return [member("server", rank) for rank in range(servers)] + [member("worker", rank) for rank in range(workers)]


def view(settings: Settings, who: Iterable[Member]) -> View:
    return View(settings, tuple(who), initial_shards(settings.num_shards, settings.num_servers))


def session(role: str, rank: int, settings: Settings = OPEN, life: int = 0) -> SchedulerSession:
    incarnation = server_id(rank, life) if role == "server" else worker_id(rank, life)
    address = f"tcp://{role}{rank}" if role == "server" else ""
    identity = Identity(role, f"{role}-{rank}", incarnation, address, "host", incarnation)
    return SchedulerSession(identity, settings, "tcp://scheduler", 1.0)


def from_scheduler(message: Any, number: tuple[int, int] = (1, 1)) -> Received:
    return Received(SCHEDULER, SCHEDULER_ID, Epoch(*number), message)


def welcome(rank: int, predecessor: str = "") -> Received:
    return from_scheduler(Welcome(1, rank, MemberState(predecessor) if predecessor else None), (1, 0))


def of(kind: type[T], effects: Iterable[Effect]) -> list[T]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects: Iterable[Effect], peer: Any = None) -> list[Any]:
    """The messages sent, to one peer or to all."""
    return [effect.message for effect in of(Send, effects) if peer is None or effect.peer == peer]


def one(values: Sequence[T]) -> T:
    assert len(values) == 1, values
    return values[0]


@cache
def uint8(count: int) -> KeySpec:
    """A key of `count` bytes: one slice if they are at most SLICE. The same object each time, as programs have it."""
    return KeySpec("uint8", (count,), SLICE)


def read(span: Span) -> bytes:
    """The bytes of a span, where the buffers are bytes."""
    return bytes(span.buffer[span.offset : span.offset + span.nbytes])


def padded_bytes(values: Sequence[bytes]) -> bytes:
    """A payload: each part starts at a multiple of eight."""
    joined = b"".join(value + bytes(-len(value) % 8) for value in values[:-1])
    return joined + values[-1]


def copies(effects: Iterable[Effect]) -> list[tuple[Any, int, Span]]:
    """The copies among the effects: target, offset in it, and source."""
    return [
        (target, row.start, Span(copy.source, row.offset, row.nbytes))
        for copy in of(Copy, effects)
        for target, row in zip(copy.targets, copy.rows, strict=True)
        if target is not None
    ]


# ── messages about one key ──


def init_of(request: int, key: str, spec: KeySpec, index: int) -> Init:
    return Init(request, (spec,), (NewSlice(key, index, 0),))


def publish_of(request: int, key: str, spec: KeySpec) -> Publish:
    return Publish(request, (spec,), (NewKey(key, 0),))


def lookup_of(request: int, key: str, wait: bool) -> Lookup:
    return Lookup(request, (key,), wait)


def info_of(request: int, spec: KeySpec) -> KeyInfo:
    return KeyInfo(request, (Made(spec, 0),), (0,))
