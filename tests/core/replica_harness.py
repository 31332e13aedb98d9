"""Servers that hold each other's partitions, joined by hand: the tests say when a message between two of them arrives.

Values are calculated by the jobs of a real server, so replicas can be compared bit by bit. All keys are in partition 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvd.core.machine import (
    SCHEDULER,
    Apply,
    Connect,
    Disconnect,
    Effect,
    ForgetState,
    Job,
    LogEntry,
    PeerKind,
    Received,
    ResetState,
    Send,
    ServerPeer,
    Span,
    Tick,
)
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.core.server.memory import ServerMemory
from kvd.node.jobs.runner import JobRunner
from kvd.optimizer import to_wire
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import (
    NO_RANK,
    Attach,
    DeclareBatch,
    Done,
    Epoch,
    Init,
    Member,
    NewKey,
    NewSlice,
    NotYet,
    Part,
    Partition,
    Publish,
    Pull,
    Push,
    PushBatch,
    SliceId,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import NodePeer, cluster, from_scheduler, member, of, server_id, session, view, welcome, worker_id
from tests.core.slice_pictures import bytes_of, picture_of

A, B, C = range(3)  # the ranks of the servers
FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
ANY_SIZE = 1 << 30


class Wire(NamedTuple):
    """A message between two servers, that has not arrived."""

    source: int
    target: int
    event: Received

    @property
    def message(self) -> Any:
        return self.event.message


def payload_of(spans: Sequence[Span]) -> bytes:
    parts = [bytes_of(span) for span in spans]
    return b"".join([part + bytes(-len(part) % 8) for part in parts[:-1]] + parts[-1:])


class Node:
    """One server. Its jobs run at once; with `holds_jobs` they wait in `jobs`."""

    def __init__(self, rank: int, life: int, memory: int) -> None:
        self.rank, self.life, self.who = rank, life, server_id(rank, life)
        own = session("server", rank, life=life)
        self.machine = ServerMachine(ServerSettings(memory, True, small_push_bytes=0), own, ServerMemory(memory))
        self.runner = JobRunner()
        self.jobs: list[Any] = []
        self.holds_jobs = False
        self.connected: set[Any] = set()
        self.log: list[LogEntry] = []
        self.told: list[Any] = []  # what the scheduler was told
        self.applied: list[Apply] = []

    def held(self, partition: int = 0) -> Any:
        """What it holds of a partition that another server leads; None if nothing."""
        return self.machine._timed.replication._replicas._held.get(partition)

    @property
    def table(self) -> Any:
        return self.machine.table

    def errors(self) -> list[str]:
        return [entry.text for entry in self.log if entry.level == "error"]


class Cluster:
    """Servers, and workers that are played by the tests.

    Args:
        rows: leader, backup and syncing server of each partition, and perhaps the successor.
        auto: messages between servers arrive at once. Else they wait in `wires`.
    """

    def __init__(
        self,
        rows: Iterable[tuple[int, ...]] = ((A, B, NO_RANK), (B, C, NO_RANK), (C, A, NO_RANK)),
        *,
        workers: int = 2,
        auto: bool = True,
        memory: Sequence[int] = (ANY_SIZE, ANY_SIZE, ANY_SIZE),
        **settings: Any,
    ) -> None:
        self.rows = list(rows)
        self.settings = cluster(workers, len(memory), replicas=2, **settings)
        self.nodes = [Node(rank, 0, memory[rank]) for rank in range(len(memory))]
        self.lineages = [node.who for node in self.nodes]
        self.workers: dict[int, Member] = {rank: member("worker", rank) for rank in range(workers)}
        self.states = dict.fromkeys(range(len(memory)), "active")
        self.auto = auto
        self.wires: deque[Wire] = deque()
        self.answers: list[tuple[int, Any, bytes]] = []  # to workers: rank, message, payload
        self.now = 0.0
        self.change = 0
        self._request = 100
        for node in self.nodes:
            self.step(node, Tick())
            self.step(node, welcome(node.rank))
        self.look()
        for rank in range(workers):
            for node in self.nodes:
                self.say(rank, Attach(self.request(), rank), at=node.rank)

    def request(self) -> int:
        self._request += 1
        return self._request

    # ── events in ──

    def step(self, node: Node, event: Any) -> list[Effect]:
        effects = node.machine.step(event, self.now)
        node.machine.validate()
        jobs = []
        for effect in effects:
            if isinstance(effect, Send):
                self._send(node, effect)
            elif isinstance(effect, LogEntry):
                node.log.append(effect)
            elif isinstance(effect, Connect):
                node.connected.add(effect.peer)
            elif isinstance(effect, Disconnect):
                node.connected.discard(effect.peer)
            elif isinstance(effect, ResetState):
                node.runner.reset(effect.slices)
            elif isinstance(effect, ForgetState):
                node.runner.forget(effect.slices)
            elif isinstance(effect, Job):
                jobs.append(effect)
        node.applied += of(Apply, jobs)
        if node.holds_jobs:
            node.jobs += jobs
        else:
            for job in jobs:
                self.step(node, node.runner.run(job))
        if self.auto:
            self.deliver()
        return effects

    def finish(self, node: Node, job: Any = None) -> None:
        """The job ends; without one, all that are held, and those that they lead to."""
        if job is not None:
            node.jobs.remove(job)
            self.step(node, node.runner.run(job))
            return
        while node.jobs:
            self.finish(node, node.jobs[0])

    def _send(self, node: Node, send: Send) -> None:
        if send.peer == SCHEDULER:
            node.told.append(send.message)
            return
        sender, epoch, message, _ = decode(encode(send.message, node.who, node.machine.epoch))
        payload = payload_of(send.payload) if send.payload else None
        target = int(send.peer)
        found = next((other for other in self.nodes if other.who == target), None)
        if target >= worker_id(0):
            self.answers.append((target - worker_id(0), message, payload or b""))
        elif found is not None:
            is_caller = send.peer.kind is PeerKind.SERVER
            assert not is_caller or target in node.connected, "it sends to a server that it is not connected to"
            peer: Any = NodePeer(node.who) if is_caller else ServerPeer(node.who)
            event = Received(peer, sender, epoch, message, payload, len(payload or b""))
            self.wires.append(Wire(node.rank, found.rank, event))

    def arrive(self, wire: Wire) -> None:
        """This message between servers arrives; it may arrive again."""
        self.step(self.nodes[wire.target], wire.event)

    def deliver(self) -> None:
        """All messages between servers arrive."""
        while self.wires:
            self.arrive(self.wires.popleft())

    def settle(self) -> None:
        """Messages arrive, and what was not taken yet is sent again, until there are none left."""
        auto, self.auto = self.auto, True
        for _ in range(50):
            self.deliver()
            self.tick(0.1)
            if not self.wires and not any(node.machine.explain(0.0)["records_waiting"] for node in self.living()):
                break
        self.auto = auto

    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.who >= 0]

    def to(self, rank: int, *kinds: type[Any]) -> list[Wire]:
        """Takes what is on its way to this server out of the wires."""
        found = [wire for wire in self.wires if wire.target == rank and (not kinds or isinstance(wire.message, kinds))]
        self.wires = deque(wire for wire in self.wires if wire not in found)
        return found

    def tick(self, seconds: float = 3.0) -> None:
        """Time passes: what was not answered is sent again."""
        self.now += seconds
        for node in self.living():
            self.step(node, Tick())

    # ── the view ──

    def view(self, rows: Iterable[tuple[int, ...]] | None = None) -> Any:
        self.rows = list(self.rows if rows is None else rows)
        servers = [member("server", node.rank, self.states[node.rank], node.life) for node in self.nodes]
        table = tuple(
            Partition(leader, backup, syncing, lineage, *successor)
            for (leader, backup, syncing, *successor), lineage in zip(self.rows, self.lineages, strict=True)
        )
        whole = view(self.settings, [*servers, *self.workers.values()])
        return replace(whole, shards=(0,) * self.settings.num_shards, partitions=table)

    def look(self, rows: Iterable[tuple[int, ...]] | None = None, *, only: Sequence[int] | None = None) -> None:
        """A new view, which all servers get, or only these, in this order."""
        self.change += 1
        told = self.view(rows)
        auto, self.auto = self.auto, False
        for rank in range(len(self.nodes)) if only is None else only:
            self.show(rank, told)
        self.auto = auto
        if auto:
            self.settle()

    def show(self, rank: int, told: Any = None) -> None:
        """A server gets the newest view."""
        event = from_scheduler(self.view() if told is None else told, (1, self.change))
        self.step(self.nodes[rank], event)

    def kill(self, rank: int) -> None:
        """What the server has sent may still arrive; what is sent to it is lost."""
        self.states[rank] = "dead"
        self.wires = deque(wire for wire in self.wires if wire.target != rank)
        self.nodes[rank] = Node(rank, 9, ANY_SIZE)  # nobody
        self.nodes[rank].who = -1

    # ── workers ──

    def say(self, rank: int, message: Any, payload: bytes | None = None, *, at: int = A, late: int = 0) -> list[Any]:
        """A worker, which is so many views late, sends something. Returns what workers are told meanwhile."""
        first = len(self.answers)
        who, peer = worker_id(rank), NodePeer(worker_id(rank))
        known = Epoch(1, self.change - late)
        event = Received(peer, who, known, message, payload, len(payload or b""))  # type: ignore[arg-type]
        self.step(self.nodes[at], event)
        return [message for _, message, _ in self.answers[first:]]

    def told_since(self, first: int) -> list[Any]:
        return [message for _, message, _ in self.answers[first:]]

    def create(self, key: str, value: Any, *, at: int = A, creation: int = 0, publish: bool = True) -> list[Any]:
        """Worker 0 makes a key of one slice, and publishes it."""
        array = np.asarray(value)
        spec = KeySpec(array.dtype.name, array.shape, 4096)
        said = self.say(0, Init(self.request(), (spec,), (NewSlice(key, 0, 0),), creation), array.tobytes(), at=at)
        if publish:
            said += self.say(0, Publish(self.request(), (spec,), (NewKey(key, 0),), creation), at=at)
        return said

    def push(self, rank: int, clock: int, value: Any, *, key: str = "w", at: int = A, **more: Any) -> list[Any]:
        request = more.pop("request", None) or self.request()
        creation = more.pop("creation", 0)
        fields = {"how": 0, "samples": 1, "pull": False} | more
        payload = np.asarray(value).tobytes()
        return self.say(rank, Push(request, (Part(key, 0, clock, creation),), **fields), payload, at=at)

    def declare(self, rank: int, *keys: str, at: int = A) -> None:
        slice_ids = tuple([SliceId(key, 0) for key in keys])
        assert self.say(rank, DeclareBatch(self.request(), 1, slice_ids), at=at)[-1:] == [Done(self._request)]

    def push_batch(self, rank: int, clock: int, *values: Any, at: int = A, **more: Any) -> list[Any]:
        fields = {"how": 0, "samples": 1, "pull": False} | more
        payload = payload_of([Span(data := np.asarray(value).tobytes(), 0, len(data)) for value in values])
        return self.say(rank, PushBatch(self.request(), 1, clock, **fields), payload, at=at)

    def pull(self, rank: int, clock: int, key: str = "w", at: int = A, dtype: Any = np.float32) -> Any:
        """The version of a key and its value, or what else the server says."""
        first = len(self.answers)
        self.say(rank, Pull(self.request(), (Part(key, 0, clock),)), at=at)
        for _, message, payload in self.answers[first:]:
            if isinstance(message, Values):
                return message.versions[0], np.frombuffer(payload, dtype)
            if isinstance(message, NotYet):
                return message
        return self.told_since(first)

    def value(self, rank: int, key: str = "w", dtype: Any = np.float32) -> Any:
        """What a server has, or holds, of a slice."""
        node = self.nodes[rank]
        held = node.held()
        slices = node.table.slices if (key, 0) in node.table.slices or held is None else held.table.slices
        slice_ = slices[key, 0]
        return np.frombuffer(bytes_of(slice_.span(slice_.log.current)), dtype)

    # ── all that a server has of partition 0 ──

    def picture(self, rank: int) -> dict[str, Any]:
        """All that a server has, or holds, of partition 0: what is the same at its leader and at its backup."""
        node = self.nodes[rank]
        is_leader = self.rows[0][0] == rank
        held = None if is_leader else node.held()
        table = node.table if held is None else held.table
        control = node.machine._control
        setting = control if held is None else held
        shared = node.machine._timed.replication._syncing._shared
        loops = shared.records(0) if held is None else list(held.loops.values())
        return {
            "live": dict(sorted(table.live.items())),
            "creation": table.creation,
            "optimizer": None if setting.optimizer is None else to_wire(setting.optimizer),
            "generation": setting.generation,
            "loops": sorted([replace(loop, request=0) for loop in loops], key=lambda loop: loop.first),
            "slices": {name: picture_of(node.runner, slice_) for name, slice_ in sorted(table.slices.items())},
        }
