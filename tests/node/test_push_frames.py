"""Small pushes that a server takes as frames, and what becomes of them when something goes another way than usual."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.core.machine import Apply, JobDone, LinkPeer, Send, Span
from kvd.core.principals import HOLDER
from kvd.core.server.machine import ServerMachine
from kvd.node.jobs.runner import JobRunner
from kvd.node.shell.counters import Counters
from kvd.node.shell.push_frames import MOST_WAITING, PushFrames, SmallPushes
from kvd.protocol.envelope import Decoded
from kvd.protocol.fixed import PUSH_NBYTES, read_push, values_header, write_push
from kvd.protocol.messages import ADD, Done, Epoch, PushBatch
from kvd.testing.cluster import LocalCluster
from kvd.transport.links.frames import INLINE, prefix_of
from kvd.transport.links.link import Link

STEPS = 24


def train(store: kvd.KVStore) -> None:
    """Each step has the sum of both workers."""
    store.init("w", np.zeros(5, np.float32))
    for step in range(STEPS):
        value = np.full(5, step + store.rank, np.float32)
        assert (store.pushpull("w", value) == 2 * step + 1).all()


def train_with_momentum(store: kvd.KVStore) -> np.ndarray[Any, Any]:
    store.init("w", np.ones(5, np.float32))
    store.set_optimizer(kvd.optimizer.SGD(0.01, momentum=0.5))
    out = np.empty(5, np.float32)
    for step in range(STEPS):
        store.pushpull("w", np.full(5, step + store.rank, np.float32), out)
    return out


def in_flight(store: kvd.KVStore) -> None:
    names = [f"w{number}" for number in range(10)]
    store.init(names, [np.zeros(3, np.float32)] * len(names))
    for step in range(STEPS):
        outs = [np.full(3, step + store.rank, np.float32) for _ in names]
        handles = [store.pushpull_async(name, out) for name, out in zip(names, outs, strict=True)]
        for handle, out in zip(handles, outs, strict=True):
            handle.wait()
            assert (out == 2 * step + 1).all()


def push_then_pull(store: kvd.KVStore) -> None:
    """As programs for MXNet do."""
    store.init("w", np.zeros(5, np.float32))
    out = np.empty(5, np.float32)
    for step in range(STEPS):
        store.push("w", np.full(5, step + store.rank, np.float32))
        store.pull("w", out)
        assert (out == 2 * step + 1).all()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The frames that were taken as such."""
    taken: list[bytes] = []
    take_all = SmallPushes.take_all

    def noting(pushes: SmallPushes, frames: PushFrames, rests: list[bytes]) -> None:
        taken.extend(rests)
        take_all(pushes, frames, rests)

    monkeypatch.setattr(SmallPushes, "take_all", noting)
    return taken


def run(program: Callable[[kvd.KVStore], Any], **settings: Any) -> Sequence[Any]:
    with LocalCluster(2, settings.get("replicas", 1), **settings) as cluster:
        return cluster.run(program)


def sometimes(every: int, usual: Callable[..., Any], odd: Callable[..., Any]) -> Callable[..., Any]:
    """Each so many calls go another way."""
    calls = itertools.count(1)
    return lambda *arguments: (usual if next(calls) % every else odd)(*arguments)


@pytest.mark.parametrize("program", [train, in_flight])
def test_pushes_are_taken_as_frames(program: Any, frames: list[bytes]) -> None:
    run(program)
    assert len(frames) > STEPS


