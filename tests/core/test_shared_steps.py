"""The steps that all workers share: who gets which number, and which of them have counted."""

from __future__ import annotations

from random import Random

import pytest

from kvd.core.server.counted_steps import CountedSteps
from kvd.core.server.shared_steps import SharedLoop
from kvd.protocol.messages import ErrorCode, Rest, StepIs, StepsLeft, TakeStep
from tests.core.fakes import cluster, member, one, said
from tests.core.server_harness import Harness

SOME, OTHERS, NONE = StepsLeft


@pytest.mark.parametrize(
    ("story", "answers"),
    [
        # (rank, done) → (what is left, step); (rank,): it is gone
        ([(0, -1), (1, -1), (0, 0)], [(SOME, 0), (SOME, 1), (SOME, 2)]),
        ([(0, -1), (0, -1)], [(SOME, 0), (SOME, 0)]),  # the same again: the answer was lost, or it has a successor
        ([(0, -1), (0, 0), (0, 0)], [(SOME, 0), (SOME, 1), (SOME, 1)]),  # a message that came twice
        ([(0, -1), (0, 0), (0, 1), (0, 2)], [(SOME, 0), (SOME, 1), (SOME, 2), (NONE, -1)]),
        ([(0, -1), (1, -1), (2, -1), (0, 0)], [(SOME, 0), (SOME, 1), (SOME, 2), (OTHERS, -1)]),
        ([(0, -1), (1, -1), (1,), (0, 0)], [(SOME, 0), (SOME, 1), (SOME, 1)]),  # of the dead, before new ones
        ([(0, -1), (1, -1), (0,), (1, 1), (1, 0)], [(SOME, 0), (SOME, 1), (SOME, 0), (SOME, 2)]),
        ([(0, -1), (0,), (0, 0), (0, 1)], [(SOME, 0), (SOME, 1), (SOME, 2)]),  # it was only slow, and is done after all
        ([(0, -1), (0,), (1, -1), (0, 0), (1, 0)], [(SOME, 0), (SOME, 0), (SOME, 1), (SOME, 2)]),
    ],
)
def test_who_makes_which_step(story: list[tuple[int, ...]], answers: list[tuple[StepsLeft, int]]) -> None:
    loop = SharedLoop(3, 0)
    seen = []
    for event in story:
        if len(event) == 1:
            loop.give_back(event)
        else:
            seen.append(loop.take(*event))
        loop.validate()
    assert seen == answers


@pytest.mark.parametrize("seed", range(20))
def test_counted_steps_are_a_set(seed: int) -> None:
    chance, counted, expected = Random(seed), CountedSteps(), set[int]()
    for _ in range(300):
        step = chance.randrange(40)
        if step not in expected:
            counted.add(step)
            expected.add(step)
        elif chance.random() < 0.5:
            counted.remove(step)
            expected.remove(step)
        counted.validate()
        assert [step in counted for step in range(-1, 41)] == [step in expected for step in range(-1, 41)]
    copied = counted.copy()
    for step in set(range(40)) - expected:
        copied.add(step)
    assert (copied.starts, copied.ends) == ([0], [40])
    assert (counted == copied) == (len(expected) == 40)


def test_a_server_gives_out_the_steps_of_several_loops() -> None:
    harness = Harness(cluster(mode="async"))
    assert said(harness.say(0, TakeStep(20, 0, 1, -1))) == [StepIs(20, SOME, 0)]
    assert said(harness.say(1, TakeStep(20, 0, 1, -1))) == [StepIs(20, OTHERS, -1, (0,))]
    assert said(harness.say(0, TakeStep(21, 0, 1, 0))) == [StepIs(21, NONE, -1)]
    assert said(harness.say(1, TakeStep(21, 0, 1, -1))) == [StepIs(21, NONE, -1)]
    assert said(harness.say(1, TakeStep(22, 1, 5, -1))) == [StepIs(22, SOME, 0)]
    refused = one(said(harness.say(0, TakeStep(22, 1, 6, -1))))
    assert (refused.error, "worker 0 shares 6 steps, worker 1 5" in refused.text) == (ErrorCode.NOT_ALLOWED, True)


def test_the_step_of_the_dead_is_free() -> None:
    harness = Harness(cluster(mode="async"))
    harness.say(0, TakeStep(20, 0, 2, -1))
    harness.say(1, TakeStep(20, 0, 2, -1))
    harness.look(member("worker", 1, "dead"))
    assert said(harness.say(0, TakeStep(21, 0, 2, 0))) == [StepIs(21, SOME, 1)]


def test_workers_share_no_steps_in_rounds() -> None:
    harness = Harness()
    for message in (TakeStep(20, 0, 2, -1), Rest(21)):
        assert one(said(harness.say(0, message))).error is ErrorCode.NOT_ALLOWED
