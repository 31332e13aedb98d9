"""A server becomes the backup of a partition while its leader goes on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Export, JobDone, Load, Tick
from kvd.core.places import PlaceKind, place_of
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, Adam, to_wire
from kvd.protocol.messages import (
    NO_RANK,
    NO_STEP,
    Delete,
    Done,
    ErrorCode,
    FetchState,
    Hold,
    HoldPublished,
    Install,
    KeyId,
    Refused,
    SetOptimizer,
    StartHolding,
    StoreState,
    Synced,
    TakeStep,
)
from tests.core.fakes import welcome
from tests.core.replica_harness import FLOATS, A, B, Cluster, Node
from tests.core.test_promotion import OTHERS
from tests.core.test_records import ALONE, HELD, ONE

SYNCING = (A, NO_RANK, B)


def alone(optimizer: Any = None, **more: Any) -> Cluster:
    run = Cluster([ALONE, *OTHERS], **more)
    for rank in (0, 1) if optimizer is not None else ():
        run.say(rank, SetOptimizer(run.request(), to_wire(optimizer)))
    return run


def both_push(run: Cluster, clock: int, value: Any = ONE, key: str = "w", **more: Any) -> None:
    for rank in (0, 1):
        run.push(rank, clock, value, key=key, **more)


def synced(run: Cluster) -> list[Any]:
    return [message for message in run.nodes[A].told if isinstance(message, Synced)]


def finish(run: Cluster) -> None:
    """The scheduler makes the server the backup, which takes over: nothing may differ."""
    run.settle()
    assert {(message.partition, message.incarnation) for message in synced(run)} == {(0, run.nodes[B].who)}
    assert run.picture(A) == run.picture(B)
    run.look([HELD, *OTHERS])
    before = run.picture(A)
    told = len(run.nodes[A].told)
    run.tick(5.0)
    assert not [message for message in run.nodes[A].told[told:] if isinstance(message, Synced)]
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    assert run.picture(B) == before


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", [None, SGD(0.5, momentum=0.5), Adam(0.1)], ids=repr)
def test_a_synced_server_has_everything(dtype: str, optimizer: Any) -> None:
    """Fused groups and single slices, halves with master weights, states of both kinds, several versions."""
    run = alone(optimizer)
    value = np.array([1, 2, 3], FLOATS[dtype])
    for key in "abcd":
        run.create(key, value)
    for rank in (0, 1):
        run.declare(rank, "a", "b")
    for clock in (1, 2):
        for rank in (0, 1):
            run.push_batch(rank, clock, value, value)
        both_push(run, clock, value, "c", place=place_of(PlaceKind.STEP, clock))
    assert len(run.nodes[A].table.groups) == 3
    run.look([SYNCING, *OTHERS])
    if dtype == "float16" and optimizer is not None:
        slots = run.picture(B)["slices"]["c", 0]["state"][1]
        assert ("master", "float32") in slots
    for rank in (0, 1):
        run.push_batch(rank, 3, value, value)
    both_push(run, 1, value, "d")
    finish(run)


def test_many_groups_are_sent_some_at_a_time_and_the_others_go_on() -> None:
    run = alone()
    keys = [f"k{number:03}" for number in range(150)]
    for key in keys:
        run.create(key, ONE)
    run.auto = False
    run.look([SYNCING, *OTHERS])
    for wire in run.to(B, StartHolding):
        run.arrive(wire)
    for wire in run.to(A):
        run.arrive(wire)
    resting = sorted(group.key for group in run.nodes[A].table.groups.values() if group.is_resting)
    assert 0 < len(resting) < len(keys)
    free = next(key for key in keys if key not in resting)
    first = len(run.answers)
    both_push(run, 1, ONE, free)
    assert [message for message in run.told_since(first) if isinstance(message, Done)]
    both_push(run, 1, ONE, resting[0])
    assert not [message for message in run.told_since(first + 4) if isinstance(message, Done)]
    run.auto = True
    run.settle()
    assert len([message for message in run.told_since(first) if isinstance(message, Done)]) == 4
    assert run.value(B, resting[0]).tolist() == run.value(B, free).tolist() == [2, 4]
    finish(run)


def test_keys_that_come_and_go_meanwhile() -> None:
    run = alone()
    for key in ("a", "b", "c"):
        run.create(key, ONE)
    run.auto = False
    run.look([SYNCING, *OTHERS])
    steps: list[Callable[[], Any]] = [
        lambda: run.create("d", 3 * ONE),
        lambda: [run.say(rank, Delete(600 + rank, (KeyId("b", 0),))) for rank in (0, 1)],
        lambda: both_push(run, 1, ONE, "a"),
        lambda: run.create("e", 4 * ONE),
        lambda: both_push(run, 1, ONE, "d"),
    ]
    for step in steps:
        step()
        for wire in list(run.wires)[:1]:
            run.wires.remove(wire)
            run.arrive(wire)
    run.auto = True
    run.settle()
    assert ("b", 0) not in run.nodes[B].held().table.slices
    assert {Done(600), Done(601)} <= set(run.told_since(0))
    finish(run)


def test_an_optimizer_and_steps_that_are_set_meanwhile() -> None:
    run = alone(SGD(0.5, momentum=0.5))
    run.create("w", ONE)
    both_push(run, 1)
    run.auto = False
    run.look([SYNCING, *OTHERS])
    for rank in (0, 1):
        run.say(rank, SetOptimizer(700 + rank, to_wire(SGD(0.25))))
    run.auto = True
    run.settle()
    both_push(run, 2)
    assert run.value(B).tolist() == [-0.5, -1]  # 1 - 0.5 * 2 = 0, then 0 - 0.25 * 2
    finish(run)


# ── it ends early ──


@pytest.mark.parametrize("after", range(4))
def test_a_server_that_dies_while_it_is_synced_holds_nothing_up(after: int) -> None:
    run = alone(Adam(0.1))
    for key in ("a", "b"):
        run.create(key, ONE)
    run.auto = False
    run.look([SYNCING, *OTHERS])
    for _ in range(after):
        if run.wires:
            run.arrive(run.wires.popleft())
    both_push(run, 1, ONE, "a")
    run.kill(B)
    run.look([ALONE, *OTHERS])
    run.auto = True
    run.settle()
    both_push(run, 2, ONE, "a")
    assert run.pull(0, 2, "a")[0] == 2
    assert not any(group.working or group.tasks for group in run.nodes[A].table.groups.values())
    assert synced(run) == []
    run.nodes[B] = Node(B, 1, 1 << 30)  # another one comes
    run.states[B] = "active"
    run.step(run.nodes[B], Tick())
    run.step(run.nodes[B], welcome(B))
    run.look([SYNCING, *OTHERS])
    finish(run)


def test_a_load_that_runs_when_a_sync_ends_is_not_overtaken_by_a_round() -> None:
    run = alone(SGD(0.5, momentum=0.5))
    run.create("w", ONE)
    both_push(run, 1)
    leader = run.nodes[A]
    leader.holds_jobs = True
    run.say(0, StoreState(70, "w", 0, 1, (("slot/momentum", "float32"),)), ONE.tobytes())
    assert [type(job) for job in leader.jobs] == [Load]
    run.look([SYNCING, *OTHERS])
    both_push(run, 2)
    run.look([ALONE, *OTHERS])
    assert [type(job) for job in leader.jobs] == [Load]
    leader.holds_jobs = False
    run.finish(leader)
    assert run.value(A).tolist() == [0 - 0.5 * (0.5 + 2), 0 - 0.5 * (1 + 4)]


def test_an_export_that_fails_ends_the_sync_with_a_line_and_the_job_goes_on() -> None:
    run = alone()
    run.create("w", ONE)
    leader = run.nodes[A]
    leader.holds_jobs = True
    run.look([SYNCING, *OTHERS])
    (export,) = leader.jobs
    assert isinstance(export, Export)
    leader.jobs.clear()
    leader.holds_jobs = False
    run.step(leader, JobDone(export.job, None, NotAllowed("broken")))
    assert any("server 1 cannot become the backup of partition 0" in text for text in leader.errors())
    both_push(run, 1)
    run.settle()
    assert run.pull(0, 1)[0] == 1
    assert synced(run) == []


# ── memory ──

FIVE = np.zeros(1000, np.float32)  # 4000 bytes
ROOM = 1 << 20


def attempts(run: Cluster) -> list[str]:
    return [text for text in run.nodes[A].errors() if "cannot become the backup" in text]


def test_a_backup_without_memory_is_tried_again_less_and_less_often_and_the_job_goes_on() -> None:
    run = alone(memory=(ROOM, 10_000, ROOM))
    for number in range(4):
        run.create(f"k{number}", FIVE)
    run.look([SYNCING, *OTHERS])
    waits = []
    for _ in range(400):
        count = len(attempts(run))
        run.tick(1.0)
        if len(attempts(run)) > count:
            waits.append(run.now)
    pauses = [later - earlier for earlier, later in pairwise(waits)]
    assert 9 <= len(attempts(run)) <= 14, pauses
    assert all(pauses[n] <= pauses[n + 1] + 1 for n in range(len(pauses) - 1)), pauses
    assert 60 <= pauses[-1] <= 62, pauses
    errors = attempts(run)
    assert "server 1" in errors[0]
    assert "raise memory_limit_bytes; it is tried again in 1 s" in errors[0]
    assert "; it is tried again in 60 s" in errors[-1]
    assert synced(run) == []
    failures: Any = run.nodes[A].machine.explain(0.0)["not_backed_up"]
    (entry,) = failures
    assert (entry["partition"], entry["server"]) == (0, "server 1")
    assert "raise memory_limit_bytes" in entry["why"]
    assert 0 <= entry["again_s"] <= 60
    both_push(run, 1, FIVE, "k0")
    run.settle()
    assert run.pull(0, 1, "k0")[0] == 1
    assert run.create("more", ONE)[-1:] == [Done(run._request)]
    assert not any(isinstance(wire.message, Install | Hold | HoldPublished) for wire in run.wires)


def test_a_backup_that_has_memory_again_is_sent_everything() -> None:
    run = alone(SGD(0.5, momentum=0.5), memory=(ROOM, 50_000, ROOM))
    for number in range(4):
        run.create(f"k{number}", FIVE)
    both_push(run, 1, FIVE, "k0")
    run.look([SYNCING, *OTHERS])
    for _ in range(10):
        run.tick(1.0)
        run.settle()
    assert attempts(run)
    for rank in (0, 1):
        run.say(rank, Delete(run.request(), (KeyId("k2", 0), KeyId("k3", 0))))
    both_push(run, 1, FIVE, "k1")
    for _ in range(30):
        run.tick(2.0)
        run.settle()
    finish(run)
    assert run.nodes[A].machine.explain(0.0)["not_backed_up"] == []


def test_a_copy_that_was_none_again_and_again_is_made_less_and_less_often() -> None:
    run = Cluster([HELD, *OTHERS])
    run.create("w", ONE)
    begun = []
    for clock in range(1, 6):
        run.nodes[B].held().table.remove("w")
        both_push(run, clock)
        assert "cannot hold partition 0" in run.nodes[A].errors()[-1]
        run.look([ALONE, *OTHERS])
        start = run.now
        run.look([SYNCING, *OTHERS])
        while not synced(run):
            run.tick(0.5)
            run.settle()
        begun.append(run.now - start)
        run.look([HELD, *OTHERS])
        run.nodes[A].told.clear()
    assert begun[0] < 3, begun
    assert begun[-1] > 10, begun


def test_a_key_beyond_the_memory_of_the_leader_is_refused_and_says_what_to_do() -> None:
    run = Cluster([HELD, *OTHERS], memory=(20_000, ROOM, ROOM))
    said = run.create("w", FIVE, publish=False)
    assert isinstance(said[-1], Refused)
    assert said[-1].error is ErrorCode.NOT_ALLOWED
    assert "would take server 0 to" in said[-1].text
    assert "add servers, or raise memory_limit_bytes" in said[-1].text
    assert run.nodes[B].held().table.slices == {}


def test_a_key_beyond_the_memory_of_the_backup_is_refused_and_says_what_to_do() -> None:
    """5 copies of what it holds for others: 20 000 bytes for 4000."""
    run = Cluster([HELD, *OTHERS], memory=(ROOM, 39_999, ROOM))
    assert run.create("w", FIVE)[-1:] == [Done(run._request)]
    said = run.create("v", FIVE, publish=False)
    assert isinstance(said[-1], Refused)
    assert said[-1].error is ErrorCode.NOT_ALLOWED
    assert "server 1 has no memory to hold key 'v': raise memory_limit_bytes" in said[-1].text
    assert said[-1].places == (0,)
    both_push(run, 1, FIVE)
    assert run.pull(0, 1)[0] == 1
    assert run.create("small", ONE[:0])[-1:] == [Done(run._request)]
    run.settle()
    assert sorted(run.nodes[B].held().table.slices) == [("small", 0), ("w", 0)]


def test_memory_of_keys_that_are_gone_is_used_again_at_the_backup() -> None:
    run = Cluster([HELD, *OTHERS], memory=(ROOM, 39_999, ROOM))
    for creation in range(4):
        assert run.create("w", FIVE, creation=creation)[-1:] == [Done(run._request)]
        for rank in (0, 1):
            run.say(rank, Delete(run.request(), (KeyId("w", creation),)))
    assert run.nodes[B].held().table.bytes_led == 0


def test_a_state_is_read_while_its_slice_rests() -> None:
    run = alone(SGD(0.5, momentum=0.5))
    run.create("w", ONE)
    both_push(run, 1)
    run.auto = False
    run.look([SYNCING, *OTHERS])
    first = len(run.answers)
    run.say(0, FetchState(80, "w", 0))
    run.auto = True
    run.settle()
    assert [message.request for message in run.told_since(first)] == [80]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_only_staged_when_a_slice_is_sent_is_sent_again_and_counts_once(mode: str) -> None:
    """In async mode the second push of worker 0 is too far ahead of worker 1."""
    run = alone(SGD(0.5), mode=mode, staleness=0 if mode == "async" else -1)
    run.create("w", ONE)
    number = 2 if mode == "async" else 1
    for clock in range(1, number + 1):
        run.push(0, clock, ONE, request=500 + clock)
    assert not run.nodes[A].table.slices["w", 0].log.is_idle
    run.look([SYNCING, *OTHERS])
    run.look([HELD, *OTHERS])
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    for clock in range(1, number + 1):
        run.push(0, clock, ONE, request=500 + clock, at=B)
    run.push(1, 1, ONE, at=B)
    assert run.value(B).tolist() == [0, 0]


def test_loops_over_shared_steps_are_known_to_a_synced_server() -> None:
    run = alone(mode="async")
    assert [message.step for message in run.say(0, TakeStep(70, 0, 3, NO_STEP))] == [0]
    run.look([SYNCING, *OTHERS])
    finish(run)
    assert [message.step for message in run.say(1, TakeStep(71, 0, 3, NO_STEP), at=B)] == [1]
