"""A table against dicts of rows in float64 and against torch; what stays untouched; what an error leaves behind."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.compute.catalogue import kernel_of
from kvd.compute.compiled import warm_up
from kvd.compute.kernels import ID_LOOPS, ROW_LOOPS, ROWS, loop_name
from kvd.errors import NotAllowed
from kvd.initializer import Constant, Normal
from kvd.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, RowWiseAdagrad, schedule
from kvd.tables.description import RowSparse
from kvd.tables.lazy import row_sums
from kvd.tables.table import Table
from tests.compute.compiled_harness import needs_numba, only_compiled, only_numpy
from tests.compute.optimizer_harness import RULES as ALL_RULES
from tests.compute.optimizer_harness import by_formula
from tests.compute.test_custom_optimizers import Failing, SignDescent

torch = pytest.importorskip("torch")

WIDTH = 4
RNG_SEED = 5
HALF = Constant(0.5)


def int64(numbers: Any) -> Any:
    return np.array(numbers, np.int64)


def new_table(dtype: str = "float64", initializer: Any = HALF, row_shape: tuple[int, ...] = (WIDTH,)) -> Table:
    return Table(RowSparse(row_shape=row_shape, dtype=dtype, initializer=initializer), "t")


def read(table: Table, ids: Any) -> Any:
    out = np.empty((len(ids), table.description.width), table.description.numpy_dtype)
    table.read(int64(ids), out)
    return out


class Model:
    """A row as the formulas of the papers say, in Python's floats, element by element."""

    def __init__(self, rule: Optimizer) -> None:
        self.rule: Any = rule
        self.step = 0
        self.rows: dict[int, list[float]] = {}
        self.state: dict[int, list[list[float]]] = {}

    def row(self, row: int) -> list[float]:
        return self.rows.get(row, [0.5] * WIDTH)

    def push(self, ids: list[int], gradients: Any) -> None:
        self.step += 1
        sums: dict[int, list[float]] = {}
        for row, gradient in zip(ids, gradients.tolist(), strict=True):
            before = sums.get(row, [0.0] * WIDTH)
            sums[row] = [one + other for one, other in zip(before, gradient, strict=True)]
        for row, gradient in sums.items():
            self._update(row, gradient)

    def _update(self, row: int, gradient: list[float]) -> None:
        rule, weights = self.rule, list(self.row(row))
        state = self.state.setdefault(row, [[0.0] * WIDTH, [0.0] * WIDTH])
        gradient = [rule.rescale_grad * g for g in gradient]
        if rule.clip_gradient is not None:
            gradient = [max(-rule.clip_gradient, min(rule.clip_gradient, g)) for g in gradient]
        if not rule.decoupled_wd:
            gradient = [g + rule.wd * w for g, w in zip(gradient, weights, strict=True)]
        if isinstance(rule, RowWiseAdagrad):
            state[0] = [state[0][0] + sum(g * g for g in gradient) / WIDTH] * WIDTH
        for j, g in enumerate(gradient):
            weights[j] = self._element(weights[j], g, state, j)
        self.rows[row] = weights

    def _element(self, w: float, g: float, state: list[list[float]], j: int) -> Any:
        rule, t, rate = self.rule, self.step, self.rule.rate(self.step)
        first, second = state
        match rule:
            case SGD():
                first[j] = rule.momentum * first[j] + g
                return w - rate * (g + rule.momentum * first[j] if rule.nesterov else first[j])
            case RowWiseAdagrad():
                return w - rate / (1 + (t - 1) * rule.lr_decay) * g / (math.sqrt(first[j]) + rule.epsilon)
            case Adagrad():
                first[j] += g * g
                return w - rate / (1 + (t - 1) * rule.lr_decay) * g / (math.sqrt(first[j]) + rule.epsilon)
            case RMSProp():
                first[j] = rule.alpha * first[j] + (1 - rule.alpha) * g * g
                return w - rate * g / (math.sqrt(first[j]) + rule.epsilon)
        w = w * (1 - rate * rule.wd) if rule.decoupled_wd else w
        first[j] = rule.beta1 * first[j] + (1 - rule.beta1) * g
        second[j] = rule.beta2 * second[j] + (1 - rule.beta2) * g * g
        mean, variance = first[j] / (1 - rule.beta1**t), second[j] / (1 - rule.beta2**t)
        return w - rate * mean / (math.sqrt(variance) + rule.epsilon)


