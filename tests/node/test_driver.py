"""The shell around a machine: events in, effects out, from whatever thread, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvd.core.machine import (
    Complete,
    Connect,
    Copy,
    Disconnect,
    Effect,
    Event,
    Halt,
    InvalidFrame,
    JobDone,
    LocalCall,
    LogEntry,
    PeerLost,
    Persist,
    Persisted,
    Received,
    Row,
    Run,
    Send,
    Span,
    Tick,
)
from kvd.errors import ConnectError, KvdError, NotAllowed
from kvd.node.driver import Driver
from kvd.node.jobs import JobRunner
from kvd.node.pieces import Pieces
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import Done, Enter, Epoch, ErrorCode, Refused, StatusReport
from kvd.transport.base import pieces_of


class Scripted:
    """A machine that answers each event with what a function says."""

    incarnation = 77
    epoch = Epoch(1, 2)

    def __init__(self, react: Callable[[Event], list[Effect]]) -> None:
        self.react = react
        self.events: list[Event] = []
        self.deadline: float | None = None
        self.inside = 0

    def step(self, event: Event, now: float) -> list[Effect]:
        self.inside += 1
        assert self.inside == 1, "two threads are in the machine"
        self.events.append(event)
        try:
            return self.react(event)
        finally:
            self.inside -= 1

    def next_deadline(self) -> float | None:
        return self.deadline

    def explain(self, now: float) -> dict[str, object]:
        return {"role": "scripted"}

    def validate(self) -> None:
        """It has no invariants."""


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[Hashable, Any, bytes]] = []
        self.log: list[Any] = []
        self.threads: list[int] = []
        self.closed = False

    def start(self, on_message: Any, on_garbage: Any) -> None:
        self.on_message, self.on_garbage = on_message, on_garbage

    def listen(self, address: str) -> str:
        return address

    def connect(self, peer: Hashable, address: str) -> None:
        self.threads.append(threading.get_ident())
        if address == "bad":
            raise ConnectError("no address", address=address)
        self.log.append(("connect", peer))

    def disconnect(self, peer: Hashable) -> None:
        self.log.append(("disconnect", peer))

    def send(self, peer: Hashable, header: bytes, payload: Sequence[Span]) -> bool:
        message = decode(header).message
        self.log.append(("send", message))
        self.sent.append((peer, message, b"".join(pieces_of(payload))))
        return True

    def close(self, linger_s: float) -> None:
        self.closed = True


class Rig:
    """A driver with both, and what it told us."""

    def __init__(self, react: Callable[[Event], list[Effect]], **options: Any) -> None:
        self.machine = Scripted(react)
        self.wire = Wire()
        self.completed: list[Complete] = []
        self.halts: list[KvdError] = []
        self.driver = Driver(
            self.machine, self.wire, on_complete=self.completed.append, on_halt=self.halts.append, **options
        )


def run(rig: Rig, program: Callable[[], Any]) -> None:
    async def main() -> None:
        rig.driver.start()
        try:
            await program()
        finally:
            rig.driver.stop(0)

    asyncio.run(main())


def nothing(event: Event) -> list[Effect]:
    return []


async def until(holds: Callable[[], Any]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def call(number: int) -> LocalCall:
    return LocalCall(number, "request", 0.0)  # type: ignore[arg-type]


def test_a_call_that_breaks_is_completed_with_the_error() -> None:
    def react(event: Event) -> list[Effect]:
        if isinstance(event, LocalCall) and event.call == 1:
            raise ZeroDivisionError("oops")
        return [Complete(event.call, "fine")] if isinstance(event, LocalCall) else []

    async def program() -> None:
        rig.driver.feed(call(1))
        rig.driver.feed(call(2))
        assert [entry.call for entry in rig.completed] == [1, 2]
        assert isinstance(rig.completed[0].error, KvdError)
        assert "oops" in str(rig.completed[0].error)
        assert rig.completed[1].result == "fine"

    rig = Rig(react)
    run(rig, program)


@pytest.mark.parametrize("broken", [Received, Tick, InvalidFrame, JobDone, Persisted, PeerLost])
def test_whatever_breaks_inside_the_node_goes_on(broken: type, caplog: pytest.LogCaptureFixture) -> None:
    def react(event: Event) -> list[Effect]:
        if isinstance(event, broken):
            raise RuntimeError("a bug")
        return [Complete(event.call)] if isinstance(event, LocalCall) else []

    async def program() -> None:
        for event in (
            Received(b"p", 1, Epoch(0, 0), Done(1)),
            Tick(),
            InvalidFrame(b"p", "x"),
            JobDone(1),
            Persisted(1),
            PeerLost(1, "gone"),
            call(5),
        ):
            rig.driver.feed(event)
        assert rig.completed == [Complete(5)]
        assert rig.halts == []

    rig = Rig(react)
    with caplog.at_level(logging.ERROR, logger="kvd.node"):
        run(rig, program)
    assert any("could not be handled" in record.getMessage() for record in caplog.records)


def test_an_effect_that_breaks_does_not_take_the_others_with_it() -> None:
    target = bytearray(4)

    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        return [
            Copy(b"toolong", (memoryview(target),), (Row(2, 0, 7),)),
            Send("peer", Done(1 << 70)),  # no such number on the wire
            Send("peer", Done("text")),  # type: ignore[arg-type]
            Send("peer", Done(object())),  # type: ignore[arg-type]
            Complete(event.call),
        ]

    async def program() -> None:
        rig.driver.feed(call(1))
        assert rig.completed == [Complete(1)]

    rig = Rig(react)
    run(rig, program)


def test_a_tick_that_always_fails_does_not_burn_the_processor() -> None:
    def react(event: Event) -> list[Effect]:
        raise RuntimeError("a bug")

    async def program() -> None:
        await asyncio.sleep(0.3)
        assert len(rig.machine.events) < 20

    rig = Rig(react)
    rig.machine.deadline = 0.0
    run(rig, program)


def test_ticks_come_at_the_deadline_also_when_it_moves_to_the_front() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        rig.machine.deadline = loop.time() + 60
        rig.driver.feed(call(1))
        rig.machine.deadline = loop.time() + 0.05
        await asyncio.to_thread(rig.driver.feed, call(2))
        before = len(rig.machine.events)

        def settle(event: Event) -> list[Effect]:
            rig.machine.deadline = None
            return []

        rig.machine.react = settle
        await until(lambda: len(rig.machine.events) > before)
        assert rig.machine.events[-1] == Tick()

    rig = Rig(nothing)
    run(rig, program)


def test_one_thread_at_a_time_and_every_event_once() -> None:
    def react(event: Event) -> list[Effect]:
        time.sleep(0.0001)
        return [Complete(event.call)] if isinstance(event, LocalCall) else []

    async def program() -> None:
        def feed(first: int) -> None:
            for number in range(first, first + 200):
                rig.driver.feed(call(number))

        await asyncio.gather(*[asyncio.to_thread(feed, first) for first in (0, 1000, 2000)])
        await until(lambda: len(rig.completed) == 600)
        numbers = [entry.call for entry in rig.completed]
        for first in (0, 1000, 2000):
            mine = [number for number in numbers if first <= number < first + 200]
            assert mine == list(range(first, first + 200))

    rig = Rig(react)
    run(rig, program)


def test_effects_for_the_loop_are_carried_out_there_and_in_order() -> None:
    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        if event.call % 10 == 0:
            return [Connect(event.call, "somewhere"), Send("p", Done(event.call))]
        return [Send("p", Done(event.call))]

    async def program() -> None:
        def feed() -> None:
            for number in range(100):
                rig.driver.feed(call(number))

        await asyncio.to_thread(feed)
        await until(lambda: len(rig.wire.sent) == 100)
        assert [message.request for _, message, _ in rig.wire.sent] == list(range(100))
        assert set(rig.wire.threads) == {threading.get_ident()}
        for number in range(0, 100, 10):
            connected = rig.wire.log.index(("connect", number))
            assert rig.wire.log[connected + 1] == ("send", Done(number))

    rig = Rig(react)
    run(rig, program)


def test_garbage_is_answered_and_told_to_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        for _ in range(50):
            rig.wire.on_message(b"stranger", b"garbage", None)
        rig.wire.on_garbage("scheduler", "of our own connection")
        assert [peer for peer, _, _ in rig.wire.sent] == [b"stranger"] * 50
        assert all(isinstance(message, Refused) and message.request == 0 for _, message, _ in rig.wire.sent)
        assert rig.machine.events[-1] == InvalidFrame("scheduler", "of our own connection")
        rig.wire.on_message(b"friend", encode(Done(3), 5, Epoch(1, 1)), memoryview(b"12345678"))
        received = rig.machine.events[-1]
        assert isinstance(received, Received)
        assert (received.sender, received.message, received.nbytes) == (5, Done(3), 8)

    rig = Rig(nothing)
    with caplog.at_level(logging.WARNING, logger="kvd.node"):
        run(rig, program)
    assert len([record for record in caplog.records if "no message" in record.getMessage()]) == 1


def test_what_cannot_be_written_is_refused_to_who_asked() -> None:
    def react(event: Event) -> list[Effect]:
        return [Send("scheduler", Enter(9, "\ud800", 1)), Send("p", Done(1))] if isinstance(event, LocalCall) else []

    async def program() -> None:
        rig.driver.feed(call(1))
        assert [message for _, message, _ in rig.wire.sent] == [Done(1)]
        refused = rig.machine.events[-1]
        assert isinstance(refused, Received)
        assert refused.peer == "scheduler"
        assert isinstance(refused.message, Refused)
        assert (refused.message.request, refused.message.error) == (9, ErrorCode.NOT_ALLOWED)
        assert "cannot be sent" in refused.message.text

    rig = Rig(react)
    run(rig, program)


def test_payloads_reports_and_pieces() -> None:
    pieces = Pieces()
    target = bytearray(6)

    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        return [
            Send("p", Done(1), (Span(b"abcdef", 2, 3), Span(None, 0, 0))),
            Send("p", StatusReport(2)),
            Send("p", Done(3), (Span(bytes(1 << 20), 0, 1 << 20),) * 200),
            Copy(b"xxdef", (pieces,), (Row(3, 2, 3),)),
            Copy(b"abc1234", (pieces, memoryview(target), None), (Row(0, 0, 3), Row(1, 4, 2), Row(0, 0, 7))),
            Copy(None, (pieces, target), (Row(6, 0, 0), Row(0, 0, 0))),
            Disconnect("p"),
            LogEntry("info", "noted", {"n": 1}),
            Complete(1),
        ]

    async def program() -> None:
        rig.driver.feed(call(1))
        assert [payload for _, _, payload in rig.wire.sent] == [b"cde", b'{"role": "scripted"}', b""]
        refused = rig.wire.sent[2][1]
        assert (refused.request, refused.error) == (3, ErrorCode.NOT_ALLOWED)
        whole = bytearray(6)
        pieces.move_to(whole)
        assert whole == b"abcdef"
        assert target == b"\0" + b"23" + bytes(3)
        assert rig.completed == [Complete(1)]
        assert rig.wire.log[-1] == ("disconnect", "p")

    rig = Rig(react)
    run(rig, program)


def test_a_command_that_ends_its_thread_is_an_error() -> None:
    def end(body: bytes) -> bytes:
        raise SystemExit(3)

    def react(event: Event) -> list[Effect]:
        return [Run(9, "end", Span(None, 0, 0))] if isinstance(event, LocalCall) else []

    async def program() -> None:
        rig.driver.feed(call(1))
        await until(lambda: any(isinstance(event, JobDone) for event in rig.machine.events))
        (done,) = [event for event in rig.machine.events if isinstance(event, JobDone)]
        assert done.job == 9
        assert isinstance(done.error, NotAllowed)
        assert "SystemExit" in str(done.error)

    with ThreadPoolExecutor(1) as executor:
        rig = Rig(react, jobs=JobRunner({"end": end}), executor=executor)
        run(rig, program)


@pytest.mark.parametrize("fails", [False, True])
def test_records_are_saved_in_the_background(fails: bool) -> None:
    saved: list[Any] = []

    def save(record: Any) -> None:
        if fails:
            raise OSError("disk full")
        saved.append(record)

    def react(event: Event) -> list[Effect]:
        return [Persist(4, {"a": 1})] if isinstance(event, LocalCall) else []

    async def program() -> None:
        rig.driver.feed(call(1))
        if fails:
            await until(lambda: rig.halts)
            assert "disk full" in str(rig.halts[0])
            assert Persisted(4) not in rig.machine.events
        else:
            await until(lambda: Persisted(4) in rig.machine.events)
            assert saved == [{"a": 1}]

    with ThreadPoolExecutor(1) as executor:
        rig = Rig(react, executor=executor, persist=save)
        run(rig, program)


def test_connections_that_cannot_be_opened() -> None:
    def react(event: Event) -> list[Effect]:
        return [Connect("server", "bad"), Connect("scheduler", "bad")] if isinstance(event, LocalCall) else []

    async def program() -> None:
        rig.driver.feed(call(1))
        assert [type(error) for error in rig.halts] == [ConnectError]

    rig = Rig(react)
    run(rig, program)


def test_a_stopped_driver_does_nothing_any_more() -> None:
    async def program() -> None:
        rig.driver.stop(0)
        rig.driver.stop(0)
        before = len(rig.machine.events)
        rig.driver.feed(Tick())
        assert len(rig.machine.events) == before
        assert rig.wire.closed

    def react(event: Event) -> list[Effect]:
        return [Halt(KvdError("no"))] if isinstance(event, LocalCall) else []

    rig = Rig(react)
    run(rig, program)
