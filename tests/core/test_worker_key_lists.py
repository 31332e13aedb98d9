"""The worker: lists of keys are made and found in few messages."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.requests import Item
from kvd.core.worker.key_queue import KeyQueue
from kvd.errors import KeyExists, NotAllowed, ProtocolError, ShapeMismatch
from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    NO_KEY,
    ClockQuery,
    Clocks,
    Done,
    Epoch,
    ErrorCode,
    Init,
    KeyInfo,
    Lookup,
    Made,
    Publish,
    Pull,
    Push,
    Refused,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import SLICE, info_of, uint8
from tests.core.worker_harness import Harness


def clocks(harness: Harness, lowest: int, highest: int) -> None:
    send = harness.take(ClockQuery)
    harness.say(send.peer, Clocks(send.message.request, lowest, highest, lowest, highest))  # type: ignore[union-attr]


def make_all(harness: Harness, *names: str, spec: KeySpec | None = None) -> int:
    return harness.call(requests.InitKeys(tuple(Item(name, spec or uint8(1), f"value {name}") for name in names)))


def test_several_keys_travel_in_one_message() -> None:
    harness = Harness()
    call = harness.call(
        requests.InitKeys((Item("a", uint8(1), "x"), Item("b", uint8(2), "y"), Item("c", uint8(1), "z")))
    )
    init = harness.take(Init)
    assert init.message.specs == (uint8(1), uint8(2))  # type: ignore[union-attr]
    assert init.message.slices == (("a", 0, 0), ("b", 0, 1), ("c", 0, 0))  # type: ignore[union-attr]
    assert init.payload == (("x", 0, 1), ("y", 0, 2), ("z", 0, 1))
    harness.reply(init, Done)
    publish = harness.take(Publish)
    assert publish.message.keys == (("a", 0), ("b", 1), ("c", 0))  # type: ignore[union-attr]
    assert call not in harness.done
    harness.reply(publish, Done)
    assert harness.result(call) is None
    assert not harness.sent


def test_a_message_is_bounded_by_the_size_of_a_slice_and_by_its_header() -> None:
    harness = Harness()
    make_all(harness, *"abcdef", spec=uint8(SLICE // 2))
    assert [len(init.slices) for init in harness.waiting(Init)] == [2, 2, 2]
    harness = Harness()
    make_all(harness, *[f"{number}{'x' * 190}" for number in range(200)])
    inits = harness.waiting(Init)
    assert sum(len(init.slices) for init in inits) == 200
    assert len(inits) == 4
    for init in inits:
        encode(init, 1, Epoch(1, 1))
    for _ in inits:
        harness.reply(harness.take(Init), Done)
    assert sum(len(publish.keys) for publish in harness.waiting(Publish)) == 200


def test_keys_with_many_specs_fit_into_headers() -> None:
    harness = Harness()
    shape = (1,) * 31
    specs = [KeySpec("float32", (*shape, number), SLICE) for number in range(600)]
    harness.call(requests.InitKeys(tuple(Item(f"key {n}", spec, "value") for n, spec in enumerate(specs))))
    for init in harness.waiting(Init):
        encode(init, 1, Epoch(1, 1))


def test_one_key_that_is_refused_does_not_keep_the_others_from_being_made() -> None:
    harness = Harness()
    call = make_all(harness, "a", "b", "c")
    harness.refuse(Init, ErrorCode.KEY_EXISTS, key="b", places=(1,))
    assert [key for key, _ in harness.waiting(Publish)[0].keys] == ["a", "c"]
    assert call not in harness.done
    harness.reply(harness.take(Publish), Done)
    assert (type(harness.error(call)), harness.error(call).key) == (KeyExists, "b")
    harness.push("a")
    harness.push("c")
    assert len(harness.waiting(Push)) == 2
    again = make_all(harness, "b")
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(again) is None


def test_a_key_is_published_when_its_slices_on_all_servers_are_stored() -> None:
    harness = Harness(servers=2)
    spec = uint8(2 * SLICE)
    call = make_all(harness, "a", "b", spec=spec)
    inits = [harness.take(Init) for _ in range(4)]
    for init in inits[:3]:
        harness.reply(init, Done)
    assert not harness.waiting(Publish)
    slices = inits[3].message.slices  # type: ignore[union-attr]
    refused = Refused(inits[3].message.request, ErrorCode.NOT_ALLOWED, "no memory", slices[0].key, places=(0,))  # type: ignore[union-attr]
    harness.say(inits[3].peer, refused)
    (publish,) = harness.waiting(Publish)
    assert [key for key, _ in publish.keys] == ["b" if slices[0].key == "a" else "a"]
    harness.reply(harness.take(Publish), Done)
    assert isinstance(harness.error(call), NotAllowed)


def test_some_keys_of_a_publish_are_refused() -> None:
    harness = Harness()
    call = make_all(harness, "a", "b")
    harness.reply(harness.take(Init), Done)
    harness.refuse(Publish, ErrorCode.NOT_ALLOWED, key="a", places=(0,))
    assert isinstance(harness.error(call), NotAllowed)
    harness.push("b")
    assert len(harness.waiting(Push)) == 1
    make_all(harness, "a")
    assert len(harness.waiting(Init)) == 1


def test_a_publish_whose_outcome_is_unknown_is_repeated_for_all_its_keys() -> None:
    harness = Harness()
    call = harness.call(requests.InitKeys((Item("a", uint8(1), "x"), Item("b", uint8(1), "y"))), 1)
    harness.reply(harness.take(Init), Done)
    harness.wait(1)
    assert harness.error(call).outcome == "unknown"
    harness.sent.clear()
    again = make_all(harness, "a", "b", "c")
    harness.refuse(Publish, ErrorCode.NOT_ALLOWED, key="b", places=(1,))
    inits = [harness.take(Init), harness.take(Init)]
    assert sorted(slice_.key for init in inits for slice_ in init.message.slices) == ["b", "c"]  # type: ignore[union-attr]
    for init in inits:
        harness.reply(init, Done)
    for _ in inits:
        harness.reply(harness.take(Publish), Done)
    error = harness.error(again)
    assert (type(error), error.key) == (KeyExists, "a")
    assert "outcome was unknown" in str(error)


def test_a_key_that_is_named_twice_is_refused() -> None:
    error = (harness := Harness()).error(make_all(harness, "a", "b", "a"))
    assert (type(error), error.key) == (NotAllowed, "a")


def test_the_others_ask_for_all_keys_in_one_message() -> None:
    harness = Harness(rank=1)
    call = make_all(harness, "a", "b", "c")
    lookup = harness.take(Lookup)
    assert lookup.message == Lookup(lookup.message.request, ("a", "b", "c"), True)  # type: ignore[union-attr]
    harness.say(lookup.peer, KeyInfo(lookup.message.request, (Made(uint8(1), 0), Made(uint8(2), 0)), (0, 1)))
    rest = harness.take(Lookup)  # the answer had no room for it
    assert rest.message.keys == ("c",)  # type: ignore[union-attr]
    assert call not in harness.done
    harness.say(rest.peer, info_of(rest.message.request, uint8(1)))  # type: ignore[union-attr]
    error = harness.error(call)
    assert (type(error), error.key) == (ShapeMismatch, "b")
    harness.pull("a", "c")
    assert len(harness.waiting(Pull)) == 1


def test_a_restarted_worker_0_makes_the_keys_that_are_missing_in_one_message() -> None:
    harness = Harness(predecessor="dead")
    call = make_all(harness, "a", "b", "c")
    lookup = harness.take(Lookup)
    assert not lookup.message.wait  # type: ignore[union-attr]
    harness.say(lookup.peer, KeyInfo(lookup.message.request, (Made(uint8(1), 0),), (NO_KEY, 0, NO_KEY)))  # type: ignore[union-attr]
    clocks(harness, 4, 4)
    init = harness.take(Init)
    assert [slice_.key for slice_ in init.message.slices] == ["a", "c"]  # type: ignore[union-attr]
    harness.reply(init, Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(call) is None


def test_an_answer_that_does_not_fit_its_question_fails_the_call() -> None:
    harness = Harness(rank=1)
    call = make_all(harness, "w")
    lookup = harness.take(Lookup)
    harness.say(lookup.peer, KeyInfo(lookup.message.request, (), (NO_KEY, NO_KEY)))  # type: ignore[union-attr]
    assert isinstance(harness.error(call), ProtocolError)


def test_a_call_looks_at_each_of_its_keys_once_while_they_become_ready_one_by_one() -> None:
    harness = Harness(rank=1, predecessor="dead")
    names = [f"key {number}" for number in range(300)]
    pull = harness.pull(*names)
    looks = 0
    must_wait = KeyQueue._key_must_wait

    def counting(queue: KeyQueue, *rest: Any, **more: Any) -> bool:
        nonlocal looks
        looks += 1
        return must_wait(queue, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyQueue, "_key_must_wait", counting)
        patch.setattr(type(harness.machine), "validate", lambda machine: None)  # which looks at keys too
        harness.found()
        for _ in names:
            clocks(harness, 1, 1)
    assert len(harness.waiting(Pull)) > 0
    assert pull not in harness.done
    assert looks <= 4 * len(names)