RULES = [
    SGD(0.1),
    SGD(0.1, momentum=0.9, wd=0.01),
    SGD(schedule.Step(0.1, 3, 0.5), momentum=0.9, nesterov=True),
    Adagrad(0.1, lr_decay=0.1, wd=0.02, rescale_grad=0.5),
    RowWiseAdagrad(0.1, lr_decay=0.1, wd=0.02, clip_gradient=0.8),
    Adam(0.01, wd=0.1),
    AdamW(0.01, wd=0.1),
    RMSProp(0.01),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_fifty_pushes_equal_the_formulas(rule: Optimizer) -> None:
    generator = np.random.default_rng(RNG_SEED)
    table, model = new_table(), Model(rule)
    for number in range(50):
        ids = generator.integers(0, 30, generator.integers(0, 20)).tolist() if number != 7 else []
        gradients = generator.standard_normal((len(ids), WIDTH))
        table.update(rule, int64(ids), gradients)
        model.push(ids, gradients)
    assert table.ids().tolist() == sorted(model.rows)
    expected = [model.row(row) for row in range(40)]
    np.testing.assert_allclose(read(table, range(40)), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_a_row_that_every_push_names_takes_the_steps_of_a_key(rule: Optimizer) -> None:
    generator = np.random.default_rng(RNG_SEED)
    table = new_table()
    gradients = generator.standard_normal((30, WIDTH))
    for number, gradient in enumerate(gradients):
        table.update(rule, int64([number % 5 + 10, 7]), np.array([gradient, gradient]))
    expected = by_formula(rule, np.full(WIDTH, 0.5), list(gradients))
    np.testing.assert_allclose(read(table, [7])[0], expected, rtol=1e-10, atol=1e-12)


def trained_bits(rule: Optimizer, *, contiguous: bool) -> bytes:
    """The rows after three pushes. What is not contiguous is updated tile by tile."""
    generator = np.random.default_rng(RNG_SEED)
    table = new_table("float32")
    for _ in range(3):
        gradients = generator.standard_normal((50, 2 * WIDTH)).astype(np.float32)[:, :WIDTH]
        table.update(rule, generator.integers(0, 40, 50), np.ascontiguousarray(gradients) if contiguous else gradients)
    return bytes(read(table, range(60)).tobytes())


@needs_numba
@pytest.mark.parametrize(
    "rule", [SGD(0.1, clip_gradient=0.5), SGD(0.1, momentum=0.9), Adam(0.1), AdamW(0.1, wd=0.1), Adagrad(0.1, wd=0.01)]
)
def test_compiled_loops_give_the_same_bits(rule: Optimizer) -> None:
    with only_numpy():
        by_numpy = trained_bits(rule, contiguous=True)
    assert warm_up(rule, of_rows=True)
    with only_compiled() as used:
        assert trained_bits(rule, contiguous=False) == by_numpy
        assert trained_bits(rule, contiguous=True) == by_numpy
    name = loop_name(kernel_of(rule))
    assert set(used) == {name, f"{name}{ROWS}", "find_ids", "put_ids", "sort_ids", "add_rows"}


def test_the_names_of_the_loops_for_rows_are_those_that_there_are() -> None:
    jit = pytest.importorskip("kvd.compute.jit")
    assert jit._ROW_LOOPS.keys() == ROW_LOOPS
    assert tuple(jit.ID_LOOPS) == ID_LOOPS


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(RULES),
    st.lists(st.lists(st.integers(0, 6) | st.sampled_from([1 << 40, (1 << 63) - 1]), max_size=12), max_size=6),
    st.integers(0, 1 << 30),
)
def test_any_pushes_equal_the_formulas(rule: Optimizer, pushes: list[list[int]], seed: int) -> None:
    generator = np.random.default_rng(seed)
    table, model = new_table(), Model(rule)
    for ids in pushes:
        gradients = generator.uniform(-2, 2, (len(ids), WIDTH))
        table.update(rule, int64(ids), gradients)
        model.push(ids, gradients)
    asked = [*range(8), 1 << 40, (1 << 63) - 1]
    expected = [model.row(row) for row in asked]
    np.testing.assert_allclose(read(table, asked), expected, rtol=1e-11, atol=1e-13)
    assert len(table) == len(model.rows)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("rule", "reference"),
    [
        (SGD(0.1), lambda weight: torch.optim.SGD([weight], 0.1)),
        (Adagrad(0.1, lr_decay=0.05), lambda weight: torch.optim.Adagrad([weight], 0.1, lr_decay=0.05)),
        (Adam(0.01), lambda weight: torch.optim.SparseAdam([weight], 0.01)),
    ],
    ids=["SGD", "Adagrad", "SparseAdam"],
)
def test_fifty_steps_with_sparse_gradients_equal_those_of_torch(rule: Optimizer, reference: Any) -> None:
    weight = torch.nn.Parameter(torch.from_numpy(read(new_table("float32", Normal(0.3, seed=2)), range(30))))
    theirs = reference(weight)
    table = new_table("float32", Normal(0.3, seed=2))
    generator = np.random.default_rng(RNG_SEED)
    for _ in range(50):
        ids, rows = generator.integers(0, 30, 12), generator.standard_normal((12, WIDTH)).astype(np.float32)
        weight.grad = torch.sparse_coo_tensor(torch.from_numpy(ids[None]), torch.from_numpy(rows), (30, WIDTH))
        table.update(rule, ids, rows)
        theirs.step()
    np.testing.assert_allclose(read(table, range(30)), weight.detach().numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_row_has_the_same_bits_whatever_is_pushed_beside_it(rule: Optimizer) -> None:
    """So the result does not depend on how a table is cut into parts, nor on the tiles."""
    generator = np.random.default_rng(RNG_SEED)
    ids = np.arange(20_000, dtype=np.int64)  # more than a tile has
    together, alone = new_table("float32"), new_table("float32")
    for _ in range(3):
        gradients = generator.standard_normal((len(ids), WIDTH)).astype(np.float32)
        together.update(rule, ids, gradients)
        alone.update(rule, ids[19_000:19_001], gradients[19_000:19_001])
    assert read(together, [19_000]).tobytes() == read(alone, [19_000]).tobytes()


def test_the_memory_is_at_most_1_3_times_the_live_rows_and_their_state() -> None:
    table = new_table("float32", row_shape=(64,))
    generator = np.random.default_rng(RNG_SEED)
    for number in range(12):
        ids = generator.integers(0, 1 << 62, 3000)
        table.update(Adagrad(0.1), ids, np.ones((3000, 64), np.float32))
        if number >= 2:
            assert table.nbytes <= 1.3 * len(table) * 64 * 4 * 2


def test_reading_takes_no_memory() -> None:
    table = new_table("float32")
    before = table.nbytes
    read(table, range(5000))
    assert (len(table), table.nbytes) == (0, before)


def test_nan_stays_in_its_row() -> None:
    table = new_table()
    gradients = np.ones((3, WIDTH))
    gradients[1, 2] = math.nan
    for rule in RULES:
        table.forget_optimizer()
        table.update(rule, int64([1, 2, 3]), gradients)
    assert np.isnan(read(table, [2])).any()
    assert np.isfinite(read(table, [0, 1, 3, 4])).all()


def test_assigned_rows_replace_and_duplicates_are_added() -> None:
    table = new_table()
    table.assign(int64([7, 3, 7]), np.array([[1.0] * WIDTH, [2.0] * WIDTH, [4.0] * WIDTH]))
    assert read(table, [3, 7, 8])[:, 0].tolist() == [2.0, 5.0, 0.5]
    assert table.step == 0


def test_rows_of_one_number_and_of_many_dimensions() -> None:
    table = new_table(row_shape=())
    table.update(SGD(1.0), int64([5]), np.array([[0.25]]))
    assert read(table, [5, 6]).tolist() == [[0.25], [0.5]]
    assert new_table(row_shape=(2, 3)).description.width == 6


def test_a_custom_optimizer_updates_rows_and_one_that_fails_changes_nothing() -> None:
    table = new_table("float32")
    table.update(SignDescent(0.25), int64([2]), np.ones((1, WIDTH), np.float32))
    assert read(table, [2, 3])[:, 0].tolist() == [0.25, 0.5]
    with pytest.raises(ZeroDivisionError):
        table.update(Failing(0.1), int64([2, 9]), np.full((2, WIDTH), 13, np.float32))
    assert read(table, [2, 9])[:, 0].tolist() == [0.25, 0.5]
    assert table.step == 1


def test_an_optimizer_of_whole_keys_is_refused() -> None:
    class Whole(SGD):
        """Known to nobody, as a rule that needs the norm of the whole key."""

    with pytest.raises(NotAllowed, match="Whole cannot update single rows"):
        new_table().update(Whole(0.1), int64([1]), np.ones((1, WIDTH)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(0, 1 << 30))
def test_row_sums_add_every_element_once(width: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-1000, 1000, (3, width)).astype(np.float64)
    expected = [[math.fsum(row)] for row in rows.tolist()]
    assert row_sums(rows.copy()).tolist() == expected


@pytest.mark.parametrize("part", ["slots", "rows"])
def test_without_memory_for_new_rows_all_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Memory runs out where the index grows, or where the initial rows are made."""
    table = new_table(initializer=Normal(1.0, seed=3))
    many = np.arange(1, 600)
    expected = read(new_table(initializer=Normal(1.0, seed=3)), many)
    table.update(SGD(0.5), int64([0]), np.zeros((1, WIDTH)))

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        if part == "slots":
            patch.setattr("kvd.tables.row_index.np.zeros", no_memory)
        else:
            patch.setattr("kvd.tables.initial_rows.InitialRows.fill", no_memory)
        with pytest.raises(MemoryError):
            table.update(SGD(0.5), many, np.ones((many.size, WIDTH)))
    assert (len(table), table.step) == (1, 1)
    np.testing.assert_array_equal(read(table, many), expected)
    table.update(SGD(0.5), many, np.ones((many.size, WIDTH)))
    np.testing.assert_array_equal(read(table, many), expected - 0.5)
