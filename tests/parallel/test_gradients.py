"""Every gradient against central finite differences in float64, and against torch in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvd.parallel import BatchNorm, Conv2D, DataDesc, Sequential
from kvd.parallel.models.numpy.layers import Dense, Dropout, Embedding, Flatten, ReLU, Tanh
from kvd.parallel.models.numpy.losses import MeanSquaredError, SoftmaxCrossEntropy

NumberArray = np.ndarray[Any, Any]

# name → layers, shape of the data, whether the data are ids, and the layers of torch
CASES: dict[str, tuple[list[Any], tuple[int, ...], int, Callable[[], list[torch.nn.Module]]]] = {
    "dense": ([Dense(4)], (5, 3), 0, lambda: [torch.nn.Linear(3, 4)]),
    "dense without bias": ([Dense(4, use_bias=False)], (5, 3), 0, lambda: [torch.nn.Linear(3, 4, bias=False)]),
    "dense on sequences": ([Dense(4), Tanh(), Dense(2)], (3, 2, 3), 0, lambda: [
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ]),
    "relu": ([Dense(4), ReLU(), Dense(3)], (5, 3), 0, lambda: [
        torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
    ]),
    "tanh first": ([Tanh(), Dense(2)], (4, 3), 0, lambda: [torch.nn.Tanh(), torch.nn.Linear(3, 2)]),
    "flatten": ([Flatten(), Dense(2)], (4, 3, 2), 0, lambda: [torch.nn.Flatten(), torch.nn.Linear(6, 2)]),
    "conv": ([Conv2D(3, 3)], (2, 2, 5, 6), 0, lambda: [torch.nn.Conv2d(2, 3, 3)]),
    "conv stride 2 padding 1": ([Conv2D(3, 3, stride=2, padding=1)], (2, 2, 6, 5), 0, lambda: [
        torch.nn.Conv2d(2, 3, 3, stride=2, padding=1)
    ]),
    "conv 1 × 1 without bias": ([Conv2D(3, 1, use_bias=False)], (2, 2, 3, 3), 0, lambda: [
        torch.nn.Conv2d(2, 3, 1, bias=False)
    ]),
    "conv stride that leaves a rest": ([Conv2D(2, 2, stride=3)], (1, 1, 7, 6), 0, lambda: [
        torch.nn.Conv2d(1, 2, 2, stride=3)
    ]),
    "two convs": ([Conv2D(3, 3, padding=1), ReLU(), Conv2D(2, 2), Flatten(), Dense(3)], (2, 1, 4, 4), 0, lambda: [
        torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 2), torch.nn.Flatten(),
        torch.nn.Linear(18, 3),
    ]),
    "batchnorm on features": ([BatchNorm()], (6, 3), 0, lambda: [torch.nn.BatchNorm1d(3)]),
    "batchnorm on images": ([Conv2D(3, 2), BatchNorm(momentum=0.7, epsilon=1e-3), ReLU()], (3, 2, 3, 4), 0, lambda: [
        torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3, eps=1e-3, momentum=0.3), torch.nn.ReLU()
    ]),
    "embedding": ([Embedding(5, 3)], (4, 6), 5, lambda: [torch.nn.Embedding(5, 3)]),
    "embedding and dense": ([Embedding(7, 3), Flatten(), Dense(2)], (4, 3), 7, lambda: [
        torch.nn.Embedding(7, 3), torch.nn.Flatten(), torch.nn.Linear(9, 2)
    ]),
}  # fmt: skip


def data_of(shape: tuple[int, ...], vocabulary: int) -> NumberArray:
    generator = np.random.default_rng(1)
    return generator.integers(0, vocabulary, shape) if vocabulary else generator.normal(size=shape)


def bound(layers: list[Any], data: NumberArray, dtype: str, **arguments: Any) -> Any:
    """An executor with random parameters; biases and the like are not 0, so that a mistake there shows."""
    model = Sequential(*layers)
    descs = [DataDesc("data", data.shape, data.dtype.name)]
    executor = model.bind("cpu", descs, dtype=dtype, **arguments)
    generator = np.random.default_rng(2)
    for name, value in model.initialize(data.shape, seed=3).items():
        executor.params[name][...] = value + 0.1 * generator.normal(size=value.shape)
    return executor


def numerical(function: Callable[[], float], array: NumberArray) -> NumberArray:
    """The gradient of ``function`` with respect to ``array``, by central differences."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        value, step = array[index], 1e-6
        array[index] = value + step
        above = function()
        array[index] = value - step
        below = function()
        array[index] = value
        gradient[index] = (above - below) / (2 * step)
    return gradient


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_finite_differences(case: str) -> None:
    layers, shape, vocabulary, _ = CASES[case]
    data = data_of(shape, vocabulary)
    requests = None if vocabulary else {"data": "write"}
    executor = bound(layers, data, "float64", grad_req=requests or "write")
    head = np.random.default_rng(4).normal(size=executor.output_descs[0].shape)

    def objective() -> float:
        return float((executor.forward({"data": data}, is_train=True)[0] * head).sum())

    objective()
    executor.backward([head])
    gradients = {name: gradient.copy() for name, gradient in executor.grads.items()}
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, numerical(objective, executor.params[name]), rtol=1e-5, atol=1e-7)
    if not vocabulary:
        gradient = executor.input_grads["data"].copy()
        np.testing.assert_allclose(gradient, numerical(objective, data), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_torch_computes_the_same(case: str) -> None:
    layers, shape, vocabulary, torch_layers = CASES[case]
    data = data_of(shape, vocabulary)
    data = data if vocabulary else data.astype(np.float32)
    executor = bound(layers, data, "float32", grad_req={} if vocabulary else {"data": "write"})
    module = torch.nn.Sequential(*torch_layers())
    for parameter, value in zip(module.parameters(), executor.params.values(), strict=True):
        parameter.data = torch.from_numpy(value.copy())
    x = torch.from_numpy(data.copy())
    if not vocabulary:
        x.requires_grad_()
    head = np.random.default_rng(4).normal(size=executor.output_descs[0].shape).astype(np.float32)

    expected = module(x)
    expected.backward(torch.from_numpy(head))
    (output,) = executor.forward({"data": data}, is_train=True)
    executor.backward([head])

    assert_close(output, expected.detach().numpy())
    assert len(executor.grads) == len(list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), executor.grads.values(), strict=True):
        assert parameter.grad is not None
        assert_close(gradient, parameter.grad.numpy())
    if not vocabulary:
        assert x.grad is not None
        assert_close(executor.input_grads["data"], x.grad.numpy())
    buffers = [buffer for buffer in module.buffers() if buffer.dtype == torch.float32]
    for buffer, state in zip(buffers, executor.aux.values(), strict=True):
        assert_close(state, buffer.numpy())
    module.eval()
    with torch.no_grad():
        expected = module(x)
    (output,) = executor.forward({"data": data}, is_train=False)
    assert_close(output, expected.numpy())


