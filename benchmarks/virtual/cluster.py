"""A whole cluster in virtual time: its nodes, their programs, and what it foretells."""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from random import Random
from typing import Any

from benchmarks.virtual.costs import Costs
from benchmarks.virtual.hosts import Cores, Pipe
from benchmarks.virtual.network import Network, Port, Rates
from benchmarks.virtual.nodes import Host, Node
from benchmarks.virtual.pricing import SchedulerPricing, ServerPricing, WorkerPricing
from kvd.config.settings import Config
from kvd.core.machine import Complete, Event, LocalCall
from kvd.core.requests import Barrier, InitKeys, Item, JoinCluster, Request, Transfer
from kvd.protocol.messages import SMALL_PUSH_BYTES
from kvd.protocol.specs import KeySpec
from tests.simulator.clock import VirtualClock
from tests.simulator.machines import SCHEDULER_ADDRESS, MachineFactory
from tests.simulator.settings import ClusterSettings, Timeouts

WARM_UP_STEPS = 2  # after these, and one more, batches are declared and lanes taken
NUM_SHARDS = Config().num_shards
PATIENCE_S = 1e6  # of virtual time
NO_NETWORK = Rates(1e15, 0.0)  # of the only host: nothing leaves it


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be foretold.

    Attributes:
        sizes: how many float32 each key has.
        slice_bytes: 0: what kvd chooses for so many servers.
        cores: of each host.
        network: between the hosts, of which each node has one for itself; None: all nodes share one host.
        shares_memory: within a host values pass by reference.
    """

    workers: int
    servers: int
    sizes: tuple[int, ...]
    steps: int
    cores: int
    network: Rates | None = None
    slice_bytes: int = 0
    shares_memory: bool = True

    @property
    def nbytes(self) -> int:
        """What each worker pushes in a step."""
        return 4 * sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one role, in the steps that were measured: of the node of which there was most.

    Attributes:
        cpu_s: of a core, for each step.
        counts: of what the costs are made up, for each step (`benchmarks.virtual.pricing`).
        port_share: of what its port can pass in one direction, in that with more; 0 without a network.
        memory_nbytes: the most that its values have taken, from the start on.
    """

    cpu_s: float
    counts: dict[str, float]
    port_share: float
    memory_nbytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a cluster does.

    Attributes:
        step_s: of each step of each worker, the median.
        steps_s: all of them one after the other, by their number: of rank 0.
        joined_s: until all workers have joined.
        made_s: from then on, until all keys are made.
        barrier_s: from the first worker that enters until the last one is told.
        scheduler_step_share: of a core, while steps are made.
        scheduler_join_cpu_s: until all workers have joined.
        scheduler_nbytes: that it has sent until then.
        memory_share: of what the memory of the first host can pass, while steps are made.
    """

    step_s: float
    steps_s: tuple[float, ...]
    joined_s: float
    made_s: float
    barrier_s: float
    workers: Usage
    servers: Usage
    scheduler_step_share: float
    scheduler_join_cpu_s: float
    scheduler_nbytes: int
    memory_share: float


@dataclass(slots=True)
class Mark:
    """How it stood at one moment."""

    at: float
    busy_s: list[float]
    counts: list[dict[str, float]]
    passed: list[tuple[int, int]]
    memory_nbytes: int


class Loop:
    """The program of a worker: it joins, makes the keys, meets the others and pushes and pulls, step by step.

    Args:
        ended: of how many workers the call in each place has ended; counted here.

    Attributes:
        ended: when each of its calls ended, in their order.
    """

    def __init__(self, clock: VirtualClock, calls: Sequence[Request], ended: Counter[int]) -> None:
        self.ended: list[float] = []
        self._clock = clock
        self._all_ended = ended
        self._calls = iter(calls)
        self._numbers = count(1)

    def begin(self, node: Node) -> None:
        for event in self._next():
            node.feed(event)

    def completed(self, node: Node, complete: Complete) -> Sequence[Event]:
        self._all_ended[len(self.ended)] += 1
        self.ended.append(self._clock.now)
        return [] if complete.error else self._next()

    def _next(self) -> list[Event]:
        request = next(self._calls, None)
        if request is None:
            return []
        return [LocalCall(next(self._numbers), request, self._clock.now + PATIENCE_S)]


JOIN, INIT, MEET, WARM_UP = range(4)  # places of calls: the first barrier lets workers that waited for keys catch up
MEET_AGAIN = WARM_UP + WARM_UP_STEPS
LEAD_IN = MEET_AGAIN + 1  # a step that is not counted: it begins with what ended the barrier


class Virtual:
    """One cluster. The same plan and costs give the same prediction."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan = plan
        self._costs = costs
        self._clock = VirtualClock()
        self._problems: list[str] = []
        self._network = Network(self._clock, shares_memory=plan.shares_memory)
        self._shared_host = None if plan.network else self._host()
        slice_bytes = plan.slice_bytes or Config().slice_bytes_for(plan.servers, given=False)
        self._slice_bytes = slice_bytes
        self._settings = _settings(plan, slice_bytes)
        self._machines = MachineFactory(self._settings, Random(0), NUM_SHARDS)
        self._scheduler = self._add_scheduler()
        self._servers = [self._add_server(rank) for rank in range(plan.servers)]
        self._loops: list[Loop] = []
        self._ended = Counter[int]()  # of how many workers the call in each place has ended
        calls = self._calls()
        self._workers = [self._add_worker(rank, calls) for rank in range(plan.workers)]

    def run(self) -> Prediction:
        """Let it run to its end.

        Raises:
            RuntimeError: a call failed, or a node stopped.
        """
        for node in (self._scheduler, *self._servers, *self._workers):
            node.start()
        for node, loop in zip(self._workers, self._loops, strict=True):
            loop.begin(node)
        joined = self._until(JOIN)
        made = self._until(INIT)
        self._until(MEET_AGAIN)
        entered = max(loop.ended[MEET_AGAIN - 1] for loop in self._loops)
        told_at = max(loop.ended[MEET_AGAIN] for loop in self._loops)
        began = self._until(LEAD_IN)
        ended = self._until(LEAD_IN + self._plan.steps)
        steps = [
            [after - before for before, after in pairwise(loop.ended[LEAD_IN : LEAD_IN + self._plan.steps + 1])]
            for loop in self._loops
        ]
        return Prediction(
            step_s=statistics.median([step_s for each in steps for step_s in each]),
            steps_s=tuple(steps[0]),
            joined_s=joined.at,
            made_s=made.at - joined.at,
            barrier_s=told_at - entered,
            workers=self._usage(self._workers, began, ended),
            servers=self._usage(self._servers, began, ended),
            scheduler_step_share=(ended.busy_s[0] - began.busy_s[0]) / (ended.at - began.at),
            scheduler_join_cpu_s=joined.busy_s[0],
            scheduler_nbytes=int(joined.counts[0].get("byte_s", 0)),
            memory_share=(ended.memory_nbytes - began.memory_nbytes)
            / self._costs.memory_bytes_per_s
            / (ended.at - began.at),
        )

    # ── building ──

    def _host(self) -> Host:
        memory = Pipe(self._costs.memory_bytes_per_s)
        cores = Cores(self._clock, self._plan.cores, memory, self._costs.wake_s)
        return Host(cores, memory, Port(self._clock, self._plan.network or NO_NETWORK))

    def _add(self, name: str, machine: Any, pricing: Any, address: str = "", program: Loop | None = None) -> Node:
        node = Node(
            name,
            machine,
            self._shared_host or self._host(),
            pricing,
            self._clock,
            self._network,
            self._problems,
            program,
        )
        if address:
            self._network.listen(address, node)
        return node

    def _add_scheduler(self) -> Node:
        machine = self._machines.scheduler(0.0, None)
        return self._add("scheduler", machine, SchedulerPricing(self._costs.scheduler), SCHEDULER_ADDRESS)

    def _add_server(self, rank: int) -> Node:
        address = f"sim://server{rank}"
        machine = self._machines.server(rank, address)
        return self._add(f"server {rank}", machine, ServerPricing(self._costs.server), address)

    def _add_worker(self, rank: int, calls: Sequence[Request]) -> Node:
        loop = Loop(self._clock, calls, self._ended)
        self._loops.append(loop)
        machine = self._machines.worker(rank, self._settings.wire(NUM_SHARDS))
        return self._add(f"worker {rank}", machine, WorkerPricing(self._costs.worker), program=loop)

    def _calls(self) -> list[Request]:
        """What every worker calls. What they push from and pull into stands for memory of their programs. The last step
        only begins, as the first one that counts has begun when it is counted from."""
        specs = [KeySpec("float32", (size,), self._slice_bytes) for size in self._plan.sizes]
        items = tuple([Item(f"key/{number}", spec, object(), object()) for number, spec in enumerate(specs)])
        step = Transfer(items, push=True, pull=True)
        first: list[Request] = [JoinCluster(), InitKeys(items), Barrier("made")]
        return [*first, *([step] * WARM_UP_STEPS), Barrier("begin"), *([step] * (1 + self._plan.steps + 1))]

    # ── looking ──

    def _until(self, call: int) -> Mark:
        """All workers have ended the call in this place."""
        self._clock.run(PATIENCE_S, lambda: self._ended[call] == self._plan.workers or bool(self._problems))
        if self._problems:
            raise RuntimeError("; ".join(self._problems))
        if self._ended[call] < self._plan.workers:
            raise RuntimeError("the workers wait for ever")
        return self._mark()

    def _mark(self) -> Mark:
        nodes = (self._scheduler, *self._servers, *self._workers)
        return Mark(
            self._clock.now,
            [node.busy_s for node in nodes],
            [dict(node.pricing.counts) for node in nodes],
            [(node.host.port.sent_nbytes, node.host.port.received.nbytes) for node in nodes],
            self._servers[0].host.memory.nbytes,
        )

    def _usage(self, nodes: Sequence[Node], begin: Mark, end: Mark) -> Usage:
        first = 1 if nodes is self._servers else 1 + len(self._servers)
        steps, seconds = self._plan.steps, end.at - begin.at
        places = range(first, first + len(nodes))
        busiest = max(places, key=lambda place: end.busy_s[place] - begin.busy_s[place])
        before = begin.counts[busiest]
        counts = {name: number - before.get(name, 0.0) for name, number in end.counts[busiest].items()}
        passed = max(
            [
                now - before
                for place in places
                for now, before in zip(end.passed[place], begin.passed[place], strict=True)
            ]
        )
        rate = self._plan.network.bytes_per_s if self._plan.network else float("inf")
        return Usage(
            cpu_s=(end.busy_s[busiest] - begin.busy_s[busiest]) / steps,
            counts={name: number / steps for name, number in sorted(counts.items())},
            port_share=passed / rate / seconds,
            memory_nbytes=max([node.ledger.peak_nbytes for node in nodes]),
        )


def _settings(plan: Plan, slice_bytes: int) -> ClusterSettings:
    """Those of kvd's defaults, but for memory and patience, which are not to end anything here."""
    defaults = Config()
    timeouts = Timeouts(
        heartbeat_interval_s=defaults.heartbeat_interval_s,
        server_timeout_s=PATIENCE_S,
        worker_timeout_s=PATIENCE_S,
        call_timeout_s=PATIENCE_S,
        answer_timeout_s=PATIENCE_S,
        notice_s=PATIENCE_S,
    )
    return ClusterSettings(
        servers=plan.servers,
        workers=plan.workers,
        rounds_ahead=defaults.rounds_ahead,
        slice_bytes=slice_bytes,
        credit_bytes=defaults.credit_bytes,
        small_push_bytes=SMALL_PUSH_BYTES,
        memory_limit_bytes=1 << 60,
        timeouts=timeouts,
    )


def foretell(plan: Plan, costs: Costs) -> Prediction:
    """Run a cluster in virtual time.

    No garbage is collected meanwhile: it would look through all machines again and again, and would decide when memory
    that circles of references keep ends to count.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Virtual(plan, costs).run()
    finally:
        if was_enabled:
            gc.enable()
