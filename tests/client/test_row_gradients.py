"""Row-sparse gradients pushed to dense keys: they count as dense gradients that are zero in all other rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvd
import kvd.aio
from kvd import RowSparseArray
from kvd.errors import DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.testing.cluster import LocalCluster

torch: Any = pytest.importorskip("torch")

ROWS, WIDTH = 6, 3
SLICED: dict[str, Any] = {"slice_bytes": "4KiB"}
IDS = np.array([4, 1, 4])
GIVEN = np.array([[1, 2, 3], [4, 5, 6], [10, 20, 30]], np.float32)
DENSE = np.zeros((ROWS, WIDTH), np.float32)
np.add.at(DENSE, IDS, GIVEN)


def coo(dtype: Any = None, shape: tuple[int, ...] = (ROWS, WIDTH)) -> Any:
    """A gradient as `nn.Embedding(sparse=True)` has it: row 4 is there twice."""
    tensor = torch.sparse_coo_tensor(torch.tensor(IDS)[None], torch.tensor(GIVEN), shape, check_invariants=True)
    return tensor.to(dtype or torch.float32)


class CsrMatrix:
    """As much of a sparse matrix of SciPy as kvd uses; the elements of row 4 are there twice."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.indptr = np.array([0, 0, 3, 3, 3, 9, *[9] * (shape[0] - 5)])
        self.indices = np.array([0, 1, 2, 2, 1, 0, 0, 1, 2])
        self.data = np.array([4, 5, 6, 3, 2, 1, 10, 20, 30], np.float32)

    def tocsr(self) -> CsrMatrix:
        return self


CsrMatrix.__module__ = "scipy.sparse._csr"

VALUES: dict[str, Callable[[], Any]] = {
    "rows": lambda: RowSparseArray(IDS, GIVEN),
    "rows as lists": lambda: RowSparseArray(IDS.tolist(), torch.tensor(GIVEN)),
    "torch": coo,
    "torch coalesced": lambda: coo().coalesce(),
    "torch by element": lambda: torch.tensor(DENSE).to_sparse(),
    "a matrix by row": lambda: CsrMatrix((ROWS, WIDTH)),
}


@pytest.fixture(params=["local", "dist_sync", "dist_async"])
def kv(request: pytest.FixtureRequest) -> Iterator[kvd.KVStore]:
    if request.param == "local":
        with kvd.create("local") as store:
            yield store
    else:
        with LocalCluster(1, 2, **SLICED) as cluster:
            yield cluster.store(request.param)


def gradient_of(kv: kvd.KVStore, key: Any, *, dtype: Any = np.float32) -> Any:
    """What an optimizer of rate 1 has taken from a key of zeros."""
    return 0 - kv.pull(key).astype(dtype)


# ── what is pushed ──


