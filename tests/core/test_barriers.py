"""Barriers by name and generation."""

from __future__ import annotations

import pytest

from kvd.client.calls import checks
from kvd.core.machine import CallerPeer
from kvd.core.scheduler.barriers import barriers as module
from kvd.core.scheduler.barriers.barriers import Barriers, Entrant, Settled, Verdict
from kvd.protocol.messages import Done, ErrorCode, Refused

TOO_MANY = "workers wait at 2 barriers, and no more can be opened: use fewer names"

NEW = CallerPeer(b"new")
OLD = CallerPeer(b"old")
P = CallerPeer(b"p")
P0 = CallerPeer(b"p0")
P1 = CallerPeer(b"p1")


def at(rank: int, request: int, peer: CallerPeer = P, *, life: int = 0) -> Entrant:
    """A request of a worker in its first life, or in a later one."""
    return Entrant(rank, 100 * (rank + 1) + life, peer, request)


def test_a_barrier_is_released_when_all_required_ranks_are_there() -> None:
    barriers = Barriers()
    assert barriers.enter("b", 0, at(0, 10, P0)) is None
    assert barriers.settle([0, 1], []) == []
    assert barriers.open() == {"b": [0]}
    assert barriers.enter("b", 0, at(1, 20, P1)) is None
    assert barriers.settle([0, 1], []) == [Settled("b", 0, Verdict(()), (at(0, 10, P0), at(1, 20, P1)))]
    assert barriers.open() == {}
    assert barriers.settle([0, 1], []) == []


def test_a_released_generation_lets_everyone_pass_who_asks_later() -> None:
    barriers = Barriers()
    for generation in range(2):
        for rank in range(2):
            assert barriers.enter("b", generation, at(rank, generation)) is None
        assert len(barriers.settle([0, 1], [])) == 1
    for who in (at(0, 0), at(0, 9), at(1, 1, NEW, life=1)):
        assert [barriers.enter("b", generation, who) for generation in range(2)] == [Verdict(()), Verdict(())]
    assert barriers.open() == {}
    assert barriers.enter("b", 2, at(1, 9, NEW, life=1)) is None


def broken(dead: int = 1, workers: int = 2) -> Barriers:
    """All but the dead worker have entered "b" with request 5, and were told that it broke."""
    barriers = Barriers()
    living = [rank for rank in range(workers) if rank != dead]
    for rank in living:
        assert barriers.enter("b", 0, at(rank, 5)) is None
    (settled,) = barriers.settle(range(workers), [dead])
    assert settled.verdict == Verdict((dead,))
    assert settled.waiting == tuple(at(rank, 5) for rank in living)
    return barriers


def test_a_request_that_a_break_has_ended_always_gets_the_same_answer() -> None:
    for barriers in (broken(), Barriers(broken().record())):
        for request in (5, 4, 5):
            assert barriers.enter("b", 0, at(0, request)) == Verdict((1,))
        assert barriers.open() == {}


def test_after_a_break_all_meet_at_the_same_generation() -> None:
    """The successor of the dead opens it anew, and so does a survivor that tries again, or its successor."""
    for again in (at(0, 6), at(0, 1, life=1)):
        for barriers in (broken(), Barriers(broken().record())):
            assert barriers.enter("b", 0, at(1, 1, life=1)) is None
            assert barriers.enter("b", 0, at(0, 5)) == Verdict((1,))  # a late copy
            assert barriers.settle([0, 1], []) == []
            assert barriers.enter("b", 0, again) is None
            assert len(barriers.settle([0, 1], [])) == 1
            assert barriers.enter("b", 0, at(0, 5)) == Verdict(())
            assert barriers.enter("b", 1, at(0, 7)) is None


def test_a_barrier_breaks_again_while_the_dead_stay_away() -> None:
    barriers = broken(dead=2, workers=3)
    for request in (6, 7):
        assert barriers.enter("b", 0, at(0, request)) is None
        (settled,) = barriers.settle(range(3), [2])
        assert settled.waiting == (at(0, request),)
    for rank, request in ((0, 6), (0, 7), (1, 5)):
        assert barriers.enter("b", 0, at(rank, request)) == Verdict((2,))


def test_a_late_copy_of_an_earlier_request_does_not_take_the_place_of_a_newer_one() -> None:
    barriers = Barriers()
    assert barriers.enter("b", 0, at(0, 6)) is None
    assert barriers.enter("b", 0, at(0, 5)) is None
    (settled,) = barriers.settle([0], [])
    assert settled.waiting == (at(0, 6),)


def test_a_later_generation_shows_that_the_earlier_ones_were_settled() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, at(0, 1, P0))
    assert barriers.enter("b", 2, at(1, 2, P1)) is None
    assert barriers.open() == {"b": [1]}
    assert barriers.enter("b", 0, at(0, 1, P0)) == Verdict(())


