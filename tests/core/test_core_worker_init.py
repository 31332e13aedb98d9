"""The worker: making keys, and taking up where a predecessor stood."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import calls
from kvd.core.calls import Item
from kvd.core.machine import Tick
from kvd.errors import KeyExists, NotAllowed
from kvd.protocol.messages import (
    Activate,
    ClockQuery,
    Clocks,
    Done,
    Init,
    KeyInfo,
    Lookup,
    Publish,
    Pull,
    Push,
    Refused,
    Staged,
)
from tests.core.core_fakes import SLICE, one, server_id, uint8, worker_id
from tests.core.worker_bench import Bench

# ── init ──


def make(bench: Bench, key: str = "w", count: int = 1, timeout_s: float = 60.0) -> int:
    return bench.call(calls.InitKeys((Item(key, uint8(count), "value"),)), timeout_s)


def test_worker_0_makes_a_key_and_publishes_it_when_all_slices_are_there() -> None:
    bench = Bench(servers=2)
    call = make(bench, count=2 * SLICE)
    sends = [bench.take(Init), bench.take(Init)]
    assert {send.message.index: send.payload[0] for send in sends} == {  # type: ignore[union-attr]
        0: ("value", 0, SLICE),
        1: ("value", SLICE, SLICE),
    }
    bench.reply(sends[1], Done)
    assert not bench.waiting(Publish)
    bench.reply(sends[0], Done)
    send = bench.take(Publish)
    assert send.peer == server_id(bench.machine.view.server_of("w", 0))
    assert call not in bench.done
    bench.reply(send, Done)
    assert bench.result(call) is None
    bench.push("w", spec=uint8(2 * SLICE))
    assert len(bench.waiting(Push)) == 2
    assert isinstance(bench.error(make(bench)), KeyExists)


@pytest.mark.parametrize("kind", [Init, Publish])
def test_a_key_that_could_not_be_made(kind: Any) -> None:
    bench = Bench()
    call = make(bench)
    if kind is Publish:
        bench.reply(bench.take(Init), Done)
    bench.refuse(kind, "NotAllowed")
    assert isinstance(bench.error(call), NotAllowed)
    pull = bench.pull("w")
    bench.refuse(Lookup, "KeyNotFound")
    assert pull in bench.done
    again = make(bench)
    bench.reply(bench.take(Init), Done)
    bench.reply(bench.take(Publish), Done)
    assert bench.result(again) is None


def test_the_others_wait_until_the_key_is_live() -> None:
    bench = Bench(rank=1)
    call = make(bench)
    assert one(bench.waiting(Lookup)).wait
    bench.found()
    assert bench.result(call) is None
    assert not bench.waiting(Init)


def test_the_others_are_told_when_the_key_is_another() -> None:
    bench = Bench(rank=1)
    call = make(bench, count=2)
    bench.found()
    assert "has shape (1,)" in str(bench.error(call))
    lost = make(bench, "v")
    bench.refuse(Lookup, "NodeLost", nodes=("worker 0",))
    assert bench.error(lost).node == "worker 0"


def test_nothing_to_make() -> None:
    bench = Bench()
    assert bench.result(bench.call(calls.InitKeys(()))) is None


def test_an_init_whose_time_is_over_can_be_made_again() -> None:
    bench = Bench()
    first = make(bench, timeout_s=1)
    bench.wait(1)
    assert bench.error(first).outcome == "unknown"
    bench.sent.clear()
    again = make(bench)
    bench.reply(bench.take(Init), Done)
    bench.reply(bench.take(Publish), Done)
    assert bench.result(again) is None


def test_worker_0_that_looks_for_a_key_while_it_makes_it() -> None:
    bench = Bench()
    pull = bench.pull("w")
    lookup = bench.take(Lookup)
    call = make(bench)
    bench.reply(bench.take(Init), Done)
    bench.reply(bench.take(Publish), Done)
    assert bench.result(call) is None
    assert bench.clocks(Pull) == [("w", 0, 0)]
    bench.say(lookup.peer, Refused(lookup.message.request, "KeyNotFound", "late"))  # type: ignore[union-attr]
    assert pull not in bench.done
    assert len(bench.waiting(Lookup)) == 0
    bench.push("w")
    assert bench.clocks() == [("w", 0, 1)]


# ── a successor ──


def clocks(bench: Bench, lowest: int, highest: int) -> None:
    send = bench.take(ClockQuery)
    bench.say(send.peer, Clocks(send.message.request, lowest, highest, lowest, highest))  # type: ignore[union-attr]


def test_a_successor_takes_up_the_clock_that_all_slices_have_counted() -> None:
    bench = Bench(rank=1, servers=2, predecessor="dead")
    spec = uint8(2 * SLICE)
    push = bench.push("w", spec=spec)
    bench.found(spec)
    clocks(bench, 4, 5)
    assert not bench.waiting(Push)
    clocks(bench, 3, 3)
    assert [clock for _, _, clock in bench.clocks()] == [4, 4]
    assert push not in bench.done


def test_rewind_sets_back_the_keys_that_are_known_and_those_to_come() -> None:
    bench = Bench(rank=1, predecessor="dead")
    for name in ("a", "b"):
        call = bench.call(calls.DescribeKey(name))
        bench.found()
        clocks(bench, 9, 9)
        assert bench.result(call) == uint8(1)
        if name == "a":
            assert bench.result(bench.call(calls.Rewind(7))) is None
    assert [bench.result(bench.call(calls.ClockOf(name))) for name in ("a", "b")] == [7, 7]
    bench.result(bench.call(calls.Rewind(8)))
    assert bench.result(bench.call(calls.ClockOf("a"))) == 7  # back, never forward
    bench.push("a")
    assert isinstance(bench.error(bench.call(calls.Rewind(7))), NotAllowed)


def test_who_comes_back_after_a_good_bye_takes_part_after_the_newest_clock() -> None:
    bench = Bench(rank=1, servers=2, predecessor="left")
    spec = uint8(2 * SLICE)
    bench.push("w", spec=spec)
    bench.found(spec)
    clocks(bench, 4, 5)
    clocks(bench, 3, 3)
    sends = [bench.take(Activate), bench.take(Activate)]
    assert {send.message.clock for send in sends} == {5}  # type: ignore[union-attr]
    for send in sends:
        assert not bench.waiting(Push)
        bench.reply(send, Done)
    assert [clock for _, _, clock in bench.clocks()] == [6, 6]


@pytest.mark.parametrize("kind", [ClockQuery, Activate])
def test_a_successor_that_is_refused(kind: Any) -> None:
    bench = Bench(rank=1, predecessor="left")
    call = bench.push("w")
    bench.found()
    if kind is Activate:
        clocks(bench, 3, 3)
    bench.refuse(kind, "NotAllowed")
    assert isinstance(bench.error(call), NotAllowed)
    bench.pull("w")
    assert len(bench.waiting(Lookup)) == 1  # it begins anew
    bench.found()
    assert len(bench.waiting(ClockQuery)) == 1


def test_a_successor_that_is_asked_for_a_key_twice_at_once_takes_up_its_clock_once() -> None:
    bench = Bench(rank=1, predecessor="dead")
    call = make(bench)
    bench.push("w")
    for _ in range(2):
        bench.found()
    clocks(bench, 3, 3)
    assert bench.result(call) is None
    assert bench.clocks() == [("w", 0, 4)]
    clocks(bench, 3, 3)
    bench.push("w")
    assert bench.clocks() == [("w", 0, 4), ("w", 0, 5)]


def test_worker_0_started_again_finds_its_key_or_makes_it() -> None:
    bench = Bench(predecessor="dead")
    call = make(bench)
    bench.found()
    clocks(bench, 2, 2)
    assert bench.result(call) is None
    other = make(bench, "v")
    bench.refuse(Lookup, "KeyNotFound")
    bench.reply(bench.take(Init), Done)
    bench.reply(bench.take(Publish), Done)
    assert bench.result(other) is None


def test_worker_0_after_a_good_bye_does_not_make_the_key_again() -> None:
    bench = Bench(predecessor="left")
    call = make(bench)
    bench.found()
    assert isinstance(bench.error(call), KeyExists)


def test_key_info_of_anyone() -> None:
    bench = Bench(rank=1)
    call = bench.call(calls.DescribeKey("w", wait=True))
    send = bench.take(Lookup)
    assert bench.step(Tick()) == []
    bench.say(send.peer, KeyInfo(send.message.request, uint8(3), worker_id(0)))  # type: ignore[union-attr]
    assert bench.result(call) == uint8(3)
    assert isinstance(Staged(1), Staged)


def test_several_keys_in_one_call() -> None:
    bench = Bench()
    call = bench.call(calls.InitKeys((Item("a", uint8(1), "x"), Item("b", uint8(1), "y"))))
    for kind in (Init, Init, Publish, Publish):
        assert call not in bench.done
        bench.reply(bench.take(kind), Done)
    assert bench.result(call) is None
