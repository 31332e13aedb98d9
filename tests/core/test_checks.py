"""Leader and backup compare what they have: one flipped bit is found, and mended, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.server.checks import MOST_GROUPS, MOST_SLICES, PAUSE_S
from kvd.node.jobs.runner import view
from kvd.optimizer import SGD, Adam, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    Compare,
    Delete,
    Done,
    KeyId,
    NotYet,
    OutOfSync,
    Refused,
    SetOptimizer,
    StoreState,
    Synced,
)
from tests.core.replica_harness import A, B, C, Cluster, Wire
from tests.core.test_records import ALONE, HELD, ONE

OTHERS = [(B, NO_RANK, NO_RANK), (C, NO_RANK, NO_RANK)]
ADAM = Adam(0.1)


def ready(*keys: str, optimizer: Any = ADAM) -> Cluster:
    """Server 1 holds what server 0 leads, after one round of each key. Messages between them arrive at once."""
    run = Cluster([HELD, *OTHERS])
    for key in keys or ("w",):
        run.create(key, ONE)
    if optimizer is not None:
        for rank in (0, 1):
            run.say(rank, SetOptimizer(run.request(), to_wire(optimizer)))
    for key in keys or ("w",):
        push(run, 1, key)
    return run


def push(run: Cluster, clock: int, key: str = "w") -> None:
    for rank in (0, 1):
        run.push(rank, clock, ONE * 0.25, key=key)


def compared(run: Cluster) -> tuple[Any, Any]:
    """How many slices the leader asked about, and how many of them differed."""
    report = run.nodes[A].machine.explain(run.now)
    return report["slices_compared"], report["slices_that_differed"]


def turn(run: Cluster) -> None:
    """The next slices are compared."""
    run.tick(0.0)
    run.tick(PAUSE_S + 1.0)


def asked(run: Cluster) -> Wire:
    """The question of the leader, which has not arrived."""
    run.auto = False
    turn(run)
    (wire,) = run.to(B, Compare)
    return wire


def flip_value(run: Cluster, rank: int, key: str = "w") -> None:
    held = run.nodes[rank].held()
    slice_ = held.table.slices[key, 0]
    view(slice_.span(slice_.log.current), np.dtype(np.uint8))[3] ^= 1


def flip_state(run: Cluster, rank: int) -> None:
    state = run.nodes[rank].runner._states.of_slice(("w", 0))
    next(iter(state.slots.values())).view(np.uint8)[5] ^= 1


def bad_backup(run: Cluster) -> list[Any]:
    return [message for message in run.nodes[A].told if isinstance(message, OutOfSync)]


@pytest.mark.parametrize("optimizer", [None, SGD(0.5, momentum=0.5), ADAM])
def test_copies_that_are_alike_are_found_alike(optimizer: Any) -> None:
    run = ready("w", "v", optimizer=optimizer)
    for clock in range(2, 6):
        turn(run)
        push(run, clock)
    assert compared(run)[0] >= 8
    assert compared(run)[1] == 0
    assert bad_backup(run) == []


@pytest.mark.parametrize("flip", [flip_value, flip_state])
def test_one_flipped_bit_is_found_and_mended(flip: Any) -> None:
    run = ready()
    flip(run, B)
    turn(run)
    assert bad_backup(run)[0] == OutOfSync(bad_backup(run)[0].request, 0, run.nodes[B].who)
    (error,) = run.nodes[A].errors()
    assert all(name in error for name in ("server 1", "partition 0", "server 0", "slice 0", "'w'")), error
    assert compared(run) == (1, 1)
    last = run.nodes[A].machine.explain(run.now)["last_difference"]
    assert last == {"partition": 0, "backup": "server 1", "text": error.split("leads: ")[1].split(". It is sent")[0]}
    run.look([ALONE, *OTHERS])
    run.look([(A, NO_RANK, B), *OTHERS])
    run.tick(1.1)
    run.settle()
    assert any(isinstance(message, Synced) for message in run.nodes[A].told)
    run.look([HELD, *OTHERS])
    turn(run)
    assert compared(run)[1] == 1
    assert run.picture(A) == run.picture(B)


def test_the_leader_goes_on_until_the_view_names_its_backup_no_more() -> None:
    run = ready()
    flip_value(run, B)
    turn(run)
    push(run, 2)
    turn(run)
    assert run.pull(0, 2)[0] == 2
    assert len({message.incarnation for message in bad_backup(run)}) == 1


def test_many_slices_that_differ_are_one_finding() -> None:
    run = Cluster([HELD, *OTHERS])
    for key in "abc":
        run.create(key, ONE)
    run.declare(0, *"abc")
    run.declare(1, *"abc")
    run.push_batch(0, 1, ONE, ONE, ONE)
    run.push_batch(1, 1, ONE, ONE, ONE)
    flip_value(run, B, "a")
    flip_value(run, B, "c")
    turn(run)
    (error,) = run.nodes[A].errors()
    assert "slice 0 of key 'a', and of 1 other slice," in error
    assert compared(run) == (3, 2)


def test_the_backup_compares_when_the_update_before_is_made() -> None:
    run = ready()
    run.nodes[B].holds_jobs = True
    push(run, 2)
    wire = asked(run)
    run.arrive(wire)
    run.arrive(wire)  # it came again
    assert run.to(A) == []
    run.finish(run.nodes[B])
    assert [type(answer.message) for answer in run.to(A)] == [Done]


def test_rounds_wait_for_the_comparison_before_them() -> None:
    run = ready()
    wire = asked(run)
    run.nodes[B].holds_jobs = True
    run.arrive(wire)
    push(run, 2)
    run.deliver()
    run.finish(run.nodes[B])
    run.settle()
    assert compared(run) == (1, 0)
    assert run.pull(0, 2)[0] == 2
    assert run.picture(A) == run.picture(B)


def push_on(run: Cluster) -> None:
    push(run, 2)


def set_anew(run: Cluster) -> None:
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), to_wire(SGD(0.5, momentum=0.5))))


def delete(run: Cluster) -> None:
    for rank in (0, 1):
        run.say(rank, Delete(run.request(), (KeyId("w", 0),)))


def store(run: Cluster) -> None:
    run.say(0, StoreState(run.request(), "w", 0, 7, ()))


def take_away(run: Cluster) -> None:
    run.look([(A, C, NO_RANK), *OTHERS])


@pytest.mark.parametrize("change", [push_on, set_anew, delete, store, take_away])
def test_a_question_that_comes_late_proves_nothing(change: Any) -> None:
    run = ready()
    wire = asked(run)
    change(run)
    run.settle()
    run.auto = False
    run.arrive(wire)
    answers = [answer.message for answer in run.to(A)]
    assert [type(answer) for answer in answers] in ([Done], [NotYet])
    assert not any(isinstance(answer, Refused) for answer in answers)
    run.settle()
    assert bad_backup(run) == []


@pytest.mark.parametrize("rank", [A, B])
def test_an_optimizer_that_is_set_while_the_state_is_read_makes_no_difference(rank: int) -> None:
    run = ready()
    run.auto = False
    if rank == A:
        run.nodes[A].holds_jobs = True
        turn(run)
    else:
        wire = asked(run)
        run.nodes[B].holds_jobs = True
        run.arrive(wire)
    set_anew(run)
    run.settle()
    run.finish(run.nodes[rank])
    run.settle()
    assert bad_backup(run) == []
    assert run.nodes[A].errors() == []


def test_a_key_that_is_made_again_waits_for_the_comparison() -> None:
    run = Cluster([HELD, *OTHERS])
    run.create("w", ONE, publish=False)
    run.nodes[A].holds_jobs = True
    turn(run)
    (answer,) = run.create("w", ONE * 3, publish=False)
    assert isinstance(answer, NotYet)
    run.finish(run.nodes[A])
    run.nodes[A].holds_jobs = False
    assert run.create("w", ONE * 3, publish=False)[-1] == Done(run._request)
    assert run.value(B).tolist() == [3, 6]


def test_a_backup_that_lacks_a_round_is_found() -> None:
    run = ready()
    log = run.nodes[B].held().table.slices["w", 0].log
    log.version = log.closed = 0
    turn(run)
    assert "its copy of slice 0 of key 'w' is at version 0, the leader's at 1" in run.nodes[A].errors()[0]


def test_nothing_is_compared_with_a_server_that_is_being_synced() -> None:
    run = Cluster([(A, NO_RANK, B), *OTHERS])
    run.create("w", ONE)
    turn(run)
    assert compared(run) == (0, 0)


def test_each_turn_reads_a_few_slices_and_all_have_their_turn() -> None:
    keys = [f"k{number}" for number in range(3 * MOST_GROUPS)]
    run = ready(*keys, optimizer=None)
    seen: list[str] = []
    run.auto = False
    for _ in range(3):
        turn(run)
        for wire in run.to(B, Compare):
            assert len(wire.message.slices) <= MOST_SLICES
            seen += [checked.key for checked in wire.message.slices]
            run.arrive(wire)
        run.deliver()
        assert len(seen) % MOST_GROUPS == 0
    assert sorted(seen) == sorted(keys)


def test_a_partition_that_is_handed_over_is_left_alone() -> None:
    run = ready()
    run.auto = False
    run.tick(0.0)
    run.tick(PAUSE_S - 0.5)
    run.look([(A, B, NO_RANK, B), *OTHERS])
    run.tick(1.0)
    assert run.to(B, Compare) == []
