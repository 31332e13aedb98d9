"""The content of one part: arrays as safetensors. Nothing in it is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.tensors import dtype_name, named_dtype

Array: TypeAlias = np.ndarray[Any, Any]

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


def packed(arrays: Mapping[str, Array]) -> Sequence[memoryview]:
    """The bytes of a part with these contiguous arrays, by name: a header, and the memory of the arrays, uncopied.

    Wide elements come first, so that each array lies at a multiple of its element's size.
    """
    header: dict[str, Any] = {}
    content = []
    offset = 0
    for name, array in sorted(arrays.items(), key=lambda entry: (-entry[1].itemsize, entry[0])):
        end = offset + array.nbytes
        header[name] = {"dtype": _CODES[dtype_name(array.dtype)], "shape": array.shape, "data_offsets": (offset, end)}
        content.append(array.reshape(-1).view(np.uint8).data)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return [memoryview(len(text).to_bytes(8, "little") + text), *content]


def unpack(data: bytes) -> dict[str, Array]:
    """The arrays, one-dimensional and read-only.

    Raises:
        ValueError: it is no safetensors file, or has a dtype that no key has.
    """
    from safetensors import SafetensorError, deserialize  # most programs read no snapshot

    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    arrays = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in _NAMES:
            raise ValueError(f"tensor {name[:80]!r} has dtype {tensor['dtype']}")
        arrays[name] = np.frombuffer(tensor["data"], named_dtype(_NAMES[tensor["dtype"]]))
    return arrays
