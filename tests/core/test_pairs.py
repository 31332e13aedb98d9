"""All machines together: a scheduler, servers and workers, over a link that loses nothing and keeps the order."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import (
    SCHEDULER,
    Apply,
    Complete,
    Copy,
    Create,
    JobDone,
    LocalCall,
    Persisted,
    Received,
    Run,
    Send,
    ServerPeer,
    Tick,
    Unsaved,
)
from kvd.core.requests import Item
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.core.worker.machine import WorkerMachine, WorkerSettings
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import ABSENT, ASSIGN, Command, Departure, Settings
from kvd.protocol.specs import KeySpec
from tests.core.fakes import (
    OPEN,
    SLICE,
    NodePeer,
    cluster,
    copies,
    padded_bytes,
    read,
    server_id,
    session,
    uint8,
    worker_id,
)

SCHEDULER_ID = 1


class Cluster:
    """All machines by incarnation. Messages go through the codec, jobs end at once, and time stands still."""

    def __init__(self, settings: Settings, *, mode: str = "sync") -> None:
        limits = SchedulerSettings(settings._replace(mode="", merge=""), 1.0, 5.0, 20.0, break_on_loss=True)
        self.machines: dict[int, Any] = {SCHEDULER_ID: SchedulerMachine(limits, SCHEDULER_ID, 1, 0.0)}
        self.queue: deque[tuple[int, Any]] = deque()
        self.done: dict[tuple[int, int], Complete] = {}
        self.messages = 0
        self._calls = 0
        self._wanted = OPEN._replace(mode=mode, merge="sum", staleness=settings.staleness)
        for rank in range(settings.num_servers):
            self.add(ServerMachine(ServerSettings(1 << 30, True, small_push_bytes=-1), session("server", rank)))
        for rank in range(settings.num_workers):
            self.start_worker(rank)

    def start_worker(self, rank: int, life: int = 0) -> None:
        self.add(
            WorkerMachine(WorkerSettings(2 * SLICE, small_push_bytes=-1), session("worker", rank, self._wanted, life))
        )
        self.call(rank, requests.JoinCluster(), life)

    def add(self, machine: Any) -> None:
        self.machines[machine.incarnation] = machine
        self.feed(machine.incarnation, Tick())

    def kill(self, incarnation: int) -> None:
        del self.machines[incarnation]

    def feed(self, who: int, event: Any) -> None:
        self.queue.append((who, event))
        while self.queue:
            target, happened = self.queue.popleft()
            machine = self.machines.get(target)
            for effect in [] if machine is None else machine.step(happened, 0.0):
                self.carry_out(machine, effect)

    def carry_out(self, machine: Any, effect: Any) -> None:
        who = machine.incarnation
        if isinstance(effect, Send):
            self.send(machine, effect)
        elif isinstance(effect, Create):
            self.queue.append((who, JobDone(effect.job, [read(first.source) for first in effect.slices])))
        elif isinstance(effect, Apply):
            given = [read(entry.span) for entry in effect.contributions if entry.span is not None]
            summed = given[0] if effect.assign else bytes(sum(column) % 256 for column in zip(*given, strict=True))
            self.queue.append((who, JobDone(effect.job, summed)))
        elif isinstance(effect, Run):
            self.queue.append((who, JobDone(effect.job, read(effect.body) if effect.body.nbytes else b"")))
        elif isinstance(effect, Unsaved):
            self.queue.append((who, Persisted(effect.token)))
        elif isinstance(effect, Copy):
            for target, start, source in copies([effect]):
                target[start : start + source.nbytes] = read(source)
        elif isinstance(effect, Complete):
            self.done[who, effect.call] = effect

    def send(self, machine: Any, effect: Send) -> None:
        self.messages += 1
        target = SCHEDULER_ID if effect.peer == SCHEDULER else effect.peer
        peer: Any = SCHEDULER if machine.incarnation == SCHEDULER_ID else NodePeer(machine.incarnation)
        if isinstance(machine, ServerMachine):
            peer = ServerPeer(machine.incarnation)
        sender, view, message, _ = decode(encode(effect.message, machine.incarnation, machine.epoch))
        payload = padded_bytes([read(span) for span in effect.payload]) if effect.payload else None
        nbytes = 0 if payload is None else len(payload)
        assert isinstance(target, int)
        self.queue.append((target, Received(peer, sender, view, message, payload, nbytes)))

    # ── what programs do ──

    def call(self, rank: int, request: Any, life: int = 0) -> tuple[int, int]:
        self._calls += 1
        who = worker_id(rank, life)
        self.feed(who, LocalCall(self._calls, request, 1000.0))
        return who, self._calls

    def result(self, call: tuple[int, int]) -> Any:
        assert self.done[call].error is None, self.done[call].error
        return self.done[call].result

    def ask(self, rank: int, request: Any, life: int = 0) -> Any:
        return self.result(self.call(rank, request, life))

    def init(self, key: str, value: bytes, spec: KeySpec | None = None) -> None:
        items = (Item(key, spec or uint8(len(value)), value),)
        started = [self.call(rank, requests.InitKeys(items)) for rank in (1, 0)]
        for call in started:
            assert self.result(call) is None

    def push(self, rank: int, key: str, value: bytes, life: int = 0, **more: Any) -> tuple[int, int]:
        move = requests.Transfer((Item(key, uint8(len(value)), value),), push=True, pull=False, **more)
        return self.call(rank, move, life)

    def pull(self, rank: int, key: str, count: int, life: int = 0) -> bytes:
        target = bytearray(count)
        self.ask(rank, requests.Transfer((Item(key, uint8(count), None, target),), push=False, pull=True), life)
        return bytes(target)


def test_everyone_joins() -> None:
    both = Cluster(cluster(2, 2))
    assert [both.done[worker_id(rank), rank + 1].result for rank in (0, 1)] == [0, 1]
    assert both.machines[worker_id(0)].epoch == both.machines[server_id(1)].epoch


@pytest.mark.parametrize("count", [0, 1, 7, SLICE, SLICE + 1, 5 * SLICE + 3])
def test_a_pull_returns_the_sum_over_the_workers(count: int) -> None:
    both = Cluster(cluster(2, 2))
    value = bytes(index % 251 for index in range(count))
    both.init("w", value)
    assert both.pull(1, "w", count) == value
    for clock in (1, 2, 3):
        pushes = [both.push(rank, "w", bytes([clock * (rank + 1)]) * count) for rank in (0, 1)]
        assert [both.result(push) for push in pushes] == [[None], [None]]
        for rank in (0, 1):
            assert both.pull(rank, "w", count) == bytes([clock * 3]) * count
            assert both.ask(rank, requests.ClockOf("w")) == clock


def test_one_call_pushes_and_pulls_many_keys_in_few_messages() -> None:
    both = Cluster(cluster(2, 2))
    names = [f"k{number}" for number in range(50)]
    for name in names:
        both.init(name, b"\0\0\0")
    before = both.messages
    targets = [bytearray(3) for _ in names]
    items = tuple(
        Item(name, uint8(3), bytes([number, 1, 2]), target)
        for number, (name, target) in enumerate(zip(names, targets, strict=True))
    )
    moves = [both.call(rank, requests.Transfer(items, push=True, pull=True)) for rank in (0, 1)]
    for move in moves:
        assert len(both.result(move)) == 50
    assert targets == [bytearray([2 * number % 256, 2, 4]) for number in range(50)]
    assert both.messages - before <= 20  # for each worker and server a batch and Done, a push, Staged and Values


def test_pushes_run_ahead_and_flush_waits_for_them() -> None:
    both = Cluster(cluster(2, 1))
    both.init("w", b"\0")
    ahead = [both.push(0, "w", bytes([number])) for number in (1, 2, 3, 4)]
    flush = both.call(0, requests.Flush())
    assert not any(call in both.done for call in (*ahead, flush))
    for number in (10, 20, 30, 40):
        both.push(1, "w", bytes([number]))
    assert both.result(flush) is None
    assert all(call in both.done for call in ahead)
    assert both.pull(0, "w", 1) == bytes([44])


def test_a_round_of_assignment_broadcasts_the_value_of_rank_0() -> None:
    both = Cluster(cluster(2, 1))
    both.init("w", b"\0")
    spec = uint8(1)
    target = bytearray(1)
    both.call(1, requests.Transfer((Item("w", spec, None, target),), push=True, pull=True, how=ABSENT))
    assert both.result(both.push(0, "w", b"\7", how=ASSIGN)) == [None]
    assert bytes(target) == b"\7"


def test_barriers_and_commands() -> None:
    both = Cluster(cluster(2, 2))
    first = both.call(0, requests.Barrier("b"))
    assert first not in both.done
    assert both.ask(1, requests.Barrier("b")) is None
    assert both.result(first) is None
    answers = both.ask(0, requests.Control((Command(0, "ping"),), payload=b"hi", nbytes=2))
    assert [payload for _, payload, _ in answers] == [b"hi", b"hi"]


def test_rounds_stop_waiting_for_a_worker_that_left_and_wait_for_its_successor() -> None:
    both = Cluster(cluster(2, 2))
    both.init("w", b"\0" * 2 * SLICE)
    for rank in (0, 1):
        both.push(rank, "w", b"\1" * 2 * SLICE)
    both.ask(1, requests.Depart(Departure.LEFT))
    for _ in range(2):
        both.result(both.push(0, "w", b"\5" * 2 * SLICE))
    assert both.pull(0, "w", 2 * SLICE) == b"\5" * 2 * SLICE
    both.kill(worker_id(1))
    both.start_worker(1, life=1)
    late = both.push(0, "w", b"\1" * 2 * SLICE)
    assert late not in both.done
    both.result(both.push(1, "w", b"\2" * 2 * SLICE, life=1))
    assert both.pull(1, "w", 2 * SLICE, life=1) == both.pull(0, "w", 2 * SLICE) == b"\3" * 2 * SLICE
    assert both.ask(1, requests.ClockOf("w"), life=1) == 4


def test_a_restarted_worker_redoes_its_step_and_no_push_counts_twice() -> None:
    both = Cluster(cluster(2, 2))
    both.init("w", b"\0" * 2 * SLICE)
    for rank in (0, 1):
        both.push(rank, "w", b"\1" * 2 * SLICE)
    both.push(1, "w", b"\x63" * 2 * SLICE)  # staged, then its worker dies
    both.kill(worker_id(1))
    both.start_worker(1, life=1)
    assert both.ask(1, requests.ClockOf("w"), life=1) == 1
    assert both.ask(1, requests.Rewind(0), life=1) is None
    assert both.result(both.push(1, "w", b"\x63" * 2 * SLICE, life=1)) == [None]  # it had counted: a duplicate
    assert both.pull(1, "w", 2 * SLICE, life=1) == b"\2" * 2 * SLICE
    both.push(0, "w", b"\1" * 2 * SLICE)
    assert both.result(both.push(1, "w", b"\4" * 2 * SLICE, life=1)) == [None]
    assert both.pull(0, "w", 2 * SLICE) == b"\5" * 2 * SLICE


@pytest.mark.parametrize("staleness", [-1, 0, 1])
def test_in_async_mode_the_last_push_replaces_the_value(staleness: int) -> None:
    both = Cluster(cluster(2, 1, mode="async", staleness=staleness), mode="async")
    both.init("w", b"\0")
    for value in (1, 2, 3):
        pushes = [both.push(rank, "w", bytes([10 * rank + value])) for rank in (0, 1)]
        assert [both.result(push) for push in pushes] == [[None], [None]]
    assert both.pull(0, "w", 1) in (b"\3", b"\x0d")


def test_the_same_events_give_the_same_messages() -> None:
    counts = []
    for _ in range(2):
        both = Cluster(cluster(2, 2))
        both.init("w", b"\0" * 3 * SLICE)
        for rank in (1, 0):
            both.push(rank, "w", b"\1" * 3 * SLICE)
        counts.append(both.messages)
    assert counts[0] == counts[1]
