"""Files of optimizer states hold those of the rows of tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvd
from kvd.client.cluster import stored_tables
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster

FLOAT = np.float32
ROWS = np.arange(40)
OPTIMIZERS = {
    "adam": kvd.optimizer.Adam(0.1),
    "row-wise": kvd.optimizer.RowWiseAdagrad(0.1),
    "momentum": kvd.optimizer.SGD(0.1, momentum=0.9),
    "stateless": kvd.optimizer.SGD(kvd.optimizer.schedule.Step(0.1, step=2, factor=0.5)),
}


def gradient(step: int) -> kvd.RowSparseArray:
    random = np.random.default_rng(step)
    ids = random.integers(0, 40, 25)
    return kvd.RowSparseArray(ids, random.standard_normal((25, 3)).astype(FLOAT))


def dense(step: int) -> Any:
    return np.full(5, step + 1, FLOAT)


def make(kv: Any, values: Any = None, whole: Any = None) -> None:
    table = kvd.RowSparse(shape=(40, 3), initializer=kvd.initializer.Normal(0.5, seed=1), values=values)
    kv.init(["t", "w"], [table, np.zeros(5, FLOAT) if whole is None else whole])


def steps(kv: Any, numbers: range) -> tuple[Any, Any]:
    for step in numbers:
        kv.push(["t", "w"], [gradient(step), dense(step)])
    return kv.row_sparse_pull("t", ROWS), kv.pull("w")


def uninterrupted(optimizer: Any) -> Any:
    with kvd.create("local") as kv:
        make(kv)
        kv.set_optimizer(optimizer)
        return steps(kv, range(6))


def first_half(kv: Any, optimizer: Any, path: Path) -> Any:
    make(kv)
    kv.set_optimizer(optimizer)
    values = steps(kv, range(3))
    kv.save_optimizer_states(path, dump_optimizer=True)
    return values


def second_half(kv: Any, values: Any, path: Path) -> Any:
    make(kv, *values)
    kv.load_optimizer_states(path)
    return steps(kv, range(3, 6))


@pytest.mark.parametrize(
    "name", ["adam", *[pytest.param(name, marks=pytest.mark.soak) for name in ("row-wise", "stateless", "momentum")]]
)
def test_a_training_goes_on_in_another_store_with_the_same_bits(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stored_tables, "PAGE_NBYTES", 200)  # several pages
    optimizer = OPTIMIZERS[name]
    wanted = uninterrupted(optimizer)
    files = [tmp_path / "of one process", tmp_path / "of three servers"]
    with kvd.create("local") as kv:
        values = first_half(kv, optimizer, files[0])
    with LocalCluster(1, 3) as cluster:
        (kv,) = cluster.open_stores()
        np.testing.assert_array_equal(first_half(kv, optimizer, files[1])[0], values[0])
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])
    results = []
    with kvd.create("local") as kv:
        results.append(second_half(kv, values, files[1]))
    with LocalCluster(1, 2) as cluster:
        (kv,) = cluster.open_stores()
        results.append(second_half(kv, values, files[0]))
    for rows, whole in results:
        np.testing.assert_array_equal(rows, wanted[0])
        np.testing.assert_array_equal(whole, wanted[1])


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_table_that_was_pushed_to_takes_a_state_too_and_forgets_the_one_that_it_had(
    kind: str, tmp_path: Path
) -> None:
    def program(kv: Any) -> Any:
        make(kv)
        kv.set_optimizer(kvd.optimizer.SGD(1.0, momentum=0.5))
        one = np.ones((1, 3), FLOAT)
        kv.push("t", ([1], one))
        kv.flush()
        kv.save_optimizer_states(tmp_path / "states")
        kv.push("t", ([1, 2], np.ones((2, 3), FLOAT)))
        before = kv.row_sparse_pull("t", [1, 2, 3])
        kv.load_optimizer_states(tmp_path / "states")
        np.testing.assert_array_equal(kv.row_sparse_pull("t", [1, 2, 3]), before)
        kv.push("t", ([1, 2, 3], np.zeros((3, 3), FLOAT)))
        return before - kv.row_sparse_pull("t", [1, 2, 3])

    if kind == "local":
        with kvd.create("local") as kv:
            moved = program(kv)
    else:
        with LocalCluster(1, 2) as cluster:
            (moved,) = cluster.run(program)
    np.testing.assert_allclose(moved, np.outer([0.5, 0, 0], np.ones(3)), atol=1e-6)  # only row 1 had a momentum, 1


@pytest.mark.soak
def test_a_backup_has_the_state_that_was_loaded(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["adam"]
    with kvd.create("local") as kv:
        values = first_half(kv, optimizer, tmp_path / "states")
    with LocalCluster(1, 2, replicas=2, processes=True) as cluster:
        (kv,) = cluster.open_stores()
        make(kv, *values)
        kv.load_optimizer_states(tmp_path / "states")
        cluster.kill_server(0)
        rows, whole = steps(kv, range(3, 6))
    wanted = uninterrupted(optimizer)
    np.testing.assert_array_equal(rows, wanted[0])
    np.testing.assert_array_equal(whole, wanted[1])


def changed(path: Path, **arrays: Any) -> Path:
    """The file with other arrays of the table."""
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path) | {f"t|rows/{name}": array for name, array in arrays.items()}
    other = path.with_name("changed")
    save_file({name: array for name, array in tensors.items() if array is not None}, other, metadata)
    return other


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"ids": np.array([3, 2])}, "no row ids in ascending order"),
        ({"ids": None}, "no row ids in ascending order"),
        (
            {"ids": np.array([1, 40]), "momentum": np.zeros((2, 3), FLOAT)},
            "state of row 40 of table 't', which has 40 rows",
        ),
        ({"ids": np.array([-1, 4]), "momentum": np.zeros((2, 3), FLOAT)}, "of table 't', which has 40 rows"),
        ({"ids": np.array([1]), "momentum": np.zeros((2, 3), FLOAT)}, "not one row for each id"),
        ({"ids": np.array([1]), "momentum": np.zeros((1, 4), FLOAT)}, "4 numbers of float32 under momentum"),
        ({"ids": np.array([1]), "momentum": np.zeros((1, 3))}, "3 numbers of float64 under momentum"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(arrays: Any, text: str, tmp_path: Path) -> None:
    with kvd.create("local") as kv:
        first_half(kv, OPTIMIZERS["momentum"], tmp_path / "states")
        assert load_file(tmp_path / "states")["t|rows/momentum"].shape[1] == 3
        file = changed(tmp_path / "states", **arrays)
        with pytest.raises(NotAllowed, match=text):
            kv.load_optimizer_states(file)
        rows, _ = steps(kv, range(3, 6))
    np.testing.assert_array_equal(rows, uninterrupted(OPTIMIZERS["momentum"])[0])


def test_a_state_of_a_table_is_none_of_another_key(tmp_path: Path) -> None:
    with kvd.create("local") as kv:
        first_half(kv, OPTIMIZERS["adam"], tmp_path / "states")
    with LocalCluster(1, 1) as cluster:
        for kv in (kvd.create("local"), *cluster.open_stores()):
            kv.init(["t", "w"], [np.zeros(3, FLOAT), np.zeros(5, FLOAT)])
            with pytest.raises(NotAllowed, match="key 't' is no table"):
                kv.load_optimizer_states(tmp_path / "states")
            kv.close()


def test_the_file_says_what_it_holds(tmp_path: Path) -> None:
    with kvd.create("local") as kv:
        first_half(kv, OPTIMIZERS["row-wise"], tmp_path / "states")
    with safe_open(tmp_path / "states", "numpy") as file:
        assert json.loads(file.metadata()["tables"]) == {"t": 3}
        ids = file.get_tensor("t|rows/ids")
        (name,) = set(file.keys()) - {"t|rows/ids"} - {key for key in file.keys() if key.startswith("w|")}  # noqa: SIM118
        assert file.get_tensor(name).shape == (len(ids), 1)
