"""Descriptions of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.errors import ConfigError
from kvd.parallel import DataDesc


def test_defaults_are_those_of_mxnet() -> None:
    desc = DataDesc("data", (8, 3, 4, 4))
    assert (desc.dtype, desc.layout) == ("float32", "NCHW")


@pytest.mark.parametrize(
    ("shape", "layout", "axis", "size", "first"),
    [
        ((8, 3, 4, 5), "NCHW", 0, 8, (8, 3, 4, 5)),
        ((8, 3), "NCHW", 0, 8, (8, 3)),
        ((8, 3), None, 0, 8, (8, 3)),
        ((7, 8, 3), "TNC", 1, 8, (8, 7, 3)),
        ((3, 4, 5, 8), "CHWN", 3, 8, (8, 3, 4, 5)),
        ((7, 3), "TC", -1, None, (7, 3)),
        ((7, 3), "", -1, None, (7, 3)),
    ],
)
def test_batch_axis(shape: Any, layout: str | None, axis: int, size: int | None, first: Any) -> None:
    desc = DataDesc("data", shape, layout=layout)
    assert (desc.batch_axis, desc.batch_size, desc.batch_first_shape) == (axis, size, first)


def test_with_batch_size() -> None:
    assert DataDesc("x", (7, 8, 3), "int64", "TNC").with_batch_size(2) == DataDesc("x", (7, 2, 3), "int64", "TNC")
    whole = DataDesc("x", (7, 3), layout="TC")
    assert whole.with_batch_size(2) is whole


def test_equality_sees_dtype_and_layout() -> None:
    desc = DataDesc("x", (2, 3))
    assert desc == DataDesc("x", [2, 3], np.dtype("float32"))  # type: ignore[arg-type]
    assert desc != DataDesc("x", (2, 3), "float64")
    assert desc != DataDesc("x", (2, 3), layout="CN")
    assert DataDesc("x", (2,), "bfloat16").dtype == "bfloat16"
    assert hash(desc) == hash(DataDesc("x", (2, 3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (-1, 3)}, "negative"),
        ({"shape": (2,), "dtype": "float33"}, "is not a dtype"),
        ({"shape": (2,), "layout": "TN"}, "has 1 axes"),
        ({"shape": ()}, "has 0 axes"),
    ],
)
def test_bad_descriptions(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataDesc("x", **arguments)
