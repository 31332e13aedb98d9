"""Tables in a store of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import DtypeMismatch, KeyExists, KeyNotFound, KvdError, NotAllowed, ShapeMismatch

FLOAT = np.float32
ROW_SPARSE: Any = kvd.RowSparse  # with arguments that are wrong


TABLE = kvd.RowSparse(shape=(10, 2), initializer=kvd.initializer.Constant(1.0))


def new_store(kind: str = "local", **settings: Any) -> Any:
    kv = kvd.create(kind, **settings)
    kv.init("t", TABLE)
    kv.init("w", np.zeros(3, FLOAT))
    return kv


def rows(count: int, value: float = 1.0) -> Any:
    return np.full((count, 2), value, FLOAT)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_rows_are_pushed_updated_and_pulled_in_the_order_asked(kind: str) -> None:
    with new_store(kind) as kv:
        kv.set_optimizer(kvd.optimizer.SGD(0.5))
        kv.push("t", kvd.RowSparseArray([3, 7, 3], np.array([[1, 2], [4, 4], [1, 2]], FLOAT)))
        assert kv.row_sparse_pull("t", [7, 3, 0, 7]).tolist() == [[-1, -1], [0, -1], [1, 1], [-1, -1]]
        assert (kv.version("t"), kv.clock("t")) == (1, 1)


def test_a_table_has_its_own_learning_rate_and_takes_no_norm_of_its_rows() -> None:
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.SGD(0.5, lr_mult={"t": 4.0}))
        kv.push("t", ([3], rows(1)))
        assert kv.row_sparse_pull("t", [3, 0]).tolist() == [[-1, -1], [1, 1]]
        for optimizer in (kvd.optimizer.LARS(1.0), kvd.optimizer.LAMB(), kvd.optimizer.SGLD(1.0)):
            kv.set_optimizer(optimizer)
            with pytest.raises(NotAllowed, match="cannot update single rows of table 't'"):
                kv.push("t", ([3], rows(1))).wait()


def test_without_an_optimizer_rows_replace_those_of_the_table() -> None:
    with new_store() as kv:
        kv.push("t", ([1, 1, 2], rows(3, 4)))
        assert kv.row_sparse_pull("t", [0, 1, 2])[:, 0].tolist() == [1, 8, 4]


def test_an_empty_push_counts() -> None:
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.SGD(0.5))
        kv.push("t", kvd.RowSparseArray([], np.zeros((0, 2), FLOAT)))
        assert kv.version("t") == 1


def test_values_of_several_devices_are_added_up_in_order() -> None:
    with new_store() as kv:
        kv.push("t", [kvd.RowSparseArray([1, 2], rows(2)), kvd.RowSparseArray([2], rows(1, 5))])
        kv.push(["t", "t"], [([3], rows(1)), ([3], rows(1, 2))])
        assert kv.row_sparse_pull("t", [1, 2, 3])[:, 0].tolist() == [1, 6, 3]


def test_tables_and_other_keys_in_one_call() -> None:
    with new_store() as kv:
        kv.init([4, "u"], [kvd.RowSparse(row_shape=(2,)), np.ones(1, FLOAT)])
        kv.push(["w", 4, "u"], [np.full(3, 2, FLOAT), ([1 << 62], rows(1, 9)), np.full(1, 3, FLOAT)])
        found = kv.row_sparse_pull([4, "t", 4], [[1 << 62], [0], []])
        assert [array.tolist() for array in found] == [[[9, 9]], [[1, 1]], []]
        assert kv.pull(["w", "u"])[1].tolist() == [3]
        with pytest.raises(NotAllowed, match="key 4 is a table"):
            kv.pull(["w", 4])


def test_out_is_filled_and_given_back() -> None:
    torch = pytest.importorskip("torch")
    with new_store() as kv:
        kv.push("t", ([1], rows(1, 3)))
        first, second, third = np.zeros((2, 2), FLOAT), torch.zeros(2, 2), np.zeros((4, 2), FLOAT)[::2]
        for out in (first, second, third):
            assert kv.row_sparse_pull("t", np.array([1, 0], np.uint64), out=out) is out
            assert out.tolist() == [[3, 3], [1, 1]]
        given = kv.row_sparse_pull_async("t", [0, 0], out=[first, second]).wait()
        assert [out.tolist() for out in given] == [[[1, 1]] * 2] * 2


def test_an_embedding_of_torch_with_sparse_gradients() -> None:
    torch = pytest.importorskip("torch")
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        embedding = torch.nn.Embedding(10, 2, sparse=True)
        embedding(torch.tensor([4, 2, 4])).sum().backward()
        kv.push("t", embedding.weight.grad)
        assert kv.row_sparse_pull("t", torch.tensor([4, 2, 0])).tolist() == [[-1, -1], [0, 0], [1, 1]]


def test_another_optimizer_starts_with_new_state_and_a_changed_rate_keeps_it() -> None:
    with new_store() as kv:
        for factor in (1.0, 0.5):
            kv.set_optimizer(kvd.optimizer.Adagrad(factor))
            kv.push("t", ([0], rows(1, 2)))
        assert kv.row_sparse_pull("t", [0])[0, 0] == 1 - 1 - 0.5
        kv.update_optimizer(learning_rate=1.0)
        kv.push("t", ([0], rows(1, 2)))
        assert kv.row_sparse_pull("t", [0])[0, 0] == pytest.approx(-0.5 - 2 / 8**0.5)


def test_a_row_that_is_evicted_begins_again_with_new_state() -> None:
    with new_store() as kv:
        kv.init("u", kvd.RowSparse(row_shape=(2,), ttl_updates=1))
        kv.set_optimizer(kvd.optimizer.SGD(1.0, momentum=0.5))
        found = []
        for row in (1, 1, 2, 1):
            kv.push("u", ([row], rows(1)))
            found.append(kv.row_sparse_pull("u", [1, 2])[:, 0].tolist())
        assert found == [[-1, 0], [-2.5, 0], [0, -1], [-1, 0]]


def test_a_table_has_the_factors_of_its_key() -> None:
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.SGD(0.5, wd=1.0, lr_mult={"t": 0.5}, wd_mult={"t": 0.0}))
        kv.push("t", ([3], rows(1, 2)))
        assert kv.row_sparse_pull("t", [3, 4])[:, 0].tolist() == [0.5, 1]


def test_row_wise_adagrad_updates_other_keys_as_adagrad() -> None:
    found = []
    for rule in (kvd.optimizer.Adagrad(0.1), kvd.optimizer.RowWiseAdagrad(0.1)):
        with new_store() as kv:
            kv.set_optimizer(rule)
            kv.push("w", np.array([1, 2, 3], FLOAT))
            found.append(kv.push("w", np.array([2, 0, 1], FLOAT)).wait() or kv.pull("w").tolist())
    assert found[0] == found[1]


def test_a_weighted_push_of_no_samples_changes_nothing() -> None:
    with new_store(merge="weighted") as kv:
        kv.push("t", ([1], rows(1, 5)), samples=0)
        kv.push("t", ([2], rows(1, 5)), samples=3)
        assert kv.row_sparse_pull("t", [1, 2])[:, 0].tolist() == [1, 5]


def test_a_table_may_have_a_merge_of_its_own() -> None:
    with new_store() as kv:
        kv.init(["a", "b"], [kvd.RowSparse(row_shape=(2,)), np.zeros(2, FLOAT)], merge=["weighted", "mean"])
        kv.push(["a", "t"], [([1], rows(1, 5)), ([1], rows(1, 5))], samples=0)
        assert [array[0, 0] for array in kv.row_sparse_pull(["a", "t"], [[1], [1]])] == [0, 5]
        with pytest.raises(NotAllowed, match="merge is one of"):
            kv.init("c", kvd.RowSparse(row_shape=(2,)), merge="median")


def test_a_table_is_deleted_and_made_again() -> None:
    with new_store() as kv:
        kv.push("t", ([1], rows(1, 5)))
        kv.delete(["t", "w"])
        with pytest.raises(KeyNotFound):
            kv.row_sparse_pull("t", [1])
        kv.init("t", kvd.RowSparse(row_shape=(1,)))
        assert kv.row_sparse_pull("t", [1]).tolist() == [[0]]


def test_steps_push_tables() -> None:
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        for step in kv.steps(3):
            kv.push("t", ([step, 9], rows(2)))
        assert kv.row_sparse_pull("t", [0, 9])[:, 0].tolist() == [0, -2]


BAD: list[tuple[Callable[[Any], Any], type[KvdError], str]] = [
    (lambda kv: kv.row_sparse_pull("t", [0, 10]), NotAllowed, r"rows 0 to 9; ids\[1\] is 10"),
    (lambda kv: kv.row_sparse_pull("t", [-1]), NotAllowed, r"ids\[0\] is -1"),
    (lambda kv: kv.row_sparse_pull("t", [1.0]), DtypeMismatch, "whole numbers"),
    (lambda kv: kv.row_sparse_pull("t", None), DtypeMismatch, "whole numbers, not None"),
    (lambda kv: kv.row_sparse_pull("t", [[1]]), ShapeMismatch, r"reshape\(-1\)"),
    (lambda kv: kv.row_sparse_pull("t", [1, [2]]), ShapeMismatch, "no array of one dimension"),
    (
        lambda kv: kv.row_sparse_pull("t", np.array([1 << 63], np.uint64)),
        NotAllowed,
        r"ids\[0\] is 9223372036854775808",
    ),
    (lambda kv: kv.row_sparse_pull("t", [1], out=rows(2)), ShapeMismatch, r"1 rows of table 't'.*\(1, 2\)"),
    (lambda kv: kv.row_sparse_pull("t", [1], out=np.zeros((1, 2))), DtypeMismatch, "out is float64"),
    (lambda kv: kv.row_sparse_pull("w", [1]), NotAllowed, "'w' is no table"),
    (lambda kv: kv.row_sparse_pull("x", [1]), KeyNotFound, "'x'"),
    (lambda kv: kv.row_sparse_pull(["t", "t"], [1]), NotAllowed, "as many lists of row ids"),
    (lambda kv: kv.push("t", ([1, 2], rows(3))), ShapeMismatch, r"\(2, 2\).*\(3, 2\)"),
    (lambda kv: kv.push("t", ([1], np.ones((1, 2)))), DtypeMismatch, "float64: cast them"),
    (lambda kv: kv.push("t", ([1], np.ones((1, 2), int)), cast=True), DtypeMismatch, "int64"),
    (lambda kv: kv.push("t", ([True], rows(1))), DtypeMismatch, "bool"),
    (lambda kv: kv.push("t", ([0, 11], rows(2))), NotAllowed, r"ids\[1\] is 11"),
    (lambda kv: kv.push("t", np.ones((10, 2), FLOAT)), NotAllowed, "says no row ids"),
    (lambda kv: kv.push("t", []), NotAllowed, "empty list"),
    (lambda kv: kv.push("w", kvd.RowSparseArray([1], rows(1))).wait(), ShapeMismatch, r"'w'.* rows of shape \(1,\)"),
    (lambda kv: kv.push("x", kvd.RowSparseArray([1], rows(1))).wait(), KeyNotFound, "'x'"),
    (lambda kv: kv.pull("t"), NotAllowed, "'t' is a table, of which calls name rows"),
    (lambda kv: kv.pull("t", ignore_sparse=False), NotAllowed, "row_sparse_pull"),
    (lambda kv: kv.pushpull("t", rows(10)), NotAllowed, "'t' is a table"),
    (lambda kv: kv.pushpull("w", kvd.RowSparseArray([1], rows(1))), NotAllowed, "only some rows: pass out="),
    (lambda kv: kv.broadcast("t", rows(10)), NotAllowed, "'t' is a table"),
    (lambda kv: kv.bind("t"), NotAllowed, "'t' is a table"),
    (lambda kv: kv.init("t", TABLE), KeyExists, "live already"),
    (lambda kv: kv.init("t", kvd.RowSparse(shape=(1, 1))), ShapeMismatch, r"'t' has 10 rows of shape \(2,\)"),
    (lambda kv: kv.init("t", rows(10)), NotAllowed, "'t' is a table"),
    (lambda kv: kv.init("w", rows(10)), ShapeMismatch, r"'w' has shape \(3,\), the given value has \(10, 2\)"),
    (lambda kv: kv.init("w", kvd.RowSparse(shape=(3,))), NotAllowed, "'w' is no table"),
    (lambda kv: kv.init("x", kvd.RowSparseArray([1], rows(1))), NotAllowed, "then push the rows"),
    (lambda kv: kv.init(["x", "w"], [kvd.RowSparse(shape=(1,)), np.zeros(3, FLOAT)]), KeyExists, "'w'"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_in_words_and_changes_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, text = BAD[number]
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        kv.push("t", ([2], rows(1)))
        with pytest.raises(kind, match=text):
            call(kv)
        assert kv.row_sparse_pull("t", range_of(10))[:, 0].tolist() == [1, 1, 0, *[1] * 7]
        assert kv.pull("w").tolist() == [0, 0, 0]
        with pytest.raises(KeyNotFound):
            kv.version("x")
    assert not list(tmp_path.iterdir())


def range_of(count: int) -> Any:
    return np.arange(count)


def test_of_a_list_with_bad_rows_nothing_is_pushed() -> None:
    with new_store() as kv:
        with pytest.raises(NotAllowed):
            kv.push(["w", "t"], [np.ones(3, FLOAT), ([10], rows(1))]).wait()
        assert kv.pull("w").tolist() == [0, 0, 0]
        assert kv.version("t") == 0


def test_an_updater_is_not_called_with_rows() -> None:
    with new_store() as kv:
        kv.set_updater(lambda key, received, stored: pytest.fail("called"))
        with pytest.raises(NotAllowed, match="an updater takes whole values"):
            kv.push("t", ([1], rows(1))).wait()


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (ROW_SPARSE, NotAllowed, "pass one of the two"),
        (lambda: ROW_SPARSE(shape=(2, 2), row_shape=(2,)), NotAllowed, "pass one of the two"),
        (lambda: ROW_SPARSE(shape=5), NotAllowed, "tuple of whole numbers"),
        (lambda: ROW_SPARSE(shape=(1.5, 2)), NotAllowed, "tuple of whole numbers"),
        (lambda: ROW_SPARSE(shape=()), NotAllowed, "number of its rows"),
        (lambda: ROW_SPARSE(shape=(-1, 2)), NotAllowed, "from 0 to"),
        (lambda: ROW_SPARSE(shape=(0, 2)), NotAllowed, r"shape=\(0, 2\) is a table without rows"),
        (lambda: ROW_SPARSE(shape=(4, 0)), NotAllowed, "elements"),
        (lambda: ROW_SPARSE(shape=(4, 1 << 30)), NotAllowed, "elements"),
        (lambda: ROW_SPARSE(shape=(4,), dtype="float16"), DtypeMismatch, "float32 or float64, not float16"),
        (lambda: ROW_SPARSE(shape=(4,), dtype="number"), DtypeMismatch, "not 'number'"),
        (lambda: ROW_SPARSE(shape=(4,), dtype=object()), DtypeMismatch, "float32 or float64"),
        (lambda: ROW_SPARSE(shape=(4,), initializer=kvd.initializer.Zeros), kvd.ConfigError, "such as Zeros()"),
    ],
)
def test_descriptions_out_of_range_are_refused(make: Callable[[], Any], kind: type[KvdError], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_an_outer_optimizer_does_not_update_rows() -> None:
    """It applies its momentum every few pushes to all elements, so a row that was left out would keep it for ever."""
    with new_store() as kv:
        kv.set_optimizer(kvd.optimizer.DelayedNesterov(0.5, buffer_size=2))
        with pytest.raises(NotAllowed, match="DelayedNesterov cannot update single rows"):
            kv.push("t", ([1], rows(1))).wait()
        assert kv.version("t") == 0


@pytest.mark.parametrize("refusing", ["optimizer", "updater"])
def test_a_push_of_keys_and_tables_changes_none_if_the_tables_refuse(refusing: str) -> None:
    with new_store() as kv:
        if refusing == "optimizer":
            kv.set_optimizer(kvd.optimizer.LARS(1.0))
        else:
            kv.set_updater(lambda key, received, stored: None)
        with pytest.raises(NotAllowed, match=r"single rows|takes whole values"):
            kv.push(["w", "t"], [np.ones(3, FLOAT), ([3], rows(1))]).wait()
        assert (kv.version("w"), kv.version("t")) == (0, 0)


def test_an_optimizer_that_is_loaded_starts_over_on_tables_unless_it_is_theirs(tmp_path: Path) -> None:
    """The file has no states of tables, and another optimizer may keep something else under the same name."""
    of_rows, of_elements = kvd.optimizer.RowWiseAdagrad(1.0), kvd.optimizer.Adagrad(1.0)
    pushed = kvd.RowSparseArray([3], np.array([[1, 3]], FLOAT))
    with kvd.create("local") as kv:
        kv.init("w", np.zeros(3, FLOAT))
        for number, optimizer in enumerate((of_rows, of_elements)):
            kv.set_optimizer(optimizer)
            kv.save_optimizer_states(tmp_path / f"{number}", dump_optimizer=True)
    with new_store() as kv:
        kv.set_optimizer(of_elements)
        kv.push("t", pushed)
        kv.load_optimizer_states(tmp_path / "1")
        kv.push("t", pushed)
        assert kv.row_sparse_pull("t", [3]) == pytest.approx(np.full((1, 2), 1 - 1 - 2**-0.5))
        kv.load_optimizer_states(tmp_path / "0")
        kv.push("t", pushed)
        moved = np.array([[1, 3]]) / 5**0.5
        assert kv.row_sparse_pull("t", [3]) == pytest.approx(-(2**-0.5) - moved)
