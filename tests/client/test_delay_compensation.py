"""DCASGD in a cluster: the gradient of a worker that was slow counts for the weights as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.optimizer import DCASGD, SGD
from kvd.testing.cluster import LocalCluster

RATE, MOMENTUM, LAMBDA = 0.1, 0.5, 0.3
RULE = DCASGD(RATE, momentum=MOMENTUM, compensation=LAMBDA, rescale_grad=0.5, clip_gradient=2.0, wd=0.01)
SHAPES = {"a": (40, 60), "b": (7,), "c": (3, 5)}
NAMES = list(SHAPES)
STEPS = 6


def gradient(name: str, rank: int, step: int) -> Any:
    return np.random.default_rng([len(name), NAMES.index(name), rank, step]).standard_normal(SHAPES[name])


def expected(name: str, order: Sequence[tuple[int, bool]]) -> Any:
    """The formula in float64. `order`: who pushes, and whether it pulls the result."""
    weight, velocity = np.ones(SHAPES[name]), np.zeros(SHAPES[name])
    pulled = {0: weight, 1: weight}
    steps = {0: 0, 1: 0}
    for rank, pulls in order:
        given = gradient(name, rank, steps[rank])
        steps[rank] += 1
        given = given + LAMBDA * 0.5 * given**2 * (weight - pulled[rank])
        given = np.clip(0.5 * given, -2, 2) + 0.01 * weight
        velocity = MOMENTUM * velocity + given
        weight = weight - RATE * velocity
        if pulls:
            pulled[rank] = weight
    return weight


def in_turn(kv: kvd.KVStore, order: Sequence[tuple[int, bool]], push: Any) -> Any:
    """The pushes of both workers, one after the other."""
    kv.init(NAMES, [np.ones(shape) for shape in SHAPES.values()])
    kv.set_optimizer(RULE)
    out = kv.pull(NAMES)
    kv.barrier("begin")
    step = 0
    for turn, (rank, pulls) in enumerate(order):
        if rank == kv.rank:
            push(kv, [gradient(name, rank, step) for name in NAMES], out if pulls else None)
            step += 1
        kv.barrier(f"turn {turn}")
    return kv.pull(NAMES)


def together(kv: kvd.KVStore, gradients: Any, out: Any) -> None:
    """All keys in one call: the servers fuse them."""
    if out is None:
        kv.push(NAMES, gradients).wait()
    else:
        kv.pushpull(NAMES, gradients, out=out)


def mixed(kv: kvd.KVStore, gradients: Any, out: Any) -> None:
    """Now together, now one by one: the servers part what they had fused."""
    if kv.clock(NAMES[0]) != 1:
        together(kv, gradients, out)
        return
    for number, name in enumerate(NAMES):
        if out is None:
            kv.push(name, gradients[number]).wait()
        else:
            kv.pushpull(name, gradients[number], out=out[number])


ORDER = [
    (0, True),
    (0, True),
    (1, True),
    (0, False),
    (0, True),
    (1, False),
    (1, True),
    (0, True),
    (0, False),
    (1, True),
]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("push", [together, mixed])
def test_each_worker_is_compensated_for_what_it_has_not_seen(push: Any, replicas: int) -> None:
    with LocalCluster(2, 2, slice_bytes=8 << 10, replicas=replicas) as cluster:
        for values in cluster.run(lambda kv: in_turn(kv, ORDER, push), "dist_async"):
            for name, value in zip(NAMES, values, strict=True):
                np.testing.assert_allclose(value, expected(name, ORDER), rtol=1e-12)
                plain = [(rank, True) for rank, _ in ORDER]
                assert not np.allclose(value, expected(name, plain)), "the order of pulls would not matter"


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_where_nothing_comes_between_it_is_sgd(kind: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init(["w", "v"], [np.ones(4, np.float32)] * 2)
        for name, rule in (("w", DCASGD(0.1, momentum=0.9)), ("v", SGD(0.1, momentum=0.9))):
            kv.set_optimizer(rule)
            for step in range(3):
                kv.pushpull(name, np.full(4, step + 1.0, np.float32))
        return kv.pull("w").tolist(), kv.pull("v").tolist()

    if kind == "local":
        with kvd.create("local") as kv:
            ours, sgd = program(kv)
    else:
        with LocalCluster(1, 1) as cluster:
            ((ours, sgd),) = cluster.run(program, kind)
    assert ours == sgd


def test_a_server_without_memory_for_it_says_so() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(1 << 20, np.float32))
        with pytest.raises(
            kvd.NotAllowed, match=r"DCASGD keeps what each worker has pulled, .* raise memory_limit_bytes"
        ):
            kv.set_optimizer(DCASGD(0.1))
        kv.set_optimizer(SGD(0.1))
        kv.push("w", np.ones(1 << 20, np.float32)).wait()
        return float(kv.pull("w")[0])

    with LocalCluster(
        1, 1, memory_limit_bytes=22 << 20, credit_bytes=4 << 20
    ) as cluster:  # 5 copies of 4 MiB, but not 6
        assert cluster.run(program, "dist_async") == [pytest.approx(-0.1)]
