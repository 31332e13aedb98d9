"""Tables in a cluster of two servers: what stores of this process make of the same calls, to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

import kvd
from kvd.client.calls.keys import KeyList
from kvd.client.calls.memory_budget import MemoryBudget
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.calls.values import Source
from kvd.client.cluster import row_pulls
from kvd.client.cluster.arguments import Arguments
from kvd.errors import DtypeMismatch, KeyExists, KeyNotFound, KvdError, NotAllowed, RequestTimeout, ShapeMismatch
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import LocalCluster
from tests.client.harness import SLOW_TO_JUDGE, Pair
from tests.client.test_tables import BAD, FLOAT, rows

ROWS, WIDTH = 50, 3
Batch = tuple[Any, Any]
T = TypeVar("T")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "sgd": lambda: kvd.optimizer.SGD(0.5, momentum=0.9, wd=0.01),
    "adagrad": lambda: kvd.optimizer.Adagrad(0.1),
    "row-wise adagrad": lambda: kvd.optimizer.RowWiseAdagrad(0.1),
    "adam": lambda: kvd.optimizer.Adam(0.1),
}


@pytest.fixture(scope="module")
def stores() -> Iterator[Pair]:
    """Two workers of a cluster that adds up. A test deletes the keys that it makes."""
    with LocalCluster(2, 2) as cluster:
        one, other = cluster.open_stores()
        yield one, other


@pytest.fixture(scope="module")
def lone() -> Iterator[kvd.KVStore]:
    """The only worker of an asynchronous cluster."""
    with LocalCluster(1, 2) as cluster:
        yield cluster.open_stores("dist_async")[0]


def both(stores: Pair, program: Callable[[kvd.KVStore], T]) -> list[T]:
    """What both workers return, who run this at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(program, stores))


def table(**more: Any) -> kvd.RowSparse:
    return kvd.RowSparse(shape=(ROWS, WIDTH), initializer=kvd.initializer.Normal(0.5, seed=3), **more)


def batch(seed: int, rank: int, high: int = ROWS) -> Batch:
    """Some row ids, with duplicates; of worker 1, none in every third step."""
    random = np.random.default_rng((seed, rank))
    count = 0 if rank == 1 and seed % 3 == 2 else 40
    return random.integers(0, high, count, np.int64), random.standard_normal((count, WIDTH)).astype(FLOAT)


def summed(ids: Any, values: Any) -> Batch:
    """The rows of one worker, those of the same id added up in their order."""
    distinct, places = np.unique(ids, return_inverse=True)
    total = np.zeros((len(distinct), WIDTH), FLOAT)
    seen = np.zeros(len(distinct), bool)
    for place, value in zip(places, values, strict=True):
        total[place] = total[place] + value if seen[place] else value
        seen[place] = True
    return distinct, total


def trained_here(optimizer: Any, steps: int, high: int = ROWS, description: Any = None) -> Any:
    """All rows after these steps of both workers, in a store of this process: `w` of the steps in turn."""
    with kvd.create("local") as kv:
        kv.init("t", description or table())
        kv.set_optimizer(optimizer)
        for step in range(steps):
            kv.push("t", [kvd.RowSparseArray(*summed(*batch(step, rank, high))) for rank in (0, 1)])
        return kv.row_sparse_pull("t", wanted(high))


def wanted(high: int) -> Any:
    """In any order, and some twice."""
    if high == ROWS:
        return np.random.default_rng(0).permutation(np.repeat(np.arange(ROWS), 2))
    return np.concatenate([batch(step, rank, high)[0] for step in range(4) for rank in (0, 1)])


def clean(stores: Pair, *keys: Any) -> None:
    both(stores, lambda kv: kv.set_optimizer(None))
    both(stores, lambda kv: kv.delete(list(keys)))


# ── the same bits ──


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_workers_train_a_table_as_one_store_does(stores: Pair, name: str) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init("t", table())
        kv.set_optimizer(OPTIMIZERS[name]())
        for step in range(4):
            kv.push("t", kvd.RowSparseArray(*batch(step, kv.rank)))
            kv.row_sparse_pull("t", [step])
        return kv.row_sparse_pull("t", wanted(ROWS)), kv.version("t"), kv.clock("t")

    expected = trained_here(OPTIMIZERS[name](), 4)
    for found, version, clock in both(stores, program):
        assert found.tobytes() == expected.tobytes()
        assert (version, clock) == (4, 4)
    clean(stores, "t")


