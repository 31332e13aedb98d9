"""Assignment of rows to the parts of a table. Workers and servers must agree on it, so it belongs to the protocol.

A row id is hashed, so that ids in runs such as 0, n, 2n … lie on all parts; and hashed with other bits than those that
place a row within its part (`kvd.tables.row_index`), which would be alike for all rows of a part otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.tables.counted_bits import mix

Ids = np.ndarray[Any, np.dtype[np.int64]]
Parts = np.ndarray[Any, np.dtype[np.int64]]

_SALT = np.uint64(0xD1B54A32D192ED03)
_HALF = np.uint64(32)


def parts_of(ids: Ids, parts: int) -> Parts:
    """The part of each row, from 0 to ``parts - 1``, shape (ids,): ``⌊(mix(id ⊕ SALT) >> 32) · parts / 2³²⌋``."""
    high = mix(ids.view(np.uint64) ^ _SALT) >> _HALF
    found: Parts = ((high * np.uint64(parts)) >> _HALF).astype(np.int64)
    return found
