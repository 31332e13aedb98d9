"""A node's session with the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import SCHEDULER, Connect, Halt, LogEntry, Send
from kvd.core.session import (
    JOIN_RETRY_S,
    TRANSITIONS,
    VIEW_INTERVAL_S,
    VIEW_RETRY_S,
    Identity,
    SchedulerSession,
    SessionEvent,
    SessionState,
)
from kvd.errors import ConfigError, NotAllowed, ProtocolError
from kvd.protocol.messages import (
    NO_PARTITIONS,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    KnownPartitions,
    MemberState,
    NotYet,
    NotYetReason,
    Partition,
    Quiet,
    Refused,
    View,
    Welcome,
)
from tests.core.fakes import (
    OPEN,
    SCHEDULER_ID,
    cluster,
    from_scheduler,
    member,
    members,
    of,
    one,
    said,
    server_id,
    session,
    view,
    welcome,
    worker_id,
)

VIEW = view(cluster(), [member("worker", 1)])


def joined(rank: int = 1) -> SchedulerSession:
    node = session("worker", rank)
    node.tick(0.0)
    node.receive(welcome(rank), 0.0)
    node.take_effects()
    return node


def test_it_connects_and_sends_joins_until_it_is_welcomed() -> None:
    node = session("worker", 1)
    assert node.next_deadline() is None
    effects = node.tick(5.0)
    assert one(of(Connect, effects)) == Connect(SCHEDULER, "tcp://scheduler")
    join = one(said(effects, SCHEDULER))
    assert join == Join(1, "worker", "worker-1", "", "host", worker_id(1), -1, OPEN)
    assert node.next_deadline() == 5.0 + JOIN_RETRY_S
    assert node.tick(5.1) == []
    assert node.tick(5.5) == [Send(SCHEDULER, join)]
    assert (node.joined, node.heard, node.name) == (False, False, "worker")
    assert node.receive(welcome(1, "dead"), 5.6)
    assert (node.joined, node.rank, node.predecessor, node.name) == (True, 1, MemberState.DEAD, "worker 1")
    assert (node.heard, node.heard_at) == (True, 5.6)
    assert "joined as worker 1" in one(of(LogEntry, node.take_effects())).text
    assert node.tick(6.0) == []
    assert said(node.tick(6.6)) == [Heartbeat("worker", 1)]
    assert node.next_deadline() == pytest.approx(7.6)


def test_a_second_welcome_changes_nothing() -> None:
    node = joined()
    node.receive(from_scheduler(Welcome(1, 1, MemberState.DEAD)), 1.0)
    assert (node.rank, node.predecessor) == (1, None)
    assert of(LogEntry, node.take_effects()) == []


def test_only_newer_views_are_taken() -> None:
    node = joined()
    assert node.receive(from_scheduler(VIEW, (1, 3)), 1.0)
    assert not node.receive(from_scheduler(View(OPEN, (), ()), (1, 2)), 1.0)
    assert node.view.epoch == (1, 3)
    assert node.view.settings.num_workers == 2


def test_it_remembers_the_quiet_nodes() -> None:
    node = joined()
    assert not node.receive(from_scheduler(HeartbeatAck((Quiet("worker", 0, 3.5),))), 1.0)
    assert node.quiet == (Quiet("worker", 0, 3.5),)


def test_an_observer_sends_no_heartbeats() -> None:
    node = session("observer", 0)
    node.tick(0.0)
    node.receive(welcome(-1)._replace(run=7), 0.0)
    node.take_effects()
    join = said(session("observer", 0).tick(0.0))
    assert said(node.tick(1.0)) == join  # it asks for the view again
    assert node.next_deadline() == 1.0 + JOIN_RETRY_S
    node.receive(from_scheduler(view(cluster(), members()), (1, 3))._replace(run=7), 1.1)
    assert said(node.tick(1.0 + JOIN_RETRY_S)) == join  # less often, now that it knows the servers
    assert node.next_deadline() == 1.0 + JOIN_RETRY_S + VIEW_INTERVAL_S
    node.view_is_old(2.0)  # another node has a newer one
    node.view_is_old(2.05)
    assert node.next_deadline() == 2.0 + VIEW_RETRY_S


def test_only_an_observer_asks_for_views() -> None:
    node = joined()
    deadline = node.next_deadline()
    node.view_is_old(0.1)
    assert node.next_deadline() == deadline


def test_it_joins_a_scheduler_that_forgot_it_again_with_the_same_rank() -> None:
    node = joined()
    node.tick(2.0)
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who?")), 2.1)
    assert node.next_deadline() == 2.1
    effects = node.tick(2.1)
    assert "forgot this node" in one(of(LogEntry, effects)).text
    assert one(said(effects)).rank == 1
    node.receive(welcome(1), 2.2)
    assert node.joined
    assert node.failure is None


def test_it_fails_if_a_scheduler_that_forgot_it_gives_it_another_rank() -> None:
    node = joined()
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who?")), 2.0)
    assert not node.receive(welcome(0), 2.1)
    assert isinstance(node.failure, NotAllowed)
    assert "worker 1, now it would be 0" in str(node.failure)


def test_a_replaced_node_halts() -> None:
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
def test_it_fails_if_its_join_is_refused(refused: Refused, kind: Any) -> None:
    node = session("worker", 1)
    node.tick(0.0)
    node.receive(from_scheduler(refused), 0.1)
    assert type(node.failure) is (type(None) if kind is None else kind)
    if isinstance(node.failure, ConfigError):
        assert node.failure.setting == "mode"


@pytest.mark.parametrize(
    "refused", [Refused(1, ErrorCode.NOT_ALLOWED, "full"), Refused(0, ErrorCode.PROTOCOL_ERROR, "?")]
)
def test_a_late_refusal_of_a_join_does_not_end_a_joined_node(refused: Refused) -> None:
    node = joined()
    node.receive(from_scheduler(refused), 2.0)
    assert node.failure is None


def test_an_invalid_frame_in_place_of_a_welcome_ends_it_and_later_does_not() -> None:
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
def test_a_closed_session_ignores_the_scheduler(message: NotYet | Refused) -> None:
    node = joined()
    node.close()
    node.receive(from_scheduler(message), 2.0)
    assert node.failure is None
    assert node.tick(60.0) == []
    assert node.next_deadline() is None


def test_a_preferred_rank_is_asked_for() -> None:
    node = SchedulerSession(Identity("worker", "a", 5, "", "h", 1, 3), OPEN, "tcp://s", 1.0)
    assert one(said(node.tick(0.0))).rank == 3


def test_a_predecessor_that_a_server_knows_counts_as_dead_unless_the_scheduler_said_otherwise() -> None:
    node = joined()
    node.succeeded_the_dead()
    assert node.predecessor is MemberState.DEAD
    node = session("worker", 1)
    node.tick(0.0)
    node.receive(welcome(1, "left"), 0.0)
    node.succeeded_the_dead()
    assert node.predecessor is MemberState.LEFT


def test_a_failure_is_final() -> None:
    node = joined()
    node.replaced("another process took the place")
    first = node.failure
    assert isinstance(first, NotAllowed)
    assert node.name == "worker 1"
    node.take_effects()
    node.replaced("once more")
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "?")), 2.0)
    node.close()
    assert (node.failure, node.joined) == (first, True)
    assert node.tick(60.0) == []
    assert node.next_deadline() is None


# ── the table of states ──

FORGET = from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "?"))
HAPPENINGS: dict[SessionEvent, Callable[[SchedulerSession], object]] = {
    SessionEvent.START: lambda node: node.tick(9.0),
    SessionEvent.WELCOME: lambda node: node.receive(welcome(1), 9.0),
    SessionEvent.FORGOTTEN: lambda node: node.receive(FORGET, 9.0),
    SessionEvent.CLOSE: lambda node: node.close(),
    SessionEvent.FAIL: lambda node: node.replaced("stop"),
}
WAYS: dict[SessionState, list[SessionEvent]] = {
    SessionState.NOT_STARTED: [],
    SessionState.JOINING: [SessionEvent.START],
    SessionState.JOINED: [SessionEvent.START, SessionEvent.WELCOME],
    SessionState.REJOINING: [SessionEvent.START, SessionEvent.WELCOME, SessionEvent.FORGOTTEN],
    SessionState.CLOSED: [SessionEvent.START, SessionEvent.WELCOME, SessionEvent.CLOSE],
    SessionState.FAILED: [SessionEvent.START, SessionEvent.WELCOME, SessionEvent.FAIL],
}
CELLS = [(state, event) for state in SessionState for event in SessionEvent]
AFTER: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.NOT_STARTED, SessionEvent.START): SessionState.JOINING,
    (SessionState.NOT_STARTED, SessionEvent.CLOSE): SessionState.CLOSED,
    (SessionState.NOT_STARTED, SessionEvent.FAIL): SessionState.FAILED,
    (SessionState.JOINING, SessionEvent.WELCOME): SessionState.JOINED,
    (SessionState.JOINING, SessionEvent.FORGOTTEN): SessionState.JOINING,
    (SessionState.JOINING, SessionEvent.CLOSE): SessionState.CLOSED,
    (SessionState.JOINING, SessionEvent.FAIL): SessionState.FAILED,
    (SessionState.JOINED, SessionEvent.FORGOTTEN): SessionState.REJOINING,
    (SessionState.JOINED, SessionEvent.CLOSE): SessionState.CLOSED,
    (SessionState.JOINED, SessionEvent.FAIL): SessionState.FAILED,
    (SessionState.REJOINING, SessionEvent.WELCOME): SessionState.JOINED,
    (SessionState.REJOINING, SessionEvent.FORGOTTEN): SessionState.REJOINING,
    (SessionState.REJOINING, SessionEvent.CLOSE): SessionState.CLOSED,
    (SessionState.REJOINING, SessionEvent.FAIL): SessionState.FAILED,
}


def brought_to(state: SessionState) -> SchedulerSession:
    node = session("worker", 1)
    for event in WAYS[state]:
        HAPPENINGS[event](node)
    return node


def observed(node: SchedulerSession) -> tuple[object, ...]:
    """What others can see of a session."""
    return node.joined, type(node.failure), node.next_deadline(), node.rank, node.name


@pytest.mark.parametrize(("before", "event"), CELLS, ids=lambda value: value.value)
def test_each_event_leads_to_the_state_in_the_table_or_is_ignored(before: SessionState, event: SessionEvent) -> None:
    node = brought_to(before)
    assert node.state is before
    node.take_effects()
    seen = observed(node)
    HAPPENINGS[event](node)
    after = AFTER.get((before, event))
    assert node.state is (before if after is None else after)
    if after is None and event is not SessionEvent.START:  # a tick sends what is due
        assert node.take_effects() == []
        assert observed(node) == seen


def test_the_table_has_these_rows_and_no_others() -> None:
    assert set(TRANSITIONS) == set(SessionState)
    rows = {(state, event): after for state, row in TRANSITIONS.items() for event, after in row.items()}
    assert rows == AFTER


def test_the_states_in_which_a_node_is_joined_and_running() -> None:
    assert [state for state in SessionState if brought_to(state).next_deadline() is not None] == [
        SessionState.JOINING,
        SessionState.JOINED,
        SessionState.REJOINING,
    ]
    assert [state for state in SessionState if brought_to(state).joined] == [
        SessionState.JOINED,
        SessionState.CLOSED,  # left while joined
        SessionState.FAILED,
    ]
    early = session("worker", 1)
    early.close()
    assert not early.joined


def test_the_view_of_the_cluster_does_not_replace_that_of_the_run() -> None:
    """A worker that had to wait was sent the view of the cluster, which may arrive after its welcome."""
    node = session("worker", 0)
    node.tick(0.0)
    assert node.receive(from_scheduler(view(cluster(), members()), (1, 9)), 0.1)
    node.receive(welcome(0)._replace(run=7), 0.2)
    assert not node.receive(from_scheduler(view(cluster(), ()), (1, 10)), 0.3)
    assert node.receive(from_scheduler(view(cluster(), members()), (1, 1))._replace(run=7), 0.4)
    assert node.view.epoch == (1, 1)


def test_an_observer_takes_the_views_of_a_scheduler_that_lost_the_record_of_the_one_before() -> None:
    """It counts its views from the beginning: no scheduler believes an observer that there were others."""
    node = session("observer", 0)
    node.tick(0.0)
    shown = view(cluster(), members())
    node.receive(welcome(-1), 0.1)
    assert node.receive(from_scheduler(shown, (5, 9)), 0.1)
    node.receive(welcome(-1)._replace(sender=SCHEDULER_ID + 1), 0.2)
    assert node.receive(from_scheduler(shown, (1, 1))._replace(sender=SCHEDULER_ID + 1), 0.2)
    assert not node.receive(from_scheduler(shown, (5, 10)), 0.3), "the scheduler that has ended sent it"
    assert node.view.epoch == (1, 1)


def test_a_server_that_joins_says_what_it_knows_of_partitions() -> None:
    node = session("server", 1)
    assert one(said(node.tick(0.0))).partitions == NO_PARTITIONS
    node.receive(welcome(1), 0.0)
    partitions = (Partition(1, 0, -1, server_id(0)), Partition(1, -1, 0, server_id(1)))
    newest = replace(view(cluster(2, 2), [*members(2, 2)][::-1]), partitions=partitions)
    node.receive(from_scheduler(newest, (1, 7)), 0.1)
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who?")), 2.1)
    joins = [message for message in said(node.tick(2.1)) if isinstance(message, Join)]
    assert one(joins).partitions == KnownPartitions(partitions, (server_id(0), server_id(1)))


def test_a_worker_says_nothing_of_partitions() -> None:
    node = joined()
    partitions = (Partition(0, -1, -1, server_id(0)),)
    node.receive(from_scheduler(replace(VIEW, partitions=partitions), (1, 7)), 0.1)
    assert node.next_deadline() == 1.0
    node.receive(from_scheduler(NotYet(0, NotYetReason.NOT_JOINED, "who?")), 2.1)
    assert one(said(node.tick(2.1))).partitions == NO_PARTITIONS


def test_a_server_shows_at_once_that_it_knows_who_leads_what() -> None:
    """The scheduler chooses nobody before: who is to be synced would wait for a heartbeat."""
    node = session("server", 0)
    node.tick(0.0)
    node.receive(welcome(0), 0.0)
    node.take_effects()
    changed = replace(view(cluster(2, 2), members(2, 2)), partitions=(Partition(0, 1, -1, 7), Partition(1, 0, -1, 8)))
    assert node.receive(from_scheduler(changed, (1, 3)), 0.5)
    assert said(node.tick(0.5)) == [Heartbeat("server", 0)]
    assert node.receive(from_scheduler(changed, (1, 4)), 0.6)
    assert node.tick(0.6) == [], "only the members have changed"
