"""Another server leads a partition: what it takes over, and what the one that led before gives up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    NO_STEP,
    Attach,
    ClockQuery,
    Clocks,
    Delete,
    Done,
    FetchState,
    Hold,
    KeyId,
    KeyInfo,
    Lookup,
    NotYet,
    NotYetReason,
    Part,
    Push,
    ReadSlices,
    SetOptimizer,
    SliceId,
    Staged,
    StepIs,
    StepsLeft,
    StoreState,
    Survey,
    Surveyed,
    TakeStep,
    UpdateOptimizer,
    Values,
)
from tests.core.replica_harness import A, B, C, Cluster
from tests.core.test_records import HELD, ONE

LED_BY_B = (B, NO_RANK, NO_RANK)
BACK = (B, NO_RANK, A)  # the one that led before is being synced
OTHERS = [(B, NO_RANK, NO_RANK), (C, NO_RANK, NO_RANK)]


def ready(optimizer: Any = None, **more: Any) -> Cluster:
    """Key "w" is [1, 2] at server 0, and held by server 1."""
    run = Cluster([HELD, *OTHERS], **more)
    run.create("w", ONE)
    if optimizer is not None:
        for rank in range(run.settings.num_workers):
            run.say(rank, SetOptimizer(run.request(), to_wire(optimizer)))
    return run


def fail_over(run: Cluster, *, dies: bool = True) -> None:
    if dies:
        run.kill(A)
    run.look([LED_BY_B, *OTHERS])


def elsewhere(said: Any) -> bool:
    answer = said[-1] if isinstance(said, list) else said
    return isinstance(answer, NotYet) and answer.reason is NotYetReason.ELSEWHERE


# ── at rest ──


@pytest.mark.parametrize("optimizer", [None, SGD(0.5, momentum=0.5)])
def test_the_backup_goes_on_where_the_leader_was(optimizer: Any) -> None:
    """By hand: with momentum, v1 = 4 and w1 = 1 - 2 = -1 of the first element; then v2 = 0.5 * 4 + 4 = 6, w2 = -4."""
    run = ready(optimizer)
    for rank in (0, 1):
        run.push(rank, 1, [np.float32(2), np.float32(2)])
    before = run.picture(A)
    fail_over(run)
    assert run.picture(B) == before
    assert run.nodes[B].machine.explain(0.0)["leads"] == [0, 1]
    assert run.pull(0, 1, at=B)[0] == 1
    for rank in (0, 1):
        run.push(rank, 2, [np.float32(2), np.float32(2)], at=B)
    version, value = run.pull(1, 2, at=B)
    assert version == 2
    assert value.tolist() == ([4, 4] if optimizer is None else [-4, -3])


def test_rounds_of_the_leader_before_are_not_counted_as_steps_of_this_one() -> None:
    """They would make the usual time of a step a few milliseconds, and each slow step a standstill."""
    run = ready()
    run.tick()
    for clock in range(1, 41):
        for rank in (0, 1):
            run.push(rank, clock, ONE)
    fail_over(run)
    run.tick()
    report: Any = run.nodes[B].machine.explain(run.now)
    assert (report["step"], report["rounds"], report["usual_step_s"], report["steps_per_s"]) == (40, 0, None, 0.0)
    for rank in (0, 1):
        run.push(rank, 41, ONE, at=B)
    run.tick()
    report = run.nodes[B].machine.explain(run.now)
    assert (report["rounds"], report["usual_step_s"]) == (1, 3.0)


def test_a_push_that_was_answered_counts_once_when_it_comes_again() -> None:
    run = ready()
    for rank, request in ((0, 501), (1, 502)):
        run.push(rank, 1, ONE, request=request)
    fail_over(run)
    assert run.push(0, 1, ONE, request=501, at=B) == [Done(501)]
    assert run.value(B).tolist() == [2, 4]
    assert run.pull(0, -1, at=B)[0] == 1


def test_a_push_that_was_only_staged_is_sent_again_and_counts_once() -> None:
    run = ready()
    assert run.push(0, 1, ONE, request=501) == [Staged(501)]
    fail_over(run)
    assert run.nodes[B].table.slices["w", 0].log.is_idle
    probe = Push(501, (Part("w", 0, 1),), 0, 1, False, probe=True)
    (answer,) = run.say(0, probe, at=B)
    assert isinstance(answer, NotYet)
    assert (answer.reason, answer.next_clock) == (NotYetReason.OUT_OF_TURN, 1)
    assert run.push(0, 1, ONE, request=501, at=B) == [Staged(501)]
    assert run.push(1, 1, ONE, request=502, at=B) == [Done(501), Done(502)]
    assert run.value(B).tolist() == [2, 4]


def test_in_async_mode_every_push_counts_once() -> None:
    run = ready(SGD(1.0), mode="async")
    run.push(0, 1, [np.float32(1), np.float32(0)], request=501)
    run.push(1, 1, [np.float32(0), np.float32(4)], request=502)
    fail_over(run)
    for rank, request, gradient in ((0, 501, [1, 0]), (1, 502, [0, 4])):
        assert run.push(rank, 1, np.array(gradient, np.float32), request=request, at=B) == [Done(request)]
    assert run.value(B).tolist() == [0, -2]
    run.push(0, 2, [np.float32(1), np.float32(0)], at=B)
    assert run.value(B).tolist() == [-1, -2]


# ── in the middle of a round ──


@pytest.mark.parametrize("is_held", [False, True])
def test_a_round_whose_record_was_on_its_way_counts_once(is_held: bool) -> None:
    """The backup holds it or not: the workers, who were not answered, send their pushes again."""
    run = ready(SGD(0.5))
    run.auto = False
    run.push(0, 1, ONE, request=501)
    run.push(1, 1, ONE, request=502)
    records = run.to(B, Hold)
    assert len(records) == 1
    if is_held:
        run.arrive(records[0])
    run.auto = True
    run.wires.clear()
    fail_over(run)
    for rank, request in ((0, 501), (1, 502)):
        run.push(rank, 1, ONE, request=request, at=B)
    assert {message for message in run.told_since(0) if message in (Done(501), Done(502))} == {Done(501), Done(502)}
    assert run.value(B).tolist() == [0, 0]  # [1, 2] - 0.5 * [2, 4]
    assert run.pull(0, 1, at=B)[0] == 1
    if not is_held:
        run.arrive(records[0])  # late: nobody leads with it any more
        assert run.value(B).tolist() == [0, 0]


def test_a_record_that_is_being_applied_is_part_of_what_is_taken_over() -> None:
    run = ready(SGD(0.5))
    backup = run.nodes[B]
    backup.holds_jobs = True
    run.push(0, 1, ONE, request=501)
    run.push(1, 1, ONE, request=502)
    assert Done(501) in run.told_since(0)  # it was held from when its update began
    fail_over(run)
    assert elsewhere(run.pull(0, 1, at=B))  # the slice is not taken over yet, and is not lost
    assert elsewhere(run.push(0, 2, ONE, at=B))
    for message in (
        Attach(90, 0),
        FetchState(94, "w", 0),
        Delete(95, (KeyId("w", 0),)),
        Survey(91, (SliceId("w", 0),)),
        ReadSlices(92, 1, 0, False, (SliceId("w", 0),)),
    ):
        said = run.say(0, message, at=B)
        assert elsewhere(said), (message, said)
    assert elsewhere(run.say(0, SetOptimizer(93, to_wire(SGD(0.25))), at=B))
    run.finish(backup)
    assert run.value(B).tolist() == [0, 0]
    assert run.pull(0, 1, at=B)[0] == 1
    run.push(0, 1, ONE, request=501, at=B)
    run.finish(backup)
    assert run.value(B).tolist() == [0, 0]


def test_records_that_waited_were_never_held() -> None:
    """The second one was not answered. Its workers send it again, and it counts once."""
    run = ready(SGD(0.5))
    backup = run.nodes[B]
    backup.holds_jobs = True
    for clock in (1, 2):
        for rank in (0, 1):
            run.push(rank, clock, ONE, request=500 + 10 * clock + rank)
    told = run.told_since(0)
    assert Done(510) in told
    assert Done(520) not in told
    fail_over(run)
    run.finish(backup)
    assert run.value(B).tolist() == [0, 0]
    assert run.pull(0, -1, at=B)[0] == 1
    for rank in (0, 1):
        run.push(rank, 2, ONE, request=520 + rank, at=B)
    run.finish(backup)
    assert run.value(B).tolist() == [-1, -2]
    assert Done(520) in run.told_since(0)


# ── everything else goes on ──


def test_the_version_before_is_kept_for_a_worker_that_redoes_its_step() -> None:
    run = ready()
    for clock in (1, 2):
        for rank in (0, 1):
            run.push(rank, clock, clock * ONE)
    fail_over(run)
    version, value = run.pull(0, 1, at=B)
    assert (version, value.tolist()) == (1, [2, 4])
    version, value = run.pull(0, 2, at=B)
    assert (version, value.tolist()) == (2, [4, 8])


def test_a_successor_asks_the_new_leader_how_far_its_rank_was() -> None:
    run = ready()
    for clock in (1, 2):
        for rank in (0, 1):
            run.push(rank, clock, ONE, place=1)
    fail_over(run)
    (answer,) = run.say(0, ClockQuery(90, "w", 1), at=B)
    assert answer == Clocks(90, 2, 2, 2, 2, 1, 0)


def test_deletions_go_on_at_the_new_leader() -> None:
    run = ready()
    assert run.say(0, Delete(500, (KeyId("w", 0),))) == []
    fail_over(run)
    assert run.say(1, Delete(501, (KeyId("w", 0),)), at=B) == []  # nobody has told it of the first one
    assert run.say(0, Delete(500, (KeyId("w", 0),)), at=B) == [Done(501), Done(500)]
    assert ("w", 0) not in run.nodes[B].table.slices
    assert run.create("w", 5 * ONE, at=B, creation=1)[-1:] == [Done(run._request)]
    assert run.value(B).tolist() == [5, 10]


def test_a_deletion_that_was_answered_is_not_undone() -> None:
    run = ready()
    for rank in (0, 1):
        run.say(rank, Delete(500 + rank, (KeyId("w", 0),)))
    fail_over(run)
    assert run.say(0, Delete(500, (KeyId("w", 0),)), at=B) == [Done(500)]
    (info,) = run.say(0, Lookup(70, ("w",), False), at=B)
    assert isinstance(info, KeyInfo)
    assert info.keys == (-1,)
    assert run.nodes[B].table.creation == 1


def test_look_ups_wait_at_the_new_leader() -> None:
    run = ready()
    assert run.say(1, Lookup(70, ("new",), True)) == []
    fail_over(run)
    assert run.say(1, Lookup(70, ("new",), True), at=B) == []
    said = run.create("new", ONE, at=B)
    assert any(isinstance(message, KeyInfo) and message.request == 70 for message in said)


def test_the_optimizer_and_its_changes_are_known_at_the_new_leader() -> None:
    """w = 1 - 0.5 * 2 = 0, then with a rate of 0.25: 0 - 0.25 * 2 = -0.5; a key that is made now has 0.25, too."""
    run = ready(SGD(0.5))
    for rank in (0, 1):
        run.push(rank, 1, ONE)
        run.say(rank, UpdateOptimizer(600 + rank, {"learning_rate": 0.25}))
    assert run.nodes[B].held().optimizer.learning_rate == 0.25
    fail_over(run)
    assert run.say(1, SetOptimizer(602, to_wire(SGD(0.5))), at=B) == [Done(602)]  # as the workers have set it before
    for rank in (0, 1):
        run.push(rank, 2, ONE, at=B)
    assert run.value(B).tolist() == [-0.5, -1]
    run.create("v", ONE, at=B)
    for rank in (0, 1):
        run.push(rank, 1, ONE, key="v", at=B)
    assert run.value(B, "v").tolist() == [0.5, 1]


def test_shared_steps_are_given_out_once() -> None:
    run = ready(mode="async")
    (first,) = run.say(0, TakeStep(70, 0, 3, NO_STEP))
    (second,) = run.say(1, TakeStep(71, 0, 3, NO_STEP))
    fail_over(run)
    assert run.say(0, TakeStep(70, 0, 3, NO_STEP), at=B) == [first]
    (third,) = run.say(1, TakeStep(72, 0, 3, second.step), at=B)
    assert [first.step, second.step, third.step] == [0, 1, 2]
    (end,) = run.say(0, TakeStep(73, 0, 3, 0), at=B)
    assert (end.left, end.held_by) == (StepsLeft.OTHERS, (1,))
    assert isinstance(end, StepIs)


def test_a_step_that_two_workers_make_counts_once_at_the_new_leader() -> None:
    from kvd.core.places import PlaceKind, kind_of

    run = ready(SGD(1.0), mode="async")
    place = next(number for number in range(1 << 12) if kind_of(number) is PlaceKind.SHARED)
    run.push(0, 1, ONE, place=place)
    fail_over(run)
    run.push(1, 1, ONE, place=place, at=B)
    assert run.value(B).tolist() == [0, 0]


def test_readers_read_at_the_new_leader() -> None:
    run = ready()
    for rank in (0, 1):
        run.push(rank, 1, ONE)
    fail_over(run)
    (survey,) = run.say(0, Survey(80, (SliceId("w", 0),)), at=B)
    assert isinstance(survey, Surveyed)
    said = run.say(0, ReadSlices(81, 1, 1, False, (SliceId("w", 0),)), at=B)
    assert [type(message) for message in said] == [Values]
    assert np.frombuffer(run.answers[-1][2], np.float32).tolist() == [2, 4]


# ── too early, and elsewhere ──


def test_who_comes_before_the_view_is_told_to_come_again() -> None:
    run = ready()
    run.kill(A)
    run.change += 1  # the worker knows it
    run.rows = [LED_BY_B, *OTHERS]
    for message in (
        Push(90, (Part("w", 0, 1),), 0, 1, False),
        Delete(91, (KeyId("w", 0),)),
        Lookup(92, ("w",), True),
        SetOptimizer(93, None),
        TakeStep(94, 0, 3, NO_STEP),
        ClockQuery(95, "w", 0),
        Attach(96, 0),
        Survey(97, (SliceId("w", 0),)),
        FetchState(98, "w", 0),
        StoreState(99, "w", 0, 0, ()),
    ):
        said = run.say(0, message, ONE.tobytes() if isinstance(message, Push) else None, at=B)
        assert elsewhere(said), (message, said)
    run.show(B)
    assert run.pull(0, -1, at=B)[0] == 0


def test_another_server_says_that_the_slice_is_led_elsewhere() -> None:
    run = ready()
    for at in (B, C):
        assert elsewhere(run.push(0, 1, ONE, at=at))
        assert elsewhere(run.pull(0, -1, at=at))


def test_an_optimizer_that_only_the_new_leader_was_told_of_is_that_of_what_it_takes_over() -> None:
    """w = 1 - 0.25 * 2 = 0.5."""
    run = ready()
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), to_wire(SGD(0.25))), at=B)
    fail_over(run)
    for rank in (0, 1):
        run.push(rank, 1, ONE, at=B)
    assert run.value(B).tolist() == [0.5, 1]
