"""Row-sparse gradients: the arrays of those that are bound, and what others see of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvd.errors import ConfigError
from kvd.parallel.device import Array, Device, Shape
from kvd.parallel.models.bind_plan import check_fits
from kvd.parallel.models.model import ModelDescription
from kvd.tables.row_values import RowSparseArray


def no_rows(device: Device, shape: Shape, dtype: np.dtype[Any]) -> RowSparseArray:
    """The gradient of a parameter of this shape before the first backward."""
    xp = device.xp
    return RowSparseArray(xp.zeros(0, dtype=np.int64), xp.zeros((0, *shape[1:]), dtype=dtype))


def check_rows(name: str, gradient: object, device: Device, shape: Shape, dtype: np.dtype[Any]) -> None:
    """Raise ConfigError, ShapeMismatch or DtypeMismatch unless it can be the gradient of this parameter."""
    if not isinstance(gradient, RowSparseArray) or not isinstance(gradient.rows, device.xp.ndarray):
        what = f"grads: {name} has row-sparse gradients, which a {type(gradient).__name__} does not hold"
        raise ConfigError(f"{what}: leave it out, or pass that of an executor of the same model", setting="grads")
    check_fits("grads", name, gradient.rows, (len(gradient.rows), *shape[1:]), dtype)


def elements_of(gradient: Array) -> Array:
    """The elements of a gradient that may be other than 0, as an array: all, or of one of rows those."""
    return gradient.rows if isinstance(gradient, RowSparseArray) else gradient


def check_dense(arrays: Mapping[str, Array], described: ModelDescription) -> None:
    """Raise ConfigError if one of these parameters is row-sparse: no array is for its gradient."""
    rows = [name for name in arrays if name in described.row_sparse]
    if rows:
        text = f"{rows[0]} has row-sparse gradients, which each backward replaces: read them from grads"
        raise ConfigError(text, setting="grads")


def check_same_kind(own: ModelDescription, others: ModelDescription) -> None:
    """Raise ConfigError if a parameter that two groups share is row-sparse in one of them only."""
    for name in own.params:
        if name in others.params and (name in own.row_sparse) != (name in others.row_sparse):
            text = f"{name} has row-sparse gradients in one of the two groups only: write sparse= alike in both models"
            raise ConfigError(text, setting="shared_group")
