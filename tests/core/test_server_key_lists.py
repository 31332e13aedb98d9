"""The server: lists of keys are made, published and found in few messages."""

from __future__ import annotations

import pytest

from kvd.core.machine import Create
from kvd.errors import NotAllowed
from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    MAX_PARTS,
    NO_KEY,
    Done,
    Epoch,
    ErrorCode,
    Init,
    KeyInfo,
    KeyList,
    ListKeys,
    Lookup,
    Made,
    NewKey,
    NewSlice,
    Publish,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, init_of, lookup_of, member, of, one, padded_bytes, said, uint8, worker_id
from tests.core.server_harness import Harness, refusal, values

AB = (NewSlice("a", 0, 0), NewSlice("b", 0, 1))
SPECS = (uint8(3), uint8(2))
VALUE = padded_bytes([b"abc", b"de"])


def publish_all(request: int, *keys: str, spec: KeySpec | None = None) -> Publish:
    return Publish(request, (spec or uint8(1),), tuple(NewKey(key, 0) for key in keys))


# ── init ──


def test_a_message_makes_several_keys_in_one_job() -> None:
    harness = Harness()
    effects = harness.say(0, Init(7, SPECS, AB), VALUE)
    assert said(effects) == [Done(7)]
    assert len(of(Create, effects)) == 1
    assert said(harness.say(0, Publish(8, SPECS, (NewKey("a", 0), NewKey("b", 1))))) == [Done(8)]
    assert [values(harness.pull(1, 0, key=key))[1] for key in "ab"] == [[b"abc"], [b"de"]]


def test_a_list_that_comes_again_is_created_once() -> None:
    harness = Harness()
    harness.hold = True
    create = one(of(Create, harness.say(0, Init(7, SPECS, AB), VALUE)))
    assert harness.say(0, Init(7, SPECS, AB), VALUE) == []
    assert harness.say(0, Init(8, SPECS[1:], (NewSlice("b", 0, 0),)), b"xy") == []  # it is asked again
    assert said(harness.finish(create)) == [Done(7)]
    assert said(harness.say(0, Init(7, SPECS, AB), VALUE)) == [Done(7)]
    assert len(of(Create, harness.say(0, Init(8, SPECS[1:], (NewSlice("b", 0, 0),)), b"xy"))) == 1


def test_a_key_that_is_live_does_not_keep_the_others_of_the_list_from_being_made() -> None:
    harness = Harness()
    harness.init("b", b"XY")
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    refused = refusal(harness.say(0, Init(7, SPECS, AB), VALUE, life=1))
    assert (refused.error, refused.key, refused.places) == (ErrorCode.KEY_EXISTS, "b", (1,))
    assert harness.value("a") == b"abc"
    assert harness.value("b") == b"XY"
    assert refusal(harness.say(0, Init(7, SPECS, AB), VALUE, life=1)) == refused


@pytest.mark.parametrize(
    ("slices", "payload"),
    [
        ((NewSlice("a", 0, 2),), b"abc"),  # there is no such spec
        ((NewSlice("a", 1, 0),), b"abc"),  # nor such a slice
        ((NewSlice("a", 0, 0), NewSlice("a", 0, 0)), padded_bytes([b"abc", b"abc"])),
        (AB, VALUE + b"f"),
        (AB, b"abcde"),  # parts start at multiples of 8
        (AB, None),
    ],
)
def test_an_invalid_list_is_refused_as_a_whole(slices: tuple[NewSlice, ...], payload: bytes | None) -> None:
    harness = Harness()
    effects = harness.say(0, Init(7, SPECS, slices), payload)
    assert (refusal(effects).error, refusal(effects).places) == (ErrorCode.PROTOCOL_ERROR, ())
    assert harness.explain()["slices"] == 0


def test_only_worker_0_makes_the_keys_of_a_list() -> None:
    refused = refusal(Harness().say(1, Init(7, SPECS, AB), VALUE))
    assert (refused.error, refused.places) == (ErrorCode.NOT_ALLOWED, (0, 1))


def test_the_keys_of_a_list_count_together_towards_the_memory_bound() -> None:
    # 3 copies, and 2 rounds ahead of 2 workers: 7 times the bytes led
    harness = Harness(memory=7 * 4)
    refused = refusal(harness.say(0, Init(7, SPECS, AB), VALUE))
    assert (refused.error, refused.key, refused.places) == (ErrorCode.NOT_ALLOWED, "b", (1,))
    assert "4 staged" in refused.text
    assert harness.explain()["bytes_led"] == 3


