"""A server that could not become a backup, or was none, is tried again, less and less often."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kvd.optimizer import SGD
from kvd.protocol.messages import Delete, Done, Hold, HoldPublished, Install, KeyId
from tests.core.replica_harness import A, B, Cluster
from tests.core.test_promotion import OTHERS
from tests.core.test_records import ALONE, HELD, ONE
from tests.core.test_syncing import FIVE, ROOM, SYNCING, alone, both_push, finish, synced


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
