"""The server: it drops slices of keys that were deleted at their home, which is another server."""

from __future__ import annotations

from kvd.core.machine import Apply
from kvd.core.placement import shard_of
from kvd.protocol.messages import Done, Drop, Init, KeyId, NewSlice, NotYetReason, Outdated
from tests.core.fakes import SLICE, cluster, init_of, of, one, said, uint8
from tests.core.server_harness import Harness, kinds, not_yet, refusal


def other() -> tuple[Harness, str]:
    """A server, of two, that leads slice 1 of a key and not slice 0; and the name of that key."""
    settings = cluster(2, 2)
    name = next(name for name in "abcdefgh" if shard_of(name, 0, settings.num_shards) % 2 == 1)
    harness = Harness(settings)
    assert kinds(harness.say(0, init_of(harness.request(), name, uint8(2 * SLICE), 1), bytes(SLICE))) == ["Done"]
    return harness, name


def test_a_server_drops_the_other_slices() -> None:
    harness, name = other()
    effects = harness.say(1, Drop(50, (KeyId(name, 0), KeyId("unknown", 3))))
    assert said(effects) == [Done(50)]
    assert harness.explain()["bytes_led"] == 0
    assert said(harness.say(0, Drop(51, (KeyId(name, 0),)))) == [Done(51)]  # every rank asks for it
    late = Init(1, (uint8(2 * SLICE),), (NewSlice(name, 1, 0),))
    assert said(harness.say(0, late, bytes(SLICE))) == [Outdated(1, 4)]


def test_a_drop_that_names_a_key_twice() -> None:
    harness, name = other()
    assert said(harness.say(1, Drop(50, (KeyId(name, 0), KeyId(name, 1))))) == [Done(50)]
    assert harness.explain()["slices"] == 0


def test_a_late_drop_does_not_touch_the_successor() -> None:
    harness, name = other()
    harness.say(1, Drop(50, (KeyId(name, 0),)))
    harness.say(0, Init(60, (uint8(2 * SLICE),), (NewSlice(name, 1, 0),), 1), bytes(SLICE))
    assert said(harness.say(0, Drop(51, (KeyId(name, 0),)))) == [Done(51)]
    assert harness.explain()["bytes_led"] == SLICE


def test_a_drop_waits_for_the_end_of_an_update() -> None:
    harness, name = other()
    harness.hold = True
    for rank in (0, 1):
        effects = harness.push(rank, 1, bytes(SLICE), key=name, index=1)
    apply = one(of(Apply, effects))
    assert not_yet(harness.say(0, Drop(50, (KeyId(name, 0),)))).reason is NotYetReason.UPDATING
    harness.finish(apply)
    assert said(harness.say(0, Drop(50, (KeyId(name, 0),)))) == [Done(50)]


def test_slices_that_nobody_dropped_give_way_to_their_successor() -> None:
    """All workers died between the home of the key and this server."""
    harness, name = other()
    for rank in (0, 1):
        harness.push(rank, 1, bytes(SLICE), key=name, index=1)
    assert refusal(harness.say(0, Init(80, (uint8(2 * SLICE + 1),), (NewSlice(name, 1, 0),)), bytes(SLICE)))
    effects = harness.say(0, Init(81, (uint8(2 * SLICE + 1),), (NewSlice(name, 1, 0),), 1), b"\1" * SLICE)
    assert said(effects) == [Done(81)]
    assert harness.value(name, 1) == b"\1" * SLICE
    assert harness.explain()["bytes_led"] == SLICE


def test_a_stranger_drops_nothing() -> None:
    harness, name = other()
    assert not_yet(harness.say(0, Drop(50, (KeyId(name, 0),)), life=9)).reason is NotYetReason.NOT_ATTACHED
    assert harness.explain()["slices"] == 1
