"""A driver with a scripted machine and a transport that only records."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvd.core.machine import (
    Complete,
    Effect,
    Event,
    LocalCall,
    Peer,
    PeerPath,
    Span,
)
from kvd.errors import ConnectError, KvdError
from kvd.node.shell.driver import Driver
from kvd.protocol.codec import decode
from kvd.protocol.messages import NO_RUN, Epoch
from kvd.transport.base import UNKNOWN_PATH, HeaderOfPath, pieces_of


class Scripted:
    """A machine that answers each event with the effects that a function returns."""

    incarnation = 77
    run = NO_RUN
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

    def explain(self, now: float, run: int = NO_RUN) -> dict[str, object]:
        return {"role": "scripted"}

    def validate(self) -> None:
        """It has no invariants."""


class RecordingTransport:
    """A transport that records what it is asked to do."""

    def __init__(self) -> None:
        self.sent: list[tuple[Peer, Any, bytes]] = []
        self.log: list[Any] = []
        self.threads: list[int] = []
        self.closed = False
        self.known_paths: dict[Peer, PeerPath] = {}

    def start(self, on_message: Any, on_garbage: Any) -> None:
        self.on_message, self.on_garbage = on_message, on_garbage

    def listen(self, address: str) -> str:
        return address

    def connect(self, peer: Peer, address: str, key: str = "") -> None:
        self.threads.append(threading.get_ident())
        if address == "bad":
            raise ConnectError("no address", address=address)
        self.log.append(("connect", peer))

    def disconnect(self, peer: Peer) -> None:
        self.log.append(("disconnect", peer))

    def send(self, peer: Peer, header: bytes, payload: Sequence[Span]) -> bool:
        message = decode(header).message
        self.log.append(("send", message))
        self.sent.append((peer, message, b"".join(pieces_of(payload))))
        return True

    def send_with_path(self, peer: Peer, header: HeaderOfPath, payload: Sequence[Span]) -> bool:
        return self.send(peer, header(self.known_paths.get(peer, UNKNOWN_PATH)), payload)

    def paths(self) -> dict[Peer, PeerPath]:
        return self.known_paths

    def close(self, linger_s: float) -> None:
        self.closed = True


class DriverHarness:
    """A driver with both, and what it reported."""

    def __init__(self, react: Callable[[Event], list[Effect]], **options: Any) -> None:
        self.machine = Scripted(react)
        self.transport = RecordingTransport()
        self.completed: list[Complete] = []
        self.halts: list[KvdError] = []
        self.driver = Driver(
            self.machine, self.transport, on_complete=self.completed.append, on_halt=self.halts.append, **options
        )


def run(harness: DriverHarness, program: Callable[[], Any]) -> None:
    async def main() -> None:
        harness.driver.start()
        try:
            await program()
        finally:
            harness.driver.stop(0)

    asyncio.run(main())


def nothing(event: Event) -> list[Effect]:
    return []


def call(number: int) -> LocalCall:
    return LocalCall(number, "request", 0.0)  # type: ignore[arg-type]
