"""The server: keys are deleted once all ranks have said so, and nothing of them counts in their successors."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Effect, Export, ForgetState
from kvd.protocol.codec import decode, encode
from kvd.protocol.messages import (
    ANY_CLOCK,
    MOST_COUNTED,
    NO_KEY,
    NO_VIEW,
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Delete,
    Done,
    Drop,
    ErrorCode,
    FetchState,
    Init,
    KeyId,
    KeyInfo,
    Lookup,
    Made,
    NewKey,
    NewSlice,
    NodeName,
    NotYetReason,
    Outdated,
    Part,
    Publish,
    Pull,
    Push,
    SliceId,
    StoreState,
)
from tests.core.fakes import SLICE, NodePeer, init_of, lookup_of, member, of, one, said, uint8, worker_id
from tests.core.server_harness import Harness, kinds, not_yet, ready, refusal, together, values


def delete(harness: Harness, rank: int, *keys: str, creation: int = 0, request: int = 0, **more: Any) -> list[Effect]:
    message = Delete(request or harness.request(), tuple(KeyId(key, creation) for key in keys or ("w",)))
    return harness.say(rank, message, **more)


def delete_by_all(harness: Harness, *keys: str, creation: int = 0) -> None:
    for rank in range(harness.settings.num_workers):
        effects = delete(harness, rank, *keys, creation=creation)
    assert set(kinds(effects)) == {"Done"}


def make(harness: Harness, key: str, value: bytes, creation: int) -> None:
    spec = uint8(len(value))
    init = Init(harness.request(), (spec,), (NewSlice(key, 0, 0),), creation)
    assert kinds(harness.say(0, init, value)) == ["Done"]
    publish = Publish(harness.request(), (spec,), (NewKey(key, 0),), creation)
    assert kinds(harness.say(0, publish), worker_id(0)) == ["Done"]


# ── the end of a key ──


def test_a_key_is_gone_once_all_ranks_have_deleted_it() -> None:
    harness = ready(b"a")
    assert delete(harness, 0, request=50) == []
    assert values(harness.pull(1, 0)) == ((0,), [b"a"])
    assert harness.explain()["bytes_led"] == 1
    assert harness.explain()["waiting_for"] == ["worker 1"]
    effects = delete(harness, 1, request=60)
    assert said(effects, worker_id(0)) == [Done(50)]
    assert said(effects, worker_id(1)) == [Done(60)]
    assert of(ForgetState, effects) == [ForgetState((("w", 0),))]
    shown = harness.explain()
    assert (shown["keys"], shown["slices"], shown["bytes_led"]) == (0, 0, 0)
    assert said(harness.say(1, lookup_of(7, "w", False))) == [KeyInfo(7, (), (NO_KEY,))]
    assert refusal(harness.pull(1, 0)).error is ErrorCode.KEY_NOT_FOUND
    assert said(delete(harness, 1, request=61)) == [Done(61)]  # it is gone already
    assert said(delete(harness, 0, request=50)) == [Done(50)]  # the answer was lost


def test_a_delete_that_comes_again_counts_once_and_is_answered_where_it_came_from_last() -> None:
    harness = ready()
    delete(harness, 0, request=50)
    assert delete(harness, 0, request=50, peer=NodePeer(4711)) == []
    effects = delete(harness, 1)
    assert said(effects, 4711) == [Done(50)]


def test_a_list_is_answered_when_all_its_keys_are_gone() -> None:
    harness = ready()
    for key in ("v", "u"):
        harness.init(key, b"\0")
    delete(harness, 0, "w", "v", "u", request=50)
    assert said(delete(harness, 1, "v", "w", request=60)) == [Done(60)]
    assert sorted({slice_.key for slice_ in harness.machine.table.slices.values()}) == ["u"]
    assert said(delete(harness, 1, "u", request=61), worker_id(0)) == [Done(50)]


def test_slices_that_are_not_the_first_go_too() -> None:
    harness = ready(bytes(2 * SLICE))
    delete_by_all(harness)
    assert harness.explain()["slices"] == 0


def test_keys_of_a_group_go_one_by_one() -> None:
    harness = together("a", "b", "c")
    delete_by_all(harness, "b")
    assert harness.groups == [["a"], ["c"]]
    assert values(harness.pull(1, 1, key="c")) == ((1,), [b"\6"])
    for rank in (0, 1):
        effects = harness.push_batch(rank, 2, b"\1", b"\1", b"\1")
        assert refusal(effects).error is ErrorCode.KEY_NOT_FOUND
    for rank in (0, 1):
        effects = harness.push(rank, 2, key="a")
    assert kinds(effects) == ["Done", "Done"]


def test_a_key_whose_group_is_being_updated_goes_after_the_update() -> None:
    harness = together("a", "b")
    harness.hold = True
    export = one(of(Export, harness.say(0, FetchState(harness.request(), "a", 0))))
    delete(harness, 0, "b", request=50)
    assert said(delete(harness, 1, "b", request=60)) == []
    assert said(harness.say(1, lookup_of(7, "b", False))) == [KeyInfo(7, (Made(uint8(1), 0),), (0,))]
    assert said(delete(harness, 1, "b", request=60)) == []
    effects = harness.finish(export)
    assert {message.request for message in said(effects) if isinstance(message, Done)} == {50, 60}
    assert harness.groups == [["a"]]


def test_what_is_staged_goes_with_the_key_and_who_waits_is_told() -> None:
    """Only ranks that have left the rounds can have something under way: the others wait before they delete."""
    harness = ready(workers=3)
    harness.push(2, 1, request=40)
    harness.look(member("worker", 2, "done"))
    delete(harness, 0, request=50)
    effects = delete(harness, 1, request=60)
    (refused,) = said(effects, worker_id(2))
    assert (refused.request, refused.error, refused.key) == (40, ErrorCode.KEY_NOT_FOUND, "w")
    assert harness.explain()["requests_waiting"] == 0


def test_the_memory_of_a_deleted_key_is_there_for_others() -> None:
    harness = Harness(memory=7 * 100)
    memory = harness.memory
    harness.init("a", bytes(100))
    assert refusal(harness.say(0, init_of(harness.request(), "b", uint8(60), 0), bytes(60))).error
    assert memory.of_others(run=-1) == 700
    delete_by_all(harness, "a")
    assert memory.of_others(run=-1) == 0  # other runs may have it
    make(harness, "b", bytes(100), 1)


# ── who is waited for ──


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    harness = ready()
    delete(harness, 0, request=50)
    assert said(harness.look(member("worker", 1, "done")), worker_id(0)) == [Done(50)]


def test_a_rank_that_has_left_deletes_nothing() -> None:
    harness = ready()
    harness.look(member("worker", 1, "done"))
    assert refusal(delete(harness, 1)).error is ErrorCode.NOT_ALLOWED
    assert said(delete(harness, 0, request=50)) == [Done(50)]


def test_an_observer_deletes_nothing() -> None:
    harness = ready(attach=True)
    assert not_yet(harness.say(0, Delete(3, (KeyId("w", 0),)), life=7)).reason is NotYetReason.NOT_ATTACHED


def test_who_waits_for_a_dead_worker_is_told_and_deletes_again() -> None:
    harness = ready()
    delete(harness, 0, request=50)
    effects = harness.look(member("worker", 1, "dead", last_seen_s=3.0))
    refused = refusal(effects)
    assert (refused.request, refused.error, refused.key) == (50, ErrorCode.NODE_LOST, "w")
    assert (refused.nodes, refused.last_seen_s) == ((NodeName("worker", 1),), 3.0)
    assert refusal(delete(harness, 0, request=51)).error is ErrorCode.NODE_LOST  # at once
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert refusal(delete(harness, 0, request=50)).request == 50  # a late copy: its sender uses the key again
    assert said(delete(harness, 1, life=1)) == []
    assert Done(52) in said(delete(harness, 0, request=52))


def test_with_wait_a_dead_worker_is_waited_for() -> None:
    harness = ready(fail=False)
    delete(harness, 0, request=50)
    assert said(harness.look(member("worker", 1, "dead"))) == []
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert said(delete(harness, 1, life=1), worker_id(0)) == [Done(50)]


def test_what_a_predecessor_said_does_not_count() -> None:
    harness = ready()
    delete(harness, 1)
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert said(delete(harness, 0, request=50)) == []
    assert values(harness.pull(1, 0, life=1)) == ((0,), [b"\0"])
    assert said(delete(harness, 1, life=1), worker_id(0)) == [Done(50)]


def test_a_rank_that_comes_back_is_waited_for() -> None:
    harness = ready()
    harness.look(member("worker", 1, "left"))
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert said(delete(harness, 0, request=50)) == []
    assert said(delete(harness, 1, life=1), worker_id(0)) == [Done(50)]


def test_a_new_request_of_a_rank_takes_the_place_of_its_earlier_one() -> None:
    harness = ready()
    delete(harness, 0, request=50)
    delete(harness, 0, request=51)
    assert said(delete(harness, 1), worker_id(0)) == [Done(51)]


# ── the key that comes after ──


def test_a_key_of_the_same_name_may_have_another_shape() -> None:
    harness = ready(b"a")
    delete_by_all(harness)
    make(harness, "w", b"abc", 1)
    assert said(harness.say(1, Lookup(7, ("w",), True))) == [KeyInfo(7, (Made(uint8(3), 1),), (0,))]
    assert values(harness.say(1, Pull(harness.request(), (Part("w", 0, 0, 1),)))) == ((0,), [b"abc"])


def reborn(value: bytes = b"\0", **more: Any) -> Harness:
    """A server whose key was deleted, and made again."""
    harness = ready(**more)
    for rank in range(harness.settings.num_workers):
        harness.push(rank, 1)
    delete_by_all(harness)
    make(harness, "w", value, 1)
    return harness


def test_what_was_sent_to_the_deleted_key_does_not_count() -> None:
    harness = reborn()
    for message in (
        Push(10, (Part("w", 0, 1),), 0, 1, False),
        Push(10, (Part("w", 0, 1),), 0, 1, True),
        Pull(10, (Part("w", 0, 0),)),
        Pull(10, (Part("w", 0, ANY_CLOCK),)),
        StoreState(10, "w", 0, 3, ()),
    ):
        refused = refusal(harness.say(1, message, b"\7" if isinstance(message, Push) else None))
        assert (refused.error, refused.key) == (ErrorCode.KEY_NOT_FOUND, "w")
        assert "was deleted, and made again" in refused.text
    harness.say(1, Activate(10, "w", 5))
    assert said(harness.say(1, ClockQuery(11, "w"))) == [Clocks(11, 0, 0, 0, 0)]
    for rank in (0, 1):
        effects = harness.say(rank, Push(harness.request(), (Part("w", 0, 1, 1),), 0, 1, False), b"\2")
    assert kinds(effects) == ["Done", "Done"]
    assert harness.value("w") == b"\4"


def test_a_batch_of_the_deleted_key_does_not_name_its_successor() -> None:
    harness = together("a", "b")
    delete_by_all(harness, "a")
    make(harness, "a", b"\0", 1)
    for rank in (0, 1):
        harness.declare(rank, 1, "a", "b")  # a late copy
        assert refusal(harness.push_batch(rank, 2, b"\1", b"\1")).error is ErrorCode.KEY_NOT_FOUND
    for rank in (0, 1):
        harness.declare(rank, 2, SliceId("a", 0, 1), SliceId("b", 0))
        effects = harness.push_batch(rank, 1, b"\1", b"\1", batch=2)
    assert kinds(effects) == ["Done", "Done"]
    assert harness.value("a") == b"\2"
    assert harness.value("b") == b"\4"  # its first round was closed before


@pytest.mark.parametrize("published", [False, True])
def test_a_late_init_does_not_make_the_deleted_key_again(published: bool) -> None:
    harness = ready()
    delete_by_all(harness)
    if published:
        make(harness, "w", b"\5", 1)
    late = init_of(1, "w", uint8(1), 0)
    assert said(harness.say(0, late, b"\0")) == [Outdated(1, 1)]
    refused = refusal(harness.say(0, Publish(2, (uint8(1),), (NewKey("w", 0),))))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert harness.explain()["slices"] == published
    if published:
        assert harness.value("w") == b"\5"


def test_an_init_that_is_under_way_when_a_key_is_deleted_is_made_again() -> None:
    harness = ready()
    harness.hold = True
    (create,) = harness.say(0, init_of(70, "v", uint8(1), 0), b"\0")
    harness.hold = False
    delete_by_all(harness)
    assert said(harness.finish(create)) == [Outdated(70, 1)]
    make(harness, "v", b"\1", 1)


def test_an_old_delete_does_not_delete_the_successor() -> None:
    harness = reborn()
    assert said(delete(harness, 0, request=90)) == [Done(90)]
    assert said(delete(harness, 1, request=91)) == [Done(91)]
    assert harness.explain()["slices"] == 1
    delete_by_all(harness, creation=1)
    make(harness, "w", b"\0", 2)


def test_a_successor_that_attaches_again_after_all_keys_are_gone() -> None:
    harness = ready()
    harness.push(0, 1)
    harness.push(1, 1)
    harness.look(member("worker", 1, life=1))
    assert kinds(harness.attach(1, life=1)) == ["Clocks"]
    delete(harness, 0)
    delete(harness, 1, life=1)
    assert said(harness.say(1, Attach(99, 1), life=1)) == [Clocks(99, 0, 0, 0, 0)]


def test_a_creation_that_a_worker_claims_leaves_one_for_the_next_key() -> None:
    harness = ready(b"a")
    harness.say(1, Drop(harness.request(), (KeyId("x", MOST_COUNTED),)))
    told = one(said(harness.say(0, init_of(harness.request(), "x", uint8(1), 0), b"a")))
    assert isinstance(told, Outdated)
    make(harness, "x", b"a", told.creation)
    init = Init(1, (uint8(1),), (NewSlice("x", 0, 0),), told.creation)
    assert decode(encode(init, 1, NO_VIEW)).message == init
