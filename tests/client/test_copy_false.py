"""`pull(copy=False)`: read-only arrays over the memory where the value is."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
import kvd.aio
from kvd.client.cluster.held_versions import FEW_KEYS
from kvd.client.facades.blocking import backend_of
from kvd.errors import KeyNotFound, NotAllowed
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import init_all
from tests.client.test_bound import stores

LARGE = (300, 200)  # float32: more than what goes through the socket in any case, less than a slice
SLICES = (900, 700)  # float32: of several slices


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One worker and a server that share memory."""
    with LocalCluster(1, 1, path="shm") as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: LocalCluster) -> kvd.KVStore:
    """Its store, with a key "w" of zeros; each push adds to none: the last one replaces the value."""
    kv = cluster.store()
    kv.init("w", np.zeros(LARGE, np.float32))
    return kv


def in_servers_memory(array: Any) -> bool:
    """Whether the array lies in a map of another process's segment."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as file:
        for line in file:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return "memfd:kvd" in line and line.split()[1].startswith("r--")
    return False


def leases_of(cluster: LocalCluster) -> int:
    """How many payloads of the servers are leased."""
    servers: Any = cluster.servers
    return sum(link.leases for server in servers for link in server._daemon.transport.reader.links)


def is_held(kv: kvd.KVStore, key: str = "w") -> int:
    """How many versions of a key the program keeps in the memory of its server."""
    values: Any = backend_of(kv).values
    return len(values._held._live(key))


def let_go(kv: kvd.KVStore, cluster: LocalCluster, left: int = 0) -> None:
    """Waits until the servers know what is not used any more."""
    gc.collect()
    wait_until(lambda: leases_of(cluster) <= left, "the servers to know what is used no more")


VALUES: dict[str, Any] = {
    "large": np.arange(60_000, dtype=np.float32).reshape(LARGE),
    "slices": np.arange(630_000, dtype=np.float32).reshape(SLICES),
    "small": np.arange(3, dtype=np.int64),
    "scalar": np.array(7.0),
    "empty": np.zeros((0, 4), np.float16),
    "bfloat16": np.arange(60_000).astype(ml_dtypes.bfloat16),
    "odd": np.arange(50_001, dtype=np.uint8),
}


@pytest.mark.parametrize("kind", ["local", "device", "shm", "tcp"])
def test_the_values_are_the_same_on_every_path_and_read_only(kind: str) -> None:
    names = list(VALUES)
    with stores(kind) as kv:
        kv.init(names, list(VALUES.values()))
        calls = (
            lambda: kv.pull(names, copy=False),
            lambda: [kv.pull(name, copy=False) for name in names],
            lambda: kv.pull_async(names, copy=False).wait(),
            lambda: kv.pushpull(names, list(VALUES.values()), copy=False),
            lambda: kv.pushpull_async(names, list(VALUES.values()), copy=False).wait(),
        )
        for call in calls:
            pulled: Any = call()
            for array, value in zip(pulled, VALUES.values(), strict=True):
                assert (array.dtype, array.shape) == (value.dtype, value.shape)
                assert array.tobytes() == value.tobytes()
                assert not array.flags.writeable
                assert array.flags.aligned
                assert array.flags.c_contiguous
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0
            if kind == "shm":
                assert [in_servers_memory(array) for array in pulled[:2]] == [True, False]
        assert kv.pull([], copy=False) == []
        twice = kv.pull(["large", "small", "large"], copy=False)
        assert [array.shape for array in twice] == [LARGE, (3,), LARGE]
        assert twice[2].tobytes() == VALUES["large"].tobytes()


@pytest.mark.parametrize("kind", ["local", "shm"])
def test_what_cannot_be_had_is_refused(kind: str) -> None:
    with stores(kind) as kv:
        kv.init("w", np.zeros(LARGE, np.float32))
        out = np.ones(LARGE, np.float32)
        for call in (
            lambda: kv.pull("w", out=out, copy=False),
            lambda: kv.pull_async("w", out=out, copy=False),
            lambda: kv.pushpull("w", out, out=out, copy=False),
            lambda: kv.pushpull_async("w", out, out=out, copy=False),
        ):
            with pytest.raises(NotAllowed, match="leave out away"):
                call()
        with pytest.raises(NotAllowed, match="copy is True or False, not 'no'"):
            kv.pull("w", copy="no")  # type: ignore[arg-type]
        with pytest.raises(KeyNotFound):
            kv.pull("unknown", copy=False)
        assert out.all()
        assert kv.clock("w") == 0


def test_pushpull_leaves_the_value_as_it_is_and_gives_the_dtype_of_the_key(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(learning_rate=0.5))
    gradient = np.full(LARGE, 2, np.float16)
    weight = kv.pushpull("w", gradient, cast=True, copy=False)
    assert (gradient == 2).all()
    assert weight.dtype == np.float32
    assert (weight == -1).all()
    assert in_servers_memory(weight)


def test_a_version_stays_as_it_is_while_later_rounds_run(kv: kvd.KVStore, cluster: LocalCluster) -> None:
    kept = kv.pushpull("w", np.full(LARGE, 1, np.float32), copy=False)
    view = kept[10:20]
    assert in_servers_memory(view)
    for value in range(2, 30):
        kv.push("w", np.full(LARGE, value, np.float32)).wait()
    assert (kept == 1).all()
    del kept
    newest = kv.pull("w", copy=False)
    for value in range(30, 60):
        kv.push("w", np.full(LARGE, value, np.float32)).wait()
    assert (view == 1).all()
    assert (newest == 29).all()


def test_the_memory_of_a_server_is_used_again_when_the_arrays_are_gone(kv: kvd.KVStore, cluster: LocalCluster) -> None:
    arena: Any = cluster.servers[0]._daemon.transport.arena  # type: ignore[union-attr]
    kept = None
    for value in range(10):
        kept = kv.pushpull("w", np.full(LARGE, value, np.float32), copy=False)
        assert in_servers_memory(kept)
    used = arena.total_bytes
    for value in range(100):
        kept = kv.pushpull("w", np.full(LARGE, value, np.float32), copy=False)
        assert in_servers_memory(kept)
    assert arena.total_bytes == used
    assert is_held(kv) == 1
    del kept
    assert is_held(kv) == 0
    let_go(kv, cluster)


def test_a_program_that_hoards_versions_gets_copies_and_one_warning(
    kv: kvd.KVStore, cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvd"):
        hoard = [kv.pushpull("w", np.full(LARGE, value, np.float32), copy=False) for value in range(8)]
    assert [in_servers_memory(array) for array in hoard] == [True] * 2 + [False] * 6
    assert [float(array[0, 0]) for array in hoard] == list(range(8))
    assert not any(array.flags.writeable for array in hoard)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "keeps arrays of 2 versions of key 'w'" in text
    assert "Let go of the arrays" in text
    del hoard[0]
    assert in_servers_memory(kv.pull("w", copy=False))
    let_go(kv, cluster, left=1)


def test_the_same_version_any_number_of_times_counts_once(kv: kvd.KVStore, cluster: LocalCluster) -> None:
    same = [kv.pull("w", copy=False) for _ in range(20)]
    assert all(in_servers_memory(array) for array in same)
    assert len({array.__array_interface__["data"][0] for array in same}) == 1
    assert is_held(kv) == 1
    let_go(kv, cluster, left=1)
    del same[:19]
    assert in_servers_memory(kv.pushpull("w", np.ones(LARGE, np.float32), copy=False))
    assert not same[0].any()


def test_one_key_of_a_list_does_not_keep_the_values_of_the_others(kv: kvd.KVStore, cluster: LocalCluster) -> None:
    names = [f"layer {number}" for number in range(20)]
    values = [np.full(10_000, number, np.float32) for number in range(20)]
    kv.init(names, values)
    for _ in range(3):
        pulled = kv.pushpull(names, values, copy=False)
    assert all(in_servers_memory(array) for array in pulled)
    assert leases_of(cluster) <= 2
    alone = kv.pull(names[3], copy=False)
    assert (alone == 3).all()
    first = pulled[0]
    del pulled
    assert is_held(kv, names[7]) == 1  # it came in one message with the first
    assert (first == 0).all()


def test_a_large_value_that_came_through_a_socket_is_not_copied() -> None:
    with LocalCluster(1, 1, path="tcp") as cluster:
        kv = cluster.store()
        kv.init("w", np.ones(LARGE, np.float32))
        for _ in range(5):
            array = kv.pushpull("w", np.ones(LARGE, np.float32), copy=False)
            assert array.base is not None
            assert not in_servers_memory(array)
            assert (array == 1).all()


def test_arrays_outlive_their_store_and_its_servers() -> None:
    with LocalCluster(1, 1, path="shm", processes=True) as cluster:
        kv = cluster.store()
        kv.init("w", np.full(LARGE, 5, np.float32))
        killed = kv.pull("w", copy=False)
        assert in_servers_memory(killed)
        cluster.kill_server(0)
        assert (killed == 5).all()
    assert (killed == 5).all()


def test_several_workers_and_servers() -> None:
    with LocalCluster(2, 2, path="shm") as cluster:
        one, other = cluster.open_stores()
        init_all((one, other), "w", np.zeros(LARGE, np.float32))
        kept: Sequence[Any] = ()
        for step in range(1, 6):
            value = np.full(LARGE, step, np.float32)
            handles = [kv.pushpull_async("w", value, copy=False) for kv in (one, other)]
            kept = [handle.wait() for handle in handles]
            assert all((array == 2 * step).all() for array in kept)
            assert all(in_servers_memory(array) for array in kept)
        read = cluster.observer().pull("w")
        assert (read == 10).all()
        assert read.flags.writeable
        for _ in range(3):
            for handle in [kv.push("w", np.zeros(LARGE, np.float32)) for kv in (one, other)]:
                handle.wait()
        assert all((array == 10).all() for array in kept)


def test_in_an_event_loop() -> None:
    with LocalCluster(1, 1, path="shm") as cluster:

        async def program() -> None:
            async with await kvd.aio.create("dist_sync", scheduler=cluster.address) as kv:
                await kv.init("w", np.zeros(LARGE, np.float32))
                value = np.ones(LARGE, np.float32)
                weight = await kv.pushpull("w", value, copy=False)
                same = await kv.pull_async("w", copy=False)
                later = await kv.pushpull_async("w", value * 3, copy=False)
                assert [in_servers_memory(array) for array in (weight, same, later)] == [True] * 3
                assert (weight == 1).all()
                assert (same == 1).all()
                assert (later == 3).all()
                with pytest.raises(NotAllowed, match="leave out away"):
                    await kv.pull("w", out=value, copy=False)

        asyncio.run(program())


def test_keys_of_which_nothing_is_kept_are_forgotten(kv: kvd.KVStore) -> None:
    names = [f"key {number}" for number in range(3 * FEW_KEYS)]
    kv.init(names, [np.zeros(17_000, np.float32)] * len(names))
    kept = kv.pull(names[0], copy=False)
    assert in_servers_memory(kept)
    for name in names:
        kv.pull(name, copy=False)
    values: Any = backend_of(kv).values
    assert len(values._held._held) <= FEW_KEYS + 1
    assert is_held(kv, names[0]) == 1


FORK = """
import os, sys, numpy as np, kvd
from kvd.errors import StoreClosed
from kvd.testing.cluster import wait_until
kv = kvd.create("dist_sync")
kv.init("w", np.zeros((300, 200), np.float32))
kept = kv.pushpull("w", np.ones((300, 200), np.float32), copy=False)
handles = [kv.pull_async("w", copy=copy) for copy in (False, True)]
wait_until(lambda: all(handle.done() for handle in handles), "the pulls end")
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)  # until the parent has made its steps
    for handle in handles:  # their values are the parent's, who lets their memory be used again
        try:
            handle.wait()
        except StoreClosed:
            continue
        sys.exit(4)
    sys.exit(0 if (kept == 1).all() else 3)
os.close(reading)
assert all((handle.wait() == 1).all() for handle in handles)
del kept, handles
for value in range(2, 40):
    newest = kv.pushpull("w", np.full((300, 200), value, np.float32), copy=False)
    assert (newest == value).all()
os.close(writing)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
kv.close()
print("fine")
"""


def test_a_forked_child_keeps_the_values_of_its_parent() -> None:
    with LocalCluster(1, 1, path="shm") as cluster:
        output, _ = cluster.script(FORK, 0).communicate(timeout=30)
        assert output.decode().splitlines()[-1] == "fine"
