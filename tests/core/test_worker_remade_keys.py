"""The worker: keys that are made again under the name of a deleted one."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Span
from kvd.core.placement import shard_of
from kvd.core.requests import Item
from kvd.errors import KeyExists, KeyNotFound, RequestTimeout
from kvd.protocol.messages import (
    Activate,
    ClockQuery,
    Clocks,
    DeclareBatch,
    Delete,
    Done,
    ErrorCode,
    FetchState,
    Init,
    KeyId,
    Lookup,
    NodeName,
    Outdated,
    Publish,
    Pull,
    Push,
    PushBatch,
    SliceId,
    StoreState,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, cluster, info_of, member, uint8
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


def test_worker_0_makes_the_successor_under_a_new_creation() -> None:
    harness = Harness()
    made(harness)
    delete(harness)
    harness.reply(harness.take(Delete), Done)
    call = make(harness, spec=uint8(3))
    send = harness.take(Init)
    assert (send.message.creation, send.message.specs) == (1, (uint8(3),))  # type: ignore[union-attr]
    harness.reply(send, Done)
    publish = harness.take(Publish)
    assert publish.message.creation == 1  # type: ignore[union-attr]
    harness.reply(publish, Done)
    assert harness.result(call) is None
    harness.push("w", spec=uint8(3))
    (push,) = harness.waiting(Push)
    assert push.parts == (("w", 0, 1, 1),)
    harness.settle()
    delete(harness)
    assert harness.take(Delete).message.keys == (KeyId("w", 1),)  # type: ignore[union-attr]


def test_an_init_behind_a_deletion_waits_for_its_end() -> None:
    harness = Harness()
    made(harness)
    first = delete(harness)
    second, third = make(harness), make(harness)
    assert not harness.waiting(Init)
    harness.wait(61)
    assert isinstance(harness.error(third), RequestTimeout)
    assert isinstance(harness.error(first), RequestTimeout)
    assert isinstance(harness.error(second), RequestTimeout)
    fourth = make(harness)
    harness.sent = [send for send in harness.sent if isinstance(send.message, Delete)][:1]
    harness.reply(harness.take(Delete), Done)
    assert harness.take(Init).message.creation == 1  # type: ignore[union-attr]
    assert fourth not in harness.done


def test_an_init_behind_a_deletion_that_fails_finds_the_key() -> None:
    harness = Harness()
    made(harness)
    delete(harness)
    call = make(harness)
    harness.refuse(Delete, ErrorCode.NODE_LOST, nodes=(NodeName("worker", 1),))
    assert isinstance(harness.error(call), KeyExists)


def test_a_server_that_knows_of_deletions_is_asked_again_with_a_new_creation() -> None:
    """Worker 0 was restarted, and does not know what its predecessor deleted."""
    harness = Harness(servers=2, predecessor="dead")
    spec = uint8(2 * SLICE)
    call = make(harness, spec=spec)
    harness.missing()
    first, second = harness.take(Init), harness.take(Init)
    harness.reply(first, Done)
    harness.say(second.peer, Outdated(second.message.request, 3))  # type: ignore[union-attr]
    again = [harness.take(Init), harness.take(Init)]
    assert {init.message.creation for init in again} == {3}  # type: ignore[union-attr]
    assert (
        {init.payload for init in again}
        == {first.payload, second.payload}
        == {
            (Span("value", 0, SLICE),),
            (Span("value", SLICE, SLICE),),
        }
    )
    for init in again:
        assert not harness.waiting(Publish)
        harness.reply(init, Done)
    publish = harness.take(Publish)
    assert publish.message.creation == 3  # type: ignore[union-attr]
    harness.reply(publish, Done)
    assert harness.result(call) is None


def test_a_late_answer_about_the_deleted_key_is_not_believed() -> None:
    harness = Harness(rank=1)
    pull = harness.pull("w")
    late = harness.sent.pop()
    init = make(harness)
    harness.found()
    assert harness.result(init) is None
    harness.values(Pull, (0,), b"\1")
    assert harness.result(pull)
    call = delete(harness)
    harness.reply(harness.take(Delete), Done)
    assert harness.result(call) is None
    harness.say(late.peer, info_of(late.message.request, uint8(1)))  # type: ignore[union-attr]
    harness.push("w")
    assert not harness.waiting(Push)
    assert len(harness.waiting(Lookup)) == 1


def test_a_late_clock_of_the_deleted_key_is_not_believed() -> None:
    harness = Harness(rank=1, predecessor="dead")
    harness.pull("w")
    init = make(harness)
    for _ in range(2):
        harness.found()
    late, early = harness.take(ClockQuery), harness.take(ClockQuery)
    harness.say(early.peer, Clocks(early.message.request, 7, 7, 7, 7))  # type: ignore[union-attr]
    assert harness.result(init) is None
    harness.values(Pull, (7,), b"\1")
    delete(harness)
    harness.reply(harness.take(Delete), Done)
    harness.say(late.peer, Clocks(late.message.request, 7, 7, 7, 7))  # type: ignore[union-attr]
    harness.push("w")
    assert not harness.waiting(Push)
    harness.found(creation=1)
    send = harness.take(ClockQuery)
    harness.say(send.peer, Clocks(send.message.request, 0, 0, 0, 0))  # type: ignore[union-attr]
    assert harness.clocks() == [("w", 0, 1)]


def test_another_worker_finds_the_successor() -> None:
    harness = ready(rank=1)
    delete(harness)
    harness.reply(harness.take(Delete), Done)
    call = harness.call(requests.InitKeys((Item("w", uint8(2)),)))
    harness.found(uint8(2), creation=0)  # a copy of an early answer
    assert call not in harness.done
    assert harness.take(Lookup).message.wait  # type: ignore[union-attr]


def test_another_worker_uses_the_creation_that_it_finds() -> None:
    harness = ready(rank=1)
    delete(harness)
    harness.reply(harness.take(Delete), Done)
    call = harness.call(requests.InitKeys((Item("w", uint8(2)),)))
    harness.found(uint8(2), creation=4)
    assert harness.result(call) is None
    harness.pull("w", spec=uint8(2))
    assert harness.take(Pull).message.parts == (("w", 0, 0, 4),)  # type: ignore[union-attr]


def test_batches_and_other_messages_name_the_creation() -> None:
    harness = Harness(rank=1, batches=True, predecessor="left")
    harness.call(requests.DescribeKey("w"))
    harness.found(uint8(1), creation=5)
    query = harness.take(ClockQuery)
    harness.say(query.peer, Clocks(query.message.request, 3, 3, 3, 3))  # type: ignore[union-attr]
    activate = harness.take(Activate)
    assert (activate.message.clock, activate.message.creation) == (3, 5)  # type: ignore[union-attr]
    harness.reply(activate, Done)
    for _ in range(2):
        harness.push("w")
    assert harness.take(DeclareBatch).message.slice_ids == (SliceId("w", 0, 5),)  # type: ignore[union-attr]
    assert harness.waiting(PushBatch)
    harness.call(requests.SliceControl("w", (StoreState(0, "w", 0, 1, ()),)))
    assert harness.take(StoreState).message.creation == 5  # type: ignore[union-attr]
    harness.call(requests.SliceControl("w", (FetchState(0, "w", 0),)))
    assert harness.waiting(FetchState)


def test_the_clocks_of_the_successor_start_at_0() -> None:
    harness = ready()
    for _ in range(2):
        harness.push("w")
        harness.settle()
    delete(harness)
    harness.reply(harness.take(Delete), Done)
    harness.call(requests.DescribeKey("w"))
    harness.found(creation=1)
    assert harness.result(harness.call(requests.ClockOf("w"))) == 0
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


@pytest.mark.parametrize("role", ["worker", "observer"])
def test_a_reader_that_meets_a_deletion_looks_again(role: str) -> None:
    harness = ready(role=role)
    if role == "worker":
        harness.look(member("worker", 0, "done"))
    pull = harness.pull("w", any_version=True)
    harness.refuse(Pull, ErrorCode.KEY_NOT_FOUND, key="w")
    assert isinstance(harness.error(pull), KeyNotFound)
    again = harness.pull("w", any_version=True, spec=uint8(2))
    harness.found(uint8(2), creation=1)
    assert harness.take(Pull).message.parts == (("w", 0, -1, 1),)  # type: ignore[union-attr]
    assert again not in harness.done


def test_many_keys_are_deleted_in_messages_that_fit() -> None:
    settings: Any = cluster(2, 2)
    names = [f"{number}{'x' * 190}" for number in range(150)]
    harness = Harness(settings=settings, servers=2)
    for name in names:
        harness.know(name)
    call = delete(harness, *names)
    messages = harness.waiting(Delete)
    assert sum(len(message.keys) for message in messages) == len(names)
    assert 2 <= len(messages) <= 4
    homes = {shard_of(name, 0, settings.num_shards) % 2 for name in names}
    assert homes == {0, 1}
    for _ in messages:
        harness.reply(harness.take(Delete), Done)
    assert harness.result(call) is None
