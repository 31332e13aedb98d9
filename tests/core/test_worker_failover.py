"""The worker when a server dies that has a backup: what is open goes to the server that takes its place."""

from __future__ import annotations

from typing import Any

from kvd.core import requests
from kvd.core.machine import Copy, Effect, Send
from kvd.core.worker.keys import KeyState
from kvd.core.worker.not_yet import MAX_ATTEMPTS
from kvd.errors import NodeLost, RequestTimeout
from kvd.protocol.messages import (
    Attach,
    Command,
    DeclareBatch,
    Done,
    FetchState,
    NotYet,
    NotYetReason,
    OptimizerQuery,
    Pull,
    PullBatch,
    Push,
    PushBatch,
    Rest,
    Staged,
    UpdateOptimizer,
    Values,
)
from tests.core.fakes import SLICE, member, of, one, server_id, uint8
from tests.core.worker_harness import S0, S1, S2, knowing, number


def sent(effects: list[Effect], kind: type[Any], peer: int) -> list[Any]:
    """The messages of a kind that went to a server in this step."""
    return [send.message for send in of(Send, effects) if send.peer == peer and isinstance(send.message, kind)]


# ── pushes and pulls ──


def test_a_push_goes_to_the_new_leader_with_its_number_and_bytes() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key)
    first = harness.take(Push)
    assert first.peer == S0
    harness.fail_over(0)
    again = harness.take(Push)
    assert (again.peer, again.message, again.payload) == (S1, first.message, first.payload)
    harness.say(S0, Done(number(first)))  # it comes too late
    assert call not in harness.done
    harness.reply(again, Done)
    assert harness.result(call) == [None]
    harness.push(key)
    assert harness.take(Push).peer == S1


def test_the_pushes_to_other_servers_stay_there() -> None:
    harness, names = knowing(0, 1, 2)
    call = harness.push(*names)
    sends = [harness.take(Push) for _ in names]
    assert [send.peer for send in sends] == [S0, S1, S2]
    harness.fail_over(0)
    assert [send.peer for send in harness.sent] == [S1]
    for send in sends[1:]:
        harness.reply(send, Done)
    harness.settle()
    assert harness.result(call) == [None] * 3


def test_a_staged_push_is_sent_again_whole() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key)
    harness.staged()
    harness.sent.clear()
    after = harness.call(requests.Control((Command(0, "x"),), staged_first=True))
    assert len(harness.waiting(Command)) == 3
    harness.sent.clear()
    harness.fail_over(0)
    push = one(harness.waiting(Push))
    assert not push.probe
    later = harness.call(requests.Control((Rest(0),), staged_first=True))
    assert harness.waiting(Rest) == []  # the bytes are not there any more
    harness.staged()
    assert len(harness.waiting(Rest)) == 3  # one for each partition
    harness.settle()
    assert harness.result(call) == [None]
    assert isinstance(harness.error(after), NodeLost)
    assert later not in harness.done


def test_the_clocks_of_a_key_keep_their_order() -> None:
    harness, (key,) = knowing(0)
    harness.push(key, priority=0)
    harness.push(key, priority=9)
    harness.reply(next(send for send in harness.sent if isinstance(send.message, Push)), Staged)
    harness.sent.clear()
    harness.fail_over(0)
    assert [send.peer for send in harness.sent] == [S1, S1]
    assert harness.clocks() == [(key, 0, 1), (key, 0, 2)]
    for _ in range(2):
        harness.settle()
    assert len(harness.done) == 3


def test_the_credit_bounds_what_goes_to_the_new_leader() -> None:
    spec = uint8(SLICE)
    harness, (key, other) = knowing(0, 1, spec=spec, credit=2 * SLICE)
    for _ in range(2):
        harness.push(key, spec=spec)
    call = harness.push(other, spec=spec)
    assert [send.peer for send in harness.sent] == [S0, S0, S1]
    effects = harness.fail_over(0)
    assert len(sent(effects, Push, S1)) == 1  # and one that it was sent before
    harness.say(S1, Staged(number(harness.sent[2])))
    assert harness.clocks()[-1] == (key, 0, 2)
    assert call not in harness.done
    for send in harness.sent[2:]:
        harness.say(S1, Done(number(send)))
    assert len(harness.machine._outbox) == 0


def test_small_pushes_are_probed_at_the_new_leader_for_those_who_wait() -> None:
    harness, (key,) = knowing(0, small=16)
    harness.push(key)
    harness.call(requests.Control((UpdateOptimizer(0, {}),), staged_first=True))
    assert [push.probe for push in harness.waiting(Push)] == [False, True]
    harness.sent.clear()
    harness.fail_over(0)
    assert [(push.probe) for push in harness.waiting(Push)] == [False, True]
    harness.staged()
    assert len(harness.waiting(UpdateOptimizer)) == 3  # one for each partition