def test_a_table_without_a_bound(stores: Pair) -> None:
    description = kvd.RowSparse(row_shape=(WIDTH,), initializer=kvd.initializer.Uniform(-1, 1, seed=9))
    high = (1 << 63) - 1

    def program(kv: kvd.KVStore) -> Any:
        kv.init("t", description)
        kv.set_optimizer(kvd.optimizer.Adagrad(0.1))
        for step in range(4):
            kv.push("t", batch(step, kv.rank, high))
        return kv.row_sparse_pull("t", wanted(high))

    expected = trained_here(kvd.optimizer.Adagrad(0.1), 4, high, description)
    assert all(found.tobytes() == expected.tobytes() for found in both(stores, program))
    clean(stores, "t")


@pytest.mark.parametrize("merge", ["mean", "weighted"])
def test_a_table_with_a_merge_of_its_own(stores: Pair, merge: str) -> None:
    """Of samples 1 and 3, whose weighted mean has exact factors."""

    def program(kv: kvd.KVStore) -> Any:
        kv.init("t", kvd.RowSparse(shape=(4, 2)), merge=merge)
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        kv.push("t", ([0, kv.rank + 1, 0], [rows(3, 8.0), rows(3, 16.0)][kv.rank]), samples=[1, 3][kv.rank])
        return kv.row_sparse_pull("t", [0, 1, 2, 3])[:, 0].tolist()

    expected = {"mean": [-24.0, -4.0, -8.0, 0.0], "weighted": [-28.0, -2.0, -12.0, 0.0]}[merge]
    assert both(stores, program) == [expected] * 2
    clean(stores, "t")


def test_an_asynchronous_store_of_one_worker_does_what_a_local_one_does(lone: kvd.KVStore) -> None:
    found = []
    with kvd.create("local") as local:
        for kv in (lone, local):
            kv.init("t", table())
            kv.set_optimizer(kvd.optimizer.Adam(0.1))
            for step in range(4):
                kv.push("t", [batch(step, 0), batch(step, 1)])
            found.append(kv.row_sparse_pull("t", wanted(ROWS)).tobytes())
    lone.set_optimizer(None)
    lone.delete("t")
    assert found[0] == found[1]


# ── the calls ──


def test_a_worker_that_did_not_make_the_table_finds_out_what_it_is(stores: Pair) -> None:
    one, other = stores
    making = one.init_async("t", table())
    making.wait()
    pushed = other.push("t", ([1, 2, 1], np.ones((3, WIDTH), FLOAT)))  # a pair, before it knows the key
    one.push("t", kvd.RowSparseArray([], np.zeros((0, WIDTH), FLOAT)))
    pushed.wait()
    assert other.row_sparse_pull("t", [2, 1]).tolist() == [[1] * WIDTH, [2] * WIDTH]
    both(stores, lambda kv: kv.delete("t"))


def test_tables_and_other_keys_in_one_call_with_out_and_devices(stores: Pair) -> None:
    def program(kv: kvd.KVStore) -> Any:
        kv.init([4, "w", "t"], [kvd.RowSparse(row_shape=(2,)), np.zeros(3, FLOAT), kvd.RowSparse(shape=(10, 2))])
        kv.push(["w", 4, "t"], [np.full(3, 2, FLOAT), ([1 << 62], rows(1, 9)), [([1], rows(1)), ([1, 2], rows(2))]])
        out = [np.zeros((1, 2), FLOAT), np.zeros((2, 4), FLOAT)[:, ::2], np.zeros((0, 2), FLOAT)]
        given = kv.row_sparse_pull([4, "t", 4], [[1 << 62], [2, 1], []], out=out)
        assert all(one is other for one, other in zip(given, out, strict=True))
        with pytest.raises(NotAllowed, match="key 4 is a table"):
            kv.pull(["w", 4])
        return [array.tolist() for array in out], kv.pull("w").tolist()

    assert both(stores, program) == [([[[18, 18]], [[2, 2], [4, 4]], []], [4, 4, 4])] * 2
    clean(stores, 4, "w", "t")


def test_rows_of_another_dtype_with_cast_and_sparse_gradients_of_torch(lone: kvd.KVStore) -> None:
    torch = pytest.importorskip("torch")
    lone.init("t", kvd.RowSparse(shape=(10, 2)))
    lone.set_optimizer(kvd.optimizer.SGD(1.0))
    embedding = torch.nn.Embedding(10, 2, sparse=True)
    embedding(torch.tensor([4, 2, 4])).sum().backward()
    lone.push("t", embedding.weight.grad)
    lone.push("t", ([9], np.ones((1, 2))), cast=True)
    assert lone.row_sparse_pull("t", torch.tensor([4, 2, 9]))[:, 0].tolist() == [-2, -1, -1]
    lone.set_optimizer(None)
    lone.delete("t")


