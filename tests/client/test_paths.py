"""Results are the same bits whether messages travel in shared memory, over Unix sockets or over TCP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
from kvd.core.machine import PeerKind
from kvd.protocol.messages import PathKind
from kvd.testing.cluster import PATHS, LocalCluster, engine_of
from kvd.transport.links.frames import INLINE_BELOW_BYTES

FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
INT64 = np.dtype(np.int64)
SLICE_BYTES = 128 << 10


def shapes_of(dtype: np.dtype[Any]) -> list[tuple[int, ...]]:
    """Nothing, one, both sides of where payloads go into shared memory, and more slices than one."""
    edge = INLINE_BELOW_BYTES // dtype.itemsize
    return [(0,), (), (1,), (edge - 1,), (edge,), (edge + 1,), (3, SLICE_BYTES // dtype.itemsize)]


class Training:
    """What one worker does, and the digest of everything that it saw.

    Args:
        bound: whether it keeps its gradients and weights in the arrays of `kv.bind`.
        rounds: how many steps of each kind.
    """

    def __init__(self, kv: kvd.KVStore, *, bound: bool, rounds: int) -> None:
        self._kv = kv
        self._bound = bound
        self._rounds = rounds
        self._seen = hashlib.sha256()
        self._draws = 0

    def digest(self) -> str:
        groups = [[(f"{dtype} {shape}", dtype, shape) for shape in shapes_of(dtype)] for dtype in [*FLOATS, INT64]]
        floats = [entry for group in groups[:-1] for entry in group]
        for entries, optimizer in [
            (floats + groups[-1], None),
            (floats, kvd.optimizer.SGD(0.05, momentum=0.9)),
            (floats, kvd.optimizer.Adam(0.01)),
        ]:
            self._phase(f"{optimizer}", entries, optimizer)
        return self._seen.hexdigest()

    def _phase(self, name: str, entries: list[tuple[str, Any, Any]], optimizer: Any) -> None:
        """Keys of their own, and every kind of step, with this optimizer."""
        kv = self._kv
        kv.set_optimizer(optimizer)
        kv.barrier(f"set {name}")
        keys = [f"{name} {key}" for key, _, _ in entries]
        kv.init(keys, [np.zeros(shape, dtype) for _, dtype, shape in entries])
        if self._bound:
            gradients, weights = kv.bind(keys)
        else:
            gradients, weights = ([np.empty(shape, dtype) for _, dtype, shape in entries] for _ in range(2))
        for _ in self._draw(gradients):
            kv.pushpull(keys, gradients, weights)
            self._look_at(weights)
        for _ in self._draw(gradients):
            push = kv.push(keys, gradients)
            kv.pull(keys, weights)
            push.wait()
            self._look_at(weights)
        for _ in self._draw(gradients):
            for handle in [kv.pushpull_async(*each) for each in zip(keys, gradients, weights, strict=True)]:
                handle.wait()
            self._look_at(weights)
        for _ in self._draw(weights):  # each worker has other values, and rank 0's count
            kv.broadcast(keys, weights)
            self._look_at(weights)

    def _draw(self, arrays: list[Any]) -> Iterator[None]:
        """Fills the arrays with this worker's own numbers, once per round."""
        for _ in range(self._rounds):
            self._draws += 1
            rng = np.random.default_rng([self._draws, self._kv.rank])
            for array in arrays:
                array[...] = (rng.standard_normal(array.shape, np.float32) * 100).astype(array.dtype)
            yield

    def _look_at(self, arrays: list[Any]) -> None:
        for array in arrays:
            self._seen.update(array.tobytes())


def digests_of(workers: int, servers: int, *, bound: bool, rounds: int = 1, **how: Any) -> set[str]:
    """What the workers of a cluster saw."""
    with LocalCluster(workers, servers, slice_bytes=SLICE_BYTES, **how) as cluster:

        def program(kv: kvd.KVStore) -> str:
            digest = Training(kv, bound=bound, rounds=rounds).digest()
            kinds = {path.kind for peer, path in paths_of(kv).items() if peer.kind is PeerKind.SERVER}
            over_links = PathKind.PLAIN_TCP if how.get("insecure") else PathKind.SEALED_TCP
            over_sockets = over_links if how.get("tcp_links") == "always" else PathKind.ZMQ
            assert kinds == {PathKind.SHARED_MEMORY if cluster.path == "shm" else over_sockets}
            return digest

        return set(cluster.run(program))


def paths_of(kv: kvd.KVStore) -> dict[Any, Any]:
    return dict(engine_of(kv).transport.paths())


@pytest.mark.parametrize(("workers", "servers", "bound"), [(2, 1, True), (3, 2, False)])
def test_a_training_has_the_same_bits_on_every_path(workers: int, servers: int, bound: bool) -> None:
    digests = {path: digests_of(workers, servers, bound=bound, path=path) for path in PATHS}
    assert len(digests["shm"]) == 1, "the workers disagree"
    assert digests == dict.fromkeys(PATHS, digests["shm"])
    for insecure in (False, True):
        over_links = digests_of(workers, servers, bound=bound, path="tcp", tcp_links="always", insecure=insecure)
        assert over_links == digests["shm"]


@pytest.mark.soak
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_training_has_the_same_bits_in_processes_bound_or_not(workers: int, servers: int) -> None:
    """Nor does it matter how many servers there are."""
    expected = digests_of(workers, 1, bound=False, rounds=3, path="tcp")
    assert len(expected) == 1, "the workers disagree"
    digests = {
        (path, bound): digests_of(workers, servers, bound=bound, rounds=3, path=path, processes=True)
        for path in PATHS
        for bound in (False, True)
    }
    assert digests == dict.fromkeys(digests, expected)