def test_a_pull_and_a_pushpull_take_the_values_of_the_new_leader() -> None:
    harness, (key,) = knowing(0)
    calls = [harness.push(key, pull=True), harness.pull(key)]
    old = harness.sent[:]
    harness.sent.clear()
    harness.fail_over(0)
    for send in old:
        late = Values(number(send), (1,))
        assert of(Copy, harness.say(S0, late, b"old")) == []
    effects = harness.values(Push, (1,), b"a") + harness.values(Pull, (1,), b"a")
    assert len(of(Copy, effects)) == 2
    for call in calls:
        assert harness.result(call) == [(1, 1)]


def test_a_batch_is_declared_ahead_to_the_new_leader() -> None:
    harness, (key,) = knowing(0, batches=True)
    harness.pull(key)
    harness.values(Pull, (0,), b"a")
    harness.pull(key)
    harness.declared()
    harness.values(PullBatch, (0,), b"a")
    harness.push(key, priority=1)
    harness.push(key, priority=7)
    assert len(harness.waiting(PushBatch)) == 2
    harness.sent.clear()
    harness.fail_over(0)
    kinds = [type(send.message) for send in harness.sent]
    assert kinds == [DeclareBatch, PushBatch, PushBatch]
    assert {send.peer for send in harness.sent} == {S1}
    batches = {send.message.batch for send in harness.sent}  # type: ignore[union-attr]
    assert len(batches) == 1
    harness.declared()
    harness.sent.clear()
    harness.pull(key)
    assert harness.waiting(DeclareBatch) == []


def test_a_declaration_that_is_under_way_moves_and_is_not_made_twice() -> None:
    harness, (key,) = knowing(0, batches=True)
    harness.pull(key)
    harness.pull(key)
    first = one(harness.waiting(DeclareBatch))
    harness.sent.clear()
    harness.fail_over(0)
    assert one(harness.waiting(DeclareBatch)) == first
    kinds = [type(send.message) for send in harness.sent]
    assert kinds.index(DeclareBatch) < kinds.index(PullBatch)


def test_a_new_leader_that_does_not_know_the_batch_is_told_again() -> None:
    harness, (key,) = knowing(0, batches=True)
    harness.pull(key)
    harness.values(Pull, (0,), b"a")
    call = harness.pull(key)
    harness.declared()
    harness.sent.clear()
    harness.fail_over(0)
    assert [type(send.message) for send in harness.sent] == [DeclareBatch, PullBatch]
    del harness.sent[0]  # it gets lost
    harness.postpone(PullBatch, NotYetReason.UNKNOWN_BATCH)
    assert len(harness.waiting(DeclareBatch)) == 1
    harness.wait(0.1)
    harness.values(PullBatch, (0,), b"a")
    assert harness.result(call) == [(0, 0)]


def test_a_call_whose_requests_wait_at_the_new_leader_may_have_happened() -> None:
    spec = uint8(SLICE)
    harness, (key, other) = knowing(0, 1, spec=spec, credit=SLICE)
    harness.push(other, spec=spec)
    call = harness.call(requests.Control((OptimizerQuery(0),), partitions=(0,)), timeout_s=5)
    harness.push(key, spec=spec, priority=3)
    assert {send.peer for send in harness.sent} == {S0, S1}
    harness.fail_over(0)
    harness.wait(5)
    assert harness.error(call).outcome == "unknown"


# ── moved more than once ──


def test_a_push_that_moves_twice_reaches_the_third() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key)
    harness.fail_over(0)
    harness.lead(0, 2)
    assert [send.peer for send in harness.sent] == [S0, S1, S2]
    for peer in (S0, S1):
        harness.say(peer, Done(number(harness.sent[0])))
        assert call not in harness.done
    harness.say(S2, Done(number(harness.sent[0])))
    assert harness.result(call) == [None]


def test_a_push_that_moves_back_reaches_the_first_again() -> None:
    """A late answer of its first time is true: the contents were the same all the while."""
    harness, (key,) = knowing(0)
    call = harness.push(key)
    harness.staged()
    harness.lead(0, 1)
    harness.lead(0, 0)
    assert [send.peer for send in harness.sent] == [S0, S1, S0]
    assert not harness.sent[2].message.probe  # type: ignore[union-attr]
    request = number(harness.sent[0])
    harness.say(S1, Staged(request))
    assert harness.machine._outbox.unstaged == 1
    harness.say(S0, Done(request))
    assert harness.result(call) == [None]


def test_a_server_that_has_lost_the_bytes_since_it_had_them_gets_them_again() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key)
    request = number(harness.sent[0])
    harness.lead(0, 1)
    harness.lead(0, 0)
    harness.sent.clear()
    harness.say(S0, Staged(request))  # it was under way when the partition moved
    harness.wait(2.0)
    assert one(harness.waiting(Push)).probe
    harness.postpone(Push, NotYetReason.OUT_OF_TURN, next_clock=1)
    harness.wait(0.1)
    assert not one(harness.waiting(Push)).probe
    harness.settle()
    assert harness.result(call) == [None]


# ── losses ──


