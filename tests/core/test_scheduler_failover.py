"""The scheduler of a run with two replicas: failover, and servers that are synced."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import LogEntry, Persisted, Tick, Unsaved
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.protocol.messages import (
    Departure,
    Done,
    Leave,
    NotYet,
    NotYetReason,
    OutOfSync,
    Partition,
    Synced,
    View,
)
from tests.core.failover_harness import A, B, Run, back_in_place, settings
from tests.core.fakes import of, one, said, server_id, worker_id
from tests.core.scheduler_harness import Harness, answer


def test_with_one_replica_views_have_no_partitions() -> None:
    harness = Harness(settings(replicas=1))
    harness.join("server", A, "s0")
    effects = harness.join("server", B, "s1")
    assert [message.partitions for message in said(effects) if isinstance(message, View)][-1] == ()
    assert "partitions" not in harness.machine.explain(0.0)
    assert harness.disk["partitions"] == []


def test_the_cluster_itself_has_no_partitions() -> None:
    limits = SchedulerSettings(settings(), 1.0, 5.0, 20.0, break_on_loss=True)
    machine = SchedulerMachine(limits, 1, 1, 0.0, with_workers=False)
    assert machine.told_to("server").partitions == ()
    assert "partitions" not in machine.explain(0.0)


def test_workers_and_servers_are_told_who_leads_what() -> None:
    run = Run()
    assert run.rows() == [(0, 1, -1), (1, 0, -1)]
    assert run.machine.told_to("worker").partitions == (Partition(0, 1, -1, A), Partition(1, 0, -1, B))


def test_a_death_is_followed_by_a_promotion_in_the_same_view_once_it_is_saved() -> None:
    run = Run()
    run.hold = True
    effects = run.dies(0)
    assert [message for message in said(effects) if isinstance(message, View)] == []
    assert run.rows() == [(0, 1, -1), (1, 0, -1)]
    effects = run.step(Persisted(one(of(Unsaved, effects)).token))
    view = next(message for message in said(effects, B) if isinstance(message, View))
    assert [tuple(row) for row in view.partitions] == [(1, -1, -1, A, -1), (1, -1, -1, B, -1)]
    assert view.members[0].state == "dead"


def test_a_server_that_leaves_hands_over_before_it_is_answered() -> None:
    run = Run()
    effects = run.say(A, Leave(9, Departure.LEFT), view=run.epoch(A))
    assert run.rows() == [(1, -1, -1), (1, -1, -1)]
    kinds = [type(message) for message in said(effects, A)]
    assert kinds.index(View) < kinds.index(Done)


def test_a_silent_server_loses_what_it_leads_and_is_synced_when_it_is_heard_again() -> None:
    run = Run()
    run.deaf.add(A)
    run.now = 4.0
    run.beats(1)
    run.beat(0)
    run.now = 6.0
    run.step(Tick())
    assert run.states()["server 0"] == "dead"
    assert run.rows() == [(1, -1, -1), (1, -1, -1)]
    run.beats(0)
    run.beats(1)
    assert run.states()["server 0"] == "active"
    assert run.rows() == [(1, -1, -1), (1, -1, -1)], "it has not shown that it knows that it leads nothing"
    run.deaf.clear()
    run.beats(0)
    run.beats(0)
    assert run.rows() == [(1, -1, 0), (1, -1, 0)]


def silence(run: Run, until: float) -> list[str]:
    """Nobody is heard until then. Returns what was said of it."""
    errors = []
    while run.now < until:
        run.now += 1.0
        errors += [entry.text for entry in of(LogEntry, run.step(Tick())) if entry.level == "error"]
    return errors


def test_a_server_that_alone_has_values_is_waited_for_however_long_it_is_silent() -> None:
    run = Run()
    assert silence(run, 15.0) == ["server 1 alone has some values, and is silent: it is waited for"]
    assert (run.states()["server 0"], run.states()["server 1"]) == ("dead", "active")
    assert run.rows() == [(1, -1, -1), (1, -1, -1)]
    run.beats(1)
    assert len(silence(run, 25.0)) == 1
    assert run.states()["server 1"] == "active"


def test_a_server_that_alone_has_values_is_dead_when_its_process_has_ended() -> None:
    run = Run()
    silence(run, 7.0)
    run.dies(1)
    assert run.states()["server 1"] == "dead"
    assert run.rows() == [(1, -1, -1), (1, -1, -1)]


def test_a_new_process_is_synced() -> None:
    run = back_in_place()
    effects = run.synced(0, (1, 0), (0, 1))
    assert answer(effects, Done) == Done(30)
    assert run.rows() == [(1, 0, -1), (1, -1, 0)]
    run.synced(1, (1, 0), (0, 1))
    assert run.rows() == [(1, 0, -1), (1, 0, -1)]
    assert [row.lineage for row in run.machine.told_to("server").partitions] == [A, B]


def test_synced_is_answered_once_the_view_that_says_so_is_saved() -> None:
    run = back_in_place()
    run.hold = True
    effects = run.synced(0, (1, 0), (0, 1))
    assert said(effects) == []
    effects = run.step(Persisted(of(Unsaved, effects)[-1].token))
    assert [type(message) for message in said(effects, B)] == [View, Done]


@pytest.mark.parametrize(
    ("partition", "leader", "synced"), [(0, (1, 0), (0, 0)), (7, (1, 0), (0, 1)), (0, (0, 1), (0, 1))]
)
def test_what_is_not_so_is_answered_and_changes_nothing(partition: int, leader: Any, synced: Any) -> None:
    run = back_in_place()
    before = run.machine.epoch
    assert answer(run.synced(partition, leader, synced), Done) == Done(30)
    assert (run.rows(), run.machine.epoch) == ([(1, -1, 0), (1, -1, 0)], before)


def test_a_backup_that_is_out_of_sync_is_named_no_more_once_that_is_saved() -> None:
    run = Run()
    run.hold = True
    effects = run.say(B, OutOfSync(31, 0, B), view=run.epoch(B))
    assert said(effects) == []
    run.hold = False
    effects = run.step(Persisted(of(Unsaved, effects)[-1].token))
    assert [type(message) for message in said(effects, B)] == [View, Done]
    assert run.rows() == [(0, -1, -1), (1, 0, -1)]
    run.dies(0)
    assert run.rows() == [(0, -1, -1), (1, -1, -1)], "nobody who is out of sync leads"


def test_a_worker_or_a_stranger_syncs_nothing() -> None:
    run = back_in_place()
    assert answer(run.say(worker_id(0), Synced(30, 0, server_id(0, 1)), view=(1, 99)), Done) == Done(30)
    stranger = run.say(777, Synced(30, 0, server_id(0, 1)), view=(1, 99))
    assert answer(stranger, NotYet).reason is NotYetReason.NOT_JOINED
    assert run.rows() == [(1, -1, 0), (1, -1, 0)]


def test_both_die_one_after_the_other() -> None:
    run = Run()
    run.dies(0)
    run.dies(1)
    assert run.rows() == [(1, -1, -1), (1, -1, -1)]
    run.comes(0, 1)
    run.rest((0, 1))
    assert run.rows() == [(1, -1, -1), (1, -1, -1)]
    run.comes(1, 1)
    assert run.rows()[0][0] == 1
    assert {row.lineage for row in run.machine.told_to("server").partitions} == {server_id(1, 1)}


def test_status_shows_who_leads_what() -> None:
    shown: Any = back_in_place().machine.explain(0.0)["partitions"]
    assert shown[0] == {
        "partition": 0,
        "leader": "server 1",
        "backup": None,
        "syncing": "server 0",
        "successor": None,
    }
