"""A server machine whose workers are played by the tests. Buffers are bytes; the sum of a round is taken bytewise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvd.core.machine import (
    Apply,
    Checksums,
    Create,
    Effect,
    Export,
    JobDone,
    KeepRows,
    KeptRows,
    ListRows,
    Load,
    ReadRows,
    Received,
    Run,
    Send,
    Span,
    TableVersion,
    Tick,
)
from kvd.core.principals import HOLDER
from kvd.core.server.captured import rows_nbytes
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.core.server.memory import ServerMemory
from kvd.errors import KvdError
from kvd.protocol.fixed import push_numbers
from kvd.protocol.messages import (
    Attach,
    DeclareBatch,
    Epoch,
    Member,
    NotYet,
    Part,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    Refused,
    Settings,
    SliceId,
    Values,
)
from kvd.protocol.specs import KeySpec
from tests.core.fake_tables import next_version, packed_ids, rows_at
from tests.core.fakes import (
    NodePeer,
    cluster,
    from_scheduler,
    init_of,
    members,
    of,
    one,
    padded_bytes,
    publish_of,
    read,
    said,
    session,
    uint8,
    view,
    welcome,
    worker_id,
)

JOBS = (Create, Apply, ReadRows, ListRows, KeepRows, Export, Checksums, Load, Run)


class Harness:
    """Jobs run at once; with `hold` they stay in `jobs` until `finish`.

    Args:
        keeps_verdicts: otherwise each push is admitted as if it were the first.
        by_frames: pushes, pulls and the ends of jobs go to the machine as the shell gives them, without a step.

    Attributes:
        pushed, pulled: the pushes and pulls that the machine took without a step.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        memory: int = 1 << 30,
        fail: bool = True,
        attach: bool = True,
        workers: int = 2,
        small: int = -1,
        keeps_verdicts: bool = True,
        by_frames: bool = False,
    ) -> None:
        self._keeps_verdicts = keeps_verdicts
        self._by_frames = by_frames
        self.pushed = self.pulled = 0
        self.settings = settings or cluster(workers)
        self.memory = ServerMemory(memory)
        told = ServerSettings(memory, fail, small_push_bytes=small)
        self.machine = ServerMachine(told, session("server", 0), self.memory)
        self.members: dict[tuple[str, int], Member] = {(m.role, m.rank): m for m in members(workers)}
        self.epoch = 0
        self.now = 0.0
        self.hold = False
        self.jobs: list[Any] = []
        self.applied: list[Apply] = []
        self.error: KvdError | None = None
        self._request = 0  # the largest so far: those of a worker grow
        self._validates = True
        self.step(Tick())
        self.step(welcome(0))
        self.look()
        if attach:
            for rank in range(workers):
                self.attach(rank)

    def step(self, event: Any, now: float | None = None) -> list[Effect]:
        at = self.now if now is None else now
        if not self._keeps_verdicts:
            self.machine.regime.change()
        effects = self._step_in_part(event) if self._by_frames else None
        if effects is None:
            effects = self.machine.step(event, at)
        if self._validates:
            self.machine.validate()
        jobs = [effect for effect in effects if isinstance(effect, JOBS)]
        self.applied += of(Apply, jobs)
        if self.hold:
            self.jobs += jobs
            return effects
        for job in jobs:
            effects = effects + self.finish(job)
        return effects

    def _step_in_part(self, event: Any) -> list[Effect] | None:
        """What `kvd.node.push_frames` does. None: it is for a step."""
        if isinstance(event, JobDone) and event.error is None:
            self.machine.end_job(event)
            return self.machine.take_effects()
        if isinstance(event, Received) and isinstance(event.message, PullBatch) and event.principal is HOLDER:
            is_taken = self.machine.pull(event.peer, event.sender, event.message)
            self.pulled += is_taken
            return self.machine.take_effects() if is_taken else None
        if not isinstance(event, Received) or not isinstance(event.message, PushBatch):
            return None
        numbers = push_numbers(event.message)
        if numbers is None or event.principal is not HOLDER:
            return None
        if not self.machine.push(event.peer, event.sender, numbers, event.payload, event.nbytes):
            return None
        self.pushed += 1
        return self.machine.take_effects()

    @contextmanager
    def validated_once(self) -> Iterator[None]:
        """For many steps: the time of each check grows with what the server holds."""
        self._validates = False
        yield
        self._validates = True
        self.machine.validate()

    def finish(self, job: Any) -> list[Effect]:
        """The job ends."""
        if job in self.jobs:
            self.jobs.remove(job)
        if self.error is not None:
            return self.step(JobDone(job.job, None, self.error))
        return self.step(JobDone(job.job, self._result(job)))

    def _result(self, job: Any) -> Any:
        if isinstance(job, Create):
            return [TableVersion(0, 0, 0) if first.table else read(first.source) for first in job.slices]
        if isinstance(job, ReadRows):
            return rows_at(job)
        if isinstance(job, ListRows):
            return 5, True, Span(packed_ids([3, 9]), 0, 16)
        if isinstance(job, Apply) and isinstance(job.current, TableVersion):
            return next_version(job)
        if isinstance(job, Apply):
            values = [read(given.span) for given in job.contributions if given.span is not None]
            return values[0] if job.assign else bytes(sum(column) % 256 for column in zip(*values, strict=True))
        if isinstance(job, KeepRows):
            return KeptRows(b"rows", rows_nbytes(self.machine.table.slices[job.key, job.slice_index]))
        if isinstance(job, Export):
            return 7, (("momentum", "float32"),), (Span(b"momentum", 0, 8),)
        return b"answer" if isinstance(job, Run) else None

    def look(self, *changed: Member) -> list[Effect]:
        """A new view, in which these members have changed."""
        for entry in changed:
            self.members[entry.role, entry.rank] = entry
        self.epoch += 1
        return self.step(from_scheduler(view(self.settings, self.members.values()), (1, self.epoch)))

    def say(
        self, rank: int, message: Any, payload: bytes | None = None, *, life: int = 0, peer: Any = None
    ) -> list[Effect]:
        who = worker_id(rank, life)
        self._request = max(self._request, getattr(message, "request", 0))
        nbytes = 0 if payload is None else len(payload)
        peer = NodePeer(who) if peer is None else peer  # a node is known by its incarnation here
        return self.step(Received(peer, who, Epoch(1, 1), message, payload, nbytes))

    def attach(self, rank: int, life: int = 0) -> list[Effect]:
        return self.say(rank, Attach(1, rank), life=life)

    def request(self) -> int:
        self._request += 1
        return self._request

    def init(self, key: str, value: bytes, spec: KeySpec | None = None, *, publish: bool = True, life: int = 0) -> None:
        """Worker 0 creates and publishes a key."""
        spec = spec or uint8(len(value))
        for index in range(spec.num_slices):
            start, length = spec.span(index)
            self.say(0, init_of(self.request(), key, spec, index), value[start : start + length], life=life)
        if publish:
            self.say(0, publish_of(self.request(), key, spec), life=life)

    def push(
        self, rank: int, clock: int, value: bytes | None = b"\1", *, key: str = "w", index: int = 0, **more: Any
    ) -> list[Effect]:
        request = more.pop("request", None) or self.request()
        where = {name: more.pop(name) for name in ("life", "peer") if name in more}
        fields = {"how": 0, "samples": 1, "pull": False} | more
        return self.say(rank, Push(request, (Part(key, index, clock),), **fields), value, **where)

    def push_all(self, rank: int, parts: list[tuple[str, int, int]], values: list[bytes], **more: Any) -> list[Effect]:
        fields = {"how": 0, "samples": 1, "pull": False} | more
        return self.say(
            rank, Push(self.request(), tuple(Part(*part) for part in parts), **fields), padded_bytes(values)
        )

    def pull(self, rank: int, clock: int, *, key: str = "w", request: int = 0, **more: Any) -> list[Effect]:
        return self.say(rank, Pull(request or self.request(), (Part(key, 0, clock),)), **more)

    def pull_all(self, rank: int, parts: list[tuple[str, int, int]]) -> list[Effect]:
        return self.say(rank, Pull(self.request(), tuple(Part(*part) for part in parts)))

    # ── batches ──

    def declare(self, rank: int, batch: int, *keys: str | SliceId, **more: Any) -> list[Effect]:
        """A name means slice 0 of the key."""
        slice_ids = tuple(SliceId(key, 0) if isinstance(key, str) else key for key in keys)
        return self.say(rank, DeclareBatch(self.request(), batch, slice_ids), **more)

    def push_batch(
        self, rank: int, clock: int, *values: bytes, batch: int = 1, request: int = 0, **more: Any
    ) -> list[Effect]:
        where = {name: more.pop(name) for name in ("life", "peer") if name in more}
        fields = {"how": 0, "samples": 1, "pull": False} | more
        payload = padded_bytes(values) if values else None
        return self.say(rank, PushBatch(request or self.request(), batch, clock, **fields), payload, **where)

    def pull_batch(self, rank: int, clock: int, *, batch: int = 1, **more: Any) -> list[Effect]:
        return self.say(rank, PullBatch(self.request(), batch, clock), **more)

    @property
    def groups(self) -> list[list[str]]:
        """The keys of each group, the oldest group first."""
        return [[entry.key for entry in group.slices] for group in self.machine.table.groups.values()]

    def value(self, key: str, index: int = 0, back: int = 0) -> bytes:
        """The bytes of a slice, or of its previous version."""
        slice_ = self.machine.table.slices[key, index]
        return read(slice_.span(slice_.log.previous if back else slice_.log.current))

    def explain(self) -> Any:
        return self.machine.explain(0.0)


