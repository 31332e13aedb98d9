"""The content of one part: arrays as safetensors. Nothing in it is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from kvd.compute.tensors import dtype_name, named_dtype

Array: TypeAlias = np.ndarray[Any, Any]

MAX_HEADER_BYTES = 100 << 20  # as in the library of safetensors

_NAMES = {
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
}
_CODES = {name: code for code, name in _NAMES.items()}
_ALIGNMENT = 8  # of the first tensor
_LENGTH_BYTES = 8  # in which the length of the header is written


def packed(arrays: Mapping[str, Array]) -> Sequence[memoryview]:
    """Return the bytes of a part: a header, and the memory of these contiguous arrays, uncopied.

    Wide elements come first, so that each array lies at a multiple of its element's size.
    """
    ordered = sorted(arrays.items(), key=lambda entry: (-entry[1].itemsize, entry[0]))
    tensors = {name: Tensor(dtype_name(array.dtype), array.shape) for name, array in ordered}
    return [memoryview(header(tensors)), *[array.reshape(-1).view(np.uint8).data for _, array in ordered]]


class Tensor(NamedTuple):
    """Entry of a tensor in a header."""

    dtype: str
    shape: tuple[int, ...]


def header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the beginning of a safetensors file, which the bytes of these tensors follow in this order."""
    found: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * named_dtype(dtype).itemsize
        found[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Place(NamedTuple):
    """Position of a tensor in a part.

    Attributes:
        begin, end: in bytes from the beginning of the file.
    """

    dtype: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def places(file: BinaryIO, nbytes: int) -> dict[str, Place]:
    """Return the positions of the tensors of a part, by name.

    Args:
        file: at its beginning.
        nbytes: its size.

    Raises:
        ValueError: it is no safetensors file, or has a dtype that no key has.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    begin = _LENGTH_BYTES + length
    if begin > nbytes or length > MAX_HEADER_BYTES:
        raise ValueError("it is no safetensors file: it has no header")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("it is no safetensors file: its header lists no tensors")
    header.pop("__metadata__", None)
    return {name: _place(name, entry, begin, nbytes - begin) for name, entry in header.items()}


def _place(name: str, entry: Any, begin: int, nbytes: int) -> Place:
    """Raise ValueError unless this describes a tensor within so many bytes."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(first), int(last)]} if code in _NAMES:
            dtype = _NAMES[code]
            sides = all(type(side) is int and side >= 0 for side in shape)
            if sides and 0 <= first <= last <= nbytes and last - first == prod(shape) * named_dtype(dtype).itemsize:
                return Place(dtype, begin + first, begin + last)
    raise ValueError(f"its tensor {name[:80]!r} has a dtype, a shape or a place that no key has")


def tensors(data: Array, found: Mapping[str, Place]) -> dict[str, Array]:
    """Return the tensors of a part, one-dimensional, in its memory.

    Args:
        data: all bytes of the part.
    """
    return {name: data[place.begin : place.end].view(named_dtype(place.dtype)) for name, place in found.items()}
