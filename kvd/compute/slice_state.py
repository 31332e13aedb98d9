"""Optimizer state of one slice, and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from kvd.compute.kernels import Array
from kvd.compute.merge import is_integer
from kvd.errors import ProtocolError

_SLOT_PREFIX = "slot/"
_FLOAT32 = {"master": "the master weights", "residual": "what compression has left over"}


@dataclass(slots=True)
class SliceState:
    """State of one slice: of its optimizer, or without one, of its compression.

    A new optimizer starts with a new state.

    Attributes:
        step: the updates that an optimizer made.
        master: float32 weights, shape (n,), of a float16 or bfloat16 slice; None before the first update and for
            other dtypes.
        slots: momentum and the like by name, shape (n,), in the compute dtype; zeros when they are first needed.
        residual: without an optimizer, what encoding the merged gradient has left over, float32, shape (n,); None:
            nothing.
    """

    step: int = 0
    master: Array | None = None
    slots: dict[str, Array] = field(default_factory=dict)
    residual: Array | None = None

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, in bytes."""
        others = sum(array.nbytes for array in (self.master, self.residual) if array is not None)
        return sum(slot.nbytes for slot in self.slots.values()) + others

    def copy(self) -> SliceState:
        """Return the same in arrays of its own."""
        master = None if self.master is None else self.master.copy()
        residual = None if self.residual is None else self.residual.copy()
        return SliceState(self.step, master, {name: slot.copy() for name, slot in self.slots.items()}, residual)

    def export(self) -> dict[str, Array]:
        """Return copies of everything as arrays: ``step`` (0-d int64), ``master`` and ``residual`` if there are
        such, ``slot/<name>``."""
        arrays: dict[str, Array] = {"step": np.asarray(self.step, np.int64)}
        if self.master is not None:
            arrays["master"] = self.master.copy()
        if self.residual is not None:
            arrays["residual"] = self.residual.copy()
        return arrays | {_SLOT_PREFIX + name: slot.copy() for name, slot in self.slots.items()}

    def checksum(self, before: int = 0) -> int:
        """Return a CRC-32 of everything, continued from that of what comes before it."""
        arrays = [("master", self.master)] if self.master is not None else []
        arrays += [("residual", self.residual)] if self.residual is not None else []
        arrays += sorted(self.slots.items())
        for name, array in arrays:
            before = crc32(array.data, crc32(name.encode(), before))
        return crc32(str(self.step).encode(), before)

    @classmethod
    def load(cls, arrays: Mapping[str, Array]) -> SliceState:
        """Return a state with copies of the arrays that ``export`` returned.

        Raises:
            ProtocolError: the arrays are not such: a step is missing or negative, a name is unknown, or an array is
                not 1-D float32 or float64 of the length of the others.
        """
        state = cls(step=_loaded_step(arrays))
        sizes = set()
        for name, array in arrays.items():
            if name == "step":
                continue
            _check_loaded(name, array)
            sizes.add(array.size)
            if name == "master":
                state.master = array.copy()
            elif name == "residual":
                state.residual = array.copy()
            else:
                state.slots[name.removeprefix(_SLOT_PREFIX)] = array.copy()
        if len(sizes) > 1:
            raise ProtocolError(f"the arrays of one optimizer state have the lengths {sorted(sizes)}")
        return state


def _loaded_step(arrays: Mapping[str, Array]) -> int:
    step = arrays.get("step")
    if step is None or step.ndim != 0 or not is_integer(step.dtype) or int(step) < 0:
        raise ProtocolError("an optimizer state needs a step: a whole number ≥ 0")
    return int(step)


def _check_loaded(name: str, array: Array) -> None:
    if name not in _FLOAT32 and not name.startswith(_SLOT_PREFIX):
        raise ProtocolError(f"{name!r:.60} is no part of an optimizer state")
    if array.ndim != 1 or array.dtype not in (np.float32, np.float64):
        raise ProtocolError(f"{name!r:.60} must be one dimension of float32 or float64")
    if name in _FLOAT32 and array.dtype != np.float32:
        raise ProtocolError(f"{_FLOAT32[name]} must be float32")