def test_a_record_gives_the_same_answers() -> None:
    barriers = Barriers()
    barriers.enter("a", 0, at(0, 2))
    barriers.settle([0], [])
    barriers.enter("a", 1, at(0, 3))
    barriers.settle([0, 1], [1])
    barriers.enter("b", 0, at(0, 4))
    restored = Barriers(barriers.record())
    assert restored.record() == barriers.record()
    assert restored.enter("a", 0, at(0, 2)) == Verdict(())
    assert restored.enter("a", 1, at(0, 3)) == Verdict((1,))
    assert restored.open() == {}
    assert restored.enter("a", 1, at(0, 5)) is None
    assert restored.open() == {"a": [0]}


def test_only_dead_ranks_that_are_missing_break_a_barrier() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, at(1, 1, P1))  # came, then died
    barriers.enter("b", 0, at(0, 2, P0))
    assert barriers.settle([0, 1, 2], [1]) == []
    (broken,) = barriers.settle([0, 1, 2, 3], [3, 1, 2])
    assert broken.verdict == Verdict((2, 3))
    assert broken.waiting == (at(1, 1, P1), at(0, 2, P0))


def test_a_death_breaks_no_barrier_at_which_nobody_waits() -> None:
    barriers = Barriers()
    assert barriers.enter("b", 0, at(0, 1, P)) is None
    barriers.withdraw(0)
    assert barriers.settle([0, 1], [1]) == []
    assert barriers.enter("b", 0, at(0, 2, P)) is None


def test_a_worker_that_asks_again_is_answered_once_at_its_newest_peer() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, at(0, 1, OLD))
    barriers.enter("b", 0, at(0, 1, NEW))
    assert barriers.settle([0], [])[0].waiting == (at(0, 1, NEW),)


def test_barriers_with_different_names_are_independent() -> None:
    barriers = Barriers()
    barriers.enter("a", 0, at(0, 1, P0))
    barriers.enter("b", 0, at(1, 2, P1))
    barriers.enter("a", 0, at(1, 3, P1))
    assert [settled.name for settled in barriers.settle([0, 1], [])] == ["a"]
    assert barriers.open() == {"b": [1]}


def test_a_barrier_that_no_rank_is_required_at_is_released_at_once() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, at(0, 1, P))
    assert len(barriers.settle([], [])) == 1


def test_the_oldest_name_that_nobody_waits_at_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    barriers = Barriers()
    barriers.enter("a", 0, at(0, 1, P))
    barriers.enter("b", 0, at(0, 1, P))
    assert barriers.enter("c", 0, at(0, 1, P)) == TOO_MANY
    barriers.settle([0], [])
    assert barriers.enter("a", 1, at(0, 1, P)) is None  # used again: b is the oldest now, and free
    assert barriers.enter("c", 0, at(0, 1, P)) is None
    assert barriers.open() == {"a": [0], "c": [0]}
    assert barriers.enter("b", 0, at(0, 1, P)) == TOO_MANY


def test_one_rank_cannot_keep_the_others_from_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 8)
    monkeypatch.setattr(module, "MAX_OF_RANK", 2)
    barriers = Barriers()
    answers = [barriers.enter(f"a{number}", 0, at(0, number, P0)) for number in range(10)]
    assert answers[:4] == [None] * 4
    assert answers[4:] == ["this worker waits at 2 barriers already: use fewer names"] * 6
    assert barriers.enter("b", 0, at(1, 1, P1)) is None
    assert barriers.enter("a0", 0, at(0, 20, P0)) is None  # asked again: it waits there already
    barriers.settle([0], [])
    assert barriers.enter("c", 0, at(0, 21, P0)) is None


def test_every_worker_that_waits_learns_which_are_missing() -> None:
    barriers = Barriers()
    barriers.enter("b", 0, at(0, 11, P0))
    (broken,) = barriers.settle([0, 1, 2], [1, 2])
    (send,) = broken.answers()
    assert send.peer == P0
    assert isinstance(send.message, Refused)
    assert (send.message.request, send.message.error) == (11, ErrorCode.BARRIER_BROKEN)
    assert send.message.nodes == (("worker", 1), ("worker", 2))
    assert "barrier 'b' cannot be reached: worker 1, worker 2 died before it" in send.message.text
    assert Verdict(()).answer(5, "b") == Done(5)


def test_the_text_has_the_name_that_the_program_gave() -> None:
    refused = Verdict((1,)).answer(5, checks.barrier_name("user", "epoch"))
    assert isinstance(refused, Refused)
    assert refused.text.startswith("barrier 'epoch' cannot be reached: worker 1 died before it; start")
