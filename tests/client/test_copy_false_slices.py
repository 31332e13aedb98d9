"""`copy=False` for values of several slices: one array over all of them, where they came in one message."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.worker.message_plans import LEAST_MESSAGES, MOST_SLICES
from kvd.testing.cluster import LocalCluster
from tests.client.harness import init_all
from tests.client.test_copy_false import in_servers_memory, is_held, leases_of, let_go

SLICE = 64 << 10
ELEMENTS = SLICE // 4  # float32, of a slice
SHAPE = (3, ELEMENTS + 5)  # of more than three slices
MANY = LEAST_MESSAGES * MOST_SLICES // 3  # values of that shape: enough for messages of several slices


def names_and_values(add: float = 0.0, shape: tuple[int, ...] = SHAPE) -> tuple[list[str], list[Any]]:
    """Enough of them that a list call takes large messages."""
    names = [f"layer {number}" for number in range(MANY)]
    return names, [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + add + n for n in range(MANY)]


def test_each_value_lies_in_one_piece_in_the_memory_of_its_server() -> None:
    names, values = names_and_values()
    with LocalCluster(1, 1, path="shm", slice_bytes=SLICE) as cluster:
        kv = cluster.store()
        kv.init(names, [np.zeros(SHAPE, np.float32)] * MANY)
        for step in range(5):
            wanted = [value + step for value in values]
            pushed: Any = kv.pushpull(names, wanted, copy=False)
            again: Any = kv.pull(names, copy=False)
            for array, same, value in zip(pushed, again, wanted, strict=True):
                assert array.tobytes() == same.tobytes() == value.tobytes()
                assert in_servers_memory(array)
                assert not array.flags.writeable
                assert array.__array_interface__["data"] == same.__array_interface__["data"]
        assert is_held(kv, names[0]) == 1
        del pushed, again, array, same
        let_go(kv, cluster)


def test_one_value_by_itself_is_pipelined_and_copied() -> None:
    with LocalCluster(1, 1, path="shm", slice_bytes=SLICE) as cluster:
        kv = cluster.store()
        kv.init("w", np.zeros(SHAPE, np.float32))
        array = kv.pushpull("w", np.ones(SHAPE, np.float32), copy=False)
        assert (array == 1).all()
        assert not in_servers_memory(array)
        let_go(kv, cluster)


def test_several_servers_have_parts_of_a_value_each_which_are_copied() -> None:
    names, values = names_and_values()
    with LocalCluster(1, 2, path="shm", slice_bytes=SLICE) as cluster:
        kv = cluster.store()
        kv.init(names, [np.zeros(SHAPE, np.float32)] * MANY)
        for _ in range(3):
            for array, value in zip(kv.pushpull(names, values, copy=False), values, strict=True):
                assert array.tobytes() == value.tobytes()
                assert not array.flags.writeable


def test_hoarded_values_become_copies_and_earlier_ones_stay(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(1, 1, path="shm", slice_bytes=SLICE) as cluster:
        kv = cluster.store()
        names, _ = names_and_values()
        kv.init(names, [np.zeros(SHAPE, np.float32)] * MANY)
        with caplog.at_level(logging.WARNING, "kvd"):
            hoard: list[Any] = [kv.pushpull(names, names_and_values(step)[1], copy=False) for step in range(6)]
        assert [in_servers_memory(arrays[0]) for arrays in hoard] == [True] * 2 + [False] * 4
        for step, arrays in enumerate(hoard):
            for array, value in zip(arrays, names_and_values(step)[1], strict=True):
                assert array.tobytes() == value.tobytes()
        (text,) = [record.getMessage() for record in caplog.records]
        assert "keeps arrays of 2 versions" in text
        assert leases_of(cluster) <= 4 * MANY
        del hoard, arrays, array
        let_go(kv, cluster)


def test_values_that_are_kept_stay_when_their_server_dies(tmp_path: Path) -> None:
    names, values = names_and_values()
    with LocalCluster(1, 2, path="shm", processes=True, slice_bytes=SLICE, replicas=2) as cluster:
        kv = cluster.store()
        kv.init(names, [np.zeros(SHAPE, np.float32)] * MANY)
        kept: Sequence[Any] = ()
        for _ in range(3):
            kept = kv.pushpull(names, values, copy=False)
        cluster.kill_server(0)
        for step in range(1, 4):
            later: Any = kv.pushpull(names, [value + step for value in values], copy=False)
            for array, newest, value in zip(kept, later, values, strict=True):
                assert array.tobytes() == value.tobytes()
                assert newest.tobytes() == (value + step).tobytes()


FORK = """
import os, numpy as np, kvd
kv = kvd.create("dist_sync")
names = [str(number) for number in range(16)]
ones = [np.ones(50_000, np.float32) for _ in names]
kv.init(names, ones)
for _ in range(3):
    kept = kv.pushpull(names, ones, copy=False)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)  # until the parent has made its steps
    os._exit(0 if all((array == 1).all() for array in kept) else 3)
os.close(reading)
del kept
for value in range(2, 8):
    for array in kv.pushpull(names, [one * value for one in ones], copy=False):
        assert (array == value).all()
os.close(writing)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
kv.close()
print("fine")
"""


def test_a_forked_child_keeps_the_values_of_its_parent() -> None:
    with LocalCluster(1, 1, path="shm", slice_bytes=SLICE) as cluster:
        output, _ = cluster.script(FORK, 0).communicate(timeout=60)
        assert output.decode().splitlines()[-1] == "fine"


@settings(max_examples=8, deadline=None)
@given(
    servers=st.integers(1, 3),
    slice_kib=st.sampled_from([4, 16, 64]),
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=40),
    dtype=st.sampled_from(["float32", "float64", "uint8", "float16"]),
)
def test_the_bits_are_those_of_copies(servers: int, slice_kib: int, sizes: list[int], dtype: str) -> None:
    names = [str(number) for number in range(len(sizes))]
    rng = np.random.default_rng(len(sizes))
    with LocalCluster(2, servers, path="shm", slice_bytes=slice_kib << 10) as cluster:
        one, other = cluster.open_stores()
        init_all((one, other), names, [np.zeros(size, dtype) for size in sizes])
        kept: list[tuple[Any, list[Any]]] = []
        for _ in range(4):
            given = [[rng.integers(0, 9, size).astype(dtype) for size in sizes] for _ in range(2)]
            wanted = [first + second for first, second in zip(*given, strict=True)]
            handle, push = one.pushpull_async(names, given[0], copy=False), other.push(names, given[1])
            own: Any = handle.wait()
            push.wait()
            copies: Any = one.pull(names)
            kept = [*kept[-1:], (own, wanted)]
            for arrays, expected in kept:
                for array, value in zip(arrays, expected, strict=True):
                    assert array.tobytes() == value.tobytes()
            assert [copy.tobytes() for copy in copies] == [array.tobytes() for array in own]