def test_a_leader_that_dies_without_a_backup_is_lost() -> None:
    harness, (key, other) = knowing(0, 1)
    harness.partitions = tuple([entry._replace(backup=-1) for entry in harness.partitions])
    calls = [harness.push(key), harness.pull(key)]
    harness.fail_over(0)
    for call in (*calls, harness.push(key)):
        error = harness.error(call)
        assert (error.node, error.last_seen_s) == ("server 0", 5.0)
        assert "no in-sync replica of its part of the keys is left" in str(error)
    assert isinstance(harness.error(harness.pull(key)), NodeLost)
    harness.pull(other)
    assert harness.sent[-1].peer == S1
    harness.look(member("server", 0))  # it was paused: nothing of the partition is lost
    flush = harness.call(requests.Flush())
    harness.settle()
    assert harness.result(flush) is None


def test_a_partition_that_begins_anew_has_lost_its_keys() -> None:
    harness, (key, other) = knowing(0, 1)
    harness.partitions = tuple([entry._replace(backup=-1) for entry in harness.partitions])
    open_ = [harness.push(key), harness.pull(key), harness.call(requests.SliceControl(key, (FetchState(0, key, 0),)))]
    kept = harness.pull(other)
    harness.sent.clear()
    harness.members["server", 0] = member("server", 0, life=1)
    harness.lead(0, 0, lineage=server_id(0, 1))
    for call in (*open_, harness.push(key), harness.pull(key)):
        assert isinstance(harness.error(call), NodeLost)
        assert harness.error(call).node == "server 0"
    assert harness.machine._queue._keys.by_name[key].state is KeyState.LOST
    assert kept not in harness.done
    assert harness.result(harness.call(requests.Flush())) is None
    harness.wait(10)
    assert harness.waiting(Push) == []


def test_a_partition_that_begins_anew_elsewhere_has_lost_its_keys() -> None:
    """Views were missed in between: the old leader lives, and leads it no more."""
    harness, (key,) = knowing(0)
    calls = [harness.push(key), harness.pull(key)]
    harness.sent.clear()
    harness.members["server", 1] = member("server", 1, life=1)
    harness.lead(0, 1, lineage=server_id(1, 1))
    for call in calls:
        assert isinstance(harness.error(call), NodeLost)
    assert harness.result(harness.call(requests.Flush())) is None
    assert harness.sent == []


def test_a_leader_that_is_replaced_after_the_move_has_lost_nothing() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key)
    harness.sent.clear()
    harness.members["server", 0] = member("server", 0, life=1)
    harness.lead(0, 1)
    harness.settle()
    assert harness.result(call) == [None]
    harness.lead(0, 0)  # it has been synced
    harness.push(key)
    assert harness.sent[-1].peer == server_id(0, 1)


# ── while nobody has taken over yet ──


def test_a_call_to_a_silent_leader_waits_until_its_time_is_up() -> None:
    harness, (key,) = knowing(0)
    call = harness.pull(key, timeout_s=60)
    harness.wait(59)
    assert call not in harness.done
    harness.wait(2)
    assert isinstance(harness.error(call), RequestTimeout)


def test_elsewhere_is_asked_again_soon_and_never_given_up() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key, timeout_s=10_000)
    for _ in range(MAX_ATTEMPTS + 10):
        harness.postpone(Push, NotYetReason.ELSEWHERE)
        harness.wait(0.21)
        assert len(harness.waiting(Push)) == 1
    harness.postpone(Push, NotYetReason.BUSY)
    assert call not in harness.done
    harness.wait(1.0)
    harness.fail_over(0)
    harness.sent = [send for send in harness.sent if send.peer == S1]
    harness.postpone(Push, NotYetReason.ELSEWHERE)  # it has not seen the view
    harness.wait(0.06)
    harness.settle()
    assert harness.result(call) == [None]


def test_the_old_leader_sends_nobody_anywhere_any_more() -> None:
    harness, (key,) = knowing(0)
    harness.push(key)
    send = harness.take(Push)
    harness.fail_over(0)
    harness.sent.clear()
    harness.say(S0, NotYet(number(send), NotYetReason.NOT_ATTACHED, "who?"))
    harness.wait(1.0)
    assert harness.waiting(Push) == harness.waiting(Attach) == []


def test_requests_stay_where_they_are_until_the_new_leader_can_be_reached() -> None:
    harness, (key,) = knowing(0)
    call = harness.push(key)
    harness.members["server", 1] = member("server", 1, "dead", life=1)
    harness.lead(0, 1)
    assert isinstance(harness.error(call), NodeLost)  # it is gone, too
    harness.sent.clear()
    flush = harness.call(requests.Flush())
    harness.look(member("server", 1, life=1))
    assert [send.peer for send in harness.sent] == [server_id(1, 1)]
    harness.settle()
    assert harness.result(flush) is None


def test_a_scheduler_that_has_yet_to_learn_the_partitions_changes_nothing() -> None:
    harness, (key,) = knowing(0)
    harness.fail_over(0)
    known, harness.partitions = harness.partitions, ()
    harness.look()
    call = harness.push(key)
    assert harness.take(Push).peer == S1
    assert call not in harness.done
    harness.partitions = known
    harness.look()
    assert harness.sent == []
