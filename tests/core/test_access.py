"""Who may send what: the table, walked for every message and every kind of sender, and the attacks that it ends."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, get_args

import pytest

from kvd.core.access import ANY_KEY, JOINS, ROWS, Doorkeeper, Row, Standing, is_allowed, row_of, table
from kvd.core.machine import SCHEDULER, CallerPeer, LogEntry, Received, Send, Stop
from kvd.core.principals import HOLDER, KeyRole, Principal
from kvd.core.pseudonyms import pseudonym
from kvd.core.scheduler.runs.table import MAX_LIVE
from kvd.protocol import messages as m
from kvd.protocol.messages import NO_RUN, NO_VIEW, ErrorCode, NotYet, Refused
from tests.core.access_harness import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    JOB,
    LEADERS,
    NOBODY,
    OF_SERVERS,
    OLGA,
    OPERATOR,
    OSKAR,
    SAMPLES,
    SENDERS,
    SERVER,
    TOKEN,
    SchedulerWorld,
    Sender,
    ServerWorld,
    is_expected,
    is_kept_out,
    message_of,
)
from tests.core.fakes import OPEN, member, of, one, said, server_id, worker_id

SCHEDULER_ROLE, SERVER_ROLE = KeyRole.SCHEDULER, KeyRole.SERVER
KINDS = get_args(m.Message)
SERVER_PEERS = (CallerPeer(b"1000"), CallerPeer(b"1001"), CallerPeer(b"gone"))
OF_MEMBERS = (
    m.Heartbeat,
    m.Leave,
    m.TakePart,
    m.StandBy,
    m.Enter,
    m.Say,
    m.Listen,
    m.WaitReport,
    m.Synced,
    m.OutOfSync,
    m.HandedOver,
    m.Late,
)  # these name the run


def cases(receiver: KeyRole) -> list[Any]:
    return [pytest.param(row, kind, id=f"{row.doing}-{kind.__name__}") for row in ROWS[receiver] for kind in row.kinds]


# ── the table ──


def test_every_message_is_in_the_table_of_both_receivers() -> None:
    assert set(SAMPLES) == set(KINDS), "the walk needs a sample of every message"
    for receiver in (SCHEDULER_ROLE, SERVER_ROLE):
        kinds = [kind for row in ROWS[receiver] if row not in JOINS.values() for kind in row.kinds]
        assert sorted(kinds + [m.Join] * (receiver is SCHEDULER_ROLE), key=str) == sorted(KINDS, key=str)
        for message in SAMPLES.values():
            assert type(message) in row_of(message, receiver).kinds


@pytest.mark.parametrize(("row", "kind"), cases(SCHEDULER_ROLE))
def test_the_scheduler_does_as_the_table_says(row: Row, kind: type[Any]) -> None:
    for sender in [*SENDERS, *OF_SERVERS]:
        check_scheduler(row, kind, sender)


def check_scheduler(row: Row, kind: type[Any], sender: Sender) -> None:
    world = SchedulerWorld()
    run = world.run if kind in OF_MEMBERS else NO_RUN
    who = sender.incarnation if sender.steals or kind is not m.Join else sender.incarnation + 5000
    before = world.router.record(), world.router.explain(0.0, world.run)
    effects = world.say(who, message_of(row, kind), sender.principal, sender.peer, run)
    after = world.router.record(), world.router.explain(0.0, world.run)
    if is_expected(row, sender) and not (sender.steals and kind is m.Join):
        assert not is_kept_out(effects, sender) or after != before, (sender, effects)
    else:
        assert is_kept_out(effects, sender), (sender, effects)
        assert after == before, sender


@pytest.mark.parametrize(("row", "kind"), cases(SERVER_ROLE))
def test_a_server_does_as_the_table_says(row: Row, kind: type[Any]) -> None:
    for sender in [*SENDERS, *LEADERS]:
        check_server(row, kind, sender)


def check_server(row: Row, kind: type[Any], sender: Sender) -> None:
    world = ServerWorld()
    before = world.router.explain(0.0, world.RUN)
    effects = world.say(sender.incarnation, message_of(row, kind), sender.principal, sender.peer, b"\0")
    if is_expected(row, sender) and not sender.steals:
        assert not is_kept_out(effects, sender), (sender, effects)
    else:
        assert is_kept_out(effects, sender), (sender, effects)
        assert world.router.explain(0.0, world.RUN) == before, sender


@pytest.mark.parametrize(
    "kind", [kind for row in ROWS[SERVER_ROLE] if row.standing is Standing.SCHEDULER for kind in row.kinds]
)
def test_a_server_hears_its_scheduler_whatever_the_key_of_that_connection(kind: type[Any]) -> None:
    world = ServerWorld()
    event = Received(SCHEDULER, 1, m.Epoch(1, 9), SAMPLES[kind], run=NO_RUN, principal=SERVER)
    effects = world.step(event)
    assert not [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Refused)]
    assert bool(of(Stop, effects)) == (kind is m.Shutdown)


# ── keys ──


@pytest.mark.parametrize(
    ("doing", "allowed", "refused"),
    [
        (m.EndRun, [OPERATOR, HOLDER], [ALICE, OLGA, SERVER]),
        (m.Shutdown, [OPERATOR, HOLDER], [ALICE, OLGA, SERVER]),
        (m.StatusQuery, [OPERATOR, HOLDER, ALICE, OLGA, SERVER], [NOBODY]),
    ],
)
def test_what_the_keys_of_each_role_may_ask_of_the_scheduler(doing: Any, allowed: Any, refused: Any) -> None:
    row = row_of(SAMPLES[doing], SCHEDULER_ROLE)
    assert [principal for principal in allowed if not is_allowed(principal, row, None)] == []
    assert [principal for principal in refused if is_allowed(principal, row, None)] == []


@pytest.mark.parametrize(
    ("kind", "allowed", "refused"),
    [
        (m.Push, [ALICE, BOB, CAROL, OPERATOR, HOLDER], [DAVE, OLGA, SERVER, NOBODY]),
        (m.Attach, [ALICE, OPERATOR], [DAVE, OLGA, SERVER]),
        (m.SetOptimizer, [ALICE, OPERATOR], [DAVE, OLGA, SERVER]),
        (m.Command, [ALICE, OPERATOR], [DAVE, OLGA, SERVER]),
        (m.Pull, [ALICE, OLGA, OPERATOR], [DAVE, OSKAR, SERVER]),
        (m.ListKeys, [ALICE, OLGA, OPERATOR], [DAVE, OSKAR, SERVER]),
    ],
)
def test_what_the_keys_of_each_role_may_ask_of_a_server(kind: Any, allowed: Any, refused: Any) -> None:
    row = row_of(SAMPLES[kind], SERVER_ROLE)
    assert [principal for principal in allowed if not is_allowed(principal, row, JOB)] == []
    assert [principal for principal in refused if is_allowed(principal, row, JOB)] == []


def received(message: Any, principal: Any) -> Received:
    return Received(CallerPeer(b"sender"), 5, NO_VIEW, message, principal=principal)


def test_a_refusal_names_the_key_what_it_may_be_and_what_it_would_have_to_be() -> None:
    keeper = Doorkeeper(SCHEDULER_ROLE)
    assert keeper.objection(received(SAMPLES[m.EndRun], ALICE), None) == (
        "key 'alice' allows to be worker, and to end a job takes operator: use such a key, or have the role added to "
        "this one"
    )
    assert Doorkeeper(SERVER_ROLE).objection(received(SAMPLES[m.Push], DAVE), JOB) == (
        f"key 'dave' allows to be worker of jobs serve-*, train, and this is job {JOB!r}: use a key of that job, or "
        "have it added to this one"
    )


def test_refusals_of_one_key_fill_no_log() -> None:
    keeper = Doorkeeper(SCHEDULER_ROLE)
    refused = received(SAMPLES[m.EndRun], ALICE)
    assert isinstance(keeper.log_entry(refused, "why", 0.0), LogEntry)
    assert keeper.log_entry(refused, "why", 9.9) is None
    assert isinstance(keeper.log_entry(received(SAMPLES[m.EndRun], BOB), "why", 9.9), LogEntry)
    assert isinstance(keeper.log_entry(refused, "why", 10.0), LogEntry)


def test_a_worker_s_key_joins_no_other_job_whatever_the_run_that_it_names() -> None:
    world = SchedulerWorld()
    for run, job in ((NO_RUN, JOB), (world.run, JOB), (world.run, "serve-1")):
        join = m.Join(1, "worker", "dave", "", "host", 7, -1, OPEN, job=job, token=TOKEN)
        effects = world.say(950, join, DAVE, CallerPeer(b"dave"), run)
        assert one(said(effects)).error is ErrorCode.NOT_ALLOWED
    own = m.Join(1, "worker", "dave", "", "host", 7, -1, OPEN, job="serve-1")
    assert any(isinstance(message, m.Welcome) for message in said(world.say(950, own, DAVE, CallerPeer(b"dave"))))


def test_a_job_without_a_run_is_read_and_named_by_its_patterns() -> None:
    world = SchedulerWorld()
    for job, is_let_in in ((JOB, True), (f"{JOB}@{world.run:x}", True), ("other", False)):
        join = m.Join(1, "observer", "", "", "host", 7, -1, OPEN, job=job)
        answers = said(world.say(950, join, OLGA, CallerPeer(b"olga")))
        assert any(isinstance(message, m.Welcome) for message in answers) == is_let_in


# ── a process keeps its key ──


def test_a_living_worker_s_node_id_is_not_taken_under_another_key() -> None:
    world = SchedulerWorld()
    effects = world.join("worker", 950, CAROL, node_id=f"node-{worker_id(0)}")
    refused = one(said(effects))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert "key 'alice'" in refused.text
    assert "key 'carol'" in refused.text
    again = world.join("worker", 951, ALICE, node_id=f"node-{worker_id(0)}")
    assert any(isinstance(message, m.Welcome) and message.rank == 0 for message in said(again))


def test_a_restarted_scheduler_knows_under_which_key_each_node_joined() -> None:
    world = SchedulerWorld()
    again = SchedulerWorld()
    again.restart(world.disk)
    peer = CallerPeer(b"thief")
    for principal in (CAROL, HOLDER):
        refused = one(said(again.say(worker_id(0), m.Leave(3, m.Departure.LEFT), principal, peer, world.run)))
        assert refused.error is ErrorCode.NOT_ALLOWED
    assert again.states() == world.states()
    assert said(again.say(worker_id(0), m.Heartbeat("worker", 0), ALICE, peer, world.run))


def test_an_incarnation_that_waits_for_its_view_attaches_only_under_the_key_that_the_view_names() -> None:
    """The thief attaches first: the server does not know the worker yet."""
    world = ServerWorld()
    attach = m.Attach(1, 2)
    assert said(world.say(worker_id(2), attach, CAROL, CallerPeer(b"thief"))) == []
    third = member("worker", 2)._replace(principal="bob")
    effects = world.told(world.view([*world.members, third]), world.RUN, change=2)
    assert one(said(effects)).error is ErrorCode.NOT_ALLOWED
    assert said(world.say(worker_id(2), attach, BOB, CallerPeer(b"bob"))) == [m.Done(1)]


# ── what readers learn ──


def test_readers_and_workers_learn_no_incarnation_of_a_worker_no_token_and_no_name_of_a_key() -> None:
    """An observer that knew the incarnation of a worker could push in its name, and the real push was a duplicate."""
    world = SchedulerWorld()
    secrets = {worker_id(0), worker_id(1)}
    join = m.Join(1, "observer", "", "", "host", 7, -1, OPEN, job=JOB)
    views = m.View | m.ViewChange
    seen = [message for message in said(world.say(950, join, OLGA, CallerPeer(b"olga"))) if isinstance(message, views)]
    newcomer = m.Join(1, "worker", "third", "", "host", 7, -1, OPEN, job=JOB, token=TOKEN)
    told = [effect for effect in world.say(951, newcomer, CAROL, CallerPeer(b"carol")) if isinstance(effect, Send)]
    seen += [send.message for send in told if isinstance(send.message, views) and send.peer not in SERVER_PEERS]
    assert len(seen) >= 4
    for shown in seen:
        assert {who.incarnation for who in shown.members} & secrets == set()
        assert {who.principal for who in shown.members} == {""}
        assert shown.runs == ()
    assert {who.incarnation for who in seen[0].members if who.role == "worker"} == set(map(pseudonym, secrets))
    assert not secrets & {world.run, *(slot.run for slot in world.router.runs)}
    for report in (world.router.explain(0.0, world.run), world.router.explain(0.0)):
        assert TOKEN not in str(report)
        assert not any(f"{secret:x}" in str(report) for secret in secrets)


def test_servers_learn_what_they_need_to_know_workers() -> None:
    world = SchedulerWorld()
    effects = world.join("worker", worker_id(2), CAROL)
    shown = [effect.message for effect in effects if isinstance(effect, Send) and effect.peer == CallerPeer(b"1000")]
    newest = [message for message in shown if isinstance(message, m.ViewChange) and not message.runs][-1]
    assert {entry.incarnation: entry.principal for entry in newest.members} == {worker_id(2): "carol"}
    joined = [message for message in said(world.join("server", server_id(0), SERVER)) if isinstance(message, m.View)][
        -1
    ]
    assert {entry.principal for entry in joined.members} == {"rack"}


# ── what a key alone does not say ──


def test_an_incarnation_of_a_server_joins_as_nothing_else() -> None:
    """Its process would be said to have ended, and every job with it."""
    world = SchedulerWorld()
    for principal in (SERVER, HOLDER, CAROL):
        for run in (NO_RUN, world.run, 77):
            join = m.Join(1, "worker", "thief", "", "host", 7, -1, OPEN, job=JOB, token=TOKEN)
            refused = one(said(world.say(server_id(0), join, principal, CallerPeer(b"thief"), run)))
            assert refused.error is ErrorCode.NOT_ALLOWED
    assert world.states() == SchedulerWorld().states()


def test_an_observer_begins_no_run() -> None:
    world = SchedulerWorld()
    join = m.Join(1, "observer", "", "", "host", 7, -1, OPEN, job=JOB)
    for run in range(1000, 1100):
        assert one(said(world.say(950, join, HOLDER, CallerPeer(b"reader"), run))).error is ErrorCode.JOB_ENDED
    assert len(world.router.runs.entries()) == 1


def test_runs_that_nodes_name_are_begun_up_to_the_limit() -> None:
    """One more than a view can list, and no server would hear of any run again."""
    world = SchedulerWorld()
    for run in range(1000, 1100):
        join = m.Join(1, "worker", f"w{run}", "", "host", run, -1, OPEN, job=f"job-{run}")
        effects = world.say(run, join, HOLDER, CallerPeer(b"worker"), run)
    assert isinstance(one(said(effects)), NotYet)
    assert len(world.router.runs.entries()) == MAX_LIVE


def begin_runs(world: SchedulerWorld, principal: Any, first: int, count: int = 100) -> list[Any]:
    """Each as a process of its own, as if its job were the first that names no run; the answers."""
    answers: list[Any] = []
    for who in range(first, first + count):
        join = m.Join(1, "worker", f"w{who}", "", "host", who, -1, OPEN, job=f"job-{who}", token=f"token-{who}")
        answers += said(world.say(who, join, principal, CallerPeer(str(who).encode()), NO_RUN))
    return answers


def live_by_key(world: SchedulerWorld) -> Counter[str]:
    return Counter(slot.owner for slot in world.router.runs if not slot.is_over)


def test_no_key_takes_all_runs() -> None:
    """Each further key gets two thirds of what is left, and at least one run as long as there is room."""
    world = SchedulerWorld()  # alice has begun one
    mallory = Principal("mallory", frozenset({KeyRole.WORKER}), ("*",), "m")
    trudy = Principal("trudy", frozenset({KeyRole.WORKER}), ("*",), "t")
    refused = [answer for answer in begin_runs(world, mallory, 50_000) if isinstance(answer, m.Refused)]
    assert live_by_key(world) == {"alice": 1, "mallory": 10}
    assert {(answer.error, answer.text) for answer in refused} == {
        (
            ErrorCode.JOB_BUSY,
            f"key 'mallory' has 10 of the 11 jobs that are running, and the rest of {MAX_LIVE} is kept for other keys: "
            "wait for one, or end one with kvd jobs end NAME",
        )
    }
    begin_runs(world, trudy, 60_000)
    assert live_by_key(world) == {"alice": 1, "mallory": 10, "trudy": 3}
    world.restart(json.loads(json.dumps(world.disk)))
    assert live_by_key(world) == {"alice": 1, "mallory": 10, "trudy": 3}, "the record has it"
    begin_runs(world, HOLDER, 70_000)
    assert sum(live_by_key(world).values()) <= MAX_LIVE


def test_the_holders_of_the_clusters_key_share_all_runs() -> None:
    world = SchedulerWorld()
    begin_runs(world, HOLDER, 50_000)
    assert live_by_key(world) == {"alice": 1, "": MAX_LIVE - 1}


def test_only_a_server_brings_runs() -> None:
    world = SchedulerWorld()
    brought = (m.RunEntry(99, "forged", "", m.RunPhase.RUNNING, 2),)
    for role in ("observer", "worker", "king"):
        join = m.Join(1, role, "n", "", "host", 7, -1, OPEN, job=JOB, runs=brought)
        world.say(950, join, HOLDER, CallerPeer(b"liar"))
    assert world.router.runs.find(99) is None


# ── for people ──


def test_the_table_for_people_has_every_row() -> None:
    for receiver, rows in ROWS.items():
        text = table(receiver)
        assert all(f"| {row.doing} |" in text for row in rows)
        shown = [kind for row in rows if row.standing is not Standing.NOBODY for kind in row.kinds]
        assert all(f"`{kind.__name__}`" in text for kind in shown)
    assert "| end a job | operator | — | `EndRun` |" in table(SCHEDULER_ROLE)
    assert frozenset(KeyRole) == ANY_KEY
