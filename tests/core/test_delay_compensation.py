"""Delay compensation: the server keeps what each worker has pulled, and gives it to the update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.core.machine import Apply, ScatterList, Span
from kvd.core.server.memory_use import COPIES
from kvd.optimizer import DCASGD, SGD, Optimizer, to_wire
from kvd.protocol.messages import NO_RANK, Attach, SetOptimizer
from kvd.protocol.specs import KeySpec
from tests.core.fakes import cluster, member, of, read
from tests.core.replica_harness import A, B, Cluster
from tests.core.server_harness import Harness, refusal
from tests.core.test_promotion import OTHERS
from tests.core.test_records import HELD

RULE = DCASGD(0.5)
SPEC = KeySpec("float32", (1,), 4096)
FIRST, PUSHED = b"\0\0\0\1", b"\0\0\0\2"


def started(*keys: str, optimizer: Optimizer = RULE, **settings: Any) -> Harness:
    harness = Harness(cluster(2, **{"mode": "async", **settings}), memory=1 << 24)  # too little to ask for more
    for key in keys or ("w",):
        harness.init(key, FIRST, SPEC)
    use(harness, optimizer)
    return harness


def use(harness: Harness, optimizer: Optimizer) -> None:
    for rank in (0, 1):
        harness.say(rank, SetOptimizer(harness.request(), to_wire(optimizer)))


def given(harness: Harness) -> Any:
    """What the latest update was told of the worker's version."""
    return harness.applied[-1].pulled


def bytes_of(pulled: Any, position: int) -> bytes | None:
    """The bytes of one slice of what was kept."""
    if isinstance(pulled, ScatterList):
        pulled = pulled.spans[position]
    elif pulled is not None:
        pulled = Span(pulled, 8 * position, 4)
    return None if pulled is None else bytes(read(pulled))


def test_an_update_gets_the_version_that_its_worker_has_pulled() -> None:
    harness = started()
    harness.pull(0, 0)
    harness.push(1, 1, PUSHED)
    assert given(harness) is None  # worker 1 has pulled nothing
    harness.push(0, 1, PUSHED, pull=True)
    assert given(harness) == FIRST
    assert harness.applied[-1].current == PUSHED
    harness.push(0, 2, PUSHED)
    assert given(harness) == harness.applied[-1].current  # it has pulled what its push made


def test_other_optimizers_and_other_modes_keep_nothing() -> None:
    for harness in (started(optimizer=SGD(0.5)), started(mode="sync")):
        harness.pull(0, 0)
        for rank in (0, 1):
            harness.push(rank, 1, PUSHED, pull=True)
        harness.push(0, 2, PUSHED)
        harness.push(1, 2, PUSHED)
        assert [apply.pulled for apply in harness.applied] == [None] * len(harness.applied)
        assert harness.machine.table.slices["w", 0].log.progress_of(0).kept is None


def test_another_optimizer_forgets_what_was_kept() -> None:
    harness = started()
    harness.pull(0, 0)
    use(harness, SGD(0.5))
    assert harness.machine.table.slices["w", 0].log.progress_of(0).kept is None
    use(harness, RULE)
    harness.push(0, 1, PUSHED)
    assert given(harness) is None


def test_a_successor_has_pulled_nothing() -> None:
    harness = started()
    harness.pull(0, 0)
    harness.look(member("worker", 0, life=1))
    harness.say(0, Attach(1, 0), life=1)
    harness.push(0, 1, PUSHED, life=1)
    assert given(harness) is None


def test_a_broadcast_is_not_compensated() -> None:
    harness = started()
    harness.pull(0, 0)
    harness.push(0, 1, PUSHED, how=1)
    assert given(harness) is None


