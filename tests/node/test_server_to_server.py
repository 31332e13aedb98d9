"""Two drivers of servers with real transports: records of two runs go one way, answers the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Connect, Effect, Event, InRun, LinkPeer, LocalCall, Received, Send, ServerPeer, Span
from kvd.node.shell.driver import Driver
from kvd.protocol.messages import Done, Epoch, Hold, HoldPlace, SliceId
from kvd.transport.host import HostTransport
from tests.node.driver_harness import Scripted, call, nothing
from tests.waiting import eventually

RUNS = {3: Epoch(1, 5), 4: Epoch(2, 9)}
HOLDER_NAME = ServerPeer(4711)


class Server:
    """A server whose machine does what the test says."""

    def __init__(self, react: Callable[[Event], list[Effect]], *, shared_memory: bool) -> None:
        self.machine = Scripted(react)
        self.transport = HostTransport(shared_memory=shared_memory)
        self.driver = Driver(self.machine, self.transport)

    @property
    def received(self) -> list[Received]:
        return [event for event in self.machine.events if isinstance(event, Received)]


def answering(event: Event) -> list[Effect]:
    """As a backup: each record is held, and the answer goes out in its run."""
    if not isinstance(event, Received) or not isinstance(event.message, Hold | HoldPlace):
        return []
    return [InRun(event.run, RUNS[event.run], [Send(event.peer, Done(event.message.request))])]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_records_of_each_run_arrive_and_are_answered_in_it(shared_memory: bool) -> None:
    leader = Server(nothing, shared_memory=shared_memory)
    backup = Server(answering, shared_memory=shared_memory)

    async def program() -> None:
        address = backup.transport.listen("tcp://127.0.0.1:0")
        backup.transport.listen_links(HOLDER_NAME)
        leader.transport.listen("tcp://127.0.0.1:0")
        for server in (leader, backup):
            server.driver.start()
        try:
            merged: Any = np.arange(100_000, dtype=np.float32)
            hold = Hold(1, 0, (SliceId("w", 0),), 1, (), True, None, 1)
            records: list[Effect] = [
                InRun(
                    3, RUNS[3], [Connect(HOLDER_NAME, address), Send(HOLDER_NAME, hold, (Span(merged, 0, 400_000),))]
                ),
                InRun(4, RUNS[4], [Send(HOLDER_NAME, HoldPlace(2, 0, 1, 7))]),
            ]
            leader.machine.react = lambda event: records if isinstance(event, LocalCall) else []
            leader.driver.feed(call(1))
            await eventually(lambda: len(leader.received) == 2)
            assert [(each.run, each.epoch, each.message) for each in backup.received] == [
                (3, RUNS[3], hold),
                (4, RUNS[4], HoldPlace(2, 0, 1, 7)),
            ]
            assert all(isinstance(each.peer, LinkPeer) is shared_memory for each in backup.received)
            held = np.frombuffer(backup.received[0].payload, np.float32)
            assert (held == merged).all()
            assert [(each.peer, each.run, each.epoch, each.message) for each in leader.received] == [
                (HOLDER_NAME, 3, RUNS[3], Done(1)),
                (HOLDER_NAME, 4, RUNS[4], Done(2)),
            ]
        finally:
            for server in (leader, backup):
                server.driver.stop(0)

    asyncio.run(program())
