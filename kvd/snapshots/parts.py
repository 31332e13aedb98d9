"""The content of one part: arrays as safetensors. Nothing in it is executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from kvd.compute.tensors import named_dtype

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


def pack(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a part with these arrays, by name."""
    from safetensors.numpy import save  # most programs write no snapshot: they need not wait for the import

    return bytes(save(dict(arrays)))


def unpack(data: bytes) -> dict[str, Array]:
    """The arrays, one-dimensional and read-only.

    Raises:
        ValueError: it is no safetensors file, or has a dtype that no key has.
    """
    from safetensors import SafetensorError, deserialize

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