def test_slices_keep_it_when_they_are_fused_and_parted() -> None:
    harness = started("a", "b")
    harness.declare(0, 1, "a", "b")
    harness.pull_all(0, [("a", 0, 0), ("b", 0, 0)])
    harness.push_batch(0, 1, PUSHED, PUSHED)
    assert harness.groups == [["a", "b"]]
    assert [bytes(memoryview(span.buffer)[span.offset :][: span.nbytes]) for span in given(harness).spans] == [
        FIRST
    ] * 2
    harness.pull_batch(0, 1)
    harness.push(0, 2, PUSHED, key="b")
    assert harness.groups == [["a"], ["b"]]
    (span,) = given(harness).spans
    assert bytes(memoryview(span.buffer)[span.offset :][: span.nbytes]) == PUSHED


def test_a_pull_of_one_slice_of_a_group_says_nothing_of_the_others() -> None:
    harness = started("a", "b")
    for rank in (0, 1):
        harness.declare(rank, 1, "a", "b")
    harness.push_batch(0, 1, PUSHED, PUSHED, pull=True)
    assert harness.groups == [["a", "b"]]
    older = harness.value("b")
    harness.push_batch(1, 1, FIRST, FIRST)
    newer = harness.value("a")
    assert newer != older
    harness.pull(0, 1, key="a")
    harness.push_batch(0, 2, PUSHED, PUSHED)
    pulled = {
        extent.key: bytes_of(apply.pulled, at) for apply in harness.applied for at, extent in enumerate(apply.layout)
    }
    assert pulled == {"a": newer, "b": older}


@pytest.mark.parametrize(("mode", "more"), [("async", 2), ("sync", 0)])
def test_what_is_kept_counts_as_memory(mode: str, more: int) -> None:
    harness = started(mode=mode)
    copies = COPIES + 2 * harness.settings.rounds_ahead
    granted = harness.memory._granted_bytes
    harness.init("v", FIRST, SPEC)
    assert list(granted.values()) == [8 * (copies + more)]


def test_it_is_refused_where_there_is_no_memory_for_it() -> None:
    harness = Harness(cluster(2, mode="async"), memory=4 * (COPIES + 4) + 1)
    harness.init("w", FIRST, SPEC)
    refused = refusal(harness.say(0, SetOptimizer(50, to_wire(RULE))))
    assert "DCASGD keeps what each worker has pulled" in refused.text
    assert harness.machine._control.optimizer is None
    harness.say(0, SetOptimizer(51, to_wire(SGD(0.5))))
    assert harness.machine._control.optimizer == SGD(0.5)


def test_the_backup_ends_with_the_same_bits_and_compensates_for_nobody() -> None:
    """The record carries the compensated gradient. Who leads after a failover does not know what the workers have."""
    run = Cluster([HELD, *OTHERS], mode="async")
    for key in ("w", "v"):
        run.create(key, np.array([1, -2, 3], np.float32))
    for rank in (0, 1):
        run.say(rank, SetOptimizer(run.request(), to_wire(DCASGD(0.5, momentum=0.5, clip_gradient=2.0))))
        run.declare(rank, "w", "v")
    random = np.random.default_rng(1)
    for clock in range(1, 5):
        for rank in (0, 1):
            values = random.standard_normal((2, 3)).astype(np.float32)
            run.push_batch(rank, clock, *values, pull=rank == 0)
        run.settle()
        assert run.picture(A) == run.picture(B)
    leader, backup = ([apply.pulled for apply in of(Apply, run.nodes[at].applied)] for at in (A, B))
    assert sum(pulled is not None for pulled in leader) == 3
    assert backup
    assert set(backup) == {None}
    before = run.picture(A)
    run.kill(A)
    run.look([(B, NO_RANK, NO_RANK), *OTHERS])
    assert run.picture(B) == before
    run.push(0, 5, np.ones(3, np.float32), at=B)
    assert of(Apply, run.nodes[B].applied)[-1].pulled is None


def test_a_leader_that_was_replaced_forgets_what_the_workers_had() -> None:
    """They may have pulled from the other one by the time it leads again."""
    harness = started()
    harness.pull(0, 0)
    log = harness.machine.table.slices["w", 0].log
    assert (log.progress_of(0).pulled, log.progress_of(0).kept) == (0, FIRST)
    log.drop_staged()
    assert (log.progress_of(0).pulled, log.progress_of(0).kept) == (-1, None)
