"""Calls on a list of keys that is named again and again: they move as one, until one of the keys moves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import SCHEDULER, Copy, Effect, Gathered, Scatter, Send, Tick
from kvd.core.requests import Item, ListedKeys, Versions
from kvd.core.worker.keys import KeyGroup
from kvd.core.worker.push_window import PushWindow
from kvd.core.worker.transfer_plans import MAX_LISTS, TransferPlans
from kvd.protocol.messages import (
    Done,
    ErrorCode,
    Heartbeat,
    HeartbeatAck,
    NotYet,
    NotYetReason,
    PushBatch,
    Refused,
    Staged,
    Uncounted,
    Values,
)
from kvd.protocol.specs import KeySpec, padded
from tests.core.fakes import SLICE, cluster, of, uint8
from tests.core.small_calls_harness import without_plans
from tests.core.worker_harness import Harness, number
from tests.simulator.lists import ListedItems

KEYS = ("a", "b", "c")


class Program:
    """A worker whose program names a list of keys again and again."""

    def __init__(self, *keys: str, specs: Any = None, pull: bool = True, **more: Any) -> None:
        self.harness = Harness(batches=True, **more)
        self.specs = specs or [uint8(1)] * len(keys)
        for key, spec in zip(keys, self.specs, strict=True):
            self.harness.know(key, spec=spec)
        self.list = ListedKeys(keys, self.specs)
        self.pulls = pull
        for clock in (1, 2):
            self.call()
            self.answer(clock)

    @property
    def window(self) -> PushWindow:
        """Of the first key."""
        window: PushWindow = self.known()[0].own_window
        return window

    @property
    def is_together(self) -> bool:
        """Whether the list is one group, and the newest call on it is by a plan."""
        keys = self.known()
        group = keys[0].group
        return group is not None and group.keys == keys and self.harness.planned > 0

    def call(self, *, push: bool = True) -> int:
        """A push of the list, and a pull; or one of the two."""
        pull = self.pulls or not push
        items = tuple(
            [
                Item(key, spec, f"source {key}" if push else None, f"target {key}" if pull else None)
                for key, spec in zip(self.list.names, self.specs, strict=True)
            ]
        )
        listed = ListedItems(self.list, items, push=push, pull=pull)
        call = self.harness.call(requests.ListTransfer(listed, requests.Transfer((), push, pull)))
        while any(type(send.message).__name__ == "DeclareBatch" for send in self.harness.sent):
            self.harness.declared()
        return call

    def answer(self, clock: int) -> None:
        """Answers all messages that were sent."""
        while self.harness.sent:
            send = self.harness.sent.pop(0)
            if self.pulls or not isinstance(send.message, PushBatch):
                nbytes = self.nbytes_of(send)
                self.harness.say(send.peer, Values(number(send), (clock,)), bytes(nbytes))
            else:
                self.harness.say(send.peer, Done(number(send)))

    def nbytes_of(self, send: Send) -> int:
        """What a message with these values has."""
        if send.payload:
            return sum(padded(span.nbytes) for span in send.payload[:-1]) + send.payload[-1].nbytes
        (message,) = self.harness.machine._plans.of(self.known()).messages
        return message.nbytes

    def known(self) -> Any:
        known = self.harness.machine._plans._keys.by_name
        return tuple([known[name] for name in self.list.names])


def meaning(effects: list[Effect]) -> list[str]:
    """The effects, with what is moved told for each buffer."""
    told = []
    for effect in effects:
        if isinstance(effect, Send):
            buffers = [
                buffer
                for span in effect.payload
                for buffer in (span.buffer.buffers if isinstance(span.buffer, Gathered) else [span.buffer])
            ]
            told.append(f"{effect.peer!r} {effect.message} {buffers}")
        elif isinstance(effect, Copy):
            told.append(f"{effect.source!r} {list(effect.targets)} {[row.nbytes for row in effect.rows]}")
        elif isinstance(effect, Scatter):
            told.append(f"{effect.source!r} {list(effect.targets)} {list(effect.nbytes)}")
        else:
            told.append(repr(effect))
    return told


def newest(program: Program) -> Send:
    return [send for send in program.harness.sent if isinstance(send.message, PushBatch)][-1]


def say(message: Any, *more: Any, payload: bytes | None = None) -> Callable[[Program], object]:
    """The server says this of the newest push."""

    def happens(program: Program) -> None:
        send = newest(program)
        program.harness.say(send.peer, message(number(send), *more), payload)

    return happens


VALUES = say(Values, (3,), payload=bytes(17))

INTERRUPTIONS: dict[str, Callable[[Program], object]] = {
    "the answer": VALUES,
    "the answer, twice": lambda program: (VALUES(program), VALUES(program)),
    "a version for each": say(Values, (3, 3, 3), payload=bytes(17)),
    "versions that differ": say(Values, (3, 2, 3), payload=bytes(17)),
    "too few versions": say(Values, (3, 3), payload=bytes(17)),
    "a payload that does not fit": say(Values, (3,), payload=bytes(16)),
    "staged": say(Staged),
    "it does not count": say(Uncounted, (3,), payload=bytes(17)),
    "it is refused": say(Refused, ErrorCode.NOT_ALLOWED, "because"),
    "the batch is forgotten": say(NotYet, NotYetReason.UNKNOWN_BATCH, "because"),
    "a heartbeat": lambda program: program.harness.wait(1.5),
    "an answer to a heartbeat": lambda program: program.harness.say(SCHEDULER, HeartbeatAck(())),
    "a retry": lambda program: program.harness.wait(2.5),
    "the deadline": lambda program: program.harness.wait(100.0),
    "a tick": lambda program: program.harness.step(Tick()),
    "the list again": lambda program: program.call(),
    "a pull of the list": lambda program: program.call(push=False),
    "one of its keys": lambda program: program.harness.push("b"),
    "its clock": lambda program: program.harness.call(requests.ClockOf("b")),
    "a rewind": lambda program: program.harness.call(requests.Rewind(1)),
    "a deletion": lambda program: program.harness.call(requests.DeleteKeys(("b",))),
    "the caller takes its arrays back": lambda program: program.harness.call(
        requests.TakeBack((("source b", b"copy"),))
    ),
    "another key is found": lambda program: program.harness.know("d"),
    "a new view": lambda program: program.harness.look(),
    "the server was restarted": lambda program: program.harness.restart_server(),
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_the_same_is_done_without_plans(name: str) -> None:
    def run(planned: int = 1) -> list[str]:
        program = Program(*KEYS)
        program.call()
        assert program.harness.planned == planned
        INTERRUPTIONS[name](program)
        if len(program.harness.done) < program.harness._calls:
            VALUES(program)
        program.call()
        program.harness.wait(5.0)
        return meaning(program.harness.effects)

    with without_plans():
        expected = run(planned=0)
    assert run() == expected


def test_the_keys_move_together_under_one_clock() -> None:
    program = Program(*KEYS)
    for clock in (3, 4, 5):
        call = program.call()
        send = newest(program)
        assert isinstance(send.message, PushBatch)
        assert (send.message.clock, send.message.step, send.message.settled) == (clock, clock, clock - 1)
        assert [span.buffer for span in send.payload] == [
            Gathered(("source a", "source b", "source c"), [bytes(7), bytes(7), b""])
        ]
        program.harness.effects.clear()
        program.answer(clock)
        assert program.harness.result(call) == [Versions(clock, clock)] * 3
        assert of(Scatter, program.harness.effects) == [
            Scatter(bytes(17), ("target a", "target b", "target c"), [1, 1, 1], [bytes(7), bytes(7), b""])
        ]
    assert program.window.clock == 1, "the clock of the list is one for all its keys"


def test_a_look_at_a_clock_leaves_the_list_together() -> None:
    program = Program(*KEYS)
    program.call()
    program.answer(3)
    assert program.harness.machine.has_pushed("a")
    assert program.harness.machine.explain(0.0)["clocks"] == dict.fromkeys(KEYS, 3)
    assert [key.group is not None for key in program.known()] == [True] * 3
    asked = program.harness.call(requests.ClockOf("b"))
    assert program.harness.result(asked) == 3


def test_a_key_that_moves_alone_parts_the_list() -> None:
    program = Program(*KEYS)
    for clock in (3, 4):
        program.call()
        program.answer(clock)
    program.harness.push("b")
    assert program.harness.clocks() == [("b", 0, 5)]
    program.harness.settle()
    assert [key.clock for key in program.known()] == [4, 5, 4]
    program.call()
    assert not program.is_together


def test_lists_that_share_a_key_part_each_other() -> None:
    program = Program(*KEYS)
    program.call()
    program.answer(3)
    others = ListedKeys(("d", "c"), [uint8(1)] * 2)
    program.harness.know("d")
    first, program.list, program.specs = program.list, others, list(others.specs)
    program.call()
    assert not program.is_together
    assert sorted(program.harness.clocks()) == [("c", 0, 4), ("d", 0, 1)]
    program.harness.values(type(program.harness.sent[0].message), (4,), b"x", b"x")
    program.list, program.specs = first, list(first.specs)
    program.call()
    assert not program.is_together


def test_two_calls_on_a_list_are_in_flight_together() -> None:
    program = Program(*KEYS, settings=cluster(2, 1, rounds_ahead=2))
    calls = [program.call(), program.call()]
    assert program.is_together
    assert program.harness.planned == 2
    clocks = [getattr(send.message, "clock", 0) for send in program.harness.sent]
    assert clocks == [3, 4]
    third = program.call()
    assert not program.is_together, "it waits in the queues of the keys"
    for clock in (3, 4, 5):
        send = program.harness.sent.pop(0)
        program.harness.say(send.peer, Values(number(send), (clock,)), bytes(17))
    assert [program.harness.result(call) for call in (*calls, third)] == [
        [Versions(clock, clock)] * 3 for clock in (3, 4, 5)
    ]


def test_a_list_that_parts_in_flight_leaves_each_key_what_is_in_flight() -> None:
    program = Program(*KEYS, settings=cluster(2, 1, rounds_ahead=2))
    program.call()
    program.harness.push("b")
    windows = [key.own_window for key in program.known()]
    assert [(window.clock, window.open_pushes, window.pulling) for window in windows] == [
        (3, 1, [3]),
        (4, 2, [3]),
        (3, 1, [3]),
    ]
    send = newest(program)
    program.harness.say(send.peer, Values(number(send), (3,)), bytes(17))
    assert [(window.clock, window.open_pushes, window.pulling) for window in windows] == [
        (3, 0, []),
        (4, 1, []),
        (3, 0, []),
    ]


@pytest.mark.parametrize("pull", [True, False])
def test_a_list_of_pushes_or_of_pulls(pull: bool) -> None:
    program = Program(*KEYS, pull=pull)
    program.call()
    assert program.is_together
    program.answer(3)
    for _ in range(3):
        call = program.call(push=False)
        was_together = program.is_together
        program.answer(3)
    assert was_together
    assert program.harness.result(call) == [Versions(3, 3)] * 3


def test_large_values_and_those_of_several_slices_are_copied_one_by_one() -> None:
    large, of_two = KeySpec("uint8", (SLICE,), SLICE), KeySpec("uint8", (SLICE + 8,), SLICE)
    assert SLICE < 1 << 14
    program = Program("a", "b", "c", specs=[uint8(8), of_two, large], credit=1 << 30)
    program.call()
    assert program.is_together
    for send in program.harness.sent:
        for span in send.payload:
            buffers = span.buffer.buffers if isinstance(span.buffer, Gathered) else [span.buffer]
            assert ("source b" in buffers) is not isinstance(span.buffer, Gathered)
    program.harness.effects.clear()
    program.answer(3)
    copies = of(Copy, program.harness.effects)
    assert sum(
        row.nbytes for copy in copies for row, to in zip(copy.rows, copy.targets, strict=True) if to == "target b"
    ) == (SLICE + 8)


def test_heartbeats_pass_by_a_call() -> None:
    program = Program(*KEYS)
    program.call()
    harness = program.harness
    harness.sent.clear()
    harness.now += 1.5
    assert [type(send.message) for send in of(Send, harness.step(Tick()))] == [Heartbeat]
    harness.say(SCHEDULER, HeartbeatAck(()))
    assert program.is_together
    assert harness.machine.session.heard_at == harness.now


def test_a_heartbeat_that_is_due_leaves_before_a_call() -> None:
    program = Program(*KEYS)
    program.harness.now += 1.5
    program.call()
    assert program.is_together
    assert [type(send.message) for send in program.harness.sent] == [Heartbeat, PushBatch]


def test_a_heartbeat_that_is_due_leaves_with_an_answer() -> None:
    program = Program(*KEYS)
    call = program.call()
    program.harness.now += 1.5
    VALUES(program)
    assert program.harness.result(call) == [Versions(3, 3)] * 3
    assert [type(send.message) for send in program.harness.sent] == [PushBatch, Heartbeat]


def test_news_of_the_scheduler_pass_by_too() -> None:
    program = Program(*KEYS)
    program.call()
    program.harness.look()
    assert program.is_together


def test_lists_are_forgotten_in_the_end() -> None:
    program = Program(*KEYS)
    plans = program.harness.machine._plans
    for _ in range(2 * MAX_LISTS):
        assert plans.of_list(ListedKeys(KEYS, program.specs)) is not None
        assert len(plans._lists) <= MAX_LISTS
    program.call()
    assert program.is_together


def test_another_list_of_the_same_keys() -> None:
    program = Program(*KEYS)
    program.call()
    program.answer(3)
    program.list = ListedKeys(KEYS, program.specs)
    program.call()
    assert program.is_together
    send = newest(program)
    assert isinstance(send.message, PushBatch)
    assert send.message.clock == 4


def test_values_that_do_not_fit_the_keys_go_the_general_way() -> None:
    program = Program(*KEYS)
    program.specs = [uint8(1), KeySpec("uint8", (2,), SLICE), uint8(1)]
    program.list = ListedKeys(KEYS, program.specs)
    call = program.call()
    assert program.harness.planned == 0
    assert program.harness.error(call) is not None


def test_messages_are_cut_again_when_a_key_was_found() -> None:
    def run() -> list[str]:
        program = Program(*KEYS)
        program.call()
        program.answer(3)
        program.harness.know("d")
        program.call()
        return meaning(program.harness.effects)

    with without_plans():
        expected = run()
    assert run() == expected


# What must be looked at. Without it, a test of these fails.
MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "whether keys are at rest": (
        lambda patch: patch.setattr("kvd.core.worker.transfer_plans.windows_at_rest", lambda keys, specs: ()),
        test_a_key_that_moves_alone_parts_the_list,
    ),
    "specs": (
        lambda patch: patch.setattr("kvd.core.worker.transfer_plans.windows_at_rest", lambda keys, specs: ()),
        test_values_that_do_not_fit_the_keys_go_the_general_way,
    ),
    "the end of a group": (
        lambda patch: patch.setattr(KeyGroup, "part", lambda group: None),
        test_a_key_that_moves_alone_parts_the_list,
    ),
    "plans that were forgotten": (
        lambda patch: patch.setattr(TransferPlans, "clear", lambda plans: plans._plans.clear()),
        test_messages_are_cut_again_when_a_key_was_found,
    ),
    "whether values are whole": (
        lambda patch: patch.setattr("kvd.core.worker.transfer_plans._is_whole", lambda plan, keys: True),
        test_large_values_and_those_of_several_slices_are_copied_one_by_one,
    ),
    "what is in flight when a list parts": (
        lambda patch: patch.setattr(
            PushWindow, "take_over", lambda window, other: setattr(window, "clock", other.clock)
        ),
        test_a_list_that_parts_in_flight_leaves_each_key_what_is_in_flight,
    ),
    "which keys are in flight": (
        lambda patch: patch.setattr(PushWindow, "holds_back", lambda window, limit: False),
        test_two_calls_on_a_list_are_in_flight_together,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_list_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, test = MUTANTS[name]
    test()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test()
