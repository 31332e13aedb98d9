"""Tables as safetensors files: ids, rows, and which rows were evicted. Nothing in them is executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kvd.compute.tensors import dtype_name
from kvd.node.storage.atomic_file import write_atomically
from kvd.snapshots.parts import Tensor, header
from kvd.tables.description import RowSparse
from kvd.tables.row_values import Ids

Array = np.ndarray[Any, Any]

FORMAT = "kvd-table"


class Exported(NamedTuple):
    """What a file has of a table.

    Attributes:
        ids: of the rows, ascending.
        evicted: the rows that were evicted since the update `since`, ascending; None: all rows are there.
        version: the last update that the file has for sure.
    """

    ids: Ids
    evicted: Ids | None
    since: int | None
    version: int


def write_table(path: Path, key: str, table: RowSparse, exported: Exported, rows: Iterable[Array]) -> None:
    """Writes the file, or replaces it.

    Args:
        rows: of the ids, in their order, in as many pieces as there may be; shape (n, width) each.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    ids, evicted = exported.ids, exported.evicted
    tensors = {"ids": Tensor("int64", ids.shape)}
    if evicted is not None:
        tensors["evicted"] = Tensor("int64", evicted.shape)
    tensors["rows"] = Tensor(dtype_name(table.numpy_dtype), (len(ids), *table.row_shape))

    def save(file: BinaryIO) -> None:
        file.write(header(tensors, _metadata(key, table, exported)))
        for array in (ids, evicted):
            if array is not None:
                file.write(array.data)
        for piece in rows:
            file.write(np.ascontiguousarray(piece).data)

    write_atomically(path, save)


def _metadata(key: str, table: RowSparse, exported: Exported) -> Mapping[str, str]:
    shape = ("any" if table.rows is None else table.rows, *table.row_shape)
    found = {
        "format": FORMAT,
        "key": key,
        "shape": ", ".join(map(str, shape)),
        "initializer": repr(table.initializer),
        "version": str(exported.version),
    }
    return found if exported.since is None else found | {"since": str(exported.since)}
