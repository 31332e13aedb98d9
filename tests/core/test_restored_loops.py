"""The loops of a program whose store was restored from a snapshot, and where a snapshot may be taken."""

from __future__ import annotations

import pytest

from kvd.core.places import Boundary, Inheritance, PlaceKind, Stopped, place_of
from kvd.core.worker.step_loops import Replay, StepLoops
from kvd.errors import NotAllowed
from tests.core.test_places import loops, walk


def restored(steps: int, stopped: Stopped | None = None) -> StepLoops:
    program = loops(stopped)
    program.check_may_restore()
    program.restored(steps)
    return program


def in_step(program: StepLoops, *pushed: str) -> StepLoops:
    """In the first step that is left of a loop of four, with these keys pushed."""
    program.enter(program.begin(4, None))
    program.take_pushes(pushed)
    return program


# ── where a restored program goes on ──


@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        (0, [[0, 1, 2], [0, 1]]),
        (2, [[2], [0, 1]]),
        (3, [[], [0, 1]]),
        (4, [[], [1]]),
        (5, [[], []]),
        (99, [[], []]),
    ],
)
def test_a_program_goes_on_after_the_steps_of_the_snapshot(steps: int, seen: list[list[int]]) -> None:
    assert walk(restored(steps), 3, 2) == seen


def test_a_longer_loop_goes_on_where_the_shorter_one_ended() -> None:
    assert walk(restored(3), 5) == [[3, 4]]


@pytest.mark.parametrize(("stopped_in", "seen"), [(1, [2]), (2, [2]), (3, [3])])
def test_a_restarted_worker_of_a_restored_job_goes_on_with_the_later_of_both(stopped_in: int, seen: list[int]) -> None:
    program = restored(2, Stopped(place_of(PlaceKind.STEP, stopped_in)))
    assert walk(program, 4)[0][:1] == seen


def test_the_first_step_of_a_restored_job_is_made_again_like_any_first_step() -> None:
    """One key of it counts, the other was never pushed in this job."""
    left = {"a": Inheritance(place_of(PlaceKind.STEP, 2), 1, 0), "b": Inheritance(0, 0, 0)}
    program = restored(2, Stopped(place_of(PlaceKind.STEP, 2), True, left.get))
    assert program.begin(4, ["a", "b"]) == 2
    program.enter(2)
    assert program.take_pushes(["a", "b"])
    strict = loops(Stopped(place_of(PlaceKind.STEP, 2), True, left.get))
    with pytest.raises(NotAllowed, match="different clocks"):
        strict.begin(4, ["a", "b"])


def test_pushes_and_broadcasts_between_loops_that_are_past_count_already() -> None:
    program = restored(5)
    assert not program.is_plain
    assert program.take_pushes(["a"])  # before the first loop: those of this job
    assert program.take_broadcasts(["a"]) is Replay.NEW
    walk(program, 3)
    assert not program.is_plain
    assert not program.take_pushes(["a"])
    assert program.take_broadcasts(["a"]) is Replay.PASSED
    walk(program, 2)
    assert program.is_plain
    assert program.take_pushes(["a"])
    assert program.take_broadcasts(["a"]) is Replay.NEW


def test_resume_begins_another_training() -> None:
    program = restored(5)
    program.resume()
    assert program.is_plain
    assert walk(program, 3) == [[0, 1, 2]]


def test_a_shared_loop_is_whole_or_not_begun() -> None:
    program = restored(3)
    with pytest.raises(NotAllowed, match=r"restored after step 3 of a loop .* which has 4 steps here"):
        program.begin(4, None, shared=True)
    assert program.begin(3, None, shared=True) == 3
    program.end()
    assert program.begin(3, None, shared=True) == 0


def test_restore_comes_before_the_first_loop() -> None:
    program = loops()
    walk(program, 0)
    with pytest.raises(NotAllowed, match="before the first loop"):
        program.check_may_restore()


# ── where a snapshot may be taken ──


def test_a_snapshot_knows_how_many_steps_were_made() -> None:
    program = loops()
    assert program.boundary() == Boundary(0, False)
    walk(program, 3)
    assert program.boundary() == Boundary(3, False)
    in_step(program)
    assert program.boundary() == Boundary(3, False)
    program.take_pushes(["a", "b"])
    assert program.boundary() == Boundary(4, False)
    program.leave()
    program.enter(1)
    assert program.boundary() == Boundary(4, False)
    program.take_pushes(["a"])
    with pytest.raises(NotAllowed, match=r"step 1 of kv.steps has yet to push 'b': call snapshot before the pushes"):
        program.boundary()
    program.take_pushes(["b"])
    assert program.boundary() == Boundary(5, False)


def test_the_first_step_pushes_nothing_after_a_snapshot() -> None:
    program = in_step(loops(), "a")
    assert program.boundary() == Boundary(1, False)
    with pytest.raises(NotAllowed, match="key 'b' is not one of the keys"):
        program.take_pushes(["b"])


def test_a_shared_step_has_no_boundary() -> None:
    program = loops()
    program.begin(3, None, shared=True)
    program.enter(0)
    with pytest.raises(NotAllowed, match="a snapshot takes all workers"):
        program.boundary()


def test_a_restored_program_is_past_what_lies_before_its_snapshot() -> None:
    program = restored(5)
    assert program.boundary() == Boundary(5, False)
    walk(program, 3)
    assert program.boundary() == Boundary(3, True)
    walk(program, 2)
    assert program.boundary() == Boundary(5, False)
    walk(program, 1)
    assert program.boundary() == Boundary(6, False)
