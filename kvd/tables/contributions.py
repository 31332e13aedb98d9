"""Merging what the workers have pushed to a table in one round, strictly in the order of the list.

The arithmetic of a row is that of an element of any other key (`kvd.compute.merge`), where a worker that has not pushed
the row has pushed zeros: so the divisors count all workers of the round. Nothing is divided or multiplied where there
is nothing to it, so the bits of a row depend on the contributions to it and these numbers alone.

=========  ==================================================================
sum        ``Σ rows``
mean       ``(Σ rows) / k`` for ``k`` contributions, empty ones among them
weighted   ``(Σ n·rows) / (Σ n)`` over those with ``n > 0`` samples
=========  ==================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvd.compute.merge import MergeMode
from kvd.compute.quiet import quietly
from kvd.tables.by_part import added_up
from kvd.tables.row_values import Rows

Array = np.ndarray[Any, Any]


class Contributed(NamedTuple):
    """What one worker has pushed.

    Attributes:
        rows: any ids, also several times the same: those are added up first.
        samples: the number behind it, ≥ 0. Only a weighted merge looks at it.
    """

    rows: Rows
    samples: int


def merged_rows(contributions: Sequence[Contributed], mode: MergeMode, width: int, dtype: np.dtype[Any]) -> Rows:
    """The merged rows: ids ascending and each once, in memory of their own or that of the only contribution.

    Args:
        width, dtype: of a row.
    """
    weighs = mode == "weighted"
    counted = [each for each in contributions if each.samples > 0 or not weighs]
    if not counted:
        return Rows(np.zeros(0, np.int64), np.zeros((0, width), dtype))
    parts = [_distinct(each.rows) for each in counted]
    if weighs:
        parts = [_times(part, each.samples) for part, each in zip(parts, counted, strict=True)]
    divisor = sum([each.samples for each in counted]) if weighs else len(counted) if mode == "mean" else 1
    merged = parts[0] if len(parts) == 1 else _sum_of(parts)
    if divisor == 1:
        return merged
    return Rows(merged.ids, quietly(np.divide, merged.rows, np.asarray(divisor, dtype)))


def _times(rows: Rows, number: int) -> Rows:
    return Rows(rows.ids, quietly(np.multiply, rows.rows, np.asarray(number, rows.rows.dtype)))


def _distinct(rows: Rows) -> Rows:
    """Those of one worker, added up. There is nothing to do when they come from another process."""
    if bool((rows.ids[1:] > rows.ids[:-1]).all()):
        return rows
    return _sum_of([rows])


def _sum_of(parts: Sequence[Rows]) -> Rows:
    ids = np.concatenate([part.ids for part in parts])
    distinct, merged = added_up(Rows(ids, np.concatenate([part.rows for part in parts])))
    out = np.empty((len(distinct), parts[0].rows.shape[1]), parts[0].rows.dtype)
    if len(distinct):
        merged.take(slice(0, len(distinct)), out)
    return Rows(distinct, out)
