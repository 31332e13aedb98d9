"""Gradients of a worker, clipped by their common norm; torch.nn.utils is the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvd.compute.tensors import BFLOAT16
from kvd.errors import ConfigError, DtypeMismatch, NotAllowed
from kvd.parallel import clip_by_global_norm

SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), (), (0,), (2, 70_000)]


def some(dtype: Any = np.float32) -> list[Any]:
    random = np.random.default_rng(1)
    return [np.asarray(random.normal(size=shape)).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("max_norm", [0.5, 100.0, 374.0, 1e6])
def test_it_does_what_torch_does(max_norm: float) -> None:
    arrays = some()
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter.grad = torch.tensor(array)
    expected = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    before = [array.tobytes() for array in arrays]
    assert clip_by_global_norm(arrays, max_norm) == pytest.approx(expected, rel=1e-5)
    for parameter, array in zip(parameters, arrays, strict=True):
        assert parameter.grad is not None
        np.testing.assert_allclose(array, parameter.grad.numpy(), rtol=1e-5)
    assert ([array.tobytes() for array in arrays] == before) == (max_norm > expected)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_gradients_of_every_float_dtype_and_of_torch(dtype: Any) -> None:
    # (3, 4) and 12 have the norm 13; a half of 6.5 is exact in every dtype.
    grad = torch.tensor(12.0, requires_grad=True)
    strided = np.array([3, 0, 4], dtype)[::2]
    gradients = {"w": strided, "none": None, "t": grad}
    assert clip_by_global_norm(gradients, 6.5) == 13
    assert strided.astype(float).tolist() == [1.5, 2]
    assert grad.item() == 6
    assert clip_by_global_norm(gradients, 6.5) == 6.5


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(poison: float) -> None:
    gradients = [np.ones(3, np.float32), np.array([poison, 1], np.float32)]
    assert not math.isfinite(clip_by_global_norm(gradients, 1.0))
    assert gradients[0].tolist() == [1, 1, 1]


def test_what_cannot_be_clipped_is_refused_before_anything_is_changed() -> None:
    first = np.full(3, 10, np.float32)
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    for other, error, text in [
        (np.ones(3, np.int32), DtypeMismatch, "gradient 1 is int32"),
        (frozen, NotAllowed, r"gradient 1, of type ndarray, cannot be written to"),
        ([1.0, 2.0], NotAllowed, r"gradient 1, of type list"),
        (1.0, NotAllowed, r"gradient 1 is a single float: pass a list of arrays"),
    ]:
        with pytest.raises(error, match=text):
            clip_by_global_norm([first, other], 1.0)
    for max_norm in (0, -1.0, math.nan, math.inf, "1", None):
        with pytest.raises(ConfigError, match="max_norm"):
            clip_by_global_norm([first], max_norm)  # type: ignore[arg-type]
    assert first.tolist() == [10, 10, 10]
    assert clip_by_global_norm([], 1.0) == 0