def test_every_form_of_rows_is_the_dense_gradient(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    for name, make in VALUES.items():
        kv.init(name, np.zeros_like(DENSE))
        kv.push(name, make()).wait()
        np.testing.assert_array_equal(gradient_of(kv, name), DENSE, err_msg=name)
        out = np.ones_like(DENSE)
        assert kv.pushpull(name, make(), out=out) is out
        np.testing.assert_array_equal(-out, DENSE * 2, err_msg=name)
        np.testing.assert_array_equal(-kv.pushpull(name, make(), copy=False), DENSE * 3, err_msg=name)
        kv.pushpull_async(name, make(), out=out).wait()
        np.testing.assert_array_equal(-out, DENSE * 4, err_msg=name)


def test_lists_of_keys_and_of_devices_mix_rows_and_arrays(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.init(["a", 5, "table"], [np.zeros_like(DENSE), np.zeros(4, np.float32), kvd.RowSparse(shape=DENSE.shape)])
    rows, array = RowSparseArray(IDS, GIVEN), np.ones(4, np.float32)
    kv.push(["a", 5, "table"], [rows, array, rows]).wait()
    np.testing.assert_array_equal(gradient_of(kv, "a"), DENSE)
    np.testing.assert_array_equal(gradient_of(kv, 5), array)
    np.testing.assert_array_equal(-kv.row_sparse_pull("table", list(range(ROWS))), DENSE)
    kv.push("a", [coo(), RowSparseArray([0], np.ones((1, WIDTH), np.float32))]).wait()
    kv.push("a", (coo(), coo())).wait()
    kv.push("a", [DENSE, coo(), DENSE]).wait()
    first_row = np.zeros_like(DENSE)
    first_row[0] = 1
    np.testing.assert_array_equal(gradient_of(kv, "a"), DENSE * 7 + first_row)
    kv.push(["a", 5, "a"], [coo(), RowSparseArray([1, 1], [2.0, 3.0]), first_row]).wait()
    np.testing.assert_array_equal(gradient_of(kv, "a"), DENSE * 8 + first_row * 2)
    assert gradient_of(kv, 5).tolist() == [1, 6, 1, 1]
    outs = [np.empty_like(DENSE), np.empty(4, np.float32)]
    kv.pushpull(["a", 5], [coo(), array], out=outs)
    np.testing.assert_array_equal(-outs[0], DENSE * 9 + first_row * 2)
    assert (-outs[1]).tolist() == [2, 7, 2, 2]


def test_rows_of_other_dimensions_and_dtypes(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.init("cube", np.zeros((4, 2, 2)))
    kv.push("cube", RowSparseArray([3, 3], np.ones((2, 2, 2)))).wait()
    assert kv.pull("cube")[3].tolist() == [[-2, -2], [-2, -2]]
    assert not kv.pull("cube")[:3].any()
    kv.init("flat", np.zeros(1500, np.float32))  # of two slices
    flat = torch.sparse_coo_tensor([[1400, 2]], [5.0, 7.0], (1500,), check_invariants=True)
    kv.push("flat", flat).wait()
    assert np.flatnonzero(kv.pull("flat")).tolist() == [2, 1400]
    for dtype in ("float16", "bfloat16"):
        kv.init(dtype, torch.zeros(ROWS, WIDTH, dtype=getattr(torch, dtype)))
        kv.push(dtype, coo(getattr(torch, dtype))).wait()
        np.testing.assert_array_equal(gradient_of(kv, dtype), DENSE)
    kv.init("empty", np.ones((ROWS, WIDTH), np.float32))
    before = kv.clock("empty")
    nothing = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, WIDTH), (ROWS, WIDTH), check_invariants=True
    )
    kv.push("empty", nothing).wait()
    kv.push("empty", RowSparseArray([], np.zeros((0, WIDTH), np.float32))).wait()
    assert kv.clock("empty") - before == 2
    assert kv.pull("empty").tolist() == np.ones((ROWS, WIDTH)).tolist()


def test_without_an_optimizer_the_other_rows_become_zero(kv: kvd.KVStore) -> None:
    kv.init("w", np.ones((ROWS, WIDTH), np.float32), merge="sum")
    kv.init("whole", np.ones((ROWS, WIDTH), np.int64))
    kv.push("w", coo()).wait()
    np.testing.assert_array_equal(kv.pull("w"), DENSE)
    kv.push("whole", RowSparseArray(IDS, GIVEN.astype(np.int64))).wait()
    assert kv.pull("whole").tolist() == DENSE.tolist()


def test_another_floating_dtype_has_to_be_wanted(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.init("w", np.zeros_like(DENSE))
    for value in (coo(torch.float64), RowSparseArray(IDS, GIVEN.astype(np.float64))):
        with pytest.raises(DtypeMismatch, match="key 'w' has dtype float32, the given value has float64"):
            kv.push("w", value)
    kv.push("w", coo(torch.float16), cast=True).wait()
    out = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    kv.pushpull("w", RowSparseArray(IDS, GIVEN.astype(np.float64)), out=out, cast=True)
    np.testing.assert_array_equal(-out.numpy(), DENSE * 2)


def test_a_bound_key_takes_rows(kv: kvd.KVStore) -> None:
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.init("w", np.zeros_like(DENSE))
    gradient, weight = kv.bind("w")
    kv.pushpull("w", coo(), out=weight)
    gradient[:] = DENSE
    kv.pushpull("w", gradient, out=weight)
    np.testing.assert_array_equal(-weight, DENSE * 2)
    np.testing.assert_array_equal(gradient, DENSE)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "an id out of range": (RowSparseArray([0, 6], np.ones((2, 3), np.float32)), NotAllowed, "rows 0 to 5; ids.1. is 6"),
    "a negative id": (RowSparseArray([-1], np.ones((1, 3), np.float32)), NotAllowed, "rows 0 to 5; ids.0. is -1"),
    "rows too wide": (RowSparseArray([1], np.ones((1, 4), np.float32)), ShapeMismatch, "need rows of shape .1, 3."),
    "too few rows": (RowSparseArray([1, 2], np.ones((1, 3), np.float32)), ShapeMismatch, "need rows of shape .2, 3."),
    "ids of two dimensions": (RowSparseArray([[1]], np.ones((1, 3), np.float32)), ShapeMismatch, "reshape"),
    "floating ids": (RowSparseArray([1.0], np.ones((1, 3), np.float32)), DtypeMismatch, "whole numbers"),
    "no ids": (RowSparseArray(None, np.ones((1, 3), np.float32)), DtypeMismatch, "whole numbers"),
    "rows of complex numbers": (RowSparseArray([1], np.ones((1, 3), np.complex64)), DtypeMismatch, "complex64"),
    "another dtype": (RowSparseArray([1], np.ones((1, 3), np.float64)), DtypeMismatch, "float64"),
    "a tensor of another shape": (coo(shape=(7, 3)), ShapeMismatch, "has shape .6, 3., the given value has .7, 3."),
    "a matrix of another shape": (CsrMatrix((6, 4)), ShapeMismatch, "has .6, 4."),
    "a tensor with a wrong index": (
        torch.sparse_coo_tensor([[-3]], torch.ones(1, 3), (6, 3), check_invariants=False),
        NotAllowed,
        "ids.0. is -3",
    ),
    "a tensor with a wrong column": (
        torch.sparse_coo_tensor([[1], [3]], torch.ones(1), (6, 3), check_invariants=False),
        NotAllowed,
        "is 3",
    ),
    "a huge tensor": (
        torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (1 << 50, 3), check_invariants=True),
        ShapeMismatch,
        "given value",
    ),
    "a device of another shape": ([coo(), np.ones((6, 4), np.float32)], ShapeMismatch, "device 1"),
}