def test_a_key_that_does_not_fit_is_refused_with_its_first_slice() -> None:
    harness = Harness(memory=7 * SLICE)
    spec = uint8(2 * SLICE)
    refused = refusal(harness.say(0, init_of(7, "big", spec, 0), bytes(SLICE)))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert harness.explain()["slices"] == 0
    assert said(harness.say(0, init_of(8, "small", uint8(SLICE), 0), bytes(SLICE))) == [Done(8)]


def test_the_number_of_slices_counts_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.key_creation.MAX_SLICES", 1)
    assert refusal(Harness().say(0, Init(7, SPECS, AB), VALUE)).places == (1,)


def test_a_job_that_fails_refuses_all_keys_of_its_list() -> None:
    harness = Harness()
    harness.error = NotAllowed("no memory")
    refused = refusal(harness.say(0, Init(7, SPECS, AB), VALUE))
    assert (refused.text, refused.key, refused.places) == ("no memory", "a", (0, 1))
    harness.error = None
    assert said(harness.say(0, Init(7, SPECS, AB), VALUE)) == [Done(7)]


def test_a_key_that_came_into_use_meanwhile_is_refused() -> None:
    harness = Harness()
    harness.init("b", b"XY", publish=False)
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    harness.hold = True
    create = one(of(Create, harness.say(0, Init(7, SPECS, AB), VALUE, life=1)))
    harness.say(0, Publish(8, SPECS[1:], (NewKey("b", 0),)), life=1)
    refused = refusal(harness.finish(create))
    assert (refused.error, refused.places) == (ErrorCode.KEY_EXISTS, (1,))
    assert harness.value("b") == b"XY"


# ── publish and look up ──


def test_some_keys_of_a_publish_are_refused() -> None:
    harness = Harness()
    harness.init("a", b"x", publish=False)
    harness.init("c", b"z", publish=False)
    refused = refusal(harness.say(0, publish_all(7, "a", "b", "c")))
    assert (refused.error, refused.key, refused.places) == (ErrorCode.NOT_ALLOWED, "b", (1,))
    assert said(harness.say(1, Lookup(8, ("a", "b", "c"), False))) == [KeyInfo(8, (Made(uint8(1), 0),), (0, NO_KEY, 0))]
    assert refusal(harness.say(0, Publish(9, (uint8(1),), (NewKey("a", 1),)))).places == (0,)  # there is no spec 1


def test_a_look_up_of_several_keys_waits_until_all_are_live() -> None:
    harness = Harness()
    for key in "abc":
        harness.init(key, key.encode(), publish=False)
    harness.init("d", b"dd")
    assert harness.say(1, Lookup(8, ("c", "d", "a"), True)) == []
    assert harness.say(1, Lookup(8, ("c", "d", "a"), True)) == []
    assert said(harness.say(0, publish_all(9, "b", "c")), worker_id(1)) == []
    info = KeyInfo(8, (Made(uint8(1), 0), Made(uint8(2), 0)), (0, 1, 0))
    assert said(harness.say(0, publish_all(10, "a")), worker_id(1)) == [info]
    assert said(harness.say(1, Lookup(8, ("c", "d", "a"), True))) == [info]


def test_keys_that_are_published_in_one_message_end_a_look_up_once() -> None:
    harness = Harness()
    for key in "abc":
        harness.init(key, key.encode(), publish=False)
    harness.say(1, Lookup(8, ("a", "b", "c"), True))
    harness.say(0, lookup_of(9, "b", True))
    effects = harness.say(0, publish_all(10, "c", "b", "a"))
    assert said(effects, worker_id(1)) == [KeyInfo(8, (Made(uint8(1), 0),), (0, 0, 0))]
    assert said(effects, worker_id(0)) == [KeyInfo(9, (Made(uint8(1), 0),), (0,)), Done(10)]


def test_an_answer_to_a_look_up_fits_into_a_header() -> None:
    harness = Harness()
    names = tuple(f"key {number}" for number in range(MAX_PARTS))
    with harness.validated_once():
        for number, name in enumerate(names):
            harness.init(name, b"x" * number, KeySpec("uint8", (*[1] * 31, number), SLICE))
    found = 0
    while found < len(names):
        (info,) = said(harness.say(1, Lookup(5, names[found:], True)))
        encode(info, 1, Epoch(1, 1))
        assert [info.made[place].spec.shape[-1] for place in info.keys] == list(range(found, found + len(info.keys)))
        found += len(info.keys)


def test_keys_made_after_a_listing_are_in_the_next_one() -> None:
    harness = Harness()
    for made in ("b", "ba", "bac"):
        harness.init(made[-1], b"x")
        (page,) = said(harness.say(1, ListKeys(3, "")))
        assert isinstance(page, KeyList)
        assert [entry.key for entry in page.entries] == sorted(made)
