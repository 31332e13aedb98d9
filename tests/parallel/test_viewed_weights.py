"""A group on CPUs takes its weights from where they arrived: within a host, from the memory of the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.parallel import DataBatch, Sequential
from kvd.parallel.models.numpy.layers import Dense, Tanh
from kvd.parallel.models.numpy.losses import SoftmaxCrossEntropy
from kvd.testing.cluster import LocalCluster
from kvd.transport.memory.remote_segments import reference_to
from tests.parallel.group_harness import Groups, assert_same, weights_of

SIZE, WIDTH, HIDDEN = 8, 5, 4000  # the first weight is large enough for shared memory
NETWORK = Sequential(Dense(HIDDEN), Tanh(), Dense(3), SoftmaxCrossEntropy())
PARAMS = NETWORK.initialize((SIZE, WIDTH), seed=2)
RULE = kvd.optimizer.SGD(0.2, momentum=0.9)
GENERATOR = np.random.default_rng(3)
BATCHES = [
    DataBatch([GENERATOR.normal(size=(SIZE, WIDTH)).astype(np.float32)], [GENERATOR.integers(0, 3, SIZE)])
    for _ in range(4)
]
group_of = Groups(NETWORK, (WIDTH,), PARAMS, devices=1, size=SIZE)


def slots_of(group: Any) -> dict[str, Any]:
    slots: dict[str, Any] = group.pipeline._slots
    return slots


def test_weights_are_read_in_the_memory_of_the_server_and_given_back() -> None:
    with LocalCluster(1, 1, path="shm") as cluster:
        group = group_of(devices=2)
        group.bind_to(cluster.store(), optimizer=RULE)
        slot = slots_of(group)["dense0_weight"]
        before = slot.weights.copy()
        for batch in BATCHES:
            group.forward_backward(batch)
            slot.wait()
            assert reference_to(slot.viewed.base.base) is not None
            taken = slot.viewed.copy()
            (own, other) = (arrays for arrays in group.param_arrays[0])
            assert not np.array_equal(own, taken)  # until the next forward
            np.testing.assert_array_equal(weights_of(group)[0], taken)
            assert slot.viewed is None
            assert own.flags.writeable
            assert other.flags.writeable
        assert not np.array_equal(before, taken)
        np.testing.assert_array_equal(slot.weights, before)  # nothing was copied there


@pytest.mark.parametrize("settings", [{"path": "tcp"}, {"slice_bytes": 4096}], ids=["socket", "slices"])
def test_the_weights_are_the_same_where_they_cannot_be(settings: dict[str, Any]) -> None:
    results = []
    for choice in ({"path": "shm"}, settings):
        with LocalCluster(1, 1, **choice) as cluster:
            group = group_of()
            group.bind_to(cluster.store(), optimizer=RULE)
            for batch in BATCHES:
                group.forward_backward(batch)
            results.append(weights_of(group))
            assert slots_of(group)["dense0_weight"].is_viewed == ("slice_bytes" not in choice)
    assert_same(*results)
