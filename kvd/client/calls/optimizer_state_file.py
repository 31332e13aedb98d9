"""Optimizer states as a safetensors file.

The file holds whole keys, so that it can be loaded into any number of servers: the array `KEY|master` or
`KEY|slot/NAME` for each key and slot, and as metadata the steps made per key and, if it was asked for, the optimizer.
Of tables it holds what is kept of rows: `kvd.client.calls.row_states`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from kvd.client.calls.row_states import arrays_of, is_of_rows, rows_from
from kvd.errors import NotAllowed, ProtocolError
from kvd.files import read_file
from kvd.node.storage.atomic_file import write_atomically
from kvd.node.storage.tensor_file import parse_tensors
from kvd.optimizer import Optimizer, from_wire, to_wire
from kvd.protocol.messages import BIGGEST
from kvd.tables.stored_rows import StoredRows

SEPARATOR = "|"
FORMAT = "kvd-optimizer-states-1"


class OptimizerStateFile:
    """The content of such a file.

    Attributes:
        arrays: key → slot → the whole 1-D array.
        steps: key → how many updates it has had.
        tables: table → what is kept of its rows, which have no elements here.
        optimizer: None if it was not asked for.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        self.steps: dict[str, int] = {}
        self.tables: dict[str, StoredRows] = {}
        self.optimizer: Optimizer | None = None

    def write(self, path: Path) -> None:
        """Writes another file and renames it: a crash leaves the old file or the new one. Several workers may write it.

        Raises:
            OSError: the file cannot be written.
        """
        from safetensors.numpy import save  # most programs write no such file: they need not wait for the import

        tensors = {
            f"{key}{SEPARATOR}{slot}": array for key, slots in self.arrays.items() for slot, array in slots.items()
        }
        for key, stored in self.tables.items():
            tensors |= {f"{key}{SEPARATOR}{slot}": np.ascontiguousarray(array) for slot, array in arrays_of(stored)}
        metadata = {"format": FORMAT, "steps": json.dumps(self.steps)}
        if self.tables:
            metadata["tables"] = json.dumps({key: stored.updates for key, stored in self.tables.items()})
        if self.optimizer is not None:
            metadata["optimizer"] = json.dumps(to_wire(self.optimizer))
        data = save(tensors, metadata)
        try:
            _check_replaceable(path)
            write_atomically(path, lambda file: file.write(data), is_private=True)
        except OSError as error:
            text = f"{error.strerror}: the optimizer states cannot be saved there, choose a file in an existing folder"
            raise OSError(error.errno, text, str(path)) from None

    @classmethod
    def read(cls, path: Path) -> OptimizerStateFile:
        """Reads a file; nothing in it is executed.

        Raises:
            NotAllowed: it is not such a file.
            OSError: it cannot be read.
        """
        try:
            data = read_file(path)
        except OSError as error:
            text = f"{error.strerror}: no optimizer states can be loaded from there, name a file that was saved"
            raise OSError(error.errno, text, str(path)) from None
        content = cls()
        try:
            tensors, metadata = parse_tensors(data, FORMAT)
            content.steps = {str(key): int(step) for key, step in json.loads(metadata["steps"]).items()}
            updates = {str(key): int(made) for key, made in json.loads(metadata.get("tables", "{}")).items()}
            if not all(0 <= step <= BIGGEST for step in (*content.steps.values(), *updates.values())):
                raise ValueError("a key has a negative number of steps")
            if "optimizer" in metadata:
                content.optimizer = from_wire(json.loads(metadata["optimizer"]))
            of_rows: dict[str, dict[str, np.ndarray[Any, Any]]] = {key: {} for key in updates}
            for name, array in list(tensors.items()):
                key, _, slot = name.rpartition(SEPARATOR)
                if key in updates and is_of_rows(slot):
                    of_rows[key][slot] = tensors.pop(name)
                elif array.dtype.name not in ("float32", "float64") or len(slot) > 64:
                    raise ValueError(f"{name[:80]!r} is not an array of a state")
            content.tables = {key: rows_from(of_rows[key], made) for key, made in updates.items()}
        except (ValueError, KeyError, TypeError, AttributeError, ProtocolError) as error:
            raise NotAllowed(f"{path} holds no optimizer states: {error}") from None
        for name, array in tensors.items():
            key, _, slot = name.rpartition(SEPARATOR)
            content.arrays.setdefault(key, {})[slot] = array.reshape(-1)
        return content


def _check_replaceable(path: Path) -> None:
    """Raises OSError for a folder, a device or a pipe: a file cannot replace it."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")
