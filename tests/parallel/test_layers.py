"""Layers: shapes, initial values, random numbers, states, and invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvd.errors import ConfigError
from kvd.parallel import BatchNorm, Conv2D, DataDesc, Sequential
from kvd.parallel.models.numpy.ids import sum_by_id
from kvd.parallel.models.numpy.layers import Dense, Dropout, Embedding, Flatten, ReLU, Tanh
from kvd.parallel.models.numpy.losses import MeanSquaredError, SoftmaxCrossEntropy

NET = (
    Conv2D(4, 3, stride=2, padding=1),
    BatchNorm(),
    ReLU(),
    Dropout(0.5),
    Flatten(),
    Dense(8),
    Tanh(),
    Dense(3, use_bias=False),
    SoftmaxCrossEntropy(),
)


def test_shapes_and_names() -> None:
    model = Sequential(*NET, prefix="net_")
    assert model.parameter_shapes((2, 1, 6, 6)) == {
        "net_conv2d0_weight": (4, 1, 3, 3),
        "net_conv2d0_bias": (4,),
        "net_batchnorm0_gamma": (4,),
        "net_batchnorm0_beta": (4,),
        "net_dense0_weight": (8, 36),
        "net_dense0_bias": (8,),
        "net_dense1_weight": (3, 8),
    }
    assert model.aux_shapes((2, 1, 6, 6)) == {
        "net_batchnorm0_running_mean": (4,),
        "net_batchnorm0_running_var": (4,),
    }
    description = model.describe([DataDesc("data", (2, 1, 6, 6))], [DataDesc("label", (2,))])
    assert description.outputs == (DataDesc("net_softmaxcrossentropy0_output", (2, 3)),)
    assert description.has_loss
    assert list(description.params) == list(model.parameter_shapes((2, 1, 6, 6)))


def test_given_names() -> None:
    model = Sequential(Dense(2, name="hidden"), Dense(2), MeanSquaredError(name="loss"))
    assert list(model.parameter_shapes((1, 2))) == ["hidden_weight", "hidden_bias", "dense1_weight", "dense1_bias"]
    assert model.describe([DataDesc("data", (1, 2))]).outputs[0].name == "loss_output"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(0), "units must be"),
        (lambda: Dense(2.5), "units must be"),  # type: ignore[arg-type]
        (lambda: Dense(True), "units must be"),
        (lambda: Dense(2, initializer="xavier"), "initializer 'xavier'"),  # type: ignore[arg-type]
        (lambda: Conv2D(0, 3), "channels must be"),
        (lambda: Conv2D(1, 0), "kernel must be"),
        (lambda: Conv2D(1, 3, stride=0), "stride must be"),
        (lambda: Conv2D(1, 3, padding=-1), "padding must not be negative"),
        (lambda: Conv2D(1, 3, initializer=""), "initializer"),  # type: ignore[arg-type]
        (lambda: Embedding(0, 3), "vocabulary must be"),
        (lambda: Embedding(3, 0), "dimensions must be"),
        (lambda: Dropout(1.0), "rate must be in"),
        (lambda: Dropout(-0.1), "rate must be in"),
        (lambda: Dropout(math.nan), "rate must be in"),
        (lambda: BatchNorm(momentum=1.5), "momentum must be in"),
        (lambda: BatchNorm(epsilon=0.0), "epsilon must be above 0"),
        (lambda: Sequential(), "at least one layer"),
        (lambda: Sequential(SoftmaxCrossEntropy()), "besides the loss"),
        (lambda: Sequential(Dense(2), MeanSquaredError(), Dense(2)), "only be the last"),
        (lambda: Sequential(Dense(2), Embedding(3, 2)), "only be the first"),
        (lambda: Sequential(Dense(2, name="a"), ReLU(name="a")), "several layers are called a"),
        (lambda: Sequential(Dense(2), Dense(2, name="dense0")), "several layers are called dense0"),
    ],
)
def test_bad_layers(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("layers", "shape", "message"),
    [
        ([Dense(2)], (3,), r"dense0 takes \(batch, …, features\)"),
        ([Conv2D(2, 3)], (3, 4), r"conv2d0 takes \(batch, channels, height, width\)"),
        ([Conv2D(2, 5)], (3, 1, 4, 6), "images of 4 × 6 with padding 0 are smaller than the kernel of 5 × 5"),
        ([Dense(2), BatchNorm()], (3,), "dense0"),
        ([BatchNorm()], (3,), r"batchnorm0 takes \(batch, channels, …\)"),
        ([ReLU(), SoftmaxCrossEntropy()], (3,), r"takes \(batch, …, classes\)"),
    ],
)
def test_shapes_that_do_not_fit(layers: Any, shape: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sequential(*layers).parameter_shapes(shape)


def test_initial_values() -> None:
    model = Sequential(Conv2D(8, 3), BatchNorm(), Flatten(), Dense(30), Dense(20, initializer="glorot"))
    shape = (1, 5, 8, 8)
    values = model.initialize(shape, seed=4)
    assert {name: value.shape for name, value in values.items()} == model.parameter_shapes(shape)
    assert {value.dtype for value in values.values()} == {np.dtype("float32")}
    bounds = {
        "conv2d0_weight": math.sqrt(6 / 45),
        "dense0_weight": math.sqrt(6 / 288),
        "dense1_weight": math.sqrt(6 / 50),
    }
    for name, bound in bounds.items():
        assert 0.95 * bound < np.abs(values[name]).max() <= bound * (1 + 1e-6)
        assert abs(values[name].mean()) < 0.15 * bound
    for name in ("conv2d0_bias", "batchnorm0_beta", "dense0_bias", "dense1_bias"):
        assert not values[name].any()
    assert (values["batchnorm0_gamma"] == 1).all()
    aux = model.initialize_aux(shape)
    assert (aux["batchnorm0_running_var"] == 1).all()
    assert not aux["batchnorm0_running_mean"].any()


def test_embedding_starts_with_rows_of_length_one() -> None:
    table = Sequential(Embedding(400, 64)).initialize((1, 1))["embedding0_weight"]
    assert np.square(table).sum(axis=1).mean() == pytest.approx(1.0, rel=0.05)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    small, large = Sequential(Dense(3)), Sequential(Dense(3), ReLU(), Dense(4))
    first = small.initialize((1, 2), seed=1)["dense0_weight"]
    assert first.tobytes() == large.initialize((9, 2), seed=1)["dense0_weight"].tobytes()
    assert not np.array_equal(first, small.initialize((1, 2), seed=2)["dense0_weight"])
    square = Sequential(Dense(3), Dense(3)).initialize((1, 3))
    assert not np.array_equal(square["dense0_weight"], square["dense1_weight"])


def dropout_output(rate: float = 0.25, seed: int = 0, step: int = 0, is_train: bool = True) -> Any:
    executor = Sequential(Dropout(rate)).bind("cpu", [DataDesc("data", (100, 100))], seed=seed)
    executor.step = step
    return executor.forward({"data": np.ones((100, 100), np.float32)}, is_train)[0].copy()


def test_dropout_keeps_the_expectation() -> None:
    output = dropout_output(0.25)
    assert set(np.unique(output)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (output == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert (dropout_output(0.25, is_train=False) == 1).all()
    assert (dropout_output(0.0) == 1).all()


def test_dropout_masks() -> None:
    assert np.array_equal(dropout_output(seed=3, step=7), dropout_output(seed=3, step=7))
    assert not np.array_equal(dropout_output(seed=3, step=7), dropout_output(seed=3, step=8))
    assert not np.array_equal(dropout_output(seed=3, step=7), dropout_output(seed=4, step=7))
    executor = Sequential(Dropout(0.5), Dropout(0.5)).bind("cpu", [DataDesc("data", (100, 100))])
    (output,) = executor.forward({"data": np.ones((100, 100), np.float32)}, is_train=True)
    assert (output > 0).mean() == pytest.approx(0.25, abs=0.03)  # two masks that know nothing of each other


def test_batchnorm_refuses_a_single_value() -> None:
    executor = Sequential(BatchNorm(name="bn")).bind("cpu", [DataDesc("data", (1, 3))])
    with pytest.raises(ValueError, match="bn: one value per channel on cpu"):
        executor.forward({"data": np.ones((1, 3), np.float32)}, is_train=True)
    executor.forward({"data": np.ones((1, 3), np.float32)}, is_train=False)
    images = Sequential(BatchNorm()).bind("cpu", [DataDesc("data", (1, 3, 2, 1))])
    images.forward({"data": np.ones((1, 3, 2, 1), np.float32)}, is_train=True)


def test_batchnorm_moves_its_state_in_training_only() -> None:
    executor = Sequential(BatchNorm(momentum=0.5)).bind("cpu", [DataDesc("data", (2, 1))])
    data = {"data": np.array([[1.0], [3.0]], np.float32)}
    executor.forward(data, is_train=True)
    assert executor.aux["batchnorm0_running_mean"].tolist() == [1.0]  # 0.5 · 0 + 0.5 · 2
    assert executor.aux["batchnorm0_running_var"].tolist() == [1.5]  # 0.5 · 1 + 0.5 · 2, unbiased
    executor.forward(data, is_train=False)
    assert executor.aux["batchnorm0_running_mean"].tolist() == [1.0]


@pytest.mark.parametrize("bad", [-1, 5, 1.5, math.nan, math.inf])
def test_ids_and_labels_out_of_range(bad: float) -> None:
    embedding = Sequential(Embedding(5, 2)).bind("cpu", [DataDesc("data", (3,))])
    with pytest.raises(ValueError, match=r"embedding0: id .* is not a whole number in \[0, 5\)"):
        embedding.forward({"data": np.array([0, 1, bad])}, is_train=True)
    softmax = Sequential(Dense(5), SoftmaxCrossEntropy()).bind(
        "cpu", [DataDesc("data", (3, 2))], [DataDesc("label", (3,))]
    )
    softmax.forward({"data": np.ones((3, 2)), "label": np.array([0, 1, bad])}, is_train=True)
    with pytest.raises(ValueError, match=r"softmaxcrossentropy0: label .* is not a whole number in \[0, 5\)"):
        softmax.backward()


def test_embedding_takes_large_ids_exactly() -> None:
    executor = Sequential(Embedding(2**24 + 2, 1)).bind("cpu", [DataDesc("data", (1,), "int64")], for_training=False)
    executor.params["embedding0_weight"][2**24 + 1] = 7
    (output,) = executor.forward({"data": np.array([2**24 + 1])}, is_train=False)
    assert output.tolist() == [[7.0]]


@pytest.mark.parametrize("size", [0, 1, 2, 50])
def test_sum_by_id(size: int) -> None:
    generator = np.random.default_rng(size)
    ids = generator.integers(0, 6, size)
    rows = generator.integers(-9, 9, (size, 3)).astype(np.float64)
    expected = np.zeros((6, 3))
    np.add.at(expected, ids, rows)
    distinct, sums = sum_by_id(np, ids, rows.copy())
    assert distinct.tolist() == sorted(set(ids.tolist()))
    assert np.array_equal(sums, expected[distinct])


def test_sum_by_id_keeps_nan_to_its_id() -> None:
    _, sums = sum_by_id(np, np.array([0, 1, 1, 2]), np.array([[1.0], [np.nan], [2.0], [3.0]]))
    assert sums[[0, 2]].tolist() == [[1.0], [3.0]]
    assert np.isnan(sums[1, 0])
