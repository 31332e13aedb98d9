"""Compressed pushes while a server dies: each counts once, and what was left over is the same as without the death."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import kvd
from kvd.testing.cluster import LocalCluster

SIZE = 200_000
STEPS = 60
Array = np.ndarray[Any, Any]


def gradient(rank: int, step: int) -> Array:
    """Multiples of 1/64, with which float32 calculates exactly."""
    return np.random.default_rng((rank, step)).integers(-40, 41, SIZE) / 64


def expected() -> Array:
    """What 2bit and SGD with a rate of 1 make of zeros, in float64."""
    weight = np.zeros(SIZE)
    for rank in (0, 1):
        residual = np.zeros(SIZE)
        for step in range(STEPS):
            total = residual + gradient(rank, step)
            sent = np.where(np.abs(total) >= 0.5, np.copysign(0.5, total), 0)
            residual = total - sent
            weight -= sent
    return weight


@pytest.mark.soak
def test_a_server_dies_while_compressed_pushes_are_under_way() -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(SIZE, np.float32))
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        for step in range(STEPS):
            kv.push("w", gradient(kv.rank, step).astype(np.float32))
            time.sleep(0.02)  # time itself: the pace of the steps
            if step == STEPS // 3 and kv.rank == 0:
                cluster.kill_server(0)
        return kv.pull("w")

    with LocalCluster(2, 2, processes=True, replicas=2, slice_bytes="64KiB") as cluster:
        for weight in cluster.run(program):
            np.testing.assert_array_equal(weight, expected())


@pytest.mark.soak
def test_a_server_dies_while_what_it_has_merged_is_pulled_encoded() -> None:
    """Every value is that of a run in which nobody dies, at both workers, so the backup had the same left over."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(SIZE, np.float32))
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        value, digests = np.empty(SIZE, np.float32), []
        for step in range(STEPS):
            kv.pushpull("w", gradient(kv.rank, step).astype(np.float32), out=value)
            digests.append(crc32(value.tobytes()))
            if kv.rank == 0 and step == STEPS // 3 and dies[0]:
                cluster.kill_server(0)
        return digests

    found = []
    for dying in (False, True):
        dies = [dying]
        with LocalCluster(2, 2, processes=True, replicas=2, slice_bytes="64KiB") as cluster:
            found += cluster.run(program)
    assert found[1:] == found[:1] * 3
