"""Barriers by name and generation."""

from __future__ import annotations

import pytest

from kvd.core.machine import CallerPeer
from kvd.core.scheduler import barriers as module
from kvd.core.scheduler.barriers import Barriers, Settled, Verdict
from kvd.protocol.messages import Done, ErrorCode, Refused

TOO_MANY = "workers wait at 2 barriers, and no more can be opened: use fewer names"

NEW = CallerPeer(b"new")
OLD = CallerPeer(b"old")
P = CallerPeer(b"p")
P0 = CallerPeer(b"p0")
P1 = CallerPeer(b"p1")


def test_a_barrier_is_released_when_all_required_ranks_are_there() -> None:
    barriers = Barriers()
    assert barriers.enter("b", 0, 0, P0, 10) is None
    assert barriers.settle([0, 1], []) == []
    assert barriers.open() == {"b": [0]}
    assert barriers.enter("b", 0, 1, P1, 20) is None
    assert barriers.settle([0, 1], []) == [Settled("b", 0, Verdict(()), ((P0, 10), (P1, 20)))]
    assert barriers.open() == {}
    assert barriers.settle([0, 1], []) == []


def test_a_settled_generation_always_gives_the_same_answer() -> None:
    barriers = Barriers()
    for generation, dead in enumerate([[], [1], []]):
        for rank in range(1 if dead else 2):
            assert barriers.enter("b", generation, rank, P, rank) is None
        assert len(barriers.settle([0, 1], dead)) == 1
    for _ in range(2):
        assert [barriers.enter("b", generation, 1, NEW, 9) for generation in range(3)] == [
            Verdict(()),
            Verdict((1,)),
            Verdict(()),
        ]
    assert barriers.open() == {}
    assert barriers.enter("b", 3, 1, NEW, 9) is None


def test_a_later_generation_shows_that_the_earlier_ones_were_settled() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, 0, P0, 1)
    assert barriers.enter("b", 2, 1, P1, 2) is None
    assert barriers.open() == {"b": [1]}
    assert barriers.enter("b", 0, 0, P0, 1) == Verdict(())


def test_a_record_gives_the_same_answers() -> None:
    barriers = Barriers()
    barriers.enter("a", 0, 0, P, 1)
    barriers.settle([0, 1], [1])
    barriers.enter("a", 1, 0, P, 2)
    barriers.settle([0], [])
    barriers.enter("b", 0, 0, P, 3)
    restored = Barriers(barriers.record())
    assert restored.record() == barriers.record()
    assert [restored.enter("a", generation, 0, P, 4) for generation in (0, 1, 2)] == [
        Verdict((1,)),
        Verdict(()),
        None,
    ]
    assert restored.open() == {"a": [0]}


def test_only_dead_ranks_that_are_missing_break_a_barrier() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, 1, P1, 1)  # came, then died
    barriers.enter("b", 0, 0, P0, 2)
    assert barriers.settle([0, 1, 2], [1]) == []
    (broken,) = barriers.settle([0, 1, 2, 3], [3, 1, 2])
    assert broken.verdict == Verdict((2, 3))
    assert broken.waiting == ((P1, 1), (P0, 2))


def test_a_death_breaks_no_barrier_at_which_nobody_waits() -> None:
    barriers = Barriers()
    assert barriers.enter("b", 0, 0, P, 1) is None
    barriers.withdraw(0)
    assert barriers.settle([0, 1], [1]) == []
    assert barriers.enter("b", 0, 0, P, 2) is None


def test_a_worker_that_asks_again_is_answered_once_at_its_newest_peer() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, 0, OLD, 1)
    barriers.enter("b", 0, 0, NEW, 1)
    assert barriers.settle([0], [])[0].waiting == ((NEW, 1),)


def test_barriers_with_different_names_are_independent() -> None:
    barriers = Barriers()
    barriers.enter("a", 0, 0, P0, 1)
    barriers.enter("b", 0, 1, P1, 2)
    barriers.enter("a", 0, 1, P1, 3)
    assert [settled.name for settled in barriers.settle([0, 1], [])] == ["a"]
    assert barriers.open() == {"b": [1]}


def test_a_barrier_that_no_rank_is_required_at_is_released_at_once() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, 0, P, 1)
    assert len(barriers.settle([], [])) == 1


def test_the_oldest_name_that_nobody_waits_at_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    barriers = Barriers()
    barriers.enter("a", 0, 0, P, 1)
    barriers.enter("b", 0, 0, P, 1)
    assert barriers.enter("c", 0, 0, P, 1) == TOO_MANY
    barriers.settle([0], [])
    assert barriers.enter("a", 1, 0, P, 1) is None  # used again: b is the oldest now, and free
    assert barriers.enter("c", 0, 0, P, 1) is None
    assert barriers.open() == {"a": [0], "c": [0]}
    assert barriers.enter("b", 0, 0, P, 1) == TOO_MANY


def test_the_oldest_broken_generations_are_forgotten() -> None:
    barriers = Barriers()
    for generation in range(module.MAX_BROKEN + 1):
        barriers.enter("b", generation, 0, P, 1)
        barriers.settle([0, 1], [1])
    assert barriers.enter("b", 0, 0, P, 1) == Verdict(())  # forgotten
    assert barriers.enter("b", 1, 0, P, 1) == Verdict((1,))


def test_every_worker_that_waits_learns_which_are_missing() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, 0, P0, 11)
    (broken,) = barriers.settle([0, 1, 2], [1, 2])
    (send,) = broken.answers()
    assert send.peer == P0
    assert isinstance(send.message, Refused)
    assert (send.message.request, send.message.error) == (11, ErrorCode.BARRIER_BROKEN)
    assert send.message.nodes == (("worker", 1), ("worker", 2))
    assert "barrier 'b' cannot be reached: worker 1, worker 2 died before it" in send.message.text
    assert Verdict(()).answer(5, "b") == Done(5)
