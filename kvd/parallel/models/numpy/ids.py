"""Ids in arrays, such as words and classes: whether they are valid, and sums of rows by id."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.parallel.device import Array


def whole_numbers(xp: Any, values: Array, limit: int, what: str) -> Array:
    """``values`` as int64, each of which must be a whole number in [0, limit).

    MXNet's data and labels are always float32, so floats are accepted. Values that are not valid ids are refused: a
    negative one would silently count from the end.

    Raises:
        ValueError: some value is not such a number; the message starts with ``what`` and names the first.
    """
    with np.errstate(invalid="ignore"):  # NaN and infinities are caught below, not warned about
        whole = values.astype(np.int64)
    wrong = (whole < 0) | (whole >= limit)
    if values.dtype.kind not in "iu":
        wrong |= whole != values
    if bool(wrong.any()):
        first = values[wrong].reshape(-1)[0].item()
        raise ValueError(f"{what} {first} is not a whole number in [0, {limit})")
    return whole


def sum_by_id(xp: Any, ids: Array, rows: Array) -> tuple[Array, Array]:
    """The distinct ids in ascending order, and for each the sum of its rows, always added in the same order.

    A segmented scan over the rows sorted by id: after the pass with distance s, a row holds the sum of the 2s rows
    of its id from it on. Scatter-add with atomics, the usual method on a GPU, would add in a different order each time.

    Arguments:
        ids: (n,) int64. rows: (n, d).
    """
    if ids.size == 0:
        return ids, rows
    order = xp.argsort(ids, kind="stable")
    ids, rows = ids[order], rows[order]
    longest = int(xp.bincount(ids).max())
    distance = 1
    while distance < longest:
        same = (ids[distance:] == ids[:-distance])[:, None]
        # the right side is a new array, so every row adds what its partner held before this pass; a product with
        # `same` would let a NaN of one id reach another
        rows[:-distance] += xp.where(same, rows[distance:], 0)
        distance *= 2
    is_first = xp.ones(ids.shape, dtype=bool)
    is_first[1:] = ids[1:] != ids[:-1]
    return ids[is_first], rows[is_first]
