"""The scheduler: which nodes have joined, and with which rank."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from kvd.core.machine import CallerPeer, InvalidFrame, LogEntry, PeerLost, Persisted, Send, Tick, Unsaved
from kvd.core.scheduler import machine
from kvd.protocol.messages import (
    BIGGEST,
    MAX_MEMBERS,
    Departure,
    Done,
    Enter,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    MemberState,
    NotYet,
    NotYetReason,
    Quiet,
    Refused,
    Settings,
    StatusQuery,
    StatusReport,
    View,
    Welcome,
)
from tests.core.fakes import OPEN, lookup_of, of, one, said, server_id, worker_id
from tests.core.scheduler_harness import BARE, Harness, answer

# ── how it is told ──


def test_the_steps_that_the_module_tells_of_exist() -> None:
    steps = re.findall(r"`([\w/]+)\.py:(\w+)\.(\w+)`", str(machine.__doc__))
    assert len(steps) >= 10
    for module, owner, function in steps:
        assert callable(
            getattr(getattr(import_module(f"kvd.core.scheduler.{module.replace('/', '.')}"), owner), function)
        )


# ── joining ──


def test_nodes_get_ranks_in_the_order_of_joining_and_all_get_the_view() -> None:
    harness = Harness()
    assert answer(harness.join("server", 1000, "s"), Welcome) == Welcome(1, 0, None)
    assert answer(harness.worker(0), Welcome) == Welcome(1, 0, None)
    effects = harness.worker(1)
    assert answer(effects, Welcome) == Welcome(1, 1, None)
    views: dict[Any, View] = {send.peer: send.message for send in of(Send, effects) if isinstance(send.message, View)}
    assert set(views) == {1000, worker_id(0), worker_id(1)}
    view = views[1000]
    assert [(member.role, member.rank, member.state) for member in view.members] == [
        ("server", 0, "active"),
        ("worker", 0, "active"),
        ("worker", 1, "active"),
    ]
    assert view.shards == (0,) * 8
    assert harness.machine.epoch == (1, 3)


def test_a_join_is_not_announced_before_it_is_persisted() -> None:
    harness = Harness()
    harness.hold = True
    effects = harness.worker(0)
    assert said(effects) == []
    token = one(of(Unsaved, effects)).token
    assert harness.machine.epoch == (1, 0)
    assert [type(message) for message in said(harness.step(Persisted(token)))] == [Welcome, View]
    assert harness.machine.epoch == (1, token)
    assert harness.step(Persisted(token)) == []


def test_of_two_unsaved_changes_the_view_announced_is_the_saved_one() -> None:
    harness = Harness()
    harness.hold = True
    first = one(of(Unsaved, harness.worker(0))).token
    second = one(of(Unsaved, harness.worker(1))).token
    harness.step(Persisted(first))
    assert harness.machine.epoch == (1, first)
    (view,) = [
        message for message in said(harness.say(worker_id(0), Heartbeat("worker", 0))) if isinstance(message, View)
    ]
    assert [member.rank for member in view.members] == [0]
    effects = harness.step(Persisted(second))
    assert answer(effects, Welcome) == Welcome(1, 1, None)
    assert all(len(message.members) == 2 for message in said(effects) if isinstance(message, View))


def test_records_saved_out_of_order_never_bring_back_an_older_view() -> None:
    harness = Harness()
    harness.hold = True
    first = one(of(Unsaved, harness.worker(0))).token
    second = one(of(Unsaved, harness.worker(1))).token
    effects = harness.step(Persisted(second))
    assert len([message for message in said(effects) if isinstance(message, Welcome)]) == 2
    assert harness.step(Persisted(first)) == []
    assert harness.machine.epoch == (1, second)


def test_a_repeated_join_is_answered_again_and_changes_nothing() -> None:
    harness = Harness()
    harness.worker(0)
    effects = harness.worker(0)
    assert [type(message) for message in said(effects)] == [Welcome, View]
    assert of(Unsaved, effects) == []


def test_a_node_gets_the_rank_it_asks_for_if_that_is_free() -> None:
    harness = Harness(BARE._replace(num_workers=3))
    assert answer(harness.join("worker", 51, "a", rank=2), Welcome).rank == 2
    assert answer(harness.join("worker", 52, "b", rank=2), Welcome).rank == 0
    assert answer(harness.join("worker", 53, "c", rank=9), Welcome).rank == 1


def test_a_restarted_worker_gets_its_old_rank_whatever_it_asks_for() -> None:
    harness = Harness()
    harness.worker(0)
    harness.worker(1)
    effects = harness.join("worker", worker_id(1, 1), "worker-1", rank=0)
    assert answer(effects, Welcome) == Welcome(1, 1, MemberState.DEAD)
    told = [send.message for send in of(Send, effects) if send.peer == worker_id(1)]
    assert [(message.error, message.request) for message in told if isinstance(message, Refused)] == [
        (ErrorCode.REPLACED, 0)
    ]


def test_a_full_cluster_refuses_a_join() -> None:
    harness = Harness()
    for rank in (0, 1):
        harness.worker(rank)
    refused = answer(harness.join("worker", 99, "third"), Refused)
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert "all 2 workers are there" in refused.text
    harness.say(worker_id(0), Leave(9, Departure.DONE))
    assert answer(harness.join("worker", 99, "third"), Refused).error is ErrorCode.NOT_ALLOWED  # done is not gone


def test_the_rank_of_a_worker_that_left_is_given_before_that_of_a_dead_one() -> None:
    harness = Harness()
    for rank in (0, 1):
        harness.worker(rank)
    harness.kill(worker_id(0))
    harness.say(worker_id(1), Leave(9, Departure.LEFT))
    assert answer(harness.join("worker", 98, "new"), Welcome) == Welcome(1, 1, MemberState.LEFT)
    assert answer(harness.join("worker", 99, "newer"), Welcome) == Welcome(1, 0, MemberState.DEAD)


def test_an_observer_gets_the_view_and_is_not_in_it() -> None:
    harness = Harness()
    harness.worker(0)
    effects = harness.join("observer", 77, "")
    assert [type(message) for message in said(effects, 77)] == [Welcome, View]
    assert said(effects)[0] == Welcome(1, -1, None)
    assert harness.states() == {"worker 0": "active"}


@pytest.mark.parametrize(
    ("have", "field", "wanted", "agrees"),
    [
        (BARE, "mode", "async", True),
        (BARE._replace(mode="sync"), "mode", "async", False),
        (BARE, "merge", "mean", True),
        (BARE._replace(merge="sum"), "merge", "mean", False),
        (BARE, "num_workers", 2, True),
        (BARE, "num_workers", 3, False),
        (BARE, "num_servers", 2, False),
        (BARE, "slice_bytes", 8192, False),
        (BARE, "rounds_ahead", 3, False),
        (BARE, "num_shards", 9, False),
        (BARE._replace(num_shards=0), "num_shards", 9, True),
        (BARE, "replicas", 2, False),
        (BARE._replace(replicas=2), "replicas", 1, False),
        (BARE._replace(mode="async", staleness=3), "staleness", 3, True),
        (BARE._replace(mode="async", staleness=3), "staleness", 2, False),
        (BARE._replace(mode="async"), "staleness", 0, False),
        (BARE, "staleness", 4, True),
    ],
)
def test_settings_agree_or_the_refusal_names_the_setting(have: Settings, field: str, wanted: Any, agrees: bool) -> None:
    effects = Harness(have).join("worker", 51, "a", settings=OPEN._replace(**{field: wanted}))
    if agrees:
        assert answer(effects, Welcome).rank == 0
    else:
        refused = answer(effects, Refused)
        assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, field)
        assert repr(wanted) in refused.text


def test_the_first_worker_decides_what_the_cluster_left_open() -> None:
    harness = Harness()
    harness.join("server", 1000, "s", settings=OPEN._replace(mode="async", merge="mean"))
    assert harness.machine.explain(0.0)["settings"]["mode"] == ""  # type: ignore[index]
    harness.join("worker", 51, "a", settings=OPEN._replace(mode="async", merge="mean", staleness=2))
    settings: Any = harness.machine.explain(0.0)["settings"]
    assert (settings["mode"], settings["merge"], settings["staleness"]) == ("async", "mean", 2)
    assert answer(harness.join("worker", 52, "b", settings=OPEN._replace(mode="sync")), Refused).key == "mode"


@pytest.mark.parametrize(("role", "node_id", "field"), [("driver", "a", "role"), ("worker", "", "node_id")])
def test_a_join_needs_a_role_and_a_name(role: str, node_id: str, field: str) -> None:
    refused = answer(Harness().join(role, 51, node_id), Refused)
    assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, field)


@pytest.mark.parametrize(("field", "word"), [("mode", "chaos"), ("merge", "max")])
def test_unknown_modes_and_merge_rules_are_refused(field: str, word: Any) -> None:
    harness = Harness()
    refused = answer(harness.join("worker", 51, "a", settings=OPEN._replace(**{field: word})), Refused)
    assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, field)
    assert harness.machine.explain(0.0)["settings"][field] == ""  # type: ignore[index]


# ── leaving and replacing ──


def test_a_leave_is_answered_when_the_view_says_so() -> None:
    harness = Harness()
    harness.worker(0)
    harness.hold = True
    effects = harness.say(worker_id(0), Leave(9, Departure.DONE))
    assert said(effects) == []
    assert Done(9) in said(harness.step(Persisted(one(of(Unsaved, effects)).token)))
    assert harness.states() == {"worker 0": "done"}
    harness.hold = False
    assert said(harness.say(worker_id(0), Leave(10, Departure.LEFT)))[-1] == Done(10)
    assert harness.states() == {"worker 0": "left"}
    assert said(harness.say(worker_id(0), Leave(10, Departure.LEFT))) == [Done(10)]


def test_the_log_says_in_words_who_left() -> None:
    harness = Harness()
    harness.worker(0)
    for departure, says in [(Departure.DONE, "worker 0 has left the rounds"), (Departure.LEFT, "worker 0 has left")]:
        assert of(LogEntry, harness.say(worker_id(0), Leave(9, departure)))[0].text == says


def test_a_member_that_left_stays_left_whatever_arrives_late() -> None:
    harness = Harness()
    harness.worker(0)
    harness.say(worker_id(0), Leave(9, Departure.DONE))
    harness.say(worker_id(0), Leave(10, Departure.LEFT))
    assert Done(9) in said(harness.say(worker_id(0), Leave(9, Departure.DONE)))
    harness.beat(0)
    harness.worker(0)
    harness.now = 1000.0
    harness.step(Tick())
    assert harness.states() == {"worker 0": "left"}


def test_a_worker_that_joined_is_active() -> None:
    harness = Harness()
    harness.worker(0)
    assert harness.states() == {"worker 0": "active"}


@pytest.mark.parametrize("message", [Heartbeat("worker", 0), Leave(3, Departure.LEFT), Enter(3, "b", 0)])
def test_an_unknown_node_is_told_to_join(message: Any) -> None:
    not_yet = answer(Harness().say(51, message), NotYet)
    assert (not_yet.reason, not_yet.request) == (NotYetReason.NOT_JOINED, getattr(message, "request", 0))


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat("worker", 0),
        Leave(3, Departure.LEFT),
        Enter(3, "b", 0),
        Join(1, "worker", "worker-0", "", "h", 1, 0, OPEN),
    ],
)
def test_a_replaced_node_can_change_nothing(message: Any) -> None:
    harness = Harness()
    harness.worker(0)
    harness.worker(0, life=1)
    effects = harness.say(worker_id(0), message)
    assert answer(effects, Refused).error is ErrorCode.REPLACED
    assert of(Unsaved, effects) == []
    restarted = Harness(saved=harness.disk, generation=2)
    assert answer(restarted.say(worker_id(0), message), Refused).error is ErrorCode.REPLACED
    assert answer(restarted.beat(0, life=1), HeartbeatAck) is not None


def test_a_heartbeat_for_a_rank_that_another_node_holds_is_refused_as_replaced() -> None:
    harness = Harness()
    harness.worker(0)
    assert answer(harness.say(51, Heartbeat("worker", 0)), Refused).error is ErrorCode.REPLACED


# ── what is refused, what is ignored ──


def test_messages_for_servers_are_refused_and_answers_are_not_answered() -> None:
    harness = Harness()
    refused = answer(harness.say(51, lookup_of(4, "w", False)), Refused)
    assert (refused.error, refused.request, refused.text) == (
        ErrorCode.PROTOCOL_ERROR,
        4,
        "the scheduler takes no Lookup: send it to a server",
    )
    assert answer(harness.say(51, View(OPEN, (), ())), Refused).request == 0
    assert harness.say(51, Refused(0, ErrorCode.PROTOCOL_ERROR, "what?")) == []
    assert harness.step(InvalidFrame(CallerPeer(b"peer"), "junk")) == []
    assert harness.step(PeerLost(12345, "who?")) == []


def test_anyone_may_ask_for_the_status() -> None:
    assert said(Harness().say(51, StatusQuery(8))) == [StatusReport(8)]


def test_explain_names_the_members_and_the_missing() -> None:
    harness = Harness()
    harness.worker(1)
    harness.now = 2.5
    shown: Any = harness.machine.explain(2.5)
    assert (shown["role"], shown["view"], shown["missing"]) == ("scheduler", [1, 1], ["server 0", "worker 1"])
    assert shown["members"][0]["last_heard_s"] == 2.5
    assert harness.machine.watched() == [(worker_id(1), "host", 71)]


def test_a_cluster_has_no_more_nodes_than_a_view_can_hold() -> None:
    harness = Harness(BARE._replace(num_workers=MAX_MEMBERS))
    refused = answer(harness.worker(0), Refused)
    assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, "num_workers")
    assert f"at most {MAX_MEMBERS} nodes in all, not {MAX_MEMBERS + 1}" in refused.text
    assert Harness(BARE._replace(num_workers=MAX_MEMBERS - 1)).worker(0)


@pytest.mark.parametrize("role", ["worker", "server", "observer"])
@pytest.mark.parametrize("field", ["num_workers", "num_servers"])
def test_a_join_with_a_giant_number_of_nodes_is_refused(role: str, field: str) -> None:
    none: Any = {field: 0}
    giant: Any = {field: BIGGEST}
    refused = answer(Harness(BARE._replace(**none)).join(role, 5000, "n", settings=OPEN._replace(**giant)), Refused)
    assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, field)


# ── heartbeats ──


def test_a_heartbeat_is_answered_with_the_quiet_nodes_and_a_newer_view() -> None:
    harness = Harness()
    harness.worker(0)
    harness.worker(1)
    harness.now = 1.0
    assert said(harness.beat(0)) == [HeartbeatAck((), 1.0)]
    harness.now = 2.25
    assert said(harness.beat(0)) == [HeartbeatAck((Quiet("worker", 1, 2.25),), 1.0)]
    effects = harness.say(worker_id(0), Heartbeat("worker", 0), view=(1, 1))
    assert [type(message) for message in said(effects)] == [HeartbeatAck, View]


def test_a_restarted_server_gets_its_old_rank() -> None:
    harness = Harness()
    harness.join("server", server_id(0), "s")
    assert answer(harness.join("server", server_id(0, 1), "s"), Welcome) == Welcome(1, 0, MemberState.DEAD)


def test_the_oldest_replaced_incarnations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.scheduler.membership.roster.MAX_REPLACED", 1)
    harness = Harness()
    for life in (0, 1, 2):
        harness.worker(0, life)
    assert [list(entry) for entry in harness.disk["replaced"]] == [[worker_id(0, 1), "worker 0"]]
