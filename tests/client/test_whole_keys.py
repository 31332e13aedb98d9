"""Optimizers that take norms of whole values: keys with several slices are refused at once, whichever comes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed
from kvd.optimizer import LAMB, LARS, SGD, SGLD
from kvd.testing.cluster import LocalCluster

SLICE_BYTES = 4 << 10
LARGE = 4001  # floats: four slices, each on one of two servers


def test_a_key_of_several_slices_is_refused_and_what_to_do_is_said() -> None:
    with LocalCluster(1, 2, slice_bytes=SLICE_BYTES) as cluster:
        kv = cluster.store()
        kv.init("large", np.ones(LARGE, np.float32))
        kv.init("count", np.ones(LARGE, np.int32))
        with pytest.raises(
            NotAllowed, match=r"LARS .* key 'large' of 16004 bytes has 4 slices: .*slice_bytes=16064"
        ) as caught:
            kv.set_optimizer(LARS(0.1))
        assert "give the scheduler slice_bytes=16064" in str(caught.value)  # a worker cannot choose it by itself
        kv.set_optimizer(SGD(1.0))  # the one before is not half in use
        kv.push("large", np.full(LARGE, -1, np.float32))
        assert (kv.pull("large") == 2).all()


def test_no_server_uses_what_another_one_refuses() -> None:
    """Four servers, of which two have no slice of the large key."""
    with LocalCluster(1, 4, slice_bytes=SLICE_BYTES) as cluster:
        kv = cluster.store()
        kv.init("large", np.ones(LARGE // 2, np.float32))
        names: list[str | int] = [f"k{number}" for number in range(8)]
        kv.init(names, [np.ones(3, np.float32)] * len(names))
        kv.set_optimizer(SGD(1.0))
        with pytest.raises(NotAllowed, match="LARS"):
            kv.set_optimizer(LARS(0.1))
        kv.push(names, [np.ones(3, np.float32)] * len(names))
        assert [value.tolist() for value in kv.pull(names)] == [[0, 0, 0]] * len(names)


def test_such_a_key_cannot_be_made_later() -> None:
    with LocalCluster(1, 2, slice_bytes=SLICE_BYTES) as cluster:
        kv = cluster.store()
        kv.init("small", np.ones(5, np.float32))
        kv.set_optimizer(LAMB(0.1))
        with pytest.raises(NotAllowed, match=r"LAMB .* key 'large'"):
            kv.init("large", np.ones(LARGE, np.float32))
        kv.set_optimizer(SGD(1.0))
        kv.init("large", np.ones(LARGE, np.float32))


@pytest.mark.parametrize("rule", [LARS(2.0, momentum=0.5, wd=0.1), LAMB(0.1), SGLD(0.01, seed=4)], ids=repr)
def test_a_cluster_takes_the_steps_of_a_local_store(rule: Any) -> None:
    """Small keys, of two dtypes, that the servers update together."""
    names: list[str | int] = ["a", "b", 7, "half"]
    dtypes = [np.float32, np.float32, np.float32, np.float16]

    def program(kv: kvd.KVStore) -> Any:
        kv.init(names, [np.arange(1, 4 + n).astype(dtype) for n, dtype in enumerate(dtypes)])
        kv.set_optimizer(rule)
        for step in range(5):
            values = [np.arange(3 + n).astype(dtype) - step for n, dtype in enumerate(dtypes)]
            kv.push(names, values)
            pulled = kv.pull(names)
        return [value.tolist() for value in pulled]

    with kvd.create("local") as local:
        expected = program(local)
    with LocalCluster(1, 2) as cluster:
        assert cluster.run(program) == [expected]
