"""The worker: it deletes keys after its earlier calls on them, and does not take them for their successors."""

from __future__ import annotations

import pytest

from kvd.core import requests
from kvd.core.requests import Item
from kvd.errors import KeyNotFound, NodeLost, NotAllowed, RequestTimeout
from kvd.protocol.messages import (
    Delete,
    Done,
    Drop,
    ErrorCode,
    Init,
    KeyId,
    NodeName,
    NotYetReason,
    Publish,
    Pull,
    Push,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, cluster, member, server_id, uint8
from tests.core.worker_harness import Harness, ready


def delete(harness: Harness, *keys: str, timeout_s: float = 60.0) -> int:
    return harness.call(requests.DeleteKeys(keys or ("w",)), timeout_s)


def make(harness: Harness, key: str = "w", spec: KeySpec | None = None) -> int:
    return harness.call(requests.InitKeys((Item(key, spec or uint8(1), "value"),)))


def made(harness: Harness, *keys: str) -> None:
    for key in keys or ("w",):
        call = make(harness, key)
        harness.reply(harness.take(Init), Done)
        harness.reply(harness.take(Publish), Done)
        assert harness.result(call) is None


# ── the way of a deletion ──


def test_a_key_is_deleted_at_its_home() -> None:
    harness = ready()
    call = delete(harness)
    send = harness.take(Delete)
    assert send.message.keys == (KeyId("w", 0),)  # type: ignore[union-attr]
    assert call not in harness.done
    harness.reply(send, Done)
    assert harness.result(call) is None
    assert not harness.sent
    pull = harness.pull("w")
    harness.missing()
    assert isinstance(harness.error(pull), KeyNotFound)


def test_then_its_other_slices_are_dropped() -> None:
    harness = Harness(servers=3)
    harness.know("w", spec=uint8(3 * SLICE))
    call = delete(harness)
    home = harness.take(Delete)
    assert home.peer == server_id(harness.machine.view.partition_of("w", 0))
    assert not harness.waiting(Drop)
    harness.reply(home, Done)
    drops = [harness.take(Drop), harness.take(Drop)]
    assert {drop.peer for drop in drops} | {home.peer} == {server_id(rank) for rank in range(3)}
    for drop in drops:
        assert call not in harness.done
        assert drop.message.keys == (KeyId("w", 0),)  # type: ignore[union-attr]
        harness.reply(drop, Done)
    assert harness.result(call) is None


def test_a_list_of_keys_goes_in_one_message_to_each_home() -> None:
    harness = ready("a", "b", "c")
    call = delete(harness, "a", "b", "c")
    (message,) = harness.waiting(Delete)
    assert message.keys == (KeyId("a", 0), KeyId("b", 0), KeyId("c", 0))
    harness.reply(harness.take(Delete), Done)
    assert harness.result(call) is None


def test_no_keys() -> None:
    harness = ready()
    assert harness.result(harness.call(requests.DeleteKeys(()))) is None


def test_a_key_that_is_named_twice_is_deleted_once() -> None:
    harness = ready()
    call = delete(harness, "w", "w")
    harness.reply(harness.take(Delete), Done)
    assert harness.result(call) is None


def test_a_deletion_waits_for_the_pushes_before_it() -> None:
    harness = ready()
    push = harness.push("w")
    call = delete(harness)
    later = harness.push("w")
    assert not harness.waiting(Delete)
    harness.settle()
    assert push in harness.done
    harness.reply(harness.take(Delete), Done)
    assert harness.result(call) is None
    harness.missing()
    assert isinstance(harness.error(later), KeyNotFound)


@pytest.mark.parametrize("timed_out", [False, True])
def test_a_deletion_waits_for_the_end_of_a_push_not_for_that_of_its_call(timed_out: bool) -> None:
    harness = ready()
    push = harness.push("w", timeout_s=1)
    delete(harness)
    if timed_out:
        harness.wait(1)
        assert isinstance(harness.error(push), RequestTimeout)
    assert not harness.waiting(Delete)
    harness.settle()
    assert harness.waiting(Delete)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("timed_out", [False, True])
def test_a_deletion_waits_for_the_pulls_before_it(mode: str, timed_out: bool) -> None:
    harness = ready(settings=cluster(mode=mode))
    pull = harness.pull("w", timeout_s=1)
    delete(harness)
    assert not harness.waiting(Delete)
    if timed_out:
        harness.wait(1)
        assert isinstance(harness.error(pull), RequestTimeout)
    else:
        harness.values(Pull, (0,), b"\1")
        assert harness.result(pull)
    assert harness.waiting(Delete)


def test_calls_on_other_keys_do_not_wait() -> None:
    harness = ready("v", "w")
    delete(harness)
    harness.push("v")
    assert harness.clocks() == [("v", 0, 1)]
    harness.push("v", "w")
    assert harness.clocks() == [("v", 0, 1)]


def test_a_push_that_was_taken_in_part_can_be_ended_by_a_deletion() -> None:
    harness = Harness()
    harness.know("w", spec=uint8(2 * SLICE))
    push = harness.push("w", spec=uint8(2 * SLICE))
    harness.settle()
    harness.refuse(Push, ErrorCode.NOT_ALLOWED)
    assert push in harness.done
    call = delete(harness)
    harness.reply(harness.take(Delete), Done)
    assert harness.result(call) is None


# ── what can go wrong ──


def test_a_key_that_is_not_there() -> None:
    harness = Harness()
    call = delete(harness, "nothing")
    harness.missing()
    assert (type(harness.error(call)), harness.error(call).key) == (KeyNotFound, "nothing")
    assert not harness.waiting(Delete)


def test_a_key_that_this_worker_has_deleted_may_be_deleted_again() -> None:
    """A call on a list that failed in part is made again."""
    harness = ready("a", "b")
    first = delete(harness, "a")
    harness.reply(harness.take(Delete), Done)
    assert harness.result(first) is None
    call = delete(harness, "a", "b")
    harness.missing()
    send = harness.take(Delete)
    assert send.message.keys == (KeyId("b", 0),)  # type: ignore[union-attr]
    harness.reply(send, Done)
    assert harness.result(call) is None
    again = delete(harness, "a", "b")
    harness.missing()
    assert harness.result(again) is None


def test_a_successor_does_not_miss_what_its_predecessor_may_have_deleted() -> None:
    harness = Harness(rank=1, predecessor="dead")
    call = delete(harness)
    harness.missing()
    assert harness.result(call) is None


@pytest.mark.parametrize("role", ["worker", "observer"])
def test_only_workers_that_take_part_delete(role: str) -> None:
    harness = ready(role=role)
    if role == "worker":
        harness.look(member("worker", 0, "done"))
    assert isinstance(harness.error(delete(harness)), NotAllowed)


def test_before_the_cluster_is_joined() -> None:
    harness = Harness(joined=False)
    assert isinstance(harness.error(delete(harness)), NotAllowed)


def test_a_deletion_that_timed_out_goes_on_and_can_be_waited_for() -> None:
    harness = ready()
    first = delete(harness, timeout_s=1)
    harness.wait(1)
    assert isinstance(harness.error(first), RequestTimeout)
    again = delete(harness)
    harness.reply(harness.take(Delete), Done)
    assert harness.result(again) is None
    assert not harness.waiting(Delete)


def test_a_deletion_that_waits_for_a_dead_worker_fails_and_the_key_stays() -> None:
    harness = ready()
    call = delete(harness)
    later = harness.push("w")
    harness.refuse(Delete, ErrorCode.NODE_LOST, nodes=(NodeName("worker", 1),))
    assert (type(harness.error(call)), harness.error(call).node) == (NodeLost, "worker 1")
    assert harness.clocks() == [("w", 0, 1)]
    assert later not in harness.done
    delete(harness)
    harness.settle()
    assert harness.waiting(Delete)


def test_a_home_that_dies_ends_the_waiting() -> None:
    harness = ready()
    call = delete(harness)
    later = harness.push("w")
    harness.look(member("server", 0, "dead"))
    assert [harness.error(number).node for number in (call, later)] == ["server 0", "server 0"]
    assert harness.error(delete(harness)).node == "server 0"


def test_a_home_that_was_restarted_has_lost_the_key() -> None:
    harness = ready()
    call = delete(harness)
    harness.restart_server()
    assert harness.error(call).node == "server 0"
    assert harness.error(harness.push("w")).node == "server 0"


def test_a_server_that_was_restarted_has_nothing_to_drop() -> None:
    harness = Harness(servers=2)
    harness.know("w", spec=uint8(2 * SLICE))
    call = delete(harness)
    home = harness.take(Delete)
    harness.reply(home, Done)
    rank = 1 - harness.machine.view.partition_of("w", 0)
    harness.restart_server(rank)
    assert harness.result(call) is None


def test_a_delete_that_cannot_be_taken_yet_is_sent_again() -> None:
    harness = Harness(servers=2)
    harness.know("w", spec=uint8(2 * SLICE))
    call = delete(harness)
    harness.reply(harness.take(Delete), Done)
    harness.postpone(Drop, NotYetReason.UPDATING)
    harness.wait(0.1)
    harness.reply(harness.take(Drop), Done)
    assert harness.result(call) is None
