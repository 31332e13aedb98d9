"""`Conv2D` of every size against loops over the pixels in float64, whole and in tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.parallel import Conv2D, DataDesc, Flatten, ReLU, Sequential, Tanh
from kvd.parallel.models.numpy.patches import COLUMNS_NBYTES

NumberArray = np.ndarray[Any, Any]

# batch, channels, height, width, channels out, kernel, stride, padding
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 0),
    (2, 3, 5, 7, 4, 3, 1, 1),
    (5, 2, 7, 4, 3, 3, 2, 1),
    (3, 2, 8, 9, 2, 2, 3, 0),
    (1, 3, 6, 5, 2, 5, 1, 2),
    (4, 1, 5, 6, 2, 4, 3, 3),
    (2, 6, 3, 4, 2, 1, 1, 0),
    (2, 2, 5, 4, 9, 1, 2, 0),
    (3, 2, 3, 3, 2, 1, 1, 1),
    (17, 2, 9, 8, 5, 3, 2, 0),
]


def by_loops(
    x: NumberArray, weight: NumberArray, bias: NumberArray, grad: NumberArray | None, stride: int, padding: int
) -> tuple[NumberArray, NumberArray, NumberArray, NumberArray]:
    """Output, and the gradients of the data, the weight and the bias, in float64: one place of the kernel at a time."""
    x, weight, bias = x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64)
    kernel = weight.shape[2]
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    height, width = ((side - kernel) // stride + 1 for side in padded.shape[2:])
    y = np.zeros((len(x), len(weight), height, width))
    to_padded, to_weight = np.zeros_like(padded), np.zeros_like(weight)
    head = np.zeros_like(y) if grad is None else grad.astype(np.float64)
    for row in range(height):
        for column in range(width):
            window = (slice(row * stride, row * stride + kernel), slice(column * stride, column * stride + kernel))
            seen = padded[:, :, *window]
            y[:, :, row, column] = np.einsum("ncij,ocij->no", seen, weight) + bias
            to_weight += np.einsum("no,ncij->ocij", head[:, :, row, column], seen)
            to_padded[:, :, *window] += np.einsum("no,ocij->ncij", head[:, :, row, column], weight)
    rows, columns = (slice(padding, padding + side) for side in x.shape[2:])
    return y, to_padded[:, :, rows, columns], to_weight, head.sum(axis=(0, 2, 3))


def bound(model: Sequential, shape: tuple[int, ...], layout: str = "NCHW", **arguments: Any) -> Any:
    executor = model.bind("cpu", [DataDesc("data", shape, layout=layout)], **arguments)
    generator = np.random.default_rng(1)
    for array in executor.params.values():
        array[...] = generator.normal(size=array.shape)
    return executor


@pytest.mark.parametrize("limit_nbytes", [1, 700, 1 << 30], ids=["a row at a time", "small tiles", "whole"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_it_computes_what_loops_compute(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], limit_nbytes: int
) -> None:
    monkeypatch.setitem(COLUMNS_NBYTES, "cpu", limit_nbytes)
    *shape, channels, kernel, stride, padding = sizes
    generator = np.random.default_rng(2)
    executor = bound(
        Sequential(Conv2D(channels, kernel, stride=stride, padding=padding)), tuple(shape), grad_req={"data": "write"}
    )
    weight, bias = executor.params.values()
    for _ in range(2):  # the second time in the memory of the first
        x = generator.normal(size=shape).astype(np.float32)
        head = generator.normal(size=executor.output_descs[0].shape).astype(np.float32)
        (y,) = executor.forward({"data": x}, is_train=True)
        executor.backward([head])
        expected = by_loops(x, weight, bias, head, stride, padding)
        got = (y, executor.input_grads["data"], *executor.grads.values())
        for actual, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)


def test_tiles_add_to_gradients_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLUMNS_NBYTES, "cpu", 1)
    executor = bound(Sequential(Conv2D(2, 3)), (2, 1, 6, 5), grad_req="add")
    x, head = np.ones((2, 1, 6, 5), np.float32), np.ones((2, 2, 4, 3), np.float32)
    for _ in range(3):
        executor.forward({"data": x}, is_train=True)
        executor.backward([head])
    assert (executor.grads["conv2d0_weight"] == 3 * 2 * 12).all()
    assert (executor.grads["conv2d0_bias"] == 3 * 2 * 12).all()


@pytest.mark.parametrize("layout", ["NCHW", "CHWN", "HNWC"])
def test_images_of_every_layout(layout: str) -> None:
    """Batch last is the order in which the layer computes, so that such images are read where they are."""
    model = Sequential(Conv2D(3, 3, stride=2), ReLU(), Conv2D(2, 2, padding=1), Tanh(), Flatten())
    x = np.random.default_rng(3).normal(size=(4, 2, 9, 7)).astype(np.float32)
    plain = bound(model, x.shape)
    given = np.ascontiguousarray(np.moveaxis(x, 0, layout.index("N")))
    executor = bound(model, given.shape, layout, grad_req={"data": "write"})
    copy = given.copy()
    (expected,), (y,) = plain.forward({"data": x}, True), executor.forward({"data": given}, True)
    np.testing.assert_array_equal(y, expected)
    head = np.random.default_rng(4).normal(size=y.shape).astype(np.float32)
    for each in (plain, executor):
        each.backward([head])
    for name, gradient in executor.grads.items():
        np.testing.assert_array_equal(gradient, plain.grads[name])
    np.testing.assert_array_equal(given, copy)
