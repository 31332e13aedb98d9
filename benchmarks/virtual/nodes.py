"""A node in virtual time: a real machine, whose steps and effects take the time that was measured for such.

It plays `kvd.node.shell.driver` for the machine, as `tests.simulator.shell` does under faults. Values have a size and
no bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.virtual.hosts import Cores, Pipe, Work
from benchmarks.virtual.memory import Ledger, Memory
from benchmarks.virtual.network import Network, Port
from kvd.core.machine import (
    Apply,
    Complete,
    Connect,
    Copy,
    Create,
    Disconnect,
    Event,
    Halt,
    Job,
    JobDone,
    LogEntry,
    Machine,
    OfOneRun,
    Peer,
    Persist,
    Persisted,
    Received,
    Send,
    Stop,
    Tick,
)
from kvd.protocol.codec import encode
from kvd.protocol.messages import Epoch, View, ViewChange
from kvd.protocol.specs import padded
from tests.simulator.clock import VirtualClock
from tests.simulator.shell import by_run

MOST_HELD = 16  # answers that wait for the next one to the same node, see `kvd.transport.links.write_coalescing`


@dataclass(frozen=True, slots=True)
class Host:
    """What its processes share."""

    cores: Cores
    memory: Pipe
    port: Port


class Pricing(Protocol):
    """What the work of a role costs. Each method says it in seconds, and notes in `counts` what for."""

    def event(self, event: Event) -> float:
        """The step of the machine for this event."""

    def after(self, event: Event) -> float:
        """What is left to do for it when its effects have left."""

    def send(self, message: Any, header_nbytes: int, nbytes: int, *, by_reference: bool) -> Work:
        """A message with so many bytes of payload leaves."""

    def take(self, message: Any, nbytes: int, *, by_reference: bool) -> Work:
        """One arrives."""

    def job(self, job: Job) -> Work:
        """A job of a server."""

    def copy(self, copy: Copy) -> float:
        """What a copy costs besides its bytes, which `take` has counted."""

    def complete(self) -> float:
        """A call of the program ends."""

    def switched(self, others: float) -> float:
        """So many other processes have had the core since."""

    @property
    def counts(self) -> Mapping[str, float]:
        """How often there was what, so far."""


class Program(Protocol):
    """What a worker does: it is told of calls that are complete, and makes others."""

    def completed(self, node: Node, complete: Complete) -> Sequence[Event]:
        """The events of its next calls."""


class Node:
    """One process.

    Args:
        problems: takes what goes wrong, in words: errors of calls, reasons to stop.

    Attributes:
        ways: its connections, by its own name for the other end.
        ledger: the memory for values that it has; what it pushes from, and pulls into, does not count.
        busy_s: how long it had a core so far.
    """

    def __init__(
        self,
        name: str,
        machine: Machine,
        host: Host,
        pricing: Pricing,
        clock: VirtualClock,
        network: Network,
        problems: list[str],
        program: Program | None = None,
    ) -> None:
        self.machine = machine
        self.host = host
        self.name = name
        self.pricing = pricing
        self.program = program
        self.ways: dict[Peer, Any] = {}
        self.ledger = Ledger()
        self.busy_s = 0.0
        self._problems = problems
        self._clock = clock
        self._network = network
        self._queue: deque[tuple[Event, bool]] = deque()  # the event, and whether its values came by reference
        self._held: dict[Peer, list[tuple[Send, int, Epoch]]] = {}
        self._tick_at: float | None = None
        self._encoded: dict[int, tuple[Any, int]] = {}  # messages to many, and the size of their headers

    # ── what happens to it ──

    def start(self) -> None:
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        """Something happened in this process."""
        self._queue.append((event, True))
        self.host.cores.wake(self)

    def take(self, peer: Peer, sender: Node, message: Any, nbytes: int, payload: Any, *, by_reference: bool) -> None:
        """A message arrived."""
        if payload is not None and not by_reference:
            payload = Memory(nbytes, self.ledger)
        incarnation, (run, epoch, body) = sender.machine.incarnation, message
        self._queue.append((Received(peer, incarnation, epoch, body, payload, nbytes, run), by_reference))
        self.host.cores.wake(self)

    # ── what its host asks ──

    def switched(self, others: float) -> float:
        return self.pricing.switched(others)

    def has_used(self, cpu_s: float) -> None:
        self.busy_s += cpu_s

    def work(self) -> Iterator[Work] | None:
        if not self._queue:
            return None
        return self._handle(*self._queue.popleft())

    # ── its work ──

    def _handle(self, event: Event, by_reference: bool) -> Iterator[Work]:
        """One event from outside, and what follows of it: jobs, and the program's next calls."""
        chain = deque([event])
        if isinstance(event, Received):
            yield self.pricing.take(event.message, event.nbytes, by_reference=by_reference)
        while chain:
            event = chain.popleft()
            cost_s = self.pricing.event(event)
            if cost_s:
                yield Work(cost_s)
            effects = self.machine.step(event, self._clock.now)
            for effect, run, epoch in by_run(self.machine, effects):
                yield from self._carry_out(effect, run, epoch, chain)
            late_s = self.pricing.after(event)
            if late_s:
                yield Work(late_s)
        if self._held:
            yield from self._pass_on(*self._held)
        self._set_timer()

    def _carry_out(self, effect: OfOneRun, run: int, epoch: Epoch, chain: deque[Event]) -> Iterator[Work]:
        match effect:
            case Send():
                yield from self._send(effect, run, epoch)
            case Create() | Apply():
                yield from self._pass_on(*self._held)
                yield self.pricing.job(effect)
                chain.append(JobDone(effect.job, self._made(effect), run=run))
            case Copy():
                yield Work(self.pricing.copy(effect))
            case Complete():
                yield Work(self.pricing.complete())
                if effect.error is not None:
                    self._problems.append(f"{self.name}: {effect.error}")
                if self.program is not None:
                    chain.extend(self.program.completed(self, effect))
            case Connect():
                self._network.connect(self, effect.peer, effect.address)
            case Disconnect():
                self._network.disconnect(self, effect.peer)
            case Persist():
                chain.append(Persisted(effect.token))
            case Halt():
                self._problems.append(f"{self.name} halts: {effect.error}")
            case Stop():
                self._problems.append(f"{self.name} stops: {effect.reason}")
            case LogEntry():
                if effect.level in ("warning", "error"):
                    self._problems.append(f"{self.name}: {effect.text} {dict(effect.fields)}")
            case _:
                raise NotImplementedError(f"{type(effect).__name__}: benchmarks.simulate has no cost of it")

    def _made(self, job: Create | Apply) -> Any:
        if isinstance(job, Create):
            return [Memory(first.source.nbytes, self.ledger) for first in job.slices]
        if job.keeps_merged or job.encoding is not None:
            raise NotImplementedError("benchmarks.simulate knows neither replicas nor compression")
        return Memory(job.nbytes, self.ledger)

    # ── messages out ──

    def _send(self, effect: Send, run: int, epoch: Epoch) -> Iterator[Work]:
        """Answers without a payload wait for the next ones: see `kvd.transport.links.write_coalescing`."""
        if self.program is None and not effect.payload:
            self._held.setdefault(effect.peer, []).append((effect, run, epoch))
            if len(self._held) >= MOST_HELD:
                yield from self._pass_on(*self._held)
            return
        yield from self._pass_on(effect.peer)
        yield from self._leave(effect, run, epoch)

    def _pass_on(self, *peers: Peer) -> Iterator[Work]:
        for peer in peers:
            for effect, run, epoch in self._held.pop(peer, ()):
                yield from self._leave(effect, run, epoch)

    def _leave(self, effect: Send, run: int, epoch: Epoch) -> Iterator[Work]:
        if effect.peer not in self.ways:
            return  # as in the driver: the other end is gone
        payload = effect.payload
        nbytes = payload_nbytes(payload)
        header_nbytes = self._header_nbytes(effect.message, run, epoch)
        by_reference = self._network.is_by_reference(self, effect.peer)
        yield self.pricing.send(effect.message, header_nbytes, nbytes, by_reference=by_reference)
        message = (run, epoch, effect.message)
        held = tuple([span.buffer for span in payload]) if payload else None
        self._network.carry(self, effect.peer, message, header_nbytes, nbytes, held)

    def _header_nbytes(self, message: Any, run: int, epoch: Epoch) -> int:
        """What goes to many nodes is encoded once, as in `kvd.node.shell.sending`."""
        if not isinstance(message, View | ViewChange):
            return len(encode(message, self.machine.incarnation, epoch, run))
        known = self._encoded.get(id(message))
        if known is None or known[0] is not message:
            if len(self._encoded) >= 64:
                self._encoded.clear()
            header = encode(message, self.machine.incarnation, epoch, run)
            known = self._encoded[id(message)] = (message, len(header))
        return known[1]

    # ── time ──

    def _set_timer(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is None or (self._tick_at is not None and self._tick_at <= deadline):
            return
        self._tick_at = max(deadline, self._clock.now + 0.001)
        at = self._tick_at
        self._clock.at(at, lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        """The deadline may have moved: then nothing is due yet."""
        if self._tick_at != at:
            return
        self._tick_at = None
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline > self._clock.now:
            self._set_timer()
        else:
            self.feed(Tick())


def payload_nbytes(payload: Sequence[Any]) -> int:
    """The bytes of spans side by side, each of which begins at a multiple of 8."""
    nbytes = 0
    for _, _, size in payload:
        nbytes = padded(nbytes) + size
    return nbytes
