"""A store whose worker joins when the job is under way, in the thread of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvd
from kvd.errors import NodeLost, NotAllowed, NotResumed
from kvd.optimizer import SGD
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import ones


def test_a_newcomer_finds_what_the_others_have_left_and_takes_part_when_it_says_so() -> None:
    with LocalCluster(1, 2, max_workers=3, merge="mean") as cluster:
        first = cluster.store(node_id="first")
        assert (first.rank, first.num_workers, first.ranks) == (0, 1, (0,))
        first.set_optimizer(SGD(1.0))
        first.init("w", np.zeros(4, np.float32))
        first.broadcast("fixed", ones())
        first.barrier()
        first.pushpull("w", -ones())

        late = cluster.store(node_id="late")
        assert (late.rank, late.ranks, late.restarted) == (1, (0,), False)
        with pytest.raises(NotAllowed, match="learning_rate"):
            late.set_optimizer(SGD(2.0))
        late.set_optimizer(SGD(1.0))
        late.init("w", np.zeros(4, np.float32))
        assert late.broadcast("fixed", np.zeros(4, np.float32)).tolist() == [1] * 4
        late.barrier()
        assert late.pull("w").tolist() == [1] * 4
        with pytest.raises(NotResumed, match="came when the job was under way"):
            late.push("w", ones())
        first.pushpull("w", -ones())  # waits for nobody
        late.resume()
        wait_until(lambda: first.ranks == (0, 1), "worker 0 knows that worker 1 takes part")
        handle = late.push("w", -3 * ones())
        first.pushpull("w", -ones())
        handle.wait()
        assert (handle.counted, late.num_workers) == (True, 2)
        assert late.pull("w").tolist() == [2 + (1 + 3) / 2] * 4

        for _ in late.steps(1):
            with pytest.raises(NotAllowed, match="broadcast it before the loop"):
                late.broadcast("fixed", ones())
            break
        first.set_barrier_before_exit(False)
        first.close()
        wait_until(lambda: late.ranks == (1,), "worker 0 has left")
        late.pushpull("w", -ones())
        assert late.pull("w").tolist() == [5] * 4
        with pytest.raises(NodeLost, match="worker 0, whose values they are, has left"):
            late.broadcast("fixed", ones())


def test_a_newcomer_does_not_skip_steps_that_only_the_others_know() -> None:
    """No optimizer is set on the servers: what the steps have changed is in the memory of the first worker."""

    def make(kv: kvd.KVStore, total: int) -> Iterator[int]:
        for step in kv.steps(total):
            kv.pushpull("w", ones())
            yield step

    with LocalCluster(1, 2, max_workers=2, merge="mean") as cluster:
        first = cluster.store(node_id="first")
        first.init("w", np.zeros(4, np.float32))
        first_makes = make(first, 1000)
        assert [next(first_makes) for _ in range(3)] == [0, 1, 2]
        late = cluster.store(node_id="late")
        late.init("w", np.zeros(4, np.float32))
        with pytest.raises(NotResumed, match=r"this worker joined while the job was running, and kv.steps skips"):
            next(make(late, 1000))
        assert [next(first_makes) for _ in range(3)] == [3, 4, 5]  # without it
        late.resume()


def test_one_process_is_alone() -> None:
    with kvd.create("local") as kv:
        assert (kv.ranks, kv.num_workers) == ((0,), 1)
