"""The server: what becomes of those who wait for a worker that died, left, or was replaced."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, CallerPeer, JobDone, Load, LogEntry, Received, ResetState, Run
from kvd.core.principals import HOLDER, KeyRole, Principal
from kvd.core.server import attachments
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    NO_VIEW,
    Attach,
    ClockQuery,
    Clocks,
    Command,
    Done,
    ErrorCode,
    Lookup,
    NodeName,
    NotYetReason,
    Refused,
    SetOptimizer,
    StoreState,
    UpdateOptimizer,
)
from tests.core.fakes import cluster, lookup_of, member, of, one, said, worker_id
from tests.core.server_harness import Harness, kinds, not_yet, ready, refusal, values


def test_requests_that_wait_for_a_dead_worker_are_refused_with_its_name() -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    harness.pull(0, 1, request=12)
    effects = harness.look(member("worker", 1, "dead", last_seen_s=20.5))
    told = [message for message in said(effects) if isinstance(message, Refused)]
    assert [(refused.request, refused.error, refused.nodes) for refused in told] == [
        (11, ErrorCode.NODE_LOST, (NodeName("worker", 1),)),
        (12, ErrorCode.NODE_LOST, (NodeName("worker", 1),)),
    ]
    assert told[0].last_seen_s == 20.5
    for remedy in ("start it again under its node id", '"wait"', "kvd launch --restart N", '"shrink"'):
        assert remedy in told[0].text


def test_staged_pushes_count_when_the_dead_worker_comes_back() -> None:
    harness = ready()
    harness.push(0, 1, b"\5", request=11)
    harness.look(member("worker", 1, "dead"))
    assert refusal(harness.push(0, 1, None, probe=True, request=11)).error is ErrorCode.NODE_LOST
    assert refusal(harness.pull(0, 1)).error is ErrorCode.NODE_LOST
    assert harness.explain()["bytes_staged"] == 1
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert kinds(harness.push(0, 1, None, probe=True, request=11)) == ["Staged"]
    assert said(harness.push(1, 1, b"\6", life=1), worker_id(0)) == [Done(11)]
    assert values(harness.pull(0, 1)) == ((1,), [b"\x0b"])


def test_a_dead_worker_that_has_pushed_holds_nothing_up() -> None:
    harness = ready()
    harness.push(1, 1)
    harness.look(member("worker", 1, "dead"))
    assert kinds(harness.push(0, 1), worker_id(0)) == ["Done"]


def test_with_on_worker_loss_wait_no_request_is_refused() -> None:
    harness = ready(fail=False)
    harness.push(0, 1)
    assert said(harness.look(member("worker", 1, "dead"))) == []
    assert kinds(harness.push(0, 2)) == ["Staged"]


def test_a_message_of_many_keys_is_failed_once() -> None:
    harness = ready()
    harness.init("v", b"\0")
    harness.push_all(0, [("w", 0, 1), ("v", 0, 1)], [b"\1", b"\1"])
    assert kinds(harness.look(member("worker", 1, "dead"))) == ["Refused"]
    assert kinds(harness.push_all(0, [("w", 0, 2), ("v", 0, 2)], [b"\1", b"\1"])) == ["Refused"]
    assert harness.explain()["requests_waiting"] == 0


@pytest.mark.parametrize("state", ["left", "done", "gone"])
def test_rounds_no_longer_wait_for_a_worker_that_left_them(state: str) -> None:
    harness = ready()
    harness.push(0, 1, request=11)
    effects = harness.look(member("worker", 1, state))
    assert said(effects) == [Done(11)]
    assert kinds(harness.push(0, 2)) == ["Done"]


def test_the_last_pushes_of_a_worker_that_left_count() -> None:
    harness = ready()
    harness.push(1, 1, b"\2")
    harness.look(member("worker", 1, "left"))
    harness.push(0, 1, b"\1")
    assert values(harness.pull(0, 1)) == ((1,), [b"\3"])


def test_async_with_staleness_a_dead_slowest_worker_is_named() -> None:
    harness = ready(settings=cluster(mode="async", staleness=1))
    harness.push(0, 1)
    harness.push(0, 2, request=12)
    refused = refusal(harness.look(member("worker", 1, "dead")))
    assert (refused.request, refused.nodes) == (12, (NodeName("worker", 1),))


def test_async_without_staleness_nothing_waits_for_the_dead() -> None:
    harness = ready(settings=cluster(mode="async"))
    harness.hold = True
    apply = one(of(Apply, harness.push(0, 1, request=11)))
    harness.push(0, 2)
    assert said(harness.look(member("worker", 1, "dead"))) == []
    assert Done(11) in said(harness.finish(apply))


# ── replaced ──


def test_the_successor_starts_where_its_predecessor_was_counted() -> None:
    harness = ready()
    for rank in (0, 1):
        harness.push(rank, 1, b"\1")
    harness.push(1, 2, b"\x63", request=22)
    effects = harness.look(member("worker", 1, life=1))
    assert any("was replaced" in note.text for note in of(LogEntry, effects))
    assert (
        not_yet(harness.push(1, 2, b"\x63", request=22)).reason is NotYetReason.NOT_ATTACHED
    )  # the old one changes nothing
    harness.attach(1, life=1)
    assert said(harness.say(1, ClockQuery(3, "w"), life=1)) == [Clocks(3, 1, 1, 1, 1)]
    assert said(harness.push(1, 1, b"\x63", life=1, request=5)) == [Done(5)]  # redone, and counted before
    harness.push(1, 2, b"\1", life=1)
    harness.push(0, 2, b"\1")
    assert values(harness.pull(0, 2)) == ((2,), [b"\2"])


def test_a_successor_that_waited_for_its_view_takes_over_when_it_comes() -> None:
    harness = ready()
    harness.push(1, 1, b"\x63")
    harness.attach(1, life=1)
    effects = harness.look(member("worker", 1, life=1))
    assert said(effects) == [Done(1)]
    assert harness.explain()["bytes_staged"] == 0


def test_the_answers_of_a_replaced_worker_go_nowhere() -> None:
    harness = ready()
    harness.push(1, 1, request=21)
    harness.pull(1, 1, request=22)
    harness.look(member("worker", 1, life=1))
    assert harness.explain()["requests_waiting"] == 0
    harness.attach(1, life=1)
    harness.push(0, 1)
    assert kinds(harness.push(1, 1, life=1), worker_id(1)) == []


def test_an_update_under_way_is_not_stopped_by_a_replacement() -> None:
    harness = ready()
    harness.hold = True
    harness.push(0, 1, request=11)
    apply = one(of(Apply, harness.push(1, 1)))
    harness.look(member("worker", 1, life=1))
    assert said(harness.finish(apply), worker_id(0)) == [Done(11)]
    assert harness.step(JobDone(apply.job, b"\x63")) == []  # the same job does not end twice
    harness.hold = False
    assert values(harness.pull(0, 1)) == ((1,), [b"\2"])


# ── worker 0 ──


@pytest.mark.parametrize(("state", "told"), [("dead", True), ("left", True), ("gone", True), ("done", False)])
def test_who_waits_for_a_key_is_told_that_nobody_will_make_it(state: str, told: bool) -> None:
    harness = Harness()
    assert harness.say(1, lookup_of(5, "w", True)) == []
    effects = harness.look(member("worker", 0, state))
    again = harness.say(1, lookup_of(6, "w", True))
    if told:
        refused = refusal(effects)
        assert (refused.request, refused.error, refused.nodes, refused.key) == (
            5,
            ErrorCode.NODE_LOST,
            (NodeName("worker", 0),),
            "w",
        )
        assert ("worker 0, which makes the keys, has left; restart it" in refused.text) == (state == "left")
        assert refusal(again).request == 6
    else:
        assert said(effects) == said(again) == []


def test_with_wait_a_dead_worker_0_is_waited_for() -> None:
    harness = Harness(fail=False)
    harness.say(1, lookup_of(5, "w", True))
    assert said(harness.look(member("worker", 0, "dead"))) == []


def test_so_many_names_wait_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.lookups.MAX_WAITING", 2)
    harness = Harness()
    assert harness.say(1, Lookup(5, ("w", "v"), True)) == []
    assert not_yet(harness.say(1, lookup_of(6, "w", True))).reason is NotYetReason.BUSY
    assert harness.say(1, Lookup(5, ("w", "v"), True)) == []  # asked again: it waits already
    harness.init("w", b"\0")
    assert not_yet(harness.say(1, lookup_of(7, "v", True))).reason is NotYetReason.BUSY
    harness.init("v", b"\0")
    assert kinds(harness.say(1, Lookup(8, ("u", "t"), True))) == []  # the first was answered
    assert not_yet(harness.say(1, lookup_of(9, "s", True))).reason is NotYetReason.BUSY


def test_one_key_cannot_keep_the_others_from_waiting_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections its holder opens. Under the cluster's key, each connection has a share."""
    monkeypatch.setattr("kvd.core.server.lookups.MAX_WAITING", 30)
    monkeypatch.setattr("kvd.core.server.lookups.FEW", 1)
    harness = Harness()
    greedy, other = (Principal(name, frozenset({KeyRole.OBSERVER})) for name in ("greedy", "other"))

    def asks(number: int, principal: Principal, connection: bytes) -> bool:
        query = Lookup(number, (f"k{number}",), True)
        return not said(harness.step(Received(CallerPeer(connection), 7, NO_VIEW, query, principal=principal)))

    assert [asks(number, greedy, b"%d" % number) for number in range(30)].count(True) == 20  # two thirds
    assert asks(40, other, b"other")
    assert asks(41, HOLDER, b"holder")
    assert not asks(42, greedy, b"once more")
    for number in range(5):
        harness.init(f"k{number}", b"\0")
    assert asks(43, greedy, b"once more")