def kinds(effects: list[Effect], peer: Any = None) -> list[str]:
    """The names of the messages sent."""
    return [type(message).__name__ for message in said(effects, peer)]


def ready(value: bytes = b"\0", settings: Any = None, **more: Any) -> Harness:
    """A server of two workers, with one key."""
    harness = Harness(settings, **more)
    harness.init("w", value)
    return harness


def packed(*keys: str, settings: Any = None, declare: bool = True, **more: Any) -> Harness:
    """A server with keys of one byte, which every worker calls batch 1."""
    harness = Harness(settings, **more)
    for key in keys:
        harness.init(key, b"\0")
    for rank in range(harness.settings.num_workers if declare else 0):
        harness.declare(rank, 1, *keys)
    return harness


def together(*keys: str, **more: Any) -> Harness:
    """A server on which the keys are one group, after one round in which every worker pushed 1, 2, 3 …"""
    harness = packed(*keys, **more)
    for rank in range(harness.settings.num_workers):
        harness.push_batch(rank, 1, *[bytes([number]) for number in range(1, len(keys) + 1)])
    assert harness.groups == [list(keys)]
    return harness


def not_yet(effects: Any) -> NotYet:
    """The only answer among the effects, which is a NotYet."""
    answer = one([message for message in said(effects) if isinstance(message, NotYet | Refused)])
    assert isinstance(answer, NotYet)
    return answer


def refusal(effects: Any) -> Refused:
    return one([message for message in said(effects) if isinstance(message, Refused)])


def values(effects: Any, peer: Any = None) -> tuple[tuple[int, ...], list[bytes]]:
    """The versions and the bytes of the one Values that is sent."""
    send = one([send for send in of(Send, effects) if isinstance(send.message, Values) and peer in (None, send.peer)])
    assert isinstance(send.message, Values)
    return send.message.versions, [read(span) for span in send.payload]