def calls_with(kv: kvd.KVStore, value: Any) -> list[Callable[[], Any]]:
    """Calls that push a value to key "w", and two that push it to key 7 in a list."""
    out, other = np.empty_like(DENSE), np.empty_like(DENSE)
    return [
        lambda: kv.push("w", value),
        lambda: kv.push_async("w", value),
        lambda: kv.pushpull("w", value, out=out),
        lambda: kv.pushpull_async("w", value, out=out),
        lambda: kv.push(["w", 7], [DENSE, value]),
        lambda: kv.pushpull(["w", 7], [DENSE, value], out=[out, other]),
    ]


def test_rows_that_do_not_fit_name_their_key(kv: kvd.KVStore) -> None:
    kv.init(["w", 7], [np.zeros_like(DENSE), np.zeros_like(DENSE)])
    for what, (value, kind, text) in WRONG.items():
        for place, call in enumerate(calls_with(kv, value)):
            with pytest.raises(kind, match=text) as raised:
                call()
            assert raised.value.key == ("w" if place < 4 else 7), what  # type: ignore[attr-defined]
    kv.init("number", np.float32(1))
    with pytest.raises(ShapeMismatch, match=r"'number' has shape .., so it has no rows"):
        kv.push("number", RowSparseArray([0], [1.0]))
    with pytest.raises(KeyNotFound) as raised:
        kv.push("nobody", coo())
    assert raised.value.key == "nobody"
    assert not kv.pull("w").any()
    assert kv.version("w") == kv.version(7) == 0