def test_attach_again_after_a_new_view() -> None:
    harness = Harness(attach=False)
    harness.attach(0)
    harness.members[("worker", 0)] = member("worker", 0, life=1)
    stale: Any = harness.say(0, Attach(2, 0))
    assert said(stale) == [Done(2)]


@pytest.mark.parametrize(
    ("message", "effect"),
    [
        (UpdateOptimizer(9, {"learning_rate": 0.5}), None),
        (SetOptimizer(9, None), ResetState),
        (StoreState(9, "w", 0, 1, ()), Load),
        (Command(9, "x"), Run),
    ],
)
def test_a_replaced_worker_controls_nothing_any_more(message: Any, effect: Any) -> None:
    """Neither what it says when it wakes, nor a late copy of what was carried out while it was there."""
    harness = ready()
    harness.say(0, SetOptimizer(8, to_wire(SGD(1.0))))
    before = harness.explain()["optimizer"]
    harness.look(member("worker", 0, life=1))
    effects = harness.say(0, message, b"")
    assert not_yet(effects).reason is NotYetReason.NOT_ATTACHED
    assert effect is None or of(effect, effects) == []
    assert harness.explain()["optimizer"] == before
    assert [group.optimizer for group in harness.machine.table.groups.values()] == [SGD(1.0)]
    harness.attach(0, life=1)
    assert "Refused" not in kinds(harness.say(0, message, b"", life=1))


def test_so_many_replaced_workers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_REPLACED", 2)
    harness = ready()
    for life in range(1, 5):
        harness.look(member("worker", 0, life=life))
        harness.attach(0, life=life)
    assert list(harness.machine._attachments._replaced) == [worker_id(0, 2), worker_id(0, 3)]


def test_requests_that_wait_for_the_dead_are_refused_after_a_failed_update() -> None:
    """While an update runs nobody is told anything: it may let them go on."""
    harness = ready(settings=cluster(3, mode="async", staleness=1), workers=3)
    harness.push(1, 1, request=21)
    harness.push(1, 2, request=22)  # one more than the slowest may be behind: it waits
    harness.hold = True
    (apply,) = of(Apply, harness.push(0, 1, request=11))
    assert said(harness.look(member("worker", 2, "dead"))) == []
    harness.error = NotAllowed("no memory")
    told = {message.request: message for message in said(harness.finish(apply))}
    assert (told[11].error, told[22].error) == (ErrorCode.NOT_ALLOWED, ErrorCode.NODE_LOST)
    assert told[22].nodes == (NodeName("worker", 2),)
