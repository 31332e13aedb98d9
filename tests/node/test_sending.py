"""Reports of the state are made anew, unless they take long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.core.machine import CallerPeer, Peer, Send
from kvd.node.shell import sending
from kvd.node.shell.counters import Counters
from kvd.node.shell.sending import STATUS_PAUSE, MessageSender
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import NO_VIEW, Epoch, StatusReport, ViewChange

PEER = CallerPeer(b"peer")


class Node:
    """A machine, its transport and its clock."""

    run, epoch, incarnation = 1, NO_VIEW, 7

    def __init__(self, takes_s: float) -> None:
        self.time = 0.0
        self.takes_s = takes_s
        self.made = 0
        self.sent: list[int] = []

    def now(self) -> float:
        return self.time

    def explain(self, now: float, run: int) -> dict[str, object]:
        self.time += self.takes_s
        self.made += 1
        return {"made": self.made, "run": run}

    def paths(self) -> dict[Peer, Any]:
        return {}

    def send(self, peer: Peer, header: bytes, payload: Any) -> bool:
        self.sent.append(json.loads(bytes(payload[0].buffer))["made"])
        return True


def asked(takes_s: float, pauses_s: list[float], runs: tuple[int, ...] = (1,)) -> list[int]:
    """Asks after each pause. Returns which report each answer was."""
    node: Any = Node(takes_s)
    sender = MessageSender(node, node, node, Counters())
    for pause_s in pauses_s:
        node.time += pause_s
        for run in runs:
            sender.send(Send(PEER, StatusReport(1)), run, NO_VIEW)
    sent: list[int] = node.sent
    return sent


def test_a_report_that_takes_no_time_is_made_each_time() -> None:
    assert asked(0.0, [0.0] * 3) == [1, 2, 3]


@pytest.mark.parametrize("takes_s", [0.1, 2.0])
def test_a_report_that_takes_long_is_sent_again(takes_s: float) -> None:
    pause_s = takes_s * STATUS_PAUSE
    assert asked(takes_s, [0.0, 0.0, 0.4 * pause_s, 0.4 * pause_s, 0.4 * pause_s]) == [1, 1, 1, 1, 2]


def test_each_run_has_its_own_report() -> None:
    assert asked(0.1, [0.0, 0.0], runs=(1, 2)) == [1, 2, 1, 2]


class Wire(Node):
    """Keeps headers."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.headers: list[bytes] = []

    def send(self, peer: Peer, header: bytes, payload: Any) -> bool:
        self.headers.append(header)
        return True


def test_what_goes_to_many_nodes_is_encoded_once_for_each_view_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def counted(*arguments: Any) -> bytes:
        encoded.append(arguments)
        return encode(*arguments)

    monkeypatch.setattr(sending, "encode", counted)
    node: Any = Wire()
    sender = MessageSender(node, node, node, Counters())
    change, equal = ViewChange(3), ViewChange(3)
    for _ in range(3):
        for message in (change, equal):
            sender.send(Send(PEER, message), 1, Epoch(1, 4))
    assert len(encoded) == 2
    sender.send(Send(PEER, change), 2, Epoch(1, 4))
    sender.send(Send(PEER, change), 2, Epoch(1, 5))
    assert len(encoded) == 4
    found = [decode(header) for header in node.headers]
    assert [(entry.run, entry.epoch) for entry in found] == [(1, (1, 4))] * 6 + [(2, (1, 4)), (2, (1, 5))]
    assert all(entry.message == change for entry in found)
