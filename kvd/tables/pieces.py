"""Pieces of tables as bytes: a head that says what they are, and arrays.

A piece is::

    length of the head, as int64 | head, as msgpack | array | array | …

each at a multiple of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from kvd.errors import ProtocolError
from kvd.protocol.specs import padded

Array = np.ndarray[Any, Any]

MOST_SLOTS = 16  # what an optimizer keeps of a row
_LENGTH_NBYTES = 8


def packed(head: Any, arrays: Sequence[Array], allocate: Callable[[int], Array]) -> Array:
    """Return a piece, as uint8.

    Args:
        allocate: gives so many bytes, as uint8.
    """
    begin: bytes = msgpack.packb(head)
    parts: list[Array] = [np.array([len(begin)], np.int64), np.frombuffer(begin, np.uint8), *arrays]
    made = allocate(sum([padded(array.nbytes) for array in parts]))
    offset = 0
    for array in parts:
        end = offset + array.nbytes
        made[offset:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset = padded(end)
        made[end:offset] = 0
    return made


def unpacked(piece: Array, key: str) -> tuple[Any, Array]:
    """Return the head of a piece, and what follows it, as uint8.

    Args:
        key: the name of the table.

    Raises:
        ProtocolError: it is none.
    """
    try:
        length = int(piece[:_LENGTH_NBYTES].view(np.int64)[0])
        end = _LENGTH_NBYTES + length
        if not 0 < length <= piece.nbytes:
            raise ValueError(length)
        return msgpack.unpackb(piece[_LENGTH_NBYTES:end].tobytes()), piece[padded(end) :]
    except Exception:  # noqa: BLE001  msgpack raises several kinds
        raise no_piece_error(key) from None


def cut(body: Array, kinds: Sequence[tuple[int, np.dtype[Any]]], num_rows: int) -> list[Array] | None:
    """Return the arrays of a piece, uncopied, of shape (rows, width); None if they have not this size.

    Args:
        kinds: width and dtype of each.
    """
    sizes = [num_rows * width * dtype.itemsize for width, dtype in kinds]
    if body.nbytes != sum(map(padded, sizes)):
        return None
    arrays, offset = [], 0
    for nbytes, (width, dtype) in zip(sizes, kinds, strict=True):
        arrays.append(body[offset : offset + nbytes].view(dtype).reshape(num_rows, width))
        offset += padded(nbytes)
    return arrays


def no_piece_error(key: str) -> ProtocolError:
    """Return the error for malformed bytes."""
    return ProtocolError(f"what came as a piece of table {key!r} is none")
