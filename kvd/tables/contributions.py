"""Merging what the workers have pushed to a table in one round, strictly in the order of the list.

The arithmetic of a row is that of an element of any other key (`kvd.compute.merge`), where a worker that has not pushed
the row has pushed zeros: so the divisors count all workers of the round. Nothing is divided or multiplied where there
is nothing to it, so the bits of a row depend on the contributions to it and these numbers alone. The sum with the last
worker and the division are left to what takes the rows: they are made where the rows are used.

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
from kvd.tables.duplicates import added_up, of_both
from kvd.tables.merged_rows import MergedRows, plain
from kvd.tables.row_values import Rows


class Contributed(NamedTuple):
    """What one worker has pushed.

    Attributes:
        rows: any ids, also several times the same: those are added up first.
        samples: the number behind it, ≥ 0. Only a weighted merge looks at it.
    """

    rows: Rows
    samples: int


def merged_rows(contributions: Sequence[Contributed], mode: MergeMode, width: int, dtype: np.dtype[Any]) -> MergedRows:
    """The merged rows. They refer to the memory of the contributions.

    Args:
        width, dtype: of a row.
    """
    weighs = mode == "weighted"
    counted = [each for each in contributions if each.samples > 0 or not weighs]
    if not counted:
        return plain(np.zeros(0, np.int64), np.zeros((0, width), dtype))
    parts = [_distinct(each.rows) for each in counted]
    factors = [each.samples if weighs else 1 for each in counted]
    divisor = sum(factors) if weighs else len(counted) if mode == "mean" else 1
    merged = parts[0]._replace(factors=(factors[0], 1))
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        merged = _sum_of(merged, part, factor)
    return merged._replace(divisor=divisor)


def _distinct(rows: Rows) -> MergedRows:
    """Those of one worker, added up. There is nothing to do when they come from another process."""
    if bool((rows.ids[1:] > rows.ids[:-1]).all()):
        return plain(rows.ids, rows.rows)
    merged = added_up(rows.ids, rows.rows)
    return plain(merged.ids, merged.rows())


def _sum_of(merged: MergedRows, part: MergedRows, factor: int) -> MergedRows:
    """What is merged so far, and the rows of one more worker, which are plain."""
    if len(merged.second):  # two lists are added at a time
        merged = plain(merged.ids, merged.rows())
    ids, left, right = of_both(merged.ids, part.ids)
    return MergedRows(ids, left, right, merged.first, part.first, (merged.factors[0], factor))