def test_a_list_with_a_table_is_compressed_but_for_the_table(lone: kvd.KVStore) -> None:
    lone.init(["w", "t"], [np.zeros(4096, FLOAT), kvd.RowSparse(shape=(10, 2))])
    lone.set_gradient_compression({"type": "fp16", "min_bytes": 1})
    third = np.float32(1 / 3)
    lone.push(["w", "t"], [np.full(4096, third), ([1], rows(1, float(third)))])
    lone.set_gradient_compression({"type": "none"})
    assert lone.pull("w")[0] == np.float16(third)
    assert lone.row_sparse_pull("t", [1])[0, 0] == third
    lone.delete(["w", "t"])


def test_steps_push_tables_and_a_table_is_made_again_in_another_shape(lone: kvd.KVStore) -> None:
    for width in (2, 5):
        lone.init("t", kvd.RowSparse(row_shape=(width,)))
        lone.set_optimizer(kvd.optimizer.SGD(1.0))
        for step in lone.steps(3):
            lone.push("t", ([step, 9], np.ones((2, width), FLOAT)))
        lone.flush()
        assert lone.row_sparse_pull("t", [0, 9]).tolist() == [[-1] * width, [-3] * width]
        lone.set_optimizer(None)
        lone.delete("t")
        with pytest.raises(KeyNotFound):
            lone.row_sparse_pull("t", [0])


def test_the_asynchronous_facade_finds_out_without_blocking() -> None:
    async def program(cluster: LocalCluster) -> Any:
        settings = {**cluster.settings, "scheduler": cluster.address}
        async with await kvd.aio.create("dist_sync", **settings) as kv:
            await kv.init("t", kvd.RowSparse(shape=(10, 2)))
            await (await kv.push("t", ([3, 3], rows(2))))
            await kv.push_async("t", kvd.RowSparseArray([4], rows(1)))
            one = await kv.row_sparse_pull_async("t", [3])
            return one.tolist(), (await kv.row_sparse_pull("t", [4])).tolist()

    with LocalCluster(1, 1) as cluster:
        assert asyncio.run(program(cluster)) == ([[2, 2]], [[1, 1]])


# ── what is refused ──

LIKE_LOCAL = [entry for entry in BAD if "'w'" not in entry[2] or entry[1] is not KeyExists]