def test_the_result_does_not_go_into_rows(kv: kvd.KVStore) -> None:
    kv.init(["w", 7], [np.zeros_like(DENSE), np.zeros_like(DENSE)])
    for call in (kv.pushpull, kv.pushpull_async):
        with pytest.raises(NotAllowed, match="key 7 has only some rows: pass out=") as raised:
            call(["w", 7], [DENSE.copy(), coo()])
        assert raised.value.key == 7
    for value in (coo(), [coo(), DENSE]):
        with pytest.raises(NotAllowed, match=r"make table 'new' with init.*, or a dense key with the whole array"):
            kv.init("new", value)
        with pytest.raises(NotAllowed, match=r"for key 7: push rows, or pass value.to_dense\(\)") as raised:
            kv.broadcast(["w", 7], [DENSE, value], out=[np.empty_like(DENSE), np.empty_like(DENSE)])
        assert raised.value.key == 7
    for value in (coo(), RowSparseArray([0], DENSE[:1])):
        with pytest.raises(NotAllowed, match="a list of keys needs as many values in a list: 2"):
            kv.broadcast(["w", 7], value)
    kv.init("table", kvd.RowSparse(shape=DENSE.shape))
    with pytest.raises(NotAllowed, match="'table' is a table"):
        kv.pushpull("table", coo(), out=np.empty_like(DENSE))
    assert not kv.pull("w").any()


