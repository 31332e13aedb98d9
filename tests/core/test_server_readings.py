"""Readers of a server: what they are answered, what they wait for, and what they may hold."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import CallerPeer, Effect, Received, Tick
from kvd.core.server.readings import HOLD_EXPIRES_S, MAX_CUTS, MAX_CUTS_OF_ONE
from kvd.protocol.messages import (
    Done,
    Epoch,
    ErrorCode,
    MemberState,
    ReadDone,
    ReadSlices,
    SliceId,
    Survey,
    Surveyed,
)
from tests.core.fakes import cluster, member, one, said
from tests.core.server_harness import Harness, ready, refusal, together, values


class Reader:
    """A reader of the harness's server."""

    now = 0.0

    def __init__(self, harness: Harness, incarnation: int = 900) -> None:
        self.harness = harness
        self.incarnation = incarnation
        self.peer = CallerPeer(b"reader %d" % incarnation)
        self._request = 0

    def say(self, message: Any) -> list[Effect]:
        return self.harness.step(Received(self.peer, self.incarnation, Epoch(1, 1), message), self.now)

    def read(self, step: int, *keys: str, number: int = 1, is_over: bool = False, request: int = 0) -> list[Effect]:
        self._request = request or self._request + 1
        slice_ids = tuple(SliceId(key, 0) for key in keys or ("w",))
        return self.say(ReadSlices(self._request, number, step, is_over, slice_ids))

    def survey(self, *keys: str) -> Surveyed:
        answer = one(said(self.say(Survey(1, tuple(SliceId(key, 0) for key in keys)))))
        assert isinstance(answer, Surveyed)
        return answer

    def done(self, number: int) -> None:
        assert said(self.say(ReadDone(99, number))) == [Done(99)]

    @property
    def held(self) -> int:
        return int(self.harness.explain()["bytes_held_by_readers"])


def two_keys() -> tuple[Harness, Reader]:
    """Keys of one byte, pushed by two workers."""
    harness = ready()
    harness.init("v", b"\0")
    return harness, Reader(harness)


def round_(
    harness: Harness, key: str, clock: int, *, step: int = 0, settled: int = 0, value: bytes = b"\1"
) -> list[Effect]:
    """All workers push to the key."""
    effects: list[Effect] = []
    for rank in range(2):
        effects += harness.push(rank, clock, value, key=key, step=step or clock, settled=settled)
    return effects


def read_by(effects: list[Effect], reader: Reader) -> tuple[tuple[int, ...], list[bytes]]:
    return values(effects, reader.peer)


def test_a_step_that_is_there_is_answered_at_once() -> None:
    harness, reader = two_keys()
    assert read_by(reader.read(0, "w", "v"), reader) == ((0, 0), [b"\0", b"\0"])
    round_(harness, "w", 1)
    round_(harness, "v", 1, value=b"\2")
    assert read_by(reader.read(1, "w", "v", number=2), reader) == ((1, 1), [b"\2", b"\4"])
    assert read_by(reader.read(0, "w", "v", number=3), reader) == ((0, 0), [b"\0", b"\0"])


def test_a_step_that_is_to_come_is_waited_for_and_not_confused_with_later_ones() -> None:
    harness, reader = two_keys()
    assert reader.read(2, "w", "v") == []
    round_(harness, "w", 1)
    round_(harness, "w", 2)
    round_(harness, "w", 3)  # what it was after step 2 is kept for the reader
    round_(harness, "v", 1, value=b"\2")
    effects = round_(harness, "v", 2, value=b"\2")
    assert read_by(effects, reader) == ((2, 2), [b"\2", b"\4"])


def test_a_step_that_is_not_kept_is_answered_with_what_there_is() -> None:
    harness, reader = two_keys()
    for clock in (1, 2, 3):
        round_(harness, "w", clock)
    assert said(reader.read(1, "w", "v")) == [Surveyed(1, 0, 3, 2, True, 0)]
    assert reader.held == 2  # until it says that it is done
    reader.done(1)
    assert reader.held == 0


def test_a_key_that_is_pushed_less_often() -> None:
    """`v` is pushed in the steps 2 and 4 of `w`."""
    harness, reader = two_keys()
    round_(harness, "w", 1)
    round_(harness, "w", 2, settled=1)
    round_(harness, "v", 1, step=2, value=b"\5", settled=1)
    assert reader.survey("w", "v") == Surveyed(1, 2, 2, 1, False, 1)
    assert read_by(reader.read(1, "w", "v"), reader) == ((1, 0), [b"\2", b"\0"])  # not from a later step
    assert reader.read(2, "w", "v", number=2) == []  # step 2 may bring more
    effects = round_(harness, "w", 3, settled=2)
    assert read_by(effects, reader) == ((2, 1), [b"\2", b"\n"])
    assert reader.read(3, "w", "v", number=3) == []
    round_(harness, "w", 4, settled=2)
    effects = round_(harness, "v", 2, step=4, value=b"\6", settled=2)  # `v` was not pushed in step 3
    assert read_by(effects, reader) == ((3, 1), [b"\2", b"\n"])


