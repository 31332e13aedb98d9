"""The scheduler of a run with two replicas is restarted: with its record, with an old one, or without."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvd.core.machine import InRun, LogEntry, Persist, Persisted, Received, ServerPeer, Tick
from kvd.core.scheduler.machine import SchedulerMachine, SchedulerSettings
from kvd.core.scheduler.router import SchedulerRouter
from kvd.core.scheduler.runs.record import Record
from kvd.protocol.messages import (
    NO_RANK,
    NO_RUN,
    NO_VIEW,
    Enter,
    Epoch,
    ErrorCode,
    Heartbeat,
    Join,
    KnownPartitions,
    NotYet,
    NotYetReason,
    Partition,
    Refused,
    RunEntry,
    RunPhase,
    View,
    Welcome,
)
from tests.core.failover_harness import A, B, Run, back_in_place, settings
from tests.core.fakes import OPEN, of, said, server_id, worker_id
from tests.core.scheduler_harness import Harness, answer

# ── restarted with its record ──


def test_a_restarted_scheduler_has_the_table_of_its_record() -> None:
    run = back_in_place()
    run.synced(0, (1, 0), (0, 1))
    disk = json.loads(json.dumps(run.disk))
    SchedulerMachine.check_record(disk)
    again = Run(begins=False, saved=disk, generation=2)
    assert again.rows() == [(1, 0, -1), (1, -1, 0)]
    again.views = dict(run.views)
    assert not [message for message in said(again.beats(1)) if isinstance(message, View)], "server 0 was not heard"
    again.beats(0, 1)
    effects = again.beats(1)
    assert [message.partitions for message in said(effects) if isinstance(message, View)] == [
        again.machine.told_to("server").partitions
    ]
    again.dies(1)
    assert again.rows() == [(0, -1, -1), (1, -1, -1)]


def test_a_copy_that_was_under_way_goes_on_after_a_restart() -> None:
    run = back_in_place()
    again = Run(begins=False, saved=run.disk, generation=2)
    again.views = dict(run.views)
    assert not said(again.synced(0, (1, 0), (0, 1))), "server 0 was not heard"
    again.rest((0, 1), (1, 0))
    again.synced(0, (1, 0), (0, 1))
    assert again.rows() == [(1, 0, -1), (1, -1, 0)]


def test_a_partition_without_a_copy_gets_one_after_a_restart() -> None:
    """The scheduler died when it waited for the servers to know that there is no copy; nothing else happens later."""
    run = Run()
    run.dies(1)
    run.comes(1, 1)  # the leader does not know it yet
    assert run.rows() == [(0, -1, -1), (0, -1, -1)]
    again = Run(begins=False, saved=run.disk, generation=2)
    again.views = run.views
    again.rest((0, 0), (1, 1))
    assert [syncing for _, _, syncing in again.rows()] == [1, 1]


def test_a_run_keeps_the_replicas_that_it_began_with() -> None:
    run = Run()
    again = Harness(settings(replicas=1), saved=run.disk, generation=2)
    assert len(again.machine.told_to("server").partitions) == 2
    before = Harness(settings(replicas=1))
    before.join("server", A, "s0")
    del before.disk["partitions"]  # as an earlier kvd wrote it
    before.disk["settings"].pop()
    SchedulerMachine.check_record(before.disk)
    after = Harness(settings(replicas=2), saved=before.disk, generation=2)
    assert after.machine.told_to("server").partitions == ()
    assert after.states() == {"server 0": "active"}


def damaged(change: Any) -> Any:
    disk = json.loads(json.dumps(Run().disk))
    change(disk["partitions"])
    return disk


def test_the_record_of_an_earlier_kvd_names_no_successors() -> None:
    older = damaged(lambda table: [entry.pop() for entry, _ in table])
    assert [entry.successor for entry, _ in Record.from_plain(older).partitions] == [None, None]
    assert Record.from_plain(older).partitions == Record.from_plain(damaged(lambda table: None)).partitions


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop(),
        lambda table: table[0].pop(),
        lambda table: table[0].__setitem__(0, table[0][0][:3]),
        lambda table: table[0].__setitem__(0, None),
        lambda table: table[0][0].__setitem__(0, None),
        lambda table: table[0][0].__setitem__(0, [1, A]),
        lambda table: table[0][0].__setitem__(0, [0, A + 1]),
        lambda table: table[0][0].__setitem__(1, [0, A]),
        lambda table: table[0][0].__setitem__(1, [7, B]),
        lambda table: table[0][0].__setitem__(1, [1, B + 1]),
        lambda table: table[0][0].__setitem__(2, [1, B]),
        lambda table: table[0][0].__setitem__(2, [-1, B]),
        lambda table: table[0][0].__setitem__(3, 0),
        lambda table: table[0][0].__setitem__(3, "x"),
        lambda table: table[0][0].__setitem__(4, [0, A]),
        lambda table: table[0][0].__setitem__(4, [1]),
        lambda table: table[0].__setitem__(1, [1]),
    ],
)
def test_a_record_with_a_table_that_cannot_be_is_refused(change: Any) -> None:
    Record.from_plain(damaged(lambda table: None))
    with pytest.raises((ValueError, TypeError)):
        Record.from_plain(damaged(change))


def test_a_dead_server_in_a_record_is_no_backup() -> None:
    disk = json.loads(json.dumps(Run().disk))
    for seat in disk["seats"]:
        if seat[0][:2] == ["server", 1]:
            seat[0][5] = "dead"
    with pytest.raises(ValueError, match="not at its place"):
        Record.from_plain(disk)


def test_a_scheduler_whose_record_is_too_old_asks_its_servers() -> None:
    run = Run()
    old = run.disk
    run.dies(0)
    again = Run(begins=False, saved=old, generation=1)
    again.views = run.views
    assert again.rows()[0] == (0, 1, -1)
    effects = again.beats(1)
    assert answer(effects, NotYet).reason is NotYetReason.NOT_JOINED
    assert again.rows()[0] == (0, 1, -1), "nothing is announced before it knows"
    assert "waiting for server 0" in answer(again.comes(1), NotYet).text
    effects = again.comes(0)
    assert answer(effects, Welcome).rank == 0
    assert again.rows()[0][0] == 1


# ── restarted without a record ──


def lost_record(run: Run, servers: int = 2) -> Run:
    again = Run(servers, begins=False)
    again.views = dict(run.views)
    return again


def test_without_a_record_nobody_is_let_in_before_all_servers_have_said_what_they_know() -> None:
    run = Run()
    run.dies(0)
    run.comes(0, 1)
    again = lost_record(run)
    for effects in (again.worker(0), again.comes(1), again.say(9, Join(1, "observer", "", "", "h", 9, -1, OPEN))):
        assert answer(effects, NotYet).reason is NotYetReason.BUSY
        assert not [message for message in said(effects) if isinstance(message, View)]
    assert again.states() == {}
    effects = again.comes(0, 1)
    assert answer(effects, Welcome).rank == 0
    assert again.machine.epoch > run.machine.epoch
    assert again.states() == {"server 0": "active", "server 1": "active"}
    assert again.rows()[0][0] == 1
    assert answer(again.comes(1), Welcome).rank == 1
    assert isinstance(answer(again.worker(0), Welcome), Welcome)
    assert [row.lineage for row in again.machine.told_to("server").partitions] == [A, B]


def test_backups_stay_and_copies_begin_anew() -> None:
    run = back_in_place()
    run.synced(0, (1, 0), (0, 1))
    again = lost_record(run)
    again.comes(0, 1)
    again.comes(1)
    assert again.rows() == [(1, 0, -1), (1, -1, -1)]
    again.rest((0, 1), (1, 0))
    assert again.rows() == [(1, 0, -1), (1, -1, 0)]


def test_a_deposed_server_that_knows_an_old_view_does_not_win() -> None:
    run = Run()
    run.deaf.add(A)
    run.dies(0)
    assert (run.epoch(A), run.known(A).partitions[0].leader) < (run.epoch(B), 0)
    for order in ((0, 1), (1, 0)):
        again = lost_record(run)
        for rank in order:
            again.comes(rank)
        assert [row[0] for row in again.rows()] == [1, 1]
        assert all(row[1] == -1 for row in again.rows())


def test_a_backup_that_comes_as_a_new_process_holds_nothing() -> None:
    run = Run()
    again = lost_record(run)
    again.comes(0)
    again.comes(1, 1)
    assert again.rows() == [(0, -1, -1), (0, -1, -1)]
    assert [row.lineage for row in again.machine.told_to("server").partitions] == [A, B]


def test_servers_that_know_of_no_table_lead_their_own_and_nobody_is_trusted_to_be_a_backup() -> None:
    again = Run(begins=False)
    again.comes(0)
    again.comes(1)
    assert again.rows() == [(0, -1, -1), (1, -1, -1)]
    again.rest((0, 0), (1, 0))
    assert again.rows() == [(0, -1, 1), (1, -1, 0)]


def test_a_server_that_does_not_come_counts_as_dead_after_its_timeout() -> None:
    run = Run()
    again = lost_record(run)
    again.comes(1)
    assert again.machine.next_deadline() == 5.0
    again.now = 4.9
    again.step(Tick())
    assert again.rows() == []
    again.now = 5.0
    again.step(Tick())
    assert again.rows() == [(1, -1, -1), (1, -1, -1)]
    assert answer(again.comes(1), Welcome).rank == 1
    assert again.states() == {"server 1": "active"}


def test_a_server_is_waited_for_that_may_know_more() -> None:
    """A worker knows a later view than the server that has come: by it, the other may lead alone."""
    run = Run()
    run.deaf.add(A)
    run.dies(0)
    again = lost_record(run)
    again.comes(0)
    again.say(worker_id(0), Join(1, "worker", "worker-0", "", "host", 7, 0, OPEN), view=run.machine.epoch)
    again.now = 60.0
    again.step(Tick())
    assert again.rows() == []
    again.comes(0)
    again.comes(1)
    assert [row[0] for row in again.rows()] == [1, 1]


def test_a_server_that_lost_its_place_without_anyone_remembering_does_not_get_it_back() -> None:
    run = Run()
    again = lost_record(run)
    again.comes(0, 1)
    again.comes(1)
    refused = answer(again.comes(0), Refused)
    assert refused.error is ErrorCode.REPLACED
    assert again.states() == {"server 0": "active", "server 1": "active"}


@pytest.mark.parametrize(
    "lie",
    [
        KnownPartitions((Partition(9, 1, -1, A), Partition(1, 0, -1, B)), (A, B)),
        KnownPartitions((Partition(0, 9, -1, A), Partition(1, 0, -1, B)), (A, B)),
        KnownPartitions((Partition(0, 0, -1, A), Partition(1, 0, -1, B)), (A, B)),
        KnownPartitions((Partition(0, 1, -1, 0), Partition(1, 0, -1, B)), (A, B)),
        KnownPartitions((Partition(0, 1, -1, A), Partition(1, 0, -1, B)), (A, A)),
        KnownPartitions((Partition(0, 1, -1, A), Partition(1, 0, -1, B)), (A, 0)),
        KnownPartitions((Partition(0, 1, -1, A), Partition(1, 0, -1, B)), (A,)),
        KnownPartitions((Partition(0, 1, -1, A),), (A, B)),
    ],
)
def test_partitions_that_no_scheduler_announces_are_not_believed(lie: KnownPartitions) -> None:
    again = Run(begins=False)
    again.say(A, Join(1, "server", "server-0", "", "host", 1, 0, OPEN, partitions=lie), view=(1, 9))
    for rank in (-1, 2, 1 << 40):
        again.say(700, Join(1, "server", "server-x", "", "host", 2, rank, OPEN), view=(1, 9))
    again.comes(1)
    assert again.rows() == [(0, -1, -1), (1, -1, -1)]


def test_one_process_cannot_come_as_two_servers() -> None:
    again = Run(begins=False)
    for rank in (0, 1):
        effects = again.say(A, Join(1, "server", f"server-{rank}", "", "host", 1, rank, OPEN))
        assert "waiting for" in answer(effects, NotYet).text
    again.comes(0, 1)
    assert again.states() == {"server 0": "active", "server 1": "active"}


def test_servers_with_two_copies_do_not_follow_a_scheduler_without() -> None:
    run = Run()
    harness = Harness(settings(replicas=1))
    join = Join(1, "server", "server-0", "", "host", 1, 0, OPEN, partitions=run.known(B))
    refused = answer(harness.say(A, join, view=(1, 9)), Refused)
    assert (refused.error, refused.key) == (ErrorCode.CONFIG_ERROR, "replicas")


# ── restarted with an old record ──


def put_back(first: int) -> tuple[Run, Run]:
    """Server 0 was replaced by its backup, but the record is from before; this server is the first that is heard."""
    run = Run()
    run.rest((0, 0), (1, 0))
    old = json.loads(json.dumps(run.disk))
    run.deaf.add(A)
    run.dies(0)
    assert (run.rows()[0][0], run.known(A).partitions[0].leader) == (1, 0)
    again = Run(begins=False, saved=old, generation=2)
    again.views = dict(run.views)
    assert again.machine.epoch > run.machine.epoch, "no server would take its views for old ones"
    again.beats(first)
    return run, again


@pytest.mark.parametrize("first", [0, 1])
def test_a_record_that_was_put_back_promotes_nobody(first: int) -> None:
    """Server 0 learns in one case first that it leads, as the old record says. What server 1 did since is kept."""
    run, again = put_back(first)
    again.beats(1 - first)
    assert again.states() == {}, "the servers have to come again"
    assert again.rows() == [(0, 1, -1), (1, 0, -1)]  # announced, but to nobody any more
    for rank in (0, 1):
        assert isinstance(answer(again.comes(rank), NotYet | Welcome), Welcome if rank else NotYet)
    assert [row[:2] for row in again.rows()] == [(1, -1), (1, -1)]
    assert again.machine.epoch > run.machine.epoch
    again.comes(0)
    again.rest((0, 0), (1, 0))
    assert again.rows() == [(1, -1, 0), (1, -1, 0)]


def test_a_record_that_is_not_old_is_believed() -> None:
    run = Run()
    run.dies(0)
    again = Run(begins=False, saved=run.disk, generation=2)
    again.views = dict(run.views)
    again.beats(1)
    assert again.states() == {"server 0": "dead", "server 1": "active", "worker 0": "active"}


def test_the_servers_are_asked_once_what_an_old_record_does_not_say() -> None:
    _, again = put_back(1)
    for rank in (0, 1, 0, 1):
        again.comes(rank)
    again.rest((0, 0), (1, 0))
    assert again.states() == {"server 0": "active", "server 1": "active"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_who_took_its_place_since_the_old_record_joins_again_and_is_not_told_to_stop(replicas: int) -> None:
    run = Harness(settings(replicas=replicas))
    for rank in (0, 1):
        run.join("server", server_id(rank), f"server-{rank}", rank=rank)
    run.worker(0)
    old = json.loads(json.dumps(run.disk))
    run.worker(0, 1)
    again = Harness(settings(replicas=replicas), saved=old, generation=2)
    beat = Heartbeat("worker", 0)
    refused = answer(again.say(worker_id(0, 2), beat, view=(1, old["epoch"])), Refused)
    assert refused.error is ErrorCode.REPLACED, "the record is not too old for this one"
    assert answer(again.say(worker_id(0, 1), beat, view=run.machine.epoch), NotYet).reason is NotYetReason.NOT_JOINED


def test_the_end_of_a_process_that_stands_in_an_old_record_promotes_nobody() -> None:
    """Both servers were replaced since the record, one after the other; their successors hold everything."""
    run = Run()
    run.rest((0, 0), (1, 0))
    old = json.loads(json.dumps(run.disk))
    for rank in (0, 1):
        run.dies(rank)
        run.comes(rank, 1)
        run.rest((0, 1), (1, 1 if rank else 0))
        for partition, (leader, _, syncing) in enumerate(run.rows()):
            if syncing >= 0:
                lives = {0: 1, 1: 1 if rank else 0}
                run.synced(partition, (leader, lives[leader]), (syncing, lives[syncing]))
        run.rest((0, 1), (1, 1 if rank else 0))
    again = Run(begins=False, saved=old, generation=2)
    again.views = dict(run.views)
    effects = again.dies(0) + again.dies(1)
    assert again.states() == {"server 0": "active", "server 1": "active", "worker 0": "active"}
    assert not of(LogEntry, effects)
    assert answer(again.beats(0, 1), NotYet).reason is NotYetReason.NOT_JOINED
    effects = again.comes(0, 1)
    assert "too old" in answer(effects, NotYet).text
    assert any("too old" in entry.text for entry in of(LogEntry, effects))
    again.comes(0, 1)
    assert isinstance(answer(again.comes(1, 1), Welcome), Welcome)
    assert [row.lineage for row in again.machine.told_to("server").partitions] == [A, B], "nothing starts over"


def test_a_server_of_the_record_that_is_not_heard_is_dead_after_its_timeout() -> None:
    run = Run()
    again = Run(begins=False, saved=run.disk, generation=2)
    again.views = dict(run.views)
    again.dies(0)
    again.beats(1)
    assert "waiting to hear from server 0" in answer(again.worker(1), NotYet).text
    again.now = 4.9
    again.beats(1)
    assert again.states()["server 0"] == "active"
    assert again.machine.next_deadline() == 5.0
    again.now = 5.0
    again.step(Tick())
    assert again.states()["server 0"] == "dead"
    assert again.rows()[0][0] == 1


def test_a_dead_worker_in_a_record_has_its_timeout_to_come_back() -> None:
    """It may have come back since the record was written: no barrier breaks before it is overdue."""
    run = Harness(settings(replicas=1)._replace(num_workers=2))
    for rank in (0, 1):
        run.join("server", server_id(rank), f"server-{rank}", rank=rank)
        run.worker(rank)
    run.kill(worker_id(1))
    assert run.states()["worker 1"] == "dead"
    again = Harness(settings(replicas=1)._replace(num_workers=2), saved=run.disk, generation=2)
    for rank in (0, 1):
        again.say(server_id(rank), Heartbeat("server", rank), view=run.machine.epoch)
    again.say(worker_id(0), Enter(7, "user:b", 0), view=run.machine.epoch)
    for again.now in (4.0, 8.0, 12.0, 16.0):
        for role, who in (("server", server_id(0)), ("server", server_id(1)), ("worker", worker_id(0))):
            effects = again.say(who, Heartbeat(role, 0), view=again.machine.epoch)
            assert not [message for message in said(effects) if isinstance(message, Refused)]
    again.now = 20.0
    assert answer(again.step(Tick()), Refused).error is ErrorCode.BARRIER_BROKEN


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("who", ["server", "worker"])
def test_a_worker_that_came_back_since_the_old_record_is_not_declared_lost(replicas: int, who: str) -> None:
    run = Run() if replicas == 2 else Harness(settings(replicas=1))
    for rank in (0, 1):
        run.join("server", server_id(rank), f"server-{rank}", rank=rank)
    run.worker(0)
    run.kill(worker_id(0))
    old = json.loads(json.dumps(run.disk))
    assert run.states()["worker 0"] == "dead"
    run.say(worker_id(0), Heartbeat("worker", 0), view=run.machine.epoch)
    assert run.states()["worker 0"] == "active"
    again = Harness(settings(replicas=replicas), saved=old, generation=2)
    sender = worker_id(0) if who == "worker" else server_id(0)
    effects = again.say(sender, Heartbeat(who, 0), view=run.machine.epoch)
    assert answer(effects, NotYet).reason is NotYetReason.NOT_JOINED
    assert any("too old" in entry.text for entry in of(LogEntry, effects))
    assert not [message for message in said(effects) if isinstance(message, View)]
    assert again.states() == {}


# ── in a cluster with runs ──


def test_a_run_that_ended_since_the_old_record_is_given_up_and_a_later_one_is_found() -> None:
    limits = SchedulerSettings(settings(1, 1), 1.0, 5.0, 20.0, break_on_loss=True)

    def feed(router: SchedulerRouter, who: int, message: Any, epoch: Epoch, run: int = NO_RUN) -> list[Any]:
        effects: Any = router.step(Received(ServerPeer(who), who, epoch, message, run=run), 0.0)
        for persist in of(Persist, effects):
            effects = effects + router.step(Persisted(persist.token), 0.0)
        router.validate()
        return said([own for effect in of(InRun, effects) for own in effect.effects])

    ended = RunEntry(77, "train", "token", RunPhase.RUNNING, 1)
    server = Join(1, "server", "server-0", "", "host", 1, 0, OPEN, runs=(ended,))
    before = SchedulerRouter(limits, 1, 1, 0.0)
    feed(before, A, server, Epoch(0, 9))
    feed(before, A, replace(server, runs=()), Epoch(0, 9), run=77)
    old = json.loads(json.dumps(before.record()))
    assert [(slot.run, slot.is_over) for slot in before.runs] == [(77, False)]
    later = Epoch(1, before.epoch.change + 5)  # by which run 77 is gone, and run 78 has begun
    again = SchedulerRouter(limits, 2, 2, 0.0, old)
    worker = Join(1, "worker", "worker-0", "", "host", 9, NO_RANK, OPEN, job="train", token="next")
    (waits,) = feed(again, worker_id(0), worker, NO_VIEW)
    assert isinstance(waits, NotYet), "it is not known yet whether run 77 is busy"
    now = (ended._replace(phase=RunPhase.GONE), RunEntry(78, "train", "next", RunPhase.RUNNING, 1))
    (refuted,) = [
        message for message in feed(again, A, replace(server, runs=now), later) if isinstance(message, NotYet)
    ]
    assert "too old" in refuted.text
    assert any(isinstance(message, Welcome) for message in feed(again, A, replace(server, runs=now), later))
    assert {slot.run: slot.phase for slot in again.runs} == {77: RunPhase.GONE, 78: RunPhase.RUNNING}


def test_a_run_that_servers_bring_waits_for_all_of_them() -> None:
    limits = SchedulerSettings(settings(), 1.0, 5.0, 20.0, break_on_loss=True)
    router = SchedulerRouter(limits, 1, 1, 0.0)
    entry = RunEntry(77, "train", "token", RunPhase.RUNNING, 1)
    known = Run().known(B)

    def joins(rank: int, run: int) -> Any:
        """The answer to a server that knew the run before."""
        who = server_id(rank)
        told: dict[str, Any] = {"partitions": known} if run else {"runs": (entry,)}
        join = Join(1, "server", f"server-{rank}", "", "host", who, rank, OPEN, **told)
        effects: Any = router.step(Received(ServerPeer(who), who, Epoch(1, 9 + rank), join, run=run), 0.0)
        for persist in of(Persist, effects):
            effects = effects + router.step(Persisted(persist.token), 0.0)
        router.validate()
        answers: list[Any] = [own for effect in of(InRun, effects) if effect.run == run for own in effect.effects]
        return answer(answers, Welcome | NotYet)

    assert isinstance(joins(0, NO_RUN), Welcome)
    assert "waiting for server 1" in joins(0, 77).text
    assert isinstance(joins(1, NO_RUN), Welcome)
    assert isinstance(joins(1, 77), Welcome)
    assert isinstance(joins(0, 77), Welcome)
    machine = router.machine_of(77)
    assert machine is not None
    assert machine.epoch.generation == 2
    assert machine.told_to("server").partitions == known.partitions
    cluster_machine = router.machine_of(NO_RUN)
    assert cluster_machine is not None
    assert cluster_machine.told_to("server").partitions == ()
    SchedulerRouter.check_record(router.record())
