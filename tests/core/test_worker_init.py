"""The worker: it makes keys, and takes over the clocks of a predecessor."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Tick
from kvd.core.requests import Item
from kvd.errors import KeyExists, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.protocol.messages import (
    Activate,
    ClockQuery,
    Clocks,
    Delete,
    Done,
    ErrorCode,
    Init,
    Lookup,
    NodeName,
    Publish,
    Pull,
    Push,
    Refused,
)
from tests.core.fakes import SLICE, info_of, one, server_id, uint8
from tests.core.worker_harness import Harness, ready

# ── init ──


def make(harness: Harness, key: str = "w", count: int = 1, timeout_s: float = 60.0) -> int:
    return harness.call(requests.InitKeys((Item(key, uint8(count), "value"),)), timeout_s)


def test_worker_0_makes_a_key_and_publishes_it_when_all_slices_are_there() -> None:
    harness = Harness(servers=2)
    call = make(harness, count=2 * SLICE)
    sends = [harness.take(Init), harness.take(Init)]
    assert {send.message.slices[0].slice_index: send.payload[0] for send in sends} == {  # type: ignore[union-attr]
        0: ("value", 0, SLICE),
        1: ("value", SLICE, SLICE),
    }
    harness.reply(sends[1], Done)
    assert not harness.waiting(Publish)
    harness.reply(sends[0], Done)
    send = harness.take(Publish)
    assert send.peer == server_id(harness.machine.view.partition_of("w", 0))
    assert call not in harness.done
    harness.reply(send, Done)
    assert harness.result(call) is None
    harness.push("w", spec=uint8(2 * SLICE))
    assert len(harness.waiting(Push)) == 2
    assert isinstance(harness.error(make(harness, count=2 * SLICE)), KeyExists)
    other = harness.error(make(harness))
    assert isinstance(other, ShapeMismatch)
    assert all(shape in str(other) for shape in (f"({2 * SLICE},)", "(1,)"))


@pytest.mark.parametrize("kind", [Init, Publish])
def test_a_key_whose_init_failed_can_be_made_later(kind: Any) -> None:
    harness = Harness()
    call = make(harness)
    if kind is Publish:
        harness.reply(harness.take(Init), Done)
    harness.refuse(kind, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    pull = harness.pull("w")
    harness.missing()
    assert pull in harness.done
    again = make(harness)
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(again) is None


def test_the_others_wait_until_the_key_is_live() -> None:
    harness = Harness(rank=1)
    call = make(harness)
    assert one(harness.waiting(Lookup)).wait
    harness.found()
    assert harness.result(call) is None
    assert not harness.waiting(Init)


def test_an_init_fails_when_the_live_key_has_another_shape() -> None:
    harness = Harness(rank=1)
    call = make(harness, count=2)
    harness.found()
    assert "has shape (1,)" in str(harness.error(call))
    lost = make(harness, "v")
    harness.refuse(Lookup, ErrorCode.NODE_LOST, nodes=(NodeName("worker", 0),))
    assert harness.error(lost).node == "worker 0"


def test_an_init_of_no_keys() -> None:
    harness = Harness()
    assert harness.result(harness.call(requests.InitKeys(()))) is None


def test_an_init_that_timed_out_can_be_repeated() -> None:
    harness = Harness()
    first = make(harness, timeout_s=1)
    harness.wait(1)
    assert harness.error(first).outcome == "unknown"
    harness.sent.clear()
    again = make(harness)
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(again) is None


def test_worker_0_may_look_up_a_key_while_it_makes_it() -> None:
    harness = Harness()
    pull = harness.pull("w")
    lookup = harness.take(Lookup)
    call = make(harness)
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(call) is None
    assert harness.clocks(Pull) == [("w", 0, 0)]
    harness.say(lookup.peer, Refused(lookup.message.request, ErrorCode.KEY_NOT_FOUND, "late"))  # type: ignore[union-attr]
    assert pull not in harness.done
    assert len(harness.waiting(Lookup)) == 0
    harness.push("w")
    assert harness.clocks() == [("w", 0, 1)]


# ── calls behind an init that is under way ──


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pull", [False, True])
def test_a_call_behind_an_init_waits_for_it(rank: int, pull: bool) -> None:
    harness = ready("v", rank=rank)
    init = make(harness)
    call = harness.push("v", "w", pull=pull)
    read = harness.pull("w")
    assert len(harness.waiting(Lookup)) == rank  # that of the init
    if rank == 0:
        harness.reply(harness.take(Init), Done)
        assert not harness.waiting(Push)
        harness.reply(harness.take(Publish), Done)
    else:
        harness.found()
    assert harness.result(init) is None
    assert {"v", "w"} == {key for key, _, _ in harness.clocks()}
    assert not harness.waiting(Lookup)
    assert not {call, read} & harness.done.keys()


@pytest.mark.parametrize("kind", [Init, Publish])
def test_a_call_behind_an_init_that_fails_gets_its_error(kind: Any) -> None:
    harness = ready("v")
    init = make(harness)
    pushes = [harness.push("w"), harness.push("v", "w", pull=True)]
    if kind is Publish:
        harness.reply(harness.take(Init), Done)
    harness.refuse(kind, ErrorCode.NOT_ALLOWED)
    errors = {str(harness.error(call)) for call in (init, *pushes)}
    assert len(errors) == 1
    assert "because" in errors.pop()
    harness.push("v")
    assert harness.clocks() == [("v", 0, 1)]  # that key's queue is free


def test_a_call_behind_an_init_of_another_shape_gets_its_error() -> None:
    harness = Harness(rank=1)
    init = make(harness, count=2)
    push = harness.push("w")
    harness.found()
    assert "has shape (1,)" in str(harness.error(init))
    assert harness.error(push) is harness.error(init)


def test_a_call_behind_the_init_of_a_key_that_is_live_does_not_fail() -> None:
    harness = Harness(rank=0, predecessor="left")
    init = make(harness)
    pull = harness.pull("w")
    harness.found()
    assert isinstance(harness.error(init), KeyExists)
    harness.found()
    assert pull not in harness.done


def test_calls_behind_an_init_that_timed_out_ask_for_the_key_themselves() -> None:
    harness = Harness()
    init = make(harness, timeout_s=1)
    pull, described = harness.pull("w"), harness.call(requests.DescribeKey("w"))
    assert not harness.waiting(Lookup)
    harness.wait(1)
    assert harness.error(init).outcome == "unknown"
    harness.missing()
    assert {type(harness.error(call)) for call in (pull, described)} == {KeyNotFound}


def test_a_call_behind_two_inits_waits_for_the_second() -> None:
    harness = Harness()
    first, second = make(harness), make(harness, count=2)
    push = harness.push("w", spec=uint8(2))
    harness.refuse(Init, ErrorCode.NOT_ALLOWED)
    assert first in harness.done
    assert push not in harness.done
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(second) is None
    assert harness.clocks() == [("w", 0, 1)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_behind_an_init_behind_a_deletion(fails: bool) -> None:
    harness = ready("w")
    deletion = harness.call(requests.DeleteKeys(("w",)))
    init = make(harness, timeout_s=1)
    push = harness.push("w")
    if fails:
        harness.wait(1)
        assert harness.error(init).outcome == "not_sent"
    harness.reply(harness.take(Delete), Done)
    assert harness.result(deletion) is None
    if fails:
        harness.missing()
        assert isinstance(harness.error(push), KeyNotFound)
        return
    assert not harness.waiting(Lookup)
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(init) is None
    assert harness.clocks() == [("w", 0, 1)]


def test_a_call_whose_look_up_failed_waits_for_an_init_that_came_meanwhile() -> None:
    harness = Harness()
    pull = harness.pull("w")
    make(harness)
    harness.missing()
    assert pull not in harness.done
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.clocks(Pull) == [("w", 0, 0)]


# ── a successor ──


def clocks(harness: Harness, lowest: int, highest: int) -> None:
    send = harness.take(ClockQuery)
    harness.say(send.peer, Clocks(send.message.request, lowest, highest, lowest, highest))  # type: ignore[union-attr]


def test_a_successor_goes_on_from_the_clock_that_all_slices_have_counted() -> None:
    harness = Harness(rank=1, servers=2, predecessor="dead")
    spec = uint8(2 * SLICE)
    push = harness.push("w", spec=spec)
    harness.found(spec)
    clocks(harness, 4, 5)
    assert not harness.waiting(Push)
    clocks(harness, 3, 3)
    assert [clock for _, _, clock in harness.clocks()] == [4, 4]
    assert push not in harness.done


def test_rewind_sets_back_known_keys_and_keys_found_later() -> None:
    harness = Harness(rank=1, predecessor="dead")
    for name in ("a", "b"):
        call = harness.call(requests.DescribeKey(name))
        harness.found()
        clocks(harness, 9, 9)
        assert harness.result(call) == uint8(1)
        if name == "a":
            assert harness.result(harness.call(requests.Rewind(7))) is None
    assert [harness.result(harness.call(requests.ClockOf(name))) for name in ("a", "b")] == [7, 7]
    harness.result(harness.call(requests.Rewind(8)))
    assert harness.result(harness.call(requests.ClockOf("a"))) == 7  # back, never forward
    harness.push("a")
    assert isinstance(harness.error(harness.call(requests.Rewind(7))), NotAllowed)


def test_a_successor_of_a_worker_that_left_resumes_after_the_newest_clock() -> None:
    harness = Harness(rank=1, servers=2, predecessor="left")
    spec = uint8(2 * SLICE)
    harness.push("w", spec=spec)
    harness.found(spec)
    clocks(harness, 4, 5)
    clocks(harness, 3, 3)
    sends = [harness.take(Activate), harness.take(Activate)]
    assert {send.message.clock for send in sends} == {5}  # type: ignore[union-attr]
    for send in sends:
        assert not harness.waiting(Push)
        harness.reply(send, Done)
    assert [clock for _, _, clock in harness.clocks()] == [6, 6]


@pytest.mark.parametrize("kind", [ClockQuery, Activate])
def test_a_successor_whose_question_is_refused_asks_again_later(kind: Any) -> None:
    harness = Harness(rank=1, predecessor="left")
    call = harness.push("w")
    harness.found()
    if kind is Activate:
        clocks(harness, 3, 3)
    harness.refuse(kind, ErrorCode.NOT_ALLOWED)
    assert isinstance(harness.error(call), NotAllowed)
    harness.pull("w")
    assert len(harness.waiting(Lookup)) == 1  # it starts from the beginning
    harness.found()
    assert len(harness.waiting(ClockQuery)) == 1


def test_two_calls_at_once_take_over_a_clock_once() -> None:
    harness = Harness(rank=1, predecessor="dead")
    harness.push("w")
    call = make(harness)
    for _ in range(2):
        harness.found()
    clocks(harness, 3, 3)
    assert harness.clocks() == [("w", 0, 4)]
    clocks(harness, 3, 3)
    assert harness.result(call) is None
    harness.push("w")
    assert harness.clocks() == [("w", 0, 4), ("w", 0, 5)]


def test_a_restarted_worker_0_finds_its_key_or_makes_it() -> None:
    harness = Harness(predecessor="dead")
    call = make(harness)
    harness.found()
    clocks(harness, 2, 2)
    assert harness.result(call) is None
    other = make(harness, "v")
    harness.missing()
    harness.reply(harness.take(Init), Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(other) is None


def test_a_successor_of_a_worker_0_that_left_does_not_make_the_key_again() -> None:
    harness = Harness(predecessor="left")
    call = make(harness)
    harness.found()
    assert isinstance(harness.error(call), KeyExists)


def test_the_spec_of_a_key_comes_from_its_home() -> None:
    harness = Harness(rank=1)
    call = harness.call(requests.DescribeKey("w", wait=True))
    send = harness.take(Lookup)
    assert harness.step(Tick()) == []
    harness.say(send.peer, info_of(send.message.request, uint8(3)))  # type: ignore[union-attr]
    assert harness.result(call) == uint8(3)