def loss_executor(loss: Any, shape: tuple[int, ...], label: NumberArray, **arguments: Any) -> Any:
    model = Sequential(Tanh(), loss)
    descs = [DataDesc("data", shape)], [DataDesc("label", label.shape, label.dtype.name)]
    return model.bind("cpu", *descs, grad_req={"data": "write"}, **arguments)


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4)])
def test_softmax_cross_entropy(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(5)
    data = generator.normal(size=shape)
    label = generator.integers(0, 4, shape[:-1]).astype(np.float32)
    executor = loss_executor(SoftmaxCrossEntropy(), shape, label, dtype="float64")

    def objective() -> float:
        p = executor.forward({"data": data, "label": label}, is_train=True)[0].reshape(-1, 4)
        return float(-np.log(p[np.arange(len(p)), label.astype(int).ravel()]).mean())

    objective()
    executor.backward()
    gradient = executor.input_grads["data"].copy()
    np.testing.assert_allclose(gradient, numerical(objective, data), rtol=1e-5, atol=1e-9)

    x = torch.from_numpy(data).requires_grad_()
    logits = torch.tanh(x).movedim(-1, 1)
    loss: Any = torch.nn.functional.cross_entropy(logits, torch.from_numpy(label).long())
    loss.backward()
    assert x.grad is not None
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4), (5, 1)])
def test_mean_squared_error(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(6)
    data, label = generator.normal(size=shape), generator.normal(size=shape)
    given = label[:, 0] if shape == (5, 1) else label
    executor = loss_executor(MeanSquaredError(), shape, given, dtype="float64")

    def objective() -> float:
        output = executor.forward({"data": data, "label": given}, is_train=True)[0]
        return float(np.square(output - label).mean())

    objective()
    executor.backward()
    gradient = executor.input_grads["data"].copy()
    np.testing.assert_allclose(gradient, numerical(objective, data), rtol=1e-5, atol=1e-9)

    x = torch.from_numpy(data).requires_grad_()
    loss: Any = torch.nn.functional.mse_loss(torch.tanh(x), torch.from_numpy(label))
    loss.backward()
    assert x.grad is not None
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", [SoftmaxCrossEntropy(), MeanSquaredError()])
def test_parts_of_a_batch_add_up_to_the_whole(loss: Any) -> None:
    generator = np.random.default_rng(7)
    data = generator.normal(size=(7, 3)).astype(np.float32)
    label = generator.integers(0, 3, 7) if isinstance(loss, SoftmaxCrossEntropy) else generator.normal(size=(7, 3))
    model = Sequential(Dense(3), loss)
    params = model.initialize((7, 3))

    def gradient(part: slice, normalization: int | None) -> NumberArray:
        descs = [DataDesc("data", data[part].shape)], [DataDesc("label", label[part].shape)]
        executor = model.bind("cpu", *descs, params=params, normalization=normalization)
        executor.forward({"data": data[part], "label": label[part]}, is_train=True)
        executor.backward()
        return np.array(executor.grads["dense0_weight"])

    whole = gradient(slice(0, 7), None)
    parts = sum(gradient(part, 7) for part in (slice(0, 1), slice(1, 4), slice(4, 7)))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-7)


def test_softmax_of_large_scores_does_not_overflow() -> None:
    model = Sequential(Flatten(), SoftmaxCrossEntropy())
    executor = model.bind("cpu", [DataDesc("data", (1, 3))])
    (p,) = executor.forward({"data": np.array([[1e30, 1e30, -1e30]], np.float32)}, is_train=False)
    assert p.tolist() == [[0.5, 0.5, 0.0]]


def test_dropout_gradient_uses_the_mask_of_the_forward_pass() -> None:
    data = np.random.default_rng(8).normal(size=(20, 30))
    executor = bound([Dense(40), Dropout(0.3), Dense(2)], data, "float64", grad_req={"data": "write"}, seed=9)
    head = np.random.default_rng(4).normal(size=(20, 2))

    def objective() -> float:
        executor.step = 5  # the mask of one and the same step
        return float((executor.forward({"data": data}, is_train=True)[0] * head).sum())

    objective()
    executor.backward([head])
    gradient = executor.grads["dense0_bias"].copy()
    np.testing.assert_allclose(gradient, numerical(objective, executor.params["dense0_bias"]), rtol=1e-5, atol=1e-7)
