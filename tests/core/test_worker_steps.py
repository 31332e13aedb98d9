"""The steps that a worker counts, and an observer's reads of a step."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Span
from kvd.core.requests import Item, Versions
from kvd.errors import KeyNotFound, ProtocolError, RequestTimeout, ShapeMismatch
from kvd.protocol.messages import (
    ClockQuery,
    Clocks,
    Done,
    ErrorCode,
    Lookup,
    MemberState,
    Push,
    ReadDone,
    ReadSlices,
    SliceId,
    Survey,
    Surveyed,
    Values,
)
from tests.core.fakes import SLICE, copies, member, padded_bytes, uint8
from tests.core.worker_harness import Harness, ready

# ── steps ──


def steps(harness: Harness) -> list[tuple[int, int]]:
    """Step and settled of the pushes that nobody has taken yet."""
    return [(message.step, message.settled) for message in harness.waiting(Push)]


def take(harness: Harness, kind: type[Any]) -> Any:
    """The oldest send of a message of this kind."""
    return harness.take(kind)


def answer(harness: Harness, count: int = 1) -> None:
    for _ in range(count):
        harness.reply(harness.take(Push), Done)


def test_the_key_that_is_pushed_most_often_counts_the_steps() -> None:
    harness = ready("a", "b", "rare")
    harness.push("a")
    harness.push("b")
    assert steps(harness) == [(1, 0), (1, 0)]
    answer(harness, 2)
    harness.push("a")
    harness.push("rare")
    harness.push("b")
    assert steps(harness) == [(2, 1), (2, 1), (2, 1)]
    answer(harness, 3)
    harness.push("rare")  # a second time in this step
    harness.push("a")
    assert steps(harness) == [(2, 1), (3, 1)]  # the push of step 2 is open


def test_a_push_that_waits_belongs_to_the_step_in_which_it_was_made() -> None:
    harness = ready("a", "b")
    for key in ("b", "b", "a", "b"):  # the last one waits for its window
        harness.push(key)
    harness.push("a")  # in step 3, although it is only the second of this key
    assert steps(harness) == [(1, 0), (2, 0), (2, 0), (3, 0)]
    answer(harness)
    assert [step for step, _ in steps(harness)] == [2, 2, 3, 3]


def test_a_successor_goes_on_with_the_steps_of_its_predecessor() -> None:
    harness = Harness(predecessor=MemberState.DEAD)
    for key, clock in (("a", 9), ("rare", 4)):
        call = harness.call(requests.DescribeKey(key))
        harness.found()
        send = take(harness, ClockQuery)
        harness.say(send.peer, Clocks(send.message.request, clock, clock, clock, clock))
        assert harness.result(call)
    harness.push("rare")
    harness.push("a")
    assert steps(harness) == [(9, 0), (10, 0)]  # of the time before it knows nothing
    answer(harness, 2)
    harness.push("a")
    assert steps(harness) == [(11, 10)]


def test_a_worker_that_goes_back_takes_its_steps_along() -> None:
    harness = ready("a", "b")
    for _ in range(2):
        harness.push("a")
        harness.push("b")
        answer(harness, 2)
    harness.result(harness.call(requests.Rewind(1)))
    harness.push("b")
    assert steps(harness) == [(2, 1)]


# ── reads ──


def reader(*keys: str, **more: Any) -> Harness:
    return ready(*keys, role="observer", **more)


def items(*keys: str) -> tuple[Item, ...]:
    return tuple(Item(key, uint8(1), None, f"target {key}") for key in keys)


def test_a_survey_asks_every_server_once() -> None:
    harness = Harness(role="observer", servers=2)
    harness.know("a", "b", spec=uint8(SLICE + 1))
    call = harness.call(requests.Survey(items("a", "b")))
    asked = [take(harness, Survey) for _ in range(2)]
    assert sorted(slice_id for send in asked for slice_id in send.message.slice_ids) == [
        SliceId(key, index) for key in ("a", "b") for index in (0, 1)
    ]
    assert len({send.peer for send in asked}) == 2
    for send in asked:
        harness.say(send.peer, Surveyed(send.message.request, 1, 2, 1, True, 1))
    assert [answer.highest for answer in harness.result(call)] == [2, 2]


def test_a_survey_of_all_keys_asks_the_servers_that_are_there() -> None:
    harness = Harness(role="observer", servers=3)
    harness.look(member("server", 1, MemberState.DEAD))
    call = harness.call(requests.Survey())
    asked = [take(harness, Survey) for _ in range(2)]
    assert [send.message.slice_ids for send in asked] == [(), ()]
    assert not harness.waiting(Survey)
    harness.say(asked[0].peer, Surveyed(asked[0].message.request, 1, 2, 1, True, 1))
    harness.say(asked[1].peer, Done(asked[1].message.request))
    assert isinstance(harness.error(call), ProtocolError)


def test_a_read_brings_the_values_and_tells_when_it_is_done() -> None:
    harness = reader("a", "b")
    call = harness.call(requests.Read(items("a", "b"), 4, 7, True))
    send = take(harness, ReadSlices)
    slice_ids = (SliceId("a", 0), SliceId("b", 0))
    assert send.message == ReadSlices(send.message.request, 4, 7, True, slice_ids)
    payload = padded_bytes([b"x", b"y"])
    effects = harness.say(send.peer, Values(send.message.request, (7, 3)), payload)
    assert copies(effects) == [("target a", 0, Span(payload, 0, 1)), ("target b", 0, Span(payload, 8, 1))]
    assert harness.result(call) == [Versions(7, 7), Versions(3, 3)]
    assert take(harness, ReadDone).message.number == 4


def test_a_read_ends_when_one_server_has_moved_on() -> None:
    harness = Harness(role="observer", servers=2)
    harness.know("a", spec=uint8(SLICE + 1))
    call = harness.call(requests.Read((Item("a", None, None, "target"),), 1, 7))
    first, second = take(harness, ReadSlices), take(harness, ReadSlices)
    harness.say(first.peer, Surveyed(first.message.request, 9, 9, 8, True, 8))
    assert harness.result(call) is None
    assert len(harness.waiting(ReadDone)) == 2
    late = harness.say(second.peer, Values(second.message.request, (7,)), b"x")
    assert copies(late) == []  # the memory is the program's again


def test_a_read_can_be_stopped_while_nothing_comes() -> None:
    harness = Harness(role="observer", servers=2)
    harness.know("a", spec=uint8(SLICE + 1))
    call = harness.call(requests.Read((Item("a", None, None, "target"),), 1, 7))
    assert harness.result(harness.call(requests.StopReading(2))) is False
    assert call not in harness.done
    assert harness.result(harness.call(requests.StopReading(1))) is True
    assert harness.result(call) is None
    call = harness.call(requests.Read((Item("a", None, None, "target"),), 2, 7))
    first = take(harness, ReadSlices), take(harness, ReadSlices)  # of the read that was stopped
    assert [send.message.number for send in first] == [1, 1]
    for nbytes in (SLICE, 1):
        send = take(harness, ReadSlices)
        harness.say(send.peer, Values(send.message.request, (7,)), b"x" * nbytes)
        assert harness.result(harness.call(requests.StopReading(2))) is False
    assert harness.result(call) == [Versions(7, 7)]
    call = harness.call(requests.Read((Item("a", None, None, "target"),), 3, 8))
    send = take(harness, ReadSlices)
    harness.say(send.peer, Values(send.message.request, (8,)), b"x" * SLICE)
    assert harness.result(harness.call(requests.StopReading(3))) is False
    assert harness.result(harness.call(requests.StopReading(3))) is True  # the rest does not come
    assert harness.result(call) is None


def test_a_read_that_fails() -> None:
    harness = reader("a")
    call = harness.call(requests.Read((Item("a", uint8(2), None, "target"),), 1, 7))
    assert isinstance(harness.error(call), ShapeMismatch)
    call = harness.call(requests.Read(items("a"), 2, 7))
    harness.refuse(ReadSlices, ErrorCode.KEY_NOT_FOUND)
    assert isinstance(harness.error(call), KeyNotFound)
    call = harness.call(requests.Read(items("a"), 3, 7))
    harness.found()  # the key may have been deleted, and made again: it is looked up
    send = take(harness, ReadSlices)
    harness.say(send.peer, Values(send.message.request, (7,)), b"too long")
    assert isinstance(harness.error(call), ProtocolError)
    call = harness.call(requests.Read(items("a"), 4, 7), timeout_s=1.0)
    harness.wait(1.0)
    assert isinstance(harness.error(call), RequestTimeout)


def test_a_read_of_an_unknown_key_looks_it_up_first() -> None:
    harness = Harness(role="observer")
    call = harness.call(requests.Read(items("a"), 1, 0))
    assert not harness.waiting(ReadSlices)
    assert harness.waiting(Lookup)
    harness.found()
    harness.values(ReadSlices, (0,), b"x")
    assert harness.result(call) == [Versions(0, 0)]


@pytest.mark.parametrize("request_", [requests.Survey(()), requests.Read((), 1, 0)])
def test_nothing_is_asked_for_no_keys(request_: Any) -> None:
    harness = Harness(role="observer", servers=1)
    harness.look(member("server", 0, MemberState.DEAD))
    assert harness.result(harness.call(request_)) == []
