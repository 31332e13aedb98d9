"""A server's connections to other servers, which all its runs share, and what comes over them."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import (
    SCHEDULER,
    CallerPeer,
    Connect,
    Disconnect,
    DropRun,
    Effect,
    Event,
    InRun,
    LinkPeer,
    LocalCall,
    Received,
    Send,
    ServerPeer,
)
from kvd.core.principals import HOLDER, Principal
from kvd.core.requests import Depart
from kvd.core.server.connections import SharedConnections
from kvd.protocol import messages as m
from kvd.protocol.messages import NO_RUN, NO_VIEW, Departure
from tests.core.access_harness import JOB, SAMPLES, SERVER, TOKEN, ServerWorld, flat

ONE, TWO = ServerPeer(1001), ServerPeer(1002)
OTHER_RUN = 8


class World(ServerWorld):
    """A server with two runs, whose machines do what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.told(m.View(self.settings, (self.members[0],), (), self.entries()), NO_RUN, 2)
        self.received: list[tuple[int, Event]] = []
        self.effects: list[Effect] = []
        for run in (self.RUN, OTHER_RUN):
            machine = self.router.machine_of(run)
            assert machine is not None
            monkeypatch.setattr(machine, "step", lambda event, now, run=run: self._step(run, event))

    def entries(self, **phases: m.RunPhase) -> tuple[m.RunEntry, ...]:
        other = m.RunEntry(OTHER_RUN, "other", "b", phases.get("other", m.RunPhase.RUNNING), 3)
        return m.RunEntry(self.RUN, JOB, TOKEN, m.RunPhase.RUNNING, 3), other

    def _step(self, run: int, event: Event) -> list[Effect]:
        self.received.append((run, event))
        return self.effects

    def emit(self, run: int, *effects: Effect) -> list[Effect]:
        """What becomes of effects of the machine of a run."""
        self.effects = list(effects)
        out = self.router.step(Received(CallerPeer(b"x"), 1, NO_VIEW, m.StatusQuery(1), run=run), 0.0)
        self.effects = []
        return out

    def hear(self, message: Any, run: int = ServerWorld.RUN, principal: Principal = HOLDER) -> list[Effect]:
        self.received = []
        return flat(self.router.step(Received(ONE, 1001, NO_VIEW, message, run=run, principal=principal), 0.0))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def connect(peer: ServerPeer) -> Connect:
    return Connect(peer, f"tcp://{int(peer)}", "key")


def test_two_runs_share_one_connection(world: World) -> None:
    run, send = world.RUN, Send(ONE, m.Done(1))
    (batch,) = world.emit(run, connect(ONE), send)
    assert isinstance(batch, InRun)
    assert (batch.run, list(batch.effects)) == (run, [connect(ONE), send])
    assert world.emit(run, connect(ONE)) == []
    assert flat(world.emit(OTHER_RUN, connect(ONE), send)) == [send]
    assert flat(world.emit(OTHER_RUN, connect(TWO))) == [connect(TWO)]
    assert world.emit(OTHER_RUN, Disconnect(ONE)) == []
    assert world.emit(OTHER_RUN, Disconnect(ONE)) == []
    assert world.emit(run, Disconnect(TWO)) == []  # it does not use it
    assert flat(world.emit(run, Disconnect(ONE))) == [Disconnect(ONE)]
    assert flat(world.emit(OTHER_RUN, connect(ONE))) == [connect(ONE)]


def test_a_run_never_touches_the_connection_to_the_scheduler(world: World) -> None:
    assert world.emit(world.RUN, Connect(SCHEDULER, "tcp://elsewhere"), Disconnect(SCHEDULER)) == []


def test_the_connections_of_a_run_that_is_given_up_are_closed_if_no_other_uses_them(world: World) -> None:
    world.emit(world.RUN, connect(ONE))
    world.emit(OTHER_RUN, connect(ONE), connect(TWO))
    gone = m.View(world.settings, (world.members[0],), (), world.entries(other=m.RunPhase.GONE))
    effects = world.told(gone, NO_RUN, 3)
    assert [each for each in effects if isinstance(each, DropRun | Connect | Disconnect)] == [
        DropRun(OTHER_RUN),
        Disconnect(TWO),
    ]
    assert flat(world.emit(world.RUN, Disconnect(ONE))) == [Disconnect(ONE)]


@pytest.mark.parametrize("principal", [HOLDER, SERVER], ids=["over ZeroMQ", "over a link"])
def test_answers_of_other_servers_go_to_the_run_that_they_are_for(world: World, principal: Principal) -> None:
    for answer in (m.Done(3), m.NotYet(3, m.NotYetReason.ELSEWHERE, "text"), m.Refused(3, m.ErrorCode.NOT_ALLOWED, "")):
        for run in (world.RUN, OTHER_RUN):
            assert world.hear(answer, run, principal) == []
            ((receiver, event),) = world.received
            assert receiver == run
            assert isinstance(event, Received)
            assert (event.peer, event.message) == (ONE, answer)


@pytest.mark.parametrize("message", SAMPLES.values(), ids=lambda message: type(message).__name__)
def test_a_server_that_this_one_connected_to_asks_for_nothing_over_that_connection(world: World, message: Any) -> None:
    """Whatever its key allows: the connection does not say what it is."""
    is_answer = isinstance(message, m.Done | m.NotYet | m.Refused)
    assert world.hear(message) == []
    assert len(world.received) == is_answer
    assert world.hear(message, NO_RUN) == []
    assert world.hear(message, run=99) == [], "an answer to an answer might be answered"
    assert world.received == []


def test_requests_of_other_servers_go_to_the_run_that_they_are_for(world: World) -> None:
    for peer in (CallerPeer(b"a server"), LinkPeer("link 1")):
        world.received = []
        hold = m.HoldPlace(5, 0, 1, 2)
        world.router.step(Received(peer, 1001, NO_VIEW, hold, run=OTHER_RUN, principal=SERVER), 0.0)
        assert [(run, event.message) for run, event in world.received if isinstance(event, Received)] == [
            (OTHER_RUN, hold)
        ]


def test_no_connection_is_closed_when_a_server_leaves(world: World) -> None:
    world.emit(world.RUN, connect(ONE))
    assert not any(isinstance(each, Disconnect) for each in world.step(LocalCall(1, Depart(Departure.LEFT), 0.0)))


def test_who_never_connected_is_not_disconnected() -> None:
    connections = SharedConnections()
    assert connections.disconnect(1, Disconnect(ONE)) is None
    assert connections.leave(1) == []
