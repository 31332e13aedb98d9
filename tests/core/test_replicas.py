"""Replicas: the same log, bytes and states as at the leader, whatever is done and whatever arrives in which order."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvd.compression import TwoBit
from kvd.compression import to_wire as to_wire_compressor
from kvd.core.machine import Apply, Received
from kvd.optimizer import SGD, Adam, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    Activate,
    Coding,
    Done,
    Given,
    Hold,
    HoldActivated,
    HoldChange,
    HoldOptimizer,
    HoldPlace,
    LaterSlice,
    MergedForm,
    NotYet,
    NotYetReason,
    Refused,
    SetOptimizer,
    SliceId,
    UpdateOptimizer,
)
from tests.core.fakes import NodePeer, member
from tests.core.replica_harness import FLOATS, A, B, C, Cluster, Wire
from tests.core.replica_programs import OPTIMIZERS, Program
from tests.core.test_promotion import OTHERS, ready
from tests.core.test_records import HELD, ONE

# ── random sequences ──


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_a_replica_is_the_same_as_its_slice_after_anything(mode: str, dtype: str, seed: int) -> None:
    run = Cluster([HELD, *OTHERS], mode=mode)
    program = Program(run, Random(seed), dtype)
    program.set_optimizer()
    for number in range(25):
        program.step()
        run.settle()
        assert run.picture(A) == run.picture(B), (number, program.clocks)
    assert any(isinstance(apply, Apply) and apply.is_merged for apply in run.nodes[B].applied)
    assert run.nodes[B].errors() == []
    before = run.picture(A)
    run.kill(A)
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    assert run.picture(B) == before


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(4))
def test_a_replica_encodes_what_its_leader_encodes(dtype: str, seed: int) -> None:
    """And the server that becomes the backup after that goes on with the same values, and with what was left over."""
    run = Cluster([HELD, *OTHERS])
    program = Program(run, Random(seed), dtype, [None, None, SGD(0.5, momentum=0.5)])
    encoded = 0
    for number in range(40):
        program.step()
        run.settle()
        encoded += any(slice_["encoded"] for slice_ in run.picture(A)["slices"].values())
        assert run.picture(A) == run.picture(B), (number, program.clocks)
    assert encoded > 5
    assert run.nodes[B].errors() == []
    run.kill(A)
    run.look([(B, NO_RANK, C), *OTHERS])
    run.look([(B, C, NO_RANK), *OTHERS])
    assert _without_bytes_of_before(run.picture(C)) == _without_bytes_of_before(run.picture(B))
    for _ in range(10):
        key = program.random.choice(program.keys)
        program.clocks[key] += 1
        coding = Coding(to_wire_compressor(TwoBit()), dtype, 5, MergedForm.FED_BACK)
        for rank in (0, 1):
            creation = program.creations[key]
            run.push(rank, program.clocks[key], program.value(), key=key, at=B, creation=creation, coding=coding)
        assert _without_bytes_of_before(run.picture(C)) == _without_bytes_of_before(run.picture(B))


def _without_bytes_of_before(picture: dict[str, Any]) -> dict[str, Any]:
    """A server that was sent a slice does not know what its versions were decoded from: it sends them as they are."""
    slices = {name: {**slice_, "encoded": None} for name, slice_ in picture["slices"].items()}
    return {**picture, "slices": slices}


@pytest.mark.parametrize("seed", range(16))
def test_records_that_overtake_each_other_lead_to_the_same_replica(seed: int) -> None:
    """Messages between the servers arrive in any order, twice, or only after they were sent again."""
    random = Random(seed)
    compresses = seed >= 8
    mode = "sync" if compresses else random.choice(["sync", "async"])
    run = Cluster([HELD, *OTHERS], auto=True, mode=mode)
    program = Program(run, random, "float32", [None, SGD(0.5, momentum=0.5)] if compresses else OPTIMIZERS)
    push = program.push_encoded if compresses else program.push
    run.auto = False
    for _ in range(12):
        push() if random.random() < 0.6 else program.set_optimizer()
        if random.random() < 0.3:
            program.change()
        for _ in range(random.randrange(4)):
            _shuffle(run, random)
    for _ in range(600):
        _shuffle(run, random)
        run.tick(0.2)
        if not run.wires and not run.nodes[A].machine.explain(0.0)["records_waiting"]:
            break
    else:
        raise AssertionError("the records never come to an end")
    assert run.picture(A) == run.picture(B)
    assert run.nodes[A].errors() == run.nodes[B].errors() == []


def _shuffle(run: Cluster, random: Random) -> None:
    wires = list(run.wires)
    run.wires.clear()
    random.shuffle(wires)
    for wire in wires:
        draw = random.random()
        if draw < 0.15:
            continue  # lost
        if draw < 0.3:
            run.wires.append(wire)  # late
        run.arrive(wire)


def test_by_hand_adam_at_a_replica() -> None:
    """Two steps of Adam in float64, worked out with NumPy."""
    rate, beta1, beta2, eps = 0.1, 0.9, 0.999, 1e-8
    run = Cluster([HELD, *OTHERS])
    weight = np.array([1.0, -2.0, 0.5])
    run.create("w", weight)
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), to_wire(Adam(rate, beta1, beta2, eps))))
    mean, square = np.zeros(3), np.zeros(3)
    for clock, parts in ((1, ([0.5, 1, -1], [0.5, 0, 3])), (2, ([2, -1, 0.25], [1, 1, 0.25]))):
        gradient = np.array(parts[0]) + np.array(parts[1])
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        weight = weight - rate * (mean / (1 - beta1**clock)) / (np.sqrt(square / (1 - beta2**clock)) + eps)
        for rank in (0, 1):
            run.push(rank, clock, np.array(parts[rank], np.float64))
    for rank in (A, B):
        np.testing.assert_allclose(run.value(rank, dtype=np.float64), weight, rtol=1e-12)


# ── who, and what fits ──


def record(run: Cluster, message: Any, payload: bytes | None = None, *, source: int = A) -> Any:
    """What the backup answers to a record that another server sends it."""
    node = run.nodes[source]
    auto, run.auto = run.auto, False
    peer: Any = NodePeer(node.who)
    event = Received(peer, node.who, node.machine.epoch, message, payload, len(payload or b""))
    run.arrive(Wire(source, B, event))
    run.auto = auto
    answers = run.to(source)
    return answers[0].message if answers else None


def hold(run: Cluster, version: int, *, request: int = 9000, **more: Any) -> Hold:
    creation = more.pop("creation", 0)
    given = tuple([Given(rank, version, 1, 0, 0, 0) for rank in (0, 1)])
    return Hold(request + version, 0, (SliceId("w", 0, creation),), version, given, False, None, 0)


def test_only_the_leader_of_the_newest_view_has_records_held() -> None:
    run = ready()
    before = run.picture(B)
    for source in (B, C):
        answer = record(run, hold(run, 1), ONE.tobytes(), source=source)
        assert isinstance(answer, NotYet) or answer is None
        assert getattr(answer, "reason", NotYetReason.ELSEWHERE) is NotYetReason.ELSEWHERE
    assert run.picture(B) == before
    assert record(run, hold(run, 1), ONE.tobytes()) == Done(9001)
    assert run.value(B).tolist() == [1, 2]
    assert run.picture(B) != before


def test_a_new_process_on_the_seat_of_the_leader_has_no_records_held() -> None:
    run = ready()
    run.workers[0] = member("worker", 0)
    run.nodes[A].life, run.nodes[A].who = 1, 1100
    assert isinstance(record(run, hold(run, 1), ONE.tobytes()), NotYet)


def test_a_gap_between_records_is_refused() -> None:
    run = ready()
    answer = record(run, hold(run, 2), ONE.tobytes())
    assert isinstance(answer, Refused)
    assert "record 2 of 'w' came when 0 were held" in answer.text
    assert run.value(B).tolist() == [1, 2]
    assert record(run, hold(run, 1), (3 * ONE).tobytes()) == Done(9001)
    assert record(run, hold(run, 2), (5 * ONE).tobytes()) == Done(9002)
    assert run.value(B).tolist() == [5, 10]


def test_an_old_record_is_held_already() -> None:
    run = ready()
    for version, factor in ((1, 3), (2, 5)):
        assert record(run, hold(run, version), (factor * ONE).tobytes()) == Done(9000 + version)
    assert record(run, hold(run, 1), (3 * ONE).tobytes()) == Done(9001)
    assert run.value(B).tolist() == [5, 10]


def test_a_record_of_a_slice_that_is_not_here_is_refused() -> None:
    run = ready()
    for message in (hold(run, 1, creation=1), Hold(9, 0, (SliceId("v", 0),), 1, (), False, None, 0)):
        answer = record(run, message, ONE.tobytes())
        assert isinstance(answer, Refused), message
        assert "does not hold slice 0" in answer.text


def test_records_behind_one_that_is_being_applied_wait_with_their_answers() -> None:
    run = ready()
    run.nodes[B].holds_jobs = True
    assert record(run, hold(run, 1), (3 * ONE).tobytes()) == Done(9001)
    assert record(run, hold(run, 2), (5 * ONE).tobytes()) is None
    assert record(run, hold(run, 2), (5 * ONE).tobytes()) is None  # it came again
    run.auto = False
    run.finish(run.nodes[B])
    assert [wire.message for wire in run.to(A)] == [Done(9002)]
    assert run.value(B).tolist() == [5, 10]


# ── changes of other things, before and after rounds ──


def test_an_activation_waits_for_the_rounds_before_it() -> None:
    run = ready()
    activated = HoldActivated(50, 0, SliceId("w", 0), 1, 1, 3)
    answer = record(run, activated)
    assert isinstance(answer, NotYet)
    assert answer.reason is NotYetReason.UPDATING
    assert record(run, hold(run, 1), ONE.tobytes()) == Done(9001)
    assert record(run, activated) == Done(50)
    log = run.nodes[B].held().table.slices["w", 0].log
    assert (log.progress_of(1).staged, log.progress_of(1).skipped) == (3, 3)


def test_an_optimizer_that_is_told_late_changes_nothing_that_came_after_it() -> None:
    """The rounds say which optimizer they were made with: a rate of 0.25 from the first on, of generation 2."""
    run = ready()
    newer, older = to_wire(SGD(0.25)), to_wire(SGD(0.5))
    given = tuple([Given(rank, 1, 1, 0, 0, 0) for rank in (0, 1)])
    round_1 = Hold(60, 0, (SliceId("w", 0),), 1, given, True, newer, 2)
    assert record(run, round_1, (4 * ONE).tobytes()) == Done(60)
    assert run.value(B).tolist() == [0, 0]
    assert record(run, HoldOptimizer(61, 0, older, older, 1)) == Done(61)
    group = run.nodes[B].held().table.slices["w", 0].group
    assert (group.optimizer.learning_rate, group.generation) == (0.25, 2)
    assert record(run, HoldOptimizer(62, 0, newer, newer, 2)) == Done(62)
    assert record(run, HoldOptimizer(63, 0, older, older, 1)) == Done(63)
    held = run.nodes[B].held()
    assert (held.optimizer.learning_rate, held.generation) == (0.25, 2)


def test_another_optimizer_begins_with_a_new_state() -> None:
    run = ready(SGD(0.5, momentum=0.5))
    for rank in (0, 1):
        run.push(rank, 1, ONE)
    state = run.picture(B)["slices"]["w", 0]["state"]
    assert state[1], "a momentum is kept"
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), to_wire(SGD(1.0, momentum=0.5))))
    for rank in (0, 1):
        run.push(rank, 2, ONE)
    # after round 1: 1 - 0.5 * 2 = 0; the momentum begins anew, so round 2 takes 1.0 * 2 away
    assert run.value(B).tolist() == [-2, -4]
    assert run.picture(A) == run.picture(B)


def test_a_change_takes_effect_with_its_round_whichever_comes_first() -> None:
    given = tuple([Given(rank, 1, 1, 0, 0, 0) for rank in (0, 1)])
    for order in ((0, 1), (1, 0)):
        run = ready(SGD(0.5))
        messages: list[tuple[Any, bytes | None]] = [
            (HoldChange(70, 0, {"learning_rate": 0.25}, (LaterSlice("w", 0, 0, 2),)), None),
            (
                Hold(
                    71,
                    0,
                    (SliceId("w", 0),),
                    1,
                    given,
                    True,
                    to_wire(SGD(0.5)),
                    1,
                ),
                ONE.tobytes(),
            ),
        ]
        for place in order:
            message, payload = messages[place]
            assert record(run, message, payload) == Done(message.request)
        group = run.nodes[B].held().table.slices["w", 0].group
        assert run.value(B).tolist() == [0.5, 1]
        assert group.optimizer_for(2).learning_rate == 0.25


def test_a_place_is_that_of_the_rank_in_all_slices() -> None:
    run = ready()
    for rank in (0, 1):
        run.push(rank, 1, ONE, place=1)
    assert record(run, HoldPlace(80, 0, 1, 2)) == Done(80)
    log = run.nodes[B].held().table.slices["w", 0].log
    assert [log.progress_of(rank).place for rank in (0, 1)] == [1, 2]


def test_workers_that_left_and_one_that_comes_back() -> None:
    run = ready()
    run.workers[1] = member("worker", 1, "done")
    run.look()
    run.push(0, 1, ONE)
    run.workers[1] = member("worker", 1)
    run.look()
    assert run.say(1, Activate(run.request(), "w", 1))[-1:] == [Done(run._request)]
    for rank in (0, 1):
        run.push(rank, 2, ONE)
    run.settle()
    assert run.picture(A) == run.picture(B)
    assert run.value(B).tolist() == [2, 4]
    assert run.nodes[B].held().table.slices["w", 0].log.progress_of(1).skipped == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_optimizer_that_is_set_while_an_update_runs_is_used_from_the_next_round_on_by_both(mode: str) -> None:
    """By hand, first element, sync: momentum 2, w = 1 - 0.5 * 2 = 0; then a new momentum: w = 0 - 1.0 * 2 = -2."""
    run = ready(SGD(0.5, momentum=0.5), mode=mode)
    leader = run.nodes[A]
    leader.holds_jobs = True
    for rank in (0, 1):
        run.push(rank, 1, ONE)
    for rank in (0, 1):
        run.say(rank, SetOptimizer(700 + rank, to_wire(SGD(1.0, momentum=0.5))))
    leader.holds_jobs = False
    run.finish(leader)
    run.settle()
    assert {Done(700), Done(701)} <= set(run.told_since(0))
    for rank in (0, 1):
        run.push(rank, 2, ONE)
    run.settle()
    assert run.picture(A) == run.picture(B)
    if mode == "sync":
        assert run.value(B).tolist() == [-2, -4]


def test_a_change_that_comes_while_an_async_update_runs_is_of_the_next_one() -> None:
    """By hand: w = 1 - 0.5 * 1 = 0.5, the record says so; then 0.5 - 0.25 * 1 = 0.25."""
    run = ready(SGD(0.5), mode="async")
    leader = run.nodes[A]
    leader.holds_jobs = True
    run.push(0, 1, ONE)
    run.say(0, UpdateOptimizer(700, {"learning_rate": 0.25}))
    leader.holds_jobs = False
    run.finish(leader)
    assert run.value(A).tolist() == run.value(B).tolist() == [0.5, 1]
    run.push(0, 2, ONE)
    assert run.value(A).tolist() == run.value(B).tolist() == [0.25, 0.5]
    assert run.picture(A) == run.picture(B)


def test_changes_of_an_optimizer_are_held_one_after_the_other() -> None:
    run = ready(SGD(0.5))
    run.auto = False
    first = len(run.answers)
    run.say(0, UpdateOptimizer(700, {"learning_rate": 0.25}))
    for message in (UpdateOptimizer(701, {"learning_rate": 0.125}), SetOptimizer(702, to_wire(SGD(2.0)))):
        (answer,) = run.say(0, message)
        assert isinstance(answer, NotYet)
        assert answer.reason is NotYetReason.BUSY
    assert len(run.to(B)) == 1
    run.tick(3.0)
    run.settle()
    assert Done(700) in run.told_since(first)
    assert run.nodes[B].held().optimizer.learning_rate == 0.25
    assert run.say(0, UpdateOptimizer(701, {"learning_rate": 0.125})) == []
    run.settle()
    assert run.nodes[B].held().optimizer.learning_rate == 0.125