@pytest.mark.parametrize("program", [train, in_flight])
def test_with_a_backup_they_are_taken_as_frames_too(
    program: Any, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = noted(monkeypatch, "push")
    run(program, replicas=2)
    assert len(frames) > STEPS
    assert taken.count(True) > STEPS


def test_a_push_and_the_pull_behind_it_take_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = noted(monkeypatch, "pull")
    run(push_then_pull)
    assert pulled.count(True) > STEPS


def noted(patch: pytest.MonkeyPatch, method: str) -> list[bool]:
    """What a method of server machines returns."""
    found: list[bool] = []
    usual = getattr(ServerMachine, method)

    def noting(*arguments: Any) -> bool:
        found.append(usual(*arguments))
        return found[-1]

    patch.setattr(ServerMachine, method, noting)
    return found


def test_what_is_not_taken_is_delivered_as_a_message(frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerMachine, "push", sometimes(5, ServerMachine.push, lambda *arguments: False))
    run(train)
    assert frames


def test_updates_are_those_of_pushes_that_come_as_messages(frames: list[bytes]) -> None:
    as_frames = run(train_with_momentum)
    assert frames
    del frames[:]
    assert all(map(np.array_equal, as_frames, run(train_with_momentum, shared_memory="off", tcp_links="off")))
    assert not frames


def test_an_update_that_fails_is_told_to_those_who_pushed(frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    failing, calculate = threading.Event(), JobRunner.run

    def may_fail(runner: JobRunner, job: Any, run: int = 0) -> JobDone:
        if failing.is_set():
            return JobDone(job.job, None, kvd.NotAllowed("no"), run)
        return calculate(runner, job, run)

    monkeypatch.setattr(JobRunner, "run", may_fail)

    def program(store: kvd.KVStore) -> None:
        train(store)
        store.barrier()
        failing.set()
        with pytest.raises(kvd.NotAllowed, match="no"):
            store.pushpull("w", np.ones(5, np.float32))
        store.barrier()
        failing.clear()
        store.barrier()
        assert (store.pushpull("w", np.ones(5, np.float32)) == 2).all()

    run(program)
    assert frames


def test_a_bug_ends_no_server(
    frames: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ServerMachine, "push", sometimes(20, ServerMachine.push, broken))
    with caplog.at_level(logging.ERROR, logger="kvd.node"):
        run(train)
    assert any("a push could not be handled" in record.getMessage() for record in caplog.records)
    assert frames


@pytest.mark.parametrize("program", [train, in_flight])
def test_an_answer_that_is_lost_is_asked_for_again(
    program: Any, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "send_frames", sometimes(9, Link.send_frames, lambda *arguments: False))
    run(program)
    assert frames


def test_without_links_they_are_taken_as_messages(frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = noted(monkeypatch, "push")
    run(train, shared_memory="off", tcp_links="off")
    assert frames == []
    assert taken.count(True) > STEPS


class Recording:
    """A link that records what it sends."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_frames(self, frames: bytes) -> bool:
        self.sent.append(frames)
        return True


def test_answers_to_calls_that_came_together_leave_together() -> None:
    link: Any = Recording()
    takes: Any = SimpleNamespace(take_all=print)
    decoded = Decoded(1, Epoch(2, 3), PushBatch(4, 5, 6, ADD, 1, True), 7)
    pushes = PushFrames(takes, LinkPeer("one"), link, bytes(PUSH_NBYTES), decoded, 8)
    value = np.arange(8, dtype=np.uint8)
    headers = [values_header(9, Epoch(2, 3), 7, request, 1) for request in range(MOST_WAITING + 2)]
    whole = [prefix_of(INLINE, 0, len(header), 8) + header + value.tobytes() for header in headers]
    for header in headers[:2]:
        pushes.let_wait(header, Span(value, 0, 8))
    assert link.sent == []
    pushes.send_answers()
    pushes.send_answers()
    assert link.sent == [whole[0] + whole[1]]
    for header in headers[2:]:  # so many do not wait
        pushes.let_wait(header, Span(value, 0, 8))
    assert link.sent[1:] == [b"".join(whole[2:])]


def small_pushes(machine: Any, link_to: Callable[[LinkPeer], Any], sender: Any) -> SmallPushes:
    """Those of a server with this machine, whose jobs end well."""
    parts: dict[str, Any] = {
        "router": SimpleNamespace(machine_of=lambda run: machine),
        "transport": SimpleNamespace(link_to=link_to),
        "stepper": SimpleNamespace(enter=lambda: machine is not None, leave=lambda deadline: None),
        "sender": sender,
        "runner": lambda run: SimpleNamespace(run=lambda job, run: JobDone(job.job, None, None, run)),
        "carry_out": print,
        "deliver": print,
        "counters": Counters(),
    }
    return SmallPushes(**parts)


def take(pushes: SmallPushes, peer: LinkPeer) -> bool:
    header = write_push(PushBatch(4, 5, 6, ADD, 1, True), 1, Epoch(2, 3), 7)
    assert header is not None
    decoded = read_push(header)
    assert decoded is not None
    return pushes.take(peer, header, decoded, memoryview(bytes(8)), HOLDER)


def test_links_that_have_ended_are_forgotten() -> None:
    links: dict[LinkPeer, Any] = {}

    class Ended:
        delivery = SimpleNamespace(repeated=None)

    pushes, known = small_pushes(None, links.get, None), []
    for number in range(200):
        peer = LinkPeer(f"link {number}")
        links[peer] = Ended()
        known.append(weakref.ref(links[peer]))
        assert not take(pushes, peer)
        del links[peer]
    gc.collect()
    assert sum(link() is not None for link in known) < 40


def test_an_update_ends_though_an_answer_cannot_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise its round would stay open for good."""

    class Machine:
        epoch = Epoch(2, 3)
        records = SimpleNamespace(has_new=False)

        def __init__(self) -> None:
            self.effects: list[Any] = [
                Apply(1, 1, (), "float32", 8, None, (), False, "sum", None),
                Send(LinkPeer("other"), Done(3)),
                Apply(2, 1, (), "float32", 8, None, (), False, "sum", None),
            ]
            self.ended: list[int] = []

        def push(self, *arguments: Any) -> bool:
            return True

        def take_effects(self) -> list[Any]:
            effects, self.effects = self.effects, []
            return effects

        def end_job(self, done: JobDone) -> None:
            self.ended.append(done.job)

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory")

    machine = Machine()
    pushes = small_pushes(machine, lambda peer: None, SimpleNamespace(send=fail))
    with caplog.at_level(logging.ERROR, logger="kvd.node"):
        assert take(pushes, LinkPeer("one"))
    assert machine.ended == [1, 2]
    assert "a Send could not be carried out" in caplog.text
