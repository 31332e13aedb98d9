"""Workers with an optimizer of their own, which get weights and momentum from each other when they are restarted.

Each step's gradients depend on the weights, so whoever has the state of another step, or parts of two, spoils the sum
of all. What a worker should have after each step is calculated beside the cluster.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from kvd.core.membership import ViewState
from kvd.core.places import step_of
from kvd.core.requests import Barrier, ClockOf, Depart, Flush, PassOver, Transfer
from kvd.core.worker.machine import WorkerMachine
from kvd.core.worker.state_transfers import Begin, PartRead, Script, give, offer_of, take
from kvd.core.worker.step_loops import StepLoops
from kvd.errors import JobEnded, KvdError, NodeLost
from kvd.protocol.messages import (
    EXIT_BARRIER,
    NO_STATE,
    Departure,
    GiveState,
    Gone,
    MemberState,
    StateGiven,
    StatePart,
)
from tests.simulator.process import Coroutine, PendingCall, Process, Sleep, Start
from tests.simulator.simulator import Me, World
from tests.simulator.workloads.steps import RETRY_S, SIZE, Floats, Keys, enter, insist, item

OFFER_AFTER_S = 0.1
LOOK_S = 0.02  # between two looks of a program that waits
OFFER_S = 60.0
PART_NBYTES = 3000
RATE, MOMENTUM = np.float32(0.1), np.float32(0.9)
DECLARED_DEAD = (MemberState.DEAD, MemberState.LOST, MemberState.GONE)


@dataclass
class Memory:
    """What is in the memory of one process.

    Attributes:
        made: how many steps are in it; None: it is that of no step.
    """

    values: Floats  # weights, then momentum
    made: int | None = None


@dataclass
class HealedTraining:
    """Ends with the state that is calculated beside it, in all workers.

    Attributes:
        healed: how many states were taken after step 0; for tests of the tests.
        passed_over: how many of them after a step that counted already.
        lost: how many programs ended since nobody had their state.
    """

    workers: int
    steps: int
    keys: Keys = ("a", "b")
    size: int = SIZE
    pace_s: float = 0.25
    healed: int = 0
    passed_over: int = 0
    lost: int = 0
    _memories: dict[Process, Memory] = field(default_factory=dict)
    _truth: list[Floats] = field(default_factory=list)  # after so many steps

    # ── the arithmetic ──

    @property
    def _half(self) -> int:
        return len(self.keys) * self.size

    def first_values(self, rank: int, life: int) -> Floats:
        """With what a process begins: each with something else."""
        weights = np.random.default_rng((rank, life)).normal(size=self._half)
        return np.concatenate([weights, np.zeros(self._half)]).astype(np.float32)

    def weights(self, values: Floats, position: int) -> Floats:
        return values[position * self.size : (position + 1) * self.size]

    def gradient(self, position: int, weights: Floats, rank: int, number: int) -> Floats:
        noise = np.random.default_rng((position, rank, number)).normal(size=self.size).astype(np.float32)
        return weights * np.float32(0.3) + noise

    def update(self, values: Floats, merged: list[Floats]) -> None:
        weights, momentum = values[: self._half], values[self._half :]
        momentum *= MOMENTUM
        momentum += np.concatenate(merged)
        weights -= RATE * momentum

    def truth(self, number: int) -> Floats:
        """The state after so many steps."""
        while len(self._truth) <= number:
            values = self._truth[-1].copy()
            merged = []
            for position in range(len(self.keys)):
                weights = self.weights(values, position)
                total = self.gradient(position, weights, 0, len(self._truth) - 1)
                for rank in range(1, self.workers):
                    total = total + self.gradient(position, weights, rank, len(self._truth) - 1)
                merged.append(total)
            self.update(values, merged)
            self._truth.append(values)
        return self._truth[number]

    # ── the program ──

    def program(self, me: Me) -> Coroutine:
        memory = self._memories[me.process] = Memory(self.first_values(me.number, me.life))
        try:
            yield from enter(me, self.keys, np.zeros(self.size, np.float32), None)
        except JobEnded:
            return  # the others have finished
        loops = StepLoops(me.machine.stopped(), is_strict=True)
        half = self.steps // 2
        for total in (half, self.steps - half):
            for step in range(loops.begin(total, self.keys), total):
                loops.enter(step)
                is_there = yield from self.come_to(me, memory, loops)
                if is_there is None:
                    yield Depart(Departure.LEFT)
                    return
                if is_there:
                    yield from self.make_step(me, memory, loops)
                loops.leave()
                loops.validate()
            loops.end()
            end = step_of(loops.place)
            if memory.made != end and not loops.is_past and not (yield from self.take(me, memory, end)):
                yield Depart(Departure.LEFT)
                return
        self.check_state(me, memory, "ends with")
        for request in (Flush(), Depart(Departure.DONE), Barrier(EXIT_BARRIER)):
            while True:
                try:
                    yield from self.wait(me, memory, (yield Start(request)))
                    break
                except NodeLost:
                    yield Sleep(RETRY_S)
        yield Depart(Departure.LEFT)

    def come_to(self, me: Me, memory: Memory, loops: StepLoops) -> Generator[Any, Any, bool | None]:
        """Whether the program makes this step, with the state that it needs; None: nobody has that."""
        number = step_of(loops.place)
        if memory.made == number:
            return True
        counts = loops.counts_whole
        if not (yield from self.take(me, memory, number + counts)):
            return None
        if counts:
            yield PassOver()
            loops.pass_over()
            self.passed_over += 1
        return not counts

    def make_step(self, me: Me, memory: Memory, loops: StepLoops) -> Coroutine:
        number = step_of(loops.place)
        self.check_state(me, memory, "makes a step with")
        yield Sleep(self.pace_s * ((3 * number + 2 * me.rank) % 4) / 2)
        targets = [np.full(self.size, np.nan, np.float32) for _ in self.keys]
        calls = []
        for position, (key, target) in enumerate(zip(self.keys, targets, strict=True)):
            loops.take_pushes([key])
            source = self.gradient(position, self.weights(memory.values, position), me.rank, number)
            transfer = Transfer((item(key, source, target),), push=True, pull=True, place=loops.place)
            calls.append((transfer, (yield Start(transfer))))
        for transfer, call in calls:
            yield from self.finish(me, memory, transfer, call, number + 1)
        memory.made = None
        yield Sleep(0.01)
        self.update(memory.values, targets)
        yield Sleep(0.01)
        memory.made = number + 1

    def finish(self, me: Me, memory: Memory, transfer: Transfer, call: PendingCall, clock: int) -> Coroutine:
        """Waits for a push and what it pulls. If a server is lost before it begins, it is made again."""
        while True:
            try:
                yield from self.wait(me, memory, call)
                return
            except NodeLost:
                yield Sleep(RETRY_S)
            if (yield from insist(ClockOf(transfer.items[0].key))) >= clock:
                pulled = tuple(entry._replace(source=None) for entry in transfer.items)
                transfer = Transfer(pulled, push=False, pull=True)
            call = yield Start(transfer)

    def wait(self, me: Me, memory: Memory, call: PendingCall) -> Generator[Any, Any, Any]:
        """Waits for a call, and gives the state of this process to others meanwhile."""
        home = me.machine.view.first_partition
        offer: PendingCall | None = None
        offer_at = me.world.clock.now + OFFER_AFTER_S
        while not call.done:
            if offer is None and memory.made is not None and me.world.clock.now >= offer_at:
                offer = yield Start(offer_of(memory.made, home), OFFER_S)
            if offer is not None and offer.done:
                ended, offer = offer, None
                offer_at = me.world.clock.now + OFFER_AFTER_S
                if ended.error is None and isinstance(ended.result[0][0], GiveState):
                    self.check_state(me, memory, "gives")
                    yield from carried_out(
                        give(ended.result[0][0], home, self.size_of(memory), self.read_by_parts(memory))
                    )
                    self.check_state(me, memory, "has given")
            yield Sleep(LOOK_S)
        if offer is not None:
            yield Start(offer_of(NO_STATE, home), OFFER_S)
        return (yield call)

    # ── states on their way ──

    def size_of(self, memory: Memory) -> tuple[int, int]:
        return -(-memory.values.nbytes // PART_NBYTES), 0

    def read_by_parts(self, memory: Memory) -> Any:
        def read(part: int) -> PartRead:
            data = memory.values.view(np.uint8)[part * PART_NBYTES : (part + 1) * PART_NBYTES].copy()
            return PartRead(data, data.nbytes, crc32(data.data))

        return read

    def take(self, me: Me, memory: Memory, made: int) -> Generator[Any, Any, bool]:
        """Gets the state after so many steps. False: nobody has it."""
        memory.made = None
        offset = 0

        def begin(given: StateGiven) -> None:
            nonlocal offset
            offset = 0

        def write(message: StatePart, payload: Any) -> None:
            nonlocal offset
            data = np.frombuffer(payload, np.uint8)
            if crc32(data.data) != message.checksum:
                me.world.fail(f"{me.process.name} got a part that is not what was sent")
            memory.values.view(np.uint8)[offset : offset + data.nbytes] = data
            offset += data.nbytes

        home = me.machine.view.first_partition
        while True:
            try:
                has_pushed = me.machine.has_pushed_in_loops
                gone = yield from carried_out(take(made, home, begin, write, has_pushed=has_pushed))
                break
            except NodeLost:
                yield Sleep(RETRY_S)
        if gone is not None and is_ghost(me):
            return False  # another process has its place, and an answer of before has come late
        if gone is not None:
            self.check_nobody_has_it(me, made, gone.why)
            if gone.why is not Gone.FIRST or offset:
                self.lost += 1
                return False
            self._truth = [memory.values.copy()]
        memory.made = made
        self.healed += made > 0
        self.check_state(me, memory, "has taken")
        return True

    # ── what must hold ──

    def check_state(self, me: Me, memory: Memory, what: str) -> None:
        """The state of a process is that after the steps that it says."""
        if is_ghost(me):
            return  # it may be of a time before a worker began anew
        if memory.made is None or not np.array_equal(memory.values, self.truth(memory.made)):
            me.world.fail(f"{me.process.name} {what} a state that is not that after {memory.made} steps")

    def check_nobody_has_it(self, me: Me, made: int, why: Gone) -> None:
        """No process has a state, but those that were declared dead, or are replaced."""
        views = [server.session.view for server in me.world.servers()]
        for process, memory in self._memories.items():
            machine = process.machine
            if memory.made is None or not process.alive or me.world.processes[process.name] is not process:
                continue
            assert isinstance(machine, WorkerMachine)
            if not any(is_gone(view, machine) for view in views) and not process.finished:
                me.world.fail(f"{me.process.name} hears {why} of step {made}, and {process.name} has {memory.made}")

    def check(self, world: World) -> None:
        """All processes that have not lost the state have that of the end."""
        for name, process in world.processes.items():
            memory = self._memories.get(process)
            if memory is not None and memory.made is not None and memory.made != self.steps:
                world.fail(f"{name} ends after {memory.made} steps of {self.steps}")


def is_ghost(me: Me) -> bool:
    """Whether another process has the place of this one."""
    return me.world.processes[me.process.name] is not me.process


def is_gone(view: ViewState, machine: WorkerMachine) -> bool:
    """Whether a server does not count on this worker any more."""
    member = view.worker(machine.session.rank)
    return member is None or member.incarnation != machine.incarnation or member.state in DECLARED_DEAD


def carried_out(script: Script) -> Generator[Any, Any, Any]:
    """A script of `kvd.core.worker.state_transfers`, in a program."""
    value: Any = None
    error: KvdError | None = None
    while True:
        try:
            step = script.send(value) if error is None else script.throw(error)
        except StopIteration as end:
            return end.value
        value = error = None
        if isinstance(step, Begin):
            value = yield Start(step.request)
        else:
            try:
                value = yield step.call
            except KvdError as failure:
                error = failure