def test_a_reader_may_know_that_a_step_is_over() -> None:
    harness, reader = two_keys()
    round_(harness, "w", 1)
    assert reader.read(1, "w", "v") == []
    assert read_by(reader.read(1, "w", "v", number=2, is_over=True), reader) == ((1, 0), [b"\2", b"\0"])


def test_when_nobody_pushes_any_more_every_step_is_over() -> None:
    harness, reader = two_keys()
    round_(harness, "w", 1)
    assert reader.survey().over == 0
    harness.look(*[member("worker", rank, state=MemberState.DONE) for rank in (0, 1)])
    assert reader.survey().over == 1
    assert reader.survey("v").over == 1


def test_a_survey_of_everything() -> None:
    harness, reader = two_keys()
    assert reader.survey() == Surveyed(1, 0, 0, 0, True, 0)
    round_(harness, "w", 1)
    round_(harness, "w", 2)
    assert reader.survey() == Surveyed(1, 0, 2, 1, True, 0)
    assert reader.survey("w") == Surveyed(1, 2, 2, 1, True, 0)


def test_no_round_waits_for_a_reader() -> None:
    harness, reader = two_keys()
    reader.read(7, "w")
    for clock in range(1, 6):
        assert "Done" in [type(message).__name__ for message in said(round_(harness, "w", clock))]
    assert harness.explain()["waiting_for"] == []


def test_fused_slices_are_read_one_by_one() -> None:
    harness = together("a", "b")
    reader = Reader(harness)
    assert read_by(reader.read(1, "b"), reader) == ((1,), [b"\4"])
    assert reader.read(2, "b", "a", number=2) == []
    harness.push_batch(0, 2, b"\1", b"\2", step=2)
    effects = harness.push_batch(1, 2, b"\1", b"\2", step=2)
    assert read_by(effects, reader) == ((2, 2), [b"\4", b"\2"])


def test_a_question_that_comes_again_is_answered_where_it_came_from_last() -> None:
    harness, reader = two_keys()
    assert reader.read(1, "w") == []
    reader.peer = CallerPeer(b"elsewhere")
    assert reader.read(1, "w", request=1) == []
    assert read_by(round_(harness, "w", 1), reader) == ((1,), [b"\2"])
    assert read_by(reader.read(1, "w", request=1), reader) == ((1,), [b"\2"])  # the answer was lost


def test_a_new_read_forgets_the_one_before() -> None:
    harness, reader = two_keys()
    assert reader.read(1, "w") == []
    assert reader.read(2, "v", number=2) == []
    assert said(round_(harness, "w", 1), reader.peer) == []
    assert isinstance(one(said(reader.read(1, "w", number=1))), Surveyed)  # sent before, and late
    assert reader.held == 1
    reader.done(1)
    assert reader.held == 1
    round_(harness, "v", 1)
    assert read_by(round_(harness, "v", 2), reader) == ((2,), [b"\2"])


def test_what_a_reader_may_hold_is_bounded() -> None:
    harness, reader = two_keys()
    for _ in range(MAX_CUTS_OF_ONE):
        read_by(reader.read(0, "w", "v"), reader)
    assert isinstance(one(said(reader.read(0, "w"))), Surveyed)
    for number in range(1, MAX_CUTS // MAX_CUTS_OF_ONE):
        other = Reader(harness, 900 + number)
        for _ in range(MAX_CUTS_OF_ONE):
            read_by(other.read(0, "w", "v"), other)
    last = Reader(harness, 1000)
    assert isinstance(one(said(last.read(0, "w"))), Surveyed)
    reader.done(1)
    assert read_by(last.read(0, "w"), last) == ((0,), [b"\0"])


def test_a_reader_that_says_nothing_more_is_forgotten() -> None:
    harness, reader = two_keys()
    reader.now = 5.0
    read_by(reader.read(0, "w"), reader)
    assert reader.read(1, "v") == []
    assert harness.machine.next_deadline() is not None
    harness.step(Tick(), 4.9 + HOLD_EXPIRES_S)
    assert reader.held == 2
    harness.step(Tick(), 5.0 + HOLD_EXPIRES_S)
    assert reader.held == 0
    assert said(round_(harness, "v", 1), reader.peer) == []


def test_what_cannot_be_read() -> None:
    _, reader = two_keys()
    unknown = refusal(reader.read(0, "w", "x"))
    assert (unknown.error, unknown.key) == (ErrorCode.KEY_NOT_FOUND, "x")
    assert refusal(reader.read(0, "w", "w")).error is ErrorCode.PROTOCOL_ERROR
    assert refusal(reader.say(Survey(1, (SliceId("x", 0),)))).error is ErrorCode.KEY_NOT_FOUND
    asynchronous = Harness(cluster(2, mode="async"))
    asynchronous.init("w", b"\0")
    assert refusal(Reader(asynchronous).read(0, "w")).error is ErrorCode.NOT_ALLOWED
