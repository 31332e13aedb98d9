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
from kvd.tables.duplicates import added_up, are_ascending, of_both
from kvd.tables.merged_rows import MergedRows, plain
from kvd.tables.row_values import Rows


class Contributed(NamedTuple):
    """Push of one worker.

    Attributes:
        rows: any ids, also several times the same: those are added up first.
        samples: the number behind it, ≥ 0. Only a weighted merge looks at it.
        is_ascending: the ids are known to be ascending, each once.
    """

    rows: Rows
    samples: int
    is_ascending: bool = False


def merged_rows(contributions: Sequence[Contributed], mode: MergeMode, width: int, dtype: np.dtype[Any]) -> MergedRows:
    """Return the merged rows. They refer to the memory of the contributions.

    Args:
        width, dtype: of a row.
    """
    weighs = mode == "weighted"
    counted = [each for each in contributions if each.samples > 0 or not weighs]
    if not counted:
        return plain(np.zeros(0, np.int64), np.zeros((0, width), dtype))
    parts = [_distinct(each) for each in counted]
    factors = [each.samples if weighs else 1 for each in counted]
    divisor = sum(factors) if weighs else len(counted) if mode == "mean" else 1
    if len(parts) == 1:
        return plain(*parts[0])._replace(factors=(factors[0], 1), divisor=divisor)
    merged = _sum_of(parts[0], parts[1], (factors[0], factors[1]))
    for part, factor in zip(parts[2:], factors[2:], strict=True):  # two lists are added at a time
        merged = _sum_of(Rows(merged.ids, merged.rows()), part, (1, factor))
    return merged._replace(divisor=divisor)


def _distinct(given: Contributed) -> Rows:
    """Return the rows of one worker with duplicates added up. Rows from another process have none."""
    ids = given.rows.ids
    if given.is_ascending or are_ascending(ids):
        return given.rows
    merged = added_up(*given.rows)
    return Rows(merged.ids, merged.rows())


def _sum_of(first: Rows, second: Rows, factors: tuple[int, int]) -> MergedRows:
    ids, left, right = of_both(first.ids, second.ids)
    return MergedRows(ids, left, right, first.rows, second.rows, factors)
