"""A node's bond with the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import SCHEDULER, Connect, Halt, LogEntry, Send
from kvd.core.session import JOIN_RETRY_S, Identity, SchedulerSession
from kvd.errors import ConfigError, NotAllowed, ProtocolError
from kvd.protocol.messages import (
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    NotYet,
    NotYetReason,
    Quiet,
    Refused,
    View,
    Welcome,
)
from tests.core.fakes import OPEN, cluster, from_scheduler, member, of, one, said, session, view, welcome

VIEW = view(cluster(), [member("worker", 1)])


def joined(rank: int = 1) -> SchedulerSession:
    node = session("worker", rank)
    node.tick(0.0)
    node.receive(welcome(rank), 0.0)
    node.take_effects()
    return node


def test_it_connects_and_joins_until_it_is_welcome() -> None:
    node = session("worker", 1)
    assert node.next_deadline() is None
    effects = node.tick(5.0)
    assert one(of(Connect, effects)) == Connect(SCHEDULER, "tcp://scheduler")
    join = one(said(effects, SCHEDULER))
    assert join == Join(1, "worker", "worker-1", "", "host", 77, -1, OPEN)
    assert node.next_deadline() == 5.0 + JOIN_RETRY_S
    assert node.tick(5.1) == []
    assert node.tick(5.5) == [Send(SCHEDULER, join)]
    assert (node.joined, node.heard, node.name) == (False, False, "worker")
    assert node.receive(welcome(1, "dead"), 5.6)
    assert (node.joined, node.rank, node.predecessor, node.name) == (True, 1, "dead", "worker 1")
    assert (node.heard, node.heard_at) == (True, 5.6)
    assert "joined as worker 1" in one(of(LogEntry, node.take_effects())).text
    assert node.tick(6.0) == []
    assert said(node.tick(6.6)) == [Heartbeat("worker", 1)]
    assert node.next_deadline() == pytest.approx(7.6)


def test_a_second_welcome_changes_nothing() -> None:
    node = joined()
    node.receive(from_scheduler(Welcome(1, 1, "dead")), 1.0)
    assert (node.rank, node.predecessor) == (1, "")
    assert of(LogEntry, node.take_effects()) == []


def test_newer_views_are_taken() -> None:
    node = joined()
    assert node.receive(from_scheduler(VIEW, (1, 3)), 1.0)
    assert not node.receive(from_scheduler(View(OPEN, (), ()), (1, 2)), 1.0)
    assert node.view.epoch == (1, 3)
    assert node.view.settings.num_workers == 2


def test_it_remembers_who_is_quiet() -> None:
    node = joined()
    assert not node.receive(from_scheduler(HeartbeatAck((Quiet("worker", 0, 3.5),))), 1.0)
    assert node.quiet == (Quiet("worker", 0, 3.5),)


def test_an_observer_sends_no_heartbeats() -> None:
    node = session("observer", 0)
    node.tick(0.0)
    node.receive(welcome(-1), 0.0)
    node.take_effects()
    assert node.tick(1.0) == []
    assert node.next_deadline() == 3601.0


def test_a_scheduler_that_forgot_it_is_joined_again_with_the_same_rank() -> None:
    node = joined()
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who?")), 2.0)
    effects = node.tick(2.0)
    assert "forgot this node" in one(of(LogEntry, effects)).text
    assert one(said(effects)).rank == 1
    node.receive(welcome(1), 2.1)
    assert node.joined
    assert node.failure is None


def test_a_scheduler_that_gives_it_another_rank_ends_it() -> None:
    node = joined()
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who?")), 2.0)
    assert not node.receive(welcome(0), 2.1)
    assert isinstance(node.failure, NotAllowed)
    assert "worker 1, now it would be 0" in str(node.failure)


def test_who_was_replaced_halts() -> None:
    node = joined()
    node.receive(from_scheduler(Refused(0, ErrorCode.REPLACED, "another process took the place")), 2.0)
    effects = node.tick(2.0)
    assert one(of(Halt, effects)).error is node.failure
    assert isinstance(node.failure, NotAllowed)
    assert node.tick(50.0) == []
    assert node.next_deadline() is None


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (Refused(1, ErrorCode.CONFIG_ERROR, "other mode", key="mode"), ConfigError),
        (Refused(1, ErrorCode.NOT_ALLOWED, "full"), NotAllowed),
        (Refused(0, ErrorCode.PROTOCOL_ERROR, "another version"), ProtocolError),
        (Refused(0, ErrorCode.KEY_NOT_FOUND, "?"), None),
        (Refused(9, ErrorCode.NOT_ALLOWED, "?"), None),
    ],
)
def test_a_join_that_is_refused_ends_it(refused: Refused, kind: Any) -> None:
    node = session("worker", 1)
    node.tick(0.0)
    node.receive(from_scheduler(refused), 0.1)
    assert type(node.failure) is (type(None) if kind is None else kind)
    if isinstance(node.failure, ConfigError):
        assert node.failure.setting == "mode"


@pytest.mark.parametrize(
    "refused", [Refused(1, ErrorCode.NOT_ALLOWED, "full"), Refused(0, ErrorCode.PROTOCOL_ERROR, "?")]
)
def test_late_refusals_of_a_join_do_not_end_one_that_is_in(refused: Refused) -> None:
    node = joined()
    node.receive(from_scheduler(refused), 2.0)
    assert node.failure is None


def test_garbage_in_place_of_a_welcome_ends_it_and_later_does_not() -> None:
    node = session("worker", 1)
    node.tick(0.0)
    node.invalid_frame("protocol version 9")
    assert isinstance(node.failure, ProtocolError)
    assert "protocol version 9" in str(node.failure)
    first = node.failure
    node.invalid_frame("more")
    assert node.failure is first
    later = joined()
    later.invalid_frame("junk")
    assert later.failure is None


@pytest.mark.parametrize(
    "message", [NotYet(0, NotYetReason.NOT_JOINED, "?"), Refused(0, ErrorCode.REPLACED, "?")], ids=["join", "replaced"]
)
def test_who_has_closed_is_not_interested(message: NotYet | Refused) -> None:
    node = joined()
    node.close()
    node.receive(from_scheduler(message), 2.0)
    assert node.failure is None
    assert node.tick(60.0) == []
    assert node.next_deadline() is None


def test_a_preferred_rank_is_asked_for() -> None:
    node = SchedulerSession(Identity("worker", "a", 5, "", "h", 1, 3), OPEN, "tcp://s", 1.0)
    assert one(said(node.tick(0.0))).rank == 3