def test_bad_input_is_refused_as_in_a_local_store(
    lone: kvd.KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a list of which one key is live: a cluster makes the others."""
    monkeypatch.chdir(tmp_path)
    lone.init("t", kvd.RowSparse(shape=(10, 2), initializer=kvd.initializer.Constant(1.0)))
    lone.init("w", np.zeros(3, FLOAT))
    lone.set_optimizer(kvd.optimizer.SGD(1.0))
    lone.push("t", ([2], rows(1)))
    for call, kind, text in LIKE_LOCAL:
        with pytest.raises(kind, match=text):
            call(lone)
        assert lone.row_sparse_pull("t", np.arange(10))[:, 0].tolist() == [1, 1, 0, *[1] * 7], text
        assert lone.pull("w").tolist() == [0, 0, 0]
    for optimizer in (kvd.optimizer.LARS(1.0), kvd.optimizer.SGLD(1.0), kvd.optimizer.DCASGD(1.0)):
        with pytest.raises(NotAllowed, match="cannot update single rows of table 't'"):
            lone.set_optimizer(optimizer)
    lone.set_optimizer(None)
    lone.delete(["t", "w"])


OTHERS: list[tuple[Any, type[KvdError], str]] = [
    (kvd.RowSparse(shape=(ROWS + 1, WIDTH)), ShapeMismatch, "50 rows"),
    (kvd.RowSparse(shape=(ROWS, 1)), ShapeMismatch, r"\(1,\)"),
    (table(dtype="float64"), DtypeMismatch, "float64"),
    (kvd.RowSparse(shape=(ROWS, WIDTH)), NotAllowed, "'t' begin as Normal"),
    (table(max_rows=9), NotAllowed, "table 't' keeps these rows: all that were updated; the given one: max_rows=9"),
    (np.zeros((ROWS, WIDTH), FLOAT), NotAllowed, "'t' is a table"),
]


@pytest.mark.parametrize(("value", "kind", "text"), OTHERS)
def test_a_worker_that_wants_another_table_is_told(stores: Pair, value: Any, kind: type[KvdError], text: str) -> None:
    one, other = stores
    one.init("t", table())
    with pytest.raises(kind, match=text):
        other.init("t", value)
    other.init("t", table())
    both(stores, lambda kv: kv.delete("t"))


def test_rows_for_a_server_that_are_too_many_for_a_message_are_refused(
    lone: kvd.KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.init("t", kvd.RowSparse(shape=(10_000, 2)))
    monkeypatch.setattr(row_pulls, "MAX_PAYLOAD_BYTES", 4096)
    many = np.arange(2000)
    with pytest.raises(NotAllowed, match=r"of table 't' this push has .*push the rows in pieces"):
        lone.push("t", (many, rows(2000))).wait()
    with pytest.raises(NotAllowed, match=r"of table 't' this pull has .*pull the rows in pieces"):
        lone.row_sparse_pull("t", many)
    lone.push("t", ([1], rows(1)))
    assert lone.row_sparse_pull("t", [1]).tolist() == [[1, 1]]
    assert lone.clock("t") == 1
    lone.delete("t")


def test_rows_that_are_pushed_count_against_the_memory_of_this_worker() -> None:
    """In one take with the other keys of the call, so that it does not wait for itself."""
    engine: Any = SimpleNamespace(memory=lambda nbytes: np.empty(nbytes, np.uint8))
    bound: Any = SimpleNamespace(source=lambda name, value, slice_bytes: None)
    budget = MemoryBudget(limit_bytes=1 << 20, timeout_s=0.05)
    arguments = Arguments(engine, bound, budget, UnobservedErrors(), 1 << 20)
    pushed = [of_rows(1 << 19)]
    pushed += arguments.sources(KeyList(["w"], True), [np.ones(1 << 17, FLOAT)], copy=True, rows=pushed)
    only_rows = KeyList([], True)
    with pytest.raises(RequestTimeout, match="1 MiB of pushes are under way"):
        arguments.sources(only_rows, [], copy=True, rows=[of_rows(8)])
    pushed.clear()
    arguments.sources(only_rows, [], copy=True, rows=[of_rows(8)])


def of_rows(nbytes: int) -> Source:
    return Source(np.zeros(nbytes, np.uint8), KeySpec("uint8", (nbytes,), 4096))


def test_readers_and_lists_of_keys() -> None:
    with LocalCluster(1, 2) as cluster:
        kv = cluster.open_stores()[0]
        kv.init(["t", "u"], [table(), kvd.RowSparse(row_shape=(2,))], merge=[None, "mean"])
        kv.push("t", (np.arange(7), np.ones((7, WIDTH), FLOAT))).wait()
        with cluster.observer() as reader:
            listed = reader.keys()
            found = {entry["key"]: entry for entry in listed}
            assert [found[key]["shape"] for key in "tu"] == [[ROWS, WIDTH], [None, 2]]
            assert [found[key]["updated_rows"] for key in "tu"] == [7, 0]
            assert found["t"]["bytes"] >= 7 * WIDTH * 4
            assert (found["t"]["slices"], found["u"]["merge"], found["t"]["version"]) == (2, "mean", 1)
            for call in (lambda: reader.pull("t"), lambda: reader.read(["t"])):
                with pytest.raises(NotAllowed, match="'t' is a table"):
                    call()


# ── a worker that dies ──


class Killed(Exception):
    """The program dies here."""


def training(kv: kvd.KVStore, crash: Callable[[int], None]) -> Any:
    kv.init("t", table())
    kv.set_optimizer(kvd.optimizer.Adagrad(0.1))
    for step in kv.steps(4):
        ids, values = batch(step, kv.rank)
        kv.row_sparse_pull("t", ids)
        crash(2 * step)
        kv.push("t", (ids, values))
        crash(2 * step + 1)
    return kv.row_sparse_pull("t", wanted(ROWS))


@pytest.mark.parametrize(
    ("rank", "point"),
    [(1, 3), *[pytest.param(rank, point, marks=pytest.mark.soak) for rank in (0, 1) for point in (0, 1, 2, 4, 7)]],
)
def test_a_restarted_worker_goes_on_and_all_end_with_the_same_bits(rank: int, point: int) -> None:
    def crash(seen: int) -> None:
        if seen == point:
            raise Killed

    expected = trained_here(kvd.optimizer.Adagrad(0.1), 4)
    with ThreadPoolExecutor(1) as pool, LocalCluster(2, 2, **SLOW_TO_JUDGE) as cluster:
        stores = cluster.open_stores(each=[{"node_id": f"worker-{number}"} for number in (0, 1)])
        other = pool.submit(training, stores[1 - rank], lambda seen: None)
        with pytest.raises(Killed):
            training(stores[rank], crash)
        stores[rank].__exit__(Killed, None, None)
        successor = cluster.store(node_id=f"worker-{rank}")
        found = [training(successor, lambda seen: None), other.result()]
    assert all(each_.tobytes() == expected.tobytes() for each_ in found)
