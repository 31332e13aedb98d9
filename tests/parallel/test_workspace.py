"""The memory that an executor keeps: what is computed in it again and again, and what a caller may keep."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvd.parallel import (
    BatchNorm,
    Conv2D,
    DataDesc,
    Dense,
    Device,
    Dropout,
    Flatten,
    Layer,
    MeanSquaredError,
    ReLU,
    Sequential,
    SoftmaxCrossEntropy,
    Tanh,
)
from kvd.parallel.models.numpy.layer import Frame
from kvd.parallel.models.numpy.workspace import Workspace, axes_in_memory, in_memory_order

FLOAT32 = np.dtype(np.float32)


def test_an_array_of_the_same_name_has_the_same_memory() -> None:
    workspace = Workspace(Device("cpu"), FLOAT32)
    large = workspace.array("a", (4, 6))
    assert large.dtype == FLOAT32
    assert np.shares_memory(large, workspace.array("a", (3, 5)))
    assert np.shares_memory(large, workspace.array("a", (24,), bool))
    assert not np.shares_memory(large, workspace.array("b", (4, 6)))
    larger = workspace.array("a", (7, 7))
    assert not np.shares_memory(large, larger)
    assert workspace.holds(larger[2:, ::2].T)
    assert not workspace.holds(np.ones(3, np.float32))


def test_arrays_in_the_order_of_another() -> None:
    workspace = Workspace(Device("cpu"), FLOAT32)
    for axes in ((0, 1, 2, 3), (1, 2, 3, 0), (3, 0, 2, 1)):
        model = np.zeros((2, 3, 4, 5), np.float32).transpose(axes)
        made = workspace.array_like("a", model)
        assert (made.shape, made.strides) == (model.shape, model.strides)
        assert in_memory_order(made).flags.c_contiguous
    assert axes_in_memory(np.zeros((2, 3)).T) == (1, 0)
    assert workspace.array_like("a", np.zeros((2, 3), np.float32), bool).dtype == bool


def test_a_gradient_never_lies_where_the_one_that_it_comes_from_does() -> None:
    workspace = Workspace(Device("cpu"), FLOAT32)
    first = workspace.gradient((4, 5), apart_from=np.ones(3, np.float32))
    second = workspace.gradient((60, 5), apart_from=first.T)
    third = workspace.gradient_like(np.zeros((8, 9), np.float32), apart_from=second[3:])
    fourth = workspace.gradient((4, 5), apart_from=third)
    for one, other in ((first, second), (second, third), (third, fourth)):
        assert not np.shares_memory(one, other)
    assert np.shares_memory(second, fourth)


NETWORK = (
    Conv2D(6, 3, stride=2, padding=1),
    BatchNorm(),
    ReLU(),
    Dropout(0.3),
    Conv2D(4, 2),
    Tanh(),
    ReLU(),
    Flatten(),
    Dense(7),
    Dropout(0.0),
    ReLU(),
    Dense(3),
)
SHAPE = (8, 2, 11, 9)


def bound(*layers: Any, shape: tuple[int, ...] = SHAPE, **arguments: Any) -> Any:
    model = Sequential(*layers)
    loss = isinstance(layers[-1], SoftmaxCrossEntropy | MeanSquaredError)
    wanted = model.describe([DataDesc("data", shape)]).outputs[0].shape
    labels = [DataDesc("label", shape[:1] if isinstance(layers[-1], SoftmaxCrossEntropy) else wanted)] if loss else []
    return model.bind("cpu", [DataDesc("data", shape)], labels, params=model.initialize(shape, seed=3), **arguments)


def data(seed: int, shape: tuple[int, ...] = SHAPE) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_step_gives_the_bits_that_it_gives_in_new_memory() -> None:
    head = data(9, (8, 3))
    used = bound(*NETWORK, grad_req={"data": "write"})
    for seed in range(3):
        used.forward({"data": data(seed)}, is_train=True)
        used.backward([head])
        used.forward({"data": data(seed + 10)}, is_train=False)
    aux = {name: array.copy() for name, array in used.aux.items()}
    new = bound(*NETWORK, grad_req={"data": "write"}, aux={name: array.copy() for name, array in aux.items()})
    new.step = used.step
    for executor in (used, new):
        executor.forward({"data": data(5)}, is_train=True)
        executor.backward([head])
    assert used.outputs[0].tobytes() == new.outputs[0].tobytes()
    for name, gradient in (new.grads | new.input_grads).items():
        assert (used.grads | used.input_grads)[name].tobytes() == gradient.tobytes(), name


@pytest.mark.parametrize(
    "layers",
    [
        (Dense(3),),
        (Conv2D(3, 2),),
        (Dense(3), ReLU()),
        (Conv2D(3, 2), Flatten()),
        (Dense(3), Dropout(0.5)),
        (BatchNorm(), Tanh()),
        (Flatten(), Dense(3), MeanSquaredError()),
        (Flatten(), Dense(3), SoftmaxCrossEntropy()),
    ],
    ids=str,
)
def test_outputs_are_the_callers(layers: tuple[Any, ...]) -> None:
    executor = bound(*layers)
    label = np.zeros(executor.output_descs[0].shape if isinstance(layers[-1], MeanSquaredError) else 8, np.float32)
    labels = {"label": label} if executor.passes._label else {}
    (first,) = executor.forward({"data": data(1), **labels}, is_train=True)
    copy = first.copy()
    assert first.flags.c_contiguous
    executor.backward(None if labels else [np.ones_like(first)])
    executor.forward({"data": data(2), **labels}, is_train=True)
    np.testing.assert_array_equal(first, copy)


@pytest.mark.parametrize(
    "layer", [ReLU(), Tanh(), Flatten(), Dropout(0.5), BatchNorm(), Conv2D(2, 2), Dense(4)], ids=str
)
def test_what_the_caller_gives_is_not_changed(layer: Layer) -> None:
    executor = bound(layer, ReLU(), grad_req={"data": "write"})
    x, head = data(1), data(2, executor.output_descs[0].shape)
    copies = x.copy(), head.copy()
    executor.forward({"data": x}, is_train=True)
    executor.backward([head])
    np.testing.assert_array_equal(x, copies[0])
    np.testing.assert_array_equal(head, copies[1])


def test_a_monitor_sees_each_output_before_another_layer_overwrites_it() -> None:
    seen: dict[str, Any] = {}
    executor = bound(*NETWORK)
    executor.set_monitor(lambda name, array: seen.__setitem__(name, array.copy()))
    executor.forward({"data": data(1)}, is_train=False)
    assert (seen["conv2d0_output"] < 0).any()
    assert (seen["batchnorm0_output"] < 0).any()
    np.testing.assert_array_equal(seen["relu0_output"], np.maximum(seen["batchnorm0_output"], 0))
    np.testing.assert_array_equal(seen["relu1_output"], np.maximum(seen["tanh0_output"], 0))


class Kept(Layer):
    """A layer of a program: backward reads its output, and it returns its own arrays."""

    kind = "kept"

    def forward(self, frame: Frame, x: Any) -> Any:
        frame.saved["y"] = x - 1
        return frame.saved["y"]

    def backward(self, frame: Frame, grad: Any) -> Any:
        np.testing.assert_array_equal(frame.saved["y"].min() < 0, True)  # a ReLU after it has left it alone
        frame.saved["grad"] = grad.copy()
        return grad


def test_layers_of_a_program_keep_what_they_return() -> None:
    executor = bound(Dense(5), Kept(), ReLU(), Flatten(), Dense(2), shape=(6, 3), grad_req={"data": "write"})
    x, head = data(1, (6, 3)), data(2, (6, 2))
    executor.forward({"data": x}, is_train=True)
    executor.backward([head])
    first, second = executor.params["dense0_weight"], executor.params["dense1_weight"]
    slope = x.astype(np.float64) @ first.T - 1 > 0
    np.testing.assert_allclose(executor.input_grads["data"], ((head @ second) * slope) @ first, rtol=1e-5, atol=1e-6)


def test_a_not_a_number_goes_through_a_relu() -> None:
    x = np.array([[np.nan, -np.nan, -1, 2, np.inf, -np.inf, -0.0]], np.float32)
    for layers in ([ReLU()], [Flatten(), ReLU()], [Dense(7, use_bias=False), ReLU()]):
        executor = bound(*layers, shape=x.shape)
        given = x
        for weight in executor.params.values():
            weight[...], given = np.diag(x[0]), np.ones_like(x)
        with np.errstate(invalid="ignore"):
            (y,) = executor.forward({"data": given}, is_train=False)
        np.testing.assert_array_equal(y, [[np.nan, np.nan, 0, 2, np.inf, 0, 0]])


def test_a_step_allocates_no_more_than_what_it_returns() -> None:
    executor = bound(*NETWORK[:3], *NETWORK[4:], SoftmaxCrossEntropy(), shape=(64, 2, 31, 29))
    inputs = {"data": data(1, (64, 2, 31, 29)), "label": np.zeros(64, np.float32)}

    def step() -> None:
        executor.forward(inputs, is_train=True)
        executor.backward()

    step()
    tracemalloc.start()
    try:
        step()
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 100_000, "the first convolution alone computes 64 · 6 · 16 · 15 numbers of 4 bytes: 369 kB"
