"""What other libraries have for rows and their ids, pushed to a table."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import DtypeMismatch, NotAllowed, ShapeMismatch

FLOAT = np.float32


def table_after(value: Any, *, cast: bool = False, rows: int | None = 6) -> Any:
    """The rows of a new table of zeros after a push of this gradient with a rate of -1, in float64."""
    with kvd.create("local") as kv:
        kv.init("t", kvd.RowSparse(shape=(rows, 2)) if rows else kvd.RowSparse(row_shape=(2,)))
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        kv.push("t", value, cast=cast).wait()
        ids = np.arange(6) if rows else [1 << 40, 3, 5]
        return 0 - kv.row_sparse_pull("t", ids).astype(np.float64)


# ── torch ──


def test_an_uncoalesced_gradient_of_torch_is_added_up() -> None:
    torch = pytest.importorskip("torch")
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    ids = torch.tensor([[4, 1], [4, 4]])
    (embedding(ids) * torch.arange(8).reshape(2, 2, 2)).sum().backward()
    assert not embedding.weight.grad.is_coalesced()
    wanted = embedding.weight.grad.to_dense().double().numpy()
    assert wanted[4].tolist() == [10, 13]
    np.testing.assert_array_equal(table_after(embedding.weight.grad), wanted)
    np.testing.assert_array_equal(table_after([embedding.weight.grad.coalesce()]), wanted)


def test_row_ids_of_torch_have_64_bits() -> None:
    torch = pytest.importorskip("torch")
    indices = torch.tensor([[1 << 40, 3, 1 << 40]])
    value = torch.sparse_coo_tensor(indices, torch.ones(3, 2), (1 << 41, 2), check_invariants=False)
    assert table_after(value, rows=None).tolist() == [[2, 2], [1, 1], [0, 0]]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64"])
def test_another_floating_dtype_of_torch_has_to_be_wanted(name: str) -> None:
    torch = pytest.importorskip("torch")
    embedding = torch.nn.Embedding(6, 2, sparse=True, dtype=getattr(torch, name))
    (embedding(torch.tensor([2, 2, 5])) * 0.25).sum().backward()
    with pytest.raises(DtypeMismatch, match=name):
        table_after(embedding.weight.grad)
    wanted = embedding.weight.grad.to_dense().double().numpy()
    assert wanted[2].tolist() == [0.5, 0.5]
    np.testing.assert_array_equal(table_after(embedding.weight.grad, cast=True), wanted)


# ── CuPy, as far as it is used ──


class DeviceArray:
    """As much of a CuPy array as is used here."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)
        self.shape = self.data.shape
        self.dtype = self.data.dtype


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("cupy")
    fake.ndarray = DeviceArray
    fake.asnumpy = lambda value: value.data.copy()
    monkeypatch.setitem(sys.modules, "cupy", fake)


WANTED = [[0, 0], [3, 4], [0, 0], [0, 7], [0, 0], [0, 0]]


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("make", [kvd.RowSparseArray, lambda ids, rows: (ids, rows)])
def test_ids_and_rows_of_cupy(make: Any) -> None:
    rows = DeviceArray(np.array([[1, 2], [0, 7], [2, 2]], FLOAT))
    assert table_after(make(DeviceArray(np.array([1, 3, 1], np.int32)), rows)).tolist() == WANTED
    with pytest.raises(DtypeMismatch, match="are float64"):
        table_after(make(DeviceArray(np.zeros(3)), rows))


class CsrMatrix:
    """As much of one of CuPy as is used here; entry (1, 0) is there twice, and row 2 has none."""

    shape = (6, 2)
    indptr = DeviceArray(np.array([0, 0, 3, 3, 4, 4, 4], np.int32))
    indices = DeviceArray(np.array([0, 1, 0, 1], np.int32))
    data = DeviceArray(np.array([1, 4, 2, 7], FLOAT))

    def tocsr(self) -> CsrMatrix:
        return self


@pytest.mark.usefixtures("cupy")
def test_a_sparse_matrix_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CsrMatrix, "__module__", "cupyx.scipy.sparse._csr")
    assert table_after(CsrMatrix()).tolist() == WANTED
    assert table_after([CsrMatrix(), CsrMatrix()]).tolist() == (2 * np.array(WANTED)).tolist()
    with pytest.raises(NotAllowed, match="make table 'x' with init"), kvd.create("local") as kv:
        kv.init("x", CsrMatrix())


@pytest.mark.parametrize("kind", ["coo_matrix", "csr_array", "csc_matrix"])
def test_sparse_matrices_of_scipy(kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    random = np.random.default_rng(4)
    dense = (random.standard_normal((6, 2)) * (random.random((6, 2)) < 0.4)).astype(FLOAT)
    value = getattr(sparse, kind)(dense)
    np.testing.assert_array_equal(table_after(value), dense)
    with pytest.raises(ShapeMismatch, match="need rows of shape"):
        table_after(getattr(sparse, kind)(np.ones((6, 3), FLOAT)))
    if kind == "csr_array":
        with pytest.raises(ShapeMismatch, match="two dimensions"):
            table_after(sparse.coo_array(np.ones(6, FLOAT)))