@pytest.mark.parametrize("kind", ["coo_matrix", "csr_array", "csc_matrix"])
def test_sparse_matrices_of_scipy(kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    with kvd.create("local") as kv:
        kv.init("w", np.ones_like(DENSE))
        kv.push("w", getattr(sparse, kind)(DENSE))
        np.testing.assert_array_equal(kv.pull("w"), DENSE)


# ── training ──


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (kvd.optimizer.SGD(0.1, momentum=0.9, wd=0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
        (kvd.optimizer.Adam(0.01, wd=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    ],
    ids=["SGD", "Adam"],
)
def test_an_embedding_trains_as_with_dense_gradients(kv: kvd.KVStore, ours: Any, theirs: Any) -> None:
    """Decay and momentum reach the rows that a step does not name, too."""
    torch.manual_seed(0)
    ours_net, dense = (torch.nn.Embedding(50, 40, sparse=is_sparse) for is_sparse in (True, False))  # of two slices
    ours_net.load_state_dict(dense.state_dict())
    optimizer = theirs(dense.parameters())
    weight = ours_net.weight.data
    kv.init("w", weight)
    kv.set_optimizer(ours)
    for _ in range(6):
        ids = torch.randint(50, (2, 7))
        for net in (ours_net, dense):
            net.zero_grad()
            net(ids).pow(2).sum().backward()
        kv.pushpull("w", ours_net.weight.grad, out=weight)
        optimizer.step()
        torch.testing.assert_close(weight, dense.weight.data, rtol=1e-5, atol=1e-6)


def test_workers_push_rows_and_arrays_in_one_round() -> None:
    with LocalCluster(3, 2, **SLICED) as cluster:

        def program(kv: kvd.KVStore) -> Any:
            kv.init("w", np.zeros_like(DENSE))
            kv.set_optimizer(kvd.optimizer.SGD(1.0))
            value = [coo(), DENSE, RowSparseArray([], np.zeros((0, WIDTH), np.float32))][kv.rank]
            kv.push("w", value)
            return kv.pushpull("w", value, out=np.empty_like(DENSE)).tolist()

        assert cluster.run(program) == [(DENSE * -4).tolist()] * 3


def test_rows_of_steps_that_are_compressed() -> None:
    """Compression reads the dense value: what it leaves over is that of all rows."""
    dense = np.zeros((64, 32), np.float32)
    np.add.at(dense, [3, 3, 60], 0.4)
    rows = RowSparseArray([3, 3, 60], np.full((3, 32), 0.4, np.float32))

    def program(kv: kvd.KVStore) -> Any:
        kv.init(["rows", "dense"], [np.zeros_like(dense), np.zeros_like(dense)])
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_bytes": 0})
        for _ in range(3):
            kv.push(["rows", "dense"], [rows, dense])
            kv.pushpull("rows", rows, out=np.empty_like(dense))
            kv.pushpull("dense", dense, out=np.empty_like(dense))
        return kv.pull(["rows", "dense"])

    with LocalCluster(1, 2, **SLICED) as cluster:
        found, wanted = cluster.run(program)[0]
        assert wanted[3, 0] == -3  # six times the threshold
        np.testing.assert_array_equal(found, wanted)


def test_rows_in_an_event_loop() -> None:
    async def program(settings: dict[str, Any]) -> None:
        async with await kvd.aio.create("dist_sync", **settings) as kv:
            await kv.init(["w", 7], [np.zeros_like(DENSE), np.zeros_like(DENSE)])
            await kv.set_optimizer(kvd.optimizer.SGD(1.0))
            out = np.empty_like(DENSE)
            assert await kv.pushpull("w", coo(), out=out) is out
            await kv.push("w", RowSparseArray(IDS, GIVEN))
            await kv.push(["w", 7], [[coo(), DENSE], coo()])
            await kv.push_async("w", coo())
            await kv.pushpull_async("w", coo(), out=out)
            np.testing.assert_array_equal(-out, DENSE * 6)
            with pytest.raises(NotAllowed, match=r"ids.0. is 6") as raised:
                await kv.pushpull(7, RowSparseArray([6], np.ones((1, WIDTH), np.float32)), out=out)
            assert raised.value.key == 7
            with pytest.raises(NotAllowed, match="pass out="):
                await kv.pushpull("w", coo())
            with pytest.raises(KeyNotFound):
                await kv.pushpull("nobody", coo(), out=out)

    with LocalCluster(1, 1) as cluster:
        asyncio.run(program({"scheduler": cluster.address, "run": cluster.settings["run"]}))


def test_a_store_that_declares_keys_declares_them_by_rows_of_a_known_shape() -> None:
    def program(kv: kvd.KVStore) -> Any:
        found = kv.pushpull("w", coo() if kv.rank else DENSE, out=np.empty_like(DENSE))
        found = kv.pushpull("v", coo(), out=found)
        kv.barrier("both are there")
        found += kv.pushpull("v", RowSparseArray(IDS, GIVEN), out=np.empty_like(DENSE))
        if kv.rank == 0:
            with pytest.raises(KeyNotFound, match="make it first") as raised:
                kv.pushpull("nobody", RowSparseArray(IDS, GIVEN), out=np.empty_like(DENSE))
            assert raised.value.key == "nobody"
        return found.tolist()

    with LocalCluster(2, 1) as cluster:
        assert cluster.run(program, "byteps") == [(DENSE * 4).tolist()] * 2


def test_a_key_that_is_made_again_as_a_table_takes_rows_as_rows() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", np.ones_like(DENSE))
        kv.push("w", coo()).wait()
        kv.delete("w")
        kv.init("w", kvd.RowSparse(shape=(ROWS, WIDTH), initializer=kvd.initializer.Constant(7)))
        kv.push("w", coo()).wait()
        assert kv.row_sparse_pull("w", [0, 4])[:, 0].tolist() == [7, DENSE[4, 0]]
        kv.delete("w")
        kv.init("w", np.ones((2, WIDTH), np.float32))
        kv.push("w", RowSparseArray([1], np.ones((1, WIDTH), np.float32))).wait()
        assert kv.pull("w")[:, 0].tolist() == [0, 1]
