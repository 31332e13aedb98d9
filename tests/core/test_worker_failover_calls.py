"""The worker when a server dies that has a backup: keys, clocks, optimizers, commands, joining, readers."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.errors import NodeLost, RequestTimeout
from kvd.protocol.messages import (
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Command,
    Delete,
    Done,
    Drop,
    FetchState,
    Init,
    ListKeys,
    Lookup,
    OptimizerIs,
    OptimizerQuery,
    Publish,
    Pull,
    Push,
    ReadDone,
    ReadSlices,
    Rest,
    SetOptimizer,
    StatusQuery,
    StoreState,
    Surveyed,
    TakeStep,
    UpdateOptimizer,
    Values,
)
from tests.core.fakes import SLICE, member, server_id, uint8, welcome
from tests.core.worker_harness import S0, S1, S2, knowing, number, replicated

# ── keys ──


def test_an_init_goes_on_at_the_new_leader() -> None:
    harness = replicated()
    key = harness.key_in(0)
    call = harness.call(requests.InitKeys((requests.Item(key, uint8(1), "source"),)))
    first = harness.take(Init)
    harness.fail_over(0)
    again = harness.take(Init)
    assert (again.peer, again.message, again.payload) == (S1, first.message, first.payload)
    harness.reply(again, Done)
    harness.fail_over(1)  # with nobody in its place: the publishing waits for a partition that is lost
    assert isinstance(harness.error(call), NodeLost)


def test_no_key_is_made_in_a_partition_that_nobody_leads() -> None:
    harness = replicated()
    harness.partitions = tuple([entry._replace(backup=-1) for entry in harness.partitions])
    harness.fail_over(0)
    items = [requests.Item(harness.key_in(partition), uint8(1), "source") for partition in (0, 1)]
    both = harness.call(requests.InitKeys(tuple(items)))
    lost = harness.call(requests.InitKeys((items[0],)))
    assert harness.error(lost).node == "server 0"
    init = harness.take(Init)
    assert init.peer == S1
    harness.reply(init, Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.error(both).node == "server 0"
    harness.push(items[1].key)
    assert harness.take(Push).peer == S1


def test_a_publishing_goes_on_at_the_new_leader() -> None:
    harness = replicated()
    key = harness.key_in(0)
    call = harness.call(requests.InitKeys((requests.Item(key, uint8(1), "source"),)))
    harness.reply(harness.take(Init), Done)
    first = harness.take(Publish)
    harness.fail_over(0)
    again = harness.take(Publish)
    assert (again.peer, again.message) == (S1, first.message)
    harness.reply(again, Done)
    assert harness.result(call) is None
    harness.push(key)
    assert harness.take(Push).peer == S1


@pytest.mark.parametrize("wait", [False, True])
def test_a_look_up_goes_on_at_the_new_leader(wait: bool) -> None:
    harness = replicated()
    call = harness.call(requests.DescribeKey(harness.key_in(0), wait=wait))
    assert harness.take(Lookup).peer == S0
    harness.fail_over(0)
    assert harness.sent[0].peer == S1
    harness.found()
    assert harness.result(call) == uint8(1)


def test_a_deletion_goes_on_at_the_new_leaders() -> None:
    spec = uint8(3 * SLICE)
    harness, (key,) = knowing(0, spec=spec)
    call = harness.call(requests.DeleteKeys((key,)))
    first = harness.take(Delete)
    harness.fail_over(0)
    again = harness.take(Delete)
    assert (again.peer, again.message) == (S1, first.message)
    harness.reply(again, Done)
    drops = [harness.take(Drop) for _ in range(2)]
    assert [drop.peer for drop in drops] == [S1, S2]
    harness.partitions = tuple([entry._replace(backup=0 if entry.leader == 2 else 2) for entry in harness.partitions])
    harness.look(member("server", 0, life=1))
    harness.fail_over(1)
    assert harness.take(Drop).peer == S2
    for _ in range(2):
        harness.say(S2, Done(number(drops[0])))
        harness.say(S2, Done(number(drops[1])))
    assert harness.result(call) is None


# ── successors ──


def test_a_successor_learns_its_clocks_from_the_new_leader() -> None:
    harness = replicated(predecessor="dead")
    key = harness.key_in(0)
    call = harness.call(requests.ClockOf(key))
    harness.found()
    harness.fail_over(0)
    asked = [send.peer for send in harness.sent if isinstance(send.message, ClockQuery)]
    assert asked == [S0, S1]
    send = next(send for send in harness.sent if send.peer == S1)
    harness.say(S1, Clocks(number(send), 3, 3, 3, 0, 0, False))
    assert harness.result(call) == 3


def test_a_successor_takes_part_again_at_the_new_leader() -> None:
    harness = replicated(predecessor="left")
    key = harness.key_in(0)
    call = harness.call(requests.ClockOf(key))
    harness.found()
    query = harness.take(ClockQuery)
    harness.say(S0, Clocks(number(query), 3, 3, 3, 0, 0, False))
    assert harness.take(Activate).peer == S0
    harness.fail_over(0)
    activate = harness.take(Activate)
    assert activate.peer == S1
    harness.reply(activate, Done)
    assert harness.result(call) == 3


def test_a_place_is_told_to_those_that_are_there() -> None:
    harness = replicated()
    call = harness.call(requests.ComeTo(5))
    assert [send.peer for send in harness.sent] == [S0, S1, S2]
    harness.fail_over(0)
    assert [send.peer for send in harness.sent] == [S0, S1, S2, S1]
    assert harness.sent[3].message == harness.sent[0].message
    for send in harness.sent[1:]:
        assert call not in harness.done
        harness.reply(send, Done)
    assert len(harness.result(call)) == 3


# ── optimizers, states, commands ──


@pytest.mark.parametrize("message", [SetOptimizer(0, None), UpdateOptimizer(0, {}), Rest(0)])
def test_what_everyone_is_told_goes_to_the_new_leader_too(message: Any) -> None:
    harness = replicated()
    call = harness.call(requests.Control((message,)))
    first = harness.take(type(message))
    harness.fail_over(0)
    rest = [harness.take(type(message)) for _ in range(3)]
    assert [send.peer for send in rest] == [S1, S2, S1]
    assert rest[2].message == first.message
    for send in rest:
        harness.reply(send, Done)
    assert len(harness.result(call)) == 3


def test_a_server_that_leads_nothing_is_told_and_may_die() -> None:
    """Its successor learns it from the other servers."""
    harness = replicated()
    harness.fail_over(2)
    harness.look(member("server", 2, life=1))
    call = harness.call(requests.Control((SetOptimizer(0, None),)))
    told = [harness.take(SetOptimizer) for _ in range(4)]
    assert sorted(send.peer for send in told) == [S0, S0, S1, server_id(2, 1)]  # S0 for each partition that it leads
    for send in told:
        if send.peer != server_id(2, 1):
            harness.reply(send, Done)
    assert call not in harness.done
    harness.look(member("server", 2, "dead", life=1))
    assert len(harness.result(call)) == 4
    harness.call(requests.Control((SetOptimizer(0, None),)))
    assert sorted(send.peer for send in harness.sent) == [S0, S0, S1]


def test_a_partition_that_moves_alone_takes_along_what_its_leader_has_to_know() -> None:
    """Another partition of the same server stays where it is, and its leader is told as well."""
    harness = replicated()
    harness.fail_over(2)  # S0 leads partitions 0 and 2
    harness.call(requests.Control((SetOptimizer(0, None),)))
    harness.sent.clear()
    harness.lead(0, 1)
    assert [send.peer for send in harness.sent if isinstance(send.message, SetOptimizer)] == [S1]


def test_a_server_that_leads_nothing_may_be_replaced_while_it_is_told() -> None:
    harness = replicated()
    harness.fail_over(2)
    harness.look(member("server", 2, life=1))
    call = harness.call(requests.Control((SetOptimizer(0, None),)))
    for send in [harness.take(SetOptimizer) for _ in range(4)]:
        if send.peer != server_id(2, 1):
            harness.reply(send, Done)
    harness.look(member("server", 2, life=2))
    assert len(harness.result(call)) == 4


def test_changed_hyperparameters_wait_for_the_pushes_that_moved_with_them() -> None:
    """They take effect after the pushes that the server has."""
    harness, (key,) = knowing(0)
    harness.push(key)
    call = harness.call(requests.Control((UpdateOptimizer(0, {}),), staged_first=True))
    harness.staged()
    first = [harness.take(UpdateOptimizer) for _ in range(3)]
    harness.take(Push)
    harness.fail_over(0)
    assert harness.waiting(UpdateOptimizer) == []
    harness.staged()
    again = harness.take(UpdateOptimizer)
    assert again.peer == S1
    for send in (*first[1:], again):
        assert call not in harness.done
        harness.reply(send, Done)
    assert len(harness.result(call)) == 3


def test_changed_hyperparameters_that_wait_again_end_with_their_call() -> None:
    harness, (key,) = knowing(0)
    harness.push(key)
    call = harness.call(requests.Control((UpdateOptimizer(0, {}),), staged_first=True), timeout_s=5)
    harness.staged()
    harness.fail_over(0)
    harness.wait(5)
    assert isinstance(harness.error(call), RequestTimeout)
    assert harness.error(call).outcome == "unknown"
    harness.sent.clear()
    harness.wait(10)
    harness.staged()
    assert harness.waiting(UpdateOptimizer) == []


def test_states_and_the_optimizer_are_asked_of_the_new_leader() -> None:
    harness, (key,) = knowing(0)
    calls = [
        harness.call(requests.Control((OptimizerQuery(0),), partitions=(0,))),
        harness.call(requests.Control((TakeStep(0, 0, 4, -1),), partitions=(0,))),
        harness.call(requests.Control((ListKeys(0, ""),), partitions=(0,))),
        harness.call(requests.SliceControl(key, (FetchState(0, key, 0),))),
        harness.call(requests.SliceControl(key, (StoreState(0, key, 0, 1, ()),), (b"x",), (1,))),
    ]
    first = harness.sent[:]
    assert {send.peer for send in first} == {S0}
    harness.sent.clear()
    harness.fail_over(0)
    assert [(send.peer, send.message, send.payload) for send in harness.sent] == [
        (S1, send.message, send.payload) for send in first
    ]
    for call, send in zip(calls, harness.sent, strict=True):
        harness.say(S1, OptimizerIs(number(send), None))
        assert len(harness.result(call)) == 1


@pytest.mark.parametrize("message", [Command(0, "x"), StatusQuery(0)])
def test_what_is_about_a_process_ends_with_it(message: Any) -> None:
    harness = replicated()
    calls = [harness.call(requests.Control((message,), servers)) for servers in (None, (0,), (1,))]
    harness.sent.clear()
    harness.fail_over(0)
    assert harness.waiting(type(message)) == []
    for call in calls[:2]:
        error = harness.error(call)
        assert isinstance(error, NodeLost)
        assert (error.node, error.reason) == ("server 0", "no heartbeat")
        assert "nothing of the keys is lost" in str(error)
    assert calls[2] not in harness.done
    harness.call(requests.Control((message,)))
    assert [send.peer for send in harness.sent] == [S1, S2]
    assert isinstance(harness.error(harness.call(requests.Control((message,), (0,)))), NodeLost)


# ── joining ──


def test_a_worker_joins_without_a_server_that_leads_nothing() -> None:
    harness = replicated(joined=False)
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(0))
    harness.members["server", 0] = member("server", 0, "dead")
    harness.lead(0, 1)
    assert harness.result(call) == 0
    assert harness.machine.view.missing_servers() == []


def test_a_worker_waits_for_the_leaders_alone() -> None:
    harness = replicated(joined=False)
    harness.attach = False
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(0))
    harness.lead(0, 1)
    asked = [harness.take(Attach) for _ in range(3)]
    assert [send.peer for send in asked] == [S0, S1, S2]
    assert [server.rank for server in harness.machine.unreached_servers()] == [1, 2]
    for send in asked[1:]:
        assert call not in harness.done
        harness.reply(send, Done)
    assert harness.result(call) == 0


def test_a_worker_waits_for_a_leader_that_is_dead() -> None:
    harness = replicated(joined=False)
    call = harness.call(requests.JoinCluster())
    harness.step(welcome(0))
    harness.look(member("server", 0, "dead"))
    assert call not in harness.done
    assert harness.machine.view.missing_servers() == [0]
    harness.fail_over(0)
    assert harness.result(call) == 0


def test_a_server_that_was_gone_before_it_knew_the_worker_is_asked_when_it_is_back() -> None:
    harness = replicated()
    harness.fail_over(2)
    harness.attach = False
    harness.look(member("server", 2, life=1))
    assert harness.take(Attach).peer == server_id(2, 1)
    harness.look(member("server", 2, "dead", life=1))
    assert len(harness.machine._outbox) == 0
    harness.look(member("server", 2, life=1))
    attach = harness.take(Attach)
    assert attach.peer == server_id(2, 1)
    harness.reply(attach, Done)
    harness.look()
    assert harness.waiting(Attach) == []


# ── readers ──


def test_an_observer_reads_on_at_the_new_leader() -> None:
    harness, (key, other) = knowing(0, 1, role="observer")
    items = tuple(requests.Item(name, uint8(1), None, f"target {name}") for name in (key, other))
    call = harness.call(requests.Read(items, 1, 4, True))
    reads = [harness.take(ReadSlices) for _ in range(2)]
    assert [send.peer for send in reads] == [S0, S1]
    harness.fail_over(0)
    again = harness.take(ReadSlices)
    assert (again.peer, again.message) == (S1, reads[0].message)
    for send in (again, reads[1]):
        harness.say(S1, Values(number(send), (4,)), b"a")
    assert harness.result(call) == [(4, 4), (4, 4)]
    assert [send.peer for send in harness.sent if isinstance(send.message, ReadDone)] == [S1]


@pytest.mark.parametrize("named", [False, True])
def test_a_survey_asks_the_leaders(named: bool) -> None:
    harness, (key,) = knowing(0, role="observer")
    items = (requests.Item(key, uint8(1)),) if named else ()
    call = harness.call(requests.Survey(items))
    first = harness.sent[:]
    assert [send.peer for send in first] == ([S0] if named else [S0, S1, S2])
    harness.fail_over(0)
    assert harness.sent[-1].peer == S1
    assert harness.sent[-1].message == first[0].message
    for send in harness.sent[1:]:
        harness.say(send.peer, Surveyed(number(send), 0, 0, 0, True, 0))
    assert len(harness.result(call)) == len(first)
    harness.sent.clear()
    harness.call(requests.Survey(()))
    assert [send.peer for send in harness.sent] == [S1, S2]


def test_an_observer_goes_on_after_a_death() -> None:
    harness, (key,) = knowing(0, role="observer")
    harness.fail_over(0)
    call = harness.pull(key)
    assert harness.sent[-1].peer == S1
    harness.values(Pull, (0,), b"a")
    assert harness.result(call) == [(0, 0)]
    assert [server.rank for server in harness.machine.view.servers() if server.state == "dead"] == [0]


def test_a_server_that_comes_later_is_told_who_rests() -> None:
    harness, (key,) = knowing(0)
    harness.call(requests.Control((Rest(0),)))
    for life, rests in ((1, True), (2, False)):
        if not rests:
            harness.push(key)  # the program has a step to make again
        harness.fail_over(2)
        harness.look(member("server", 2, life=life))
        told = [send.peer for send in harness.sent if isinstance(send.message, Rest)]
        assert (server_id(2, life) in told) is rests
