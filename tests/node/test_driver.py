"""Which effect does what, and what happens when one fails."""

from __future__ import annotations

import json
import logging
import os
import time

import pytest

import kvd
from kvd.core.machine import (
    SCHEDULER,
    CallerPeer,
    Complete,
    Connect,
    Copy,
    Disconnect,
    Effect,
    Event,
    Halt,
    InvalidFrame,
    LocalCall,
    LogEntry,
    Received,
    Row,
    Send,
    ServerPeer,
    Span,
    Tick,
)
from kvd.errors import ConnectError, KvdError
from kvd.node.daemon.facts import ProcessFacts
from kvd.node.shell.payloads import ReassemblyBuffer
from kvd.protocol.codec import encode
from kvd.protocol.messages import Done, Enter, Epoch, ErrorCode, Refused, StatusReport
from tests.node.driver_harness import DriverHarness, call, nothing, run

PEER = CallerPeer(b"p")


def test_an_effect_that_raises_does_not_stop_the_others() -> None:
    target = bytearray(4)

    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        return [
            Copy(b"toolong", (memoryview(target),), (Row(2, 0, 7),)),
            Send(PEER, Done(1 << 70)),  # no such number on the wire
            Send(PEER, Done("text")),  # type: ignore[arg-type]
            Send(PEER, Done(object())),  # type: ignore[arg-type]
            Complete(event.call),
        ]

    async def program() -> None:
        harness.driver.feed(call(1))
        assert harness.completed == [Complete(1)]

    harness = DriverHarness(react)
    run(harness, program)


def test_payloads_reports_and_pieces() -> None:
    pieces = ReassemblyBuffer()
    target = bytearray(6)

    def react(event: Event) -> list[Effect]:
        if not isinstance(event, LocalCall):
            return []
        return [
            Send(PEER, Done(1), (Span(b"abcdef", 2, 3), Span(None, 0, 0))),
            Send(PEER, StatusReport(2)),
            Send(PEER, Done(3), (Span(bytes(1 << 20), 0, 1 << 20),) * 200),
            Copy(b"xxdef", (pieces,), (Row(3, 2, 3),)),
            Copy(b"abc1234", (pieces, memoryview(target), None), (Row(0, 0, 3), Row(1, 4, 2), Row(0, 0, 7))),
            Copy(None, (pieces, target), (Row(6, 0, 0), Row(0, 0, 0))),
            Disconnect(PEER),
            LogEntry("info", "noted", {"n": 1}),
            Complete(1),
        ]

    async def program() -> None:
        harness.driver.feed(call(1))
        piece, report, nothing = [payload for _, _, payload in harness.transport.sent]
        assert (piece, nothing) == (b"cde", b"")
        shown = json.loads(report)
        assert (shown["role"], shown["version"], shown["pid"]) == ("scripted", kvd.__version__, os.getpid())
        assert shown["uptime_s"] >= 0
        refused = harness.transport.sent[2][1]
        assert (refused.request, refused.error) == (3, ErrorCode.NOT_ALLOWED)
        whole = bytearray(6)
        pieces.move_to(whole)
        assert whole == b"abcdef"
        assert target == b"\0" + b"23" + bytes(3)
        assert harness.completed == [Complete(1)]
        assert harness.transport.log[-1] == ("disconnect", PEER)

    harness = DriverHarness(react, facts=ProcessFacts(time.monotonic, {}))
    run(harness, program)


def test_connections_that_cannot_be_opened() -> None:
    def react(event: Event) -> list[Effect]:
        return [Connect(ServerPeer(5), "bad"), Connect(SCHEDULER, "bad")] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        assert [type(error) for error in harness.halts] == [ConnectError]

    harness = DriverHarness(react)
    run(harness, program)


def test_a_stopped_driver_does_nothing() -> None:
    async def program() -> None:
        harness.driver.stop(0)
        harness.driver.stop(0)
        before = len(harness.machine.events)
        harness.driver.feed(Tick())
        assert len(harness.machine.events) == before
        assert harness.transport.closed

    def react(event: Event) -> list[Effect]:
        return [Halt(KvdError("no"))] if isinstance(event, LocalCall) else []

    harness = DriverHarness(react)
    run(harness, program)


def test_invalid_frames_are_answered_and_reported_to_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        for _ in range(50):
            harness.transport.on_message(CallerPeer(b"stranger"), b"garbage", None)
        harness.transport.on_garbage(SCHEDULER, "of our own connection")
        assert [peer for peer, _, _ in harness.transport.sent] == [CallerPeer(b"stranger")] * 50
        assert all(isinstance(message, Refused) and message.request == 0 for _, message, _ in harness.transport.sent)
        assert harness.machine.events[-1] == InvalidFrame(SCHEDULER, "of our own connection")
        harness.transport.on_message(CallerPeer(b"friend"), encode(Done(3), 5, Epoch(1, 1)), memoryview(b"12345678"))
        received = harness.machine.events[-1]
        assert isinstance(received, Received)
        assert (received.sender, received.message, received.nbytes) == (5, Done(3), 8)

    harness = DriverHarness(nothing)
    with caplog.at_level(logging.WARNING, logger="kvd.node"):
        run(harness, program)
    assert len([record for record in caplog.records if "invalid frame" in record.getMessage()]) == 1


def test_a_message_that_cannot_be_encoded_is_refused_to_its_own_machine() -> None:
    def react(event: Event) -> list[Effect]:
        return [Send(SCHEDULER, Enter(9, "\ud800", 1)), Send(PEER, Done(1))] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        assert [message for _, message, _ in harness.transport.sent] == [Done(1)]
        refused = harness.machine.events[-1]
        assert isinstance(refused, Received)
        assert refused.peer == SCHEDULER
        assert isinstance(refused.message, Refused)
        assert (refused.message.request, refused.message.error) == (9, ErrorCode.NOT_ALLOWED)
        assert "cannot be sent" in refused.message.text

    harness = DriverHarness(react)
    run(harness, program)


def test_an_answer_that_would_be_too_large_is_refused() -> None:
    spans = tuple(Span(b"", 0, 64 << 20) for _ in range(3))

    def react(event: Event) -> list[Effect]:
        return [Send(PEER, Done(7), spans)] if isinstance(event, LocalCall) else []

    async def program() -> None:
        harness.driver.feed(call(1))
        [(_, refused, payload)] = harness.transport.sent
        assert (refused.request, refused.error, payload) == (7, ErrorCode.NOT_ALLOWED, b"")
        assert "at most 128 MiB" in refused.text

    harness = DriverHarness(react)
    run(harness, program)
