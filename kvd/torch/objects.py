"""Objects of plain values, tensors and arrays as bytes and back, without pickle: no byte is ever executed.

::

    node      None | bool | int | float | str | bytes | [kind, node, …] | ext
    [kind, …] 0: the items of a list; 1: of a tuple; 2: keys and values of a dict, in turn
    ext       1: a tensor, 2: a NumPy array, 3: a NumPy scalar, each [dtype, shape, bytes in C order]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any

import msgpack
import numpy as np
import torch

from kvd.compute.tensors import BFLOAT16
from kvd.errors import NotAllowed, ProtocolError

MAX_DEPTH = 100
"""The deepest nesting. An object that contains itself has no end."""

_LIST, _TUPLE, _DICT = range(3)
_TENSOR, _ARRAY, _SCALAR = 1, 2, 3
_PLAIN = frozenset({type(None), bool, float, str, bytes})
_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
    if hasattr(torch, name)
}
_NUMPY_KINDS = "biufc"


def to_bytes(thing: object) -> bytes:
    """Return the object as bytes.

    Raises:
        NotAllowed: a part of it is of another type; the message says where it is, such as ``thing['state'][0]``.
    """
    packed: bytes = msgpack.packb(_node_of(thing, "thing", 0), use_bin_type=True)
    return packed


def from_bytes(data: bytes | memoryview) -> Any:
    """Return the object that `to_bytes` wrote. Tensors are on the CPU.

    Raises:
        ProtocolError: the bytes are no such object.
    """
    try:
        node = msgpack.unpackb(data, ext_hook=_value_of, raw=False, strict_map_key=False)
        return _thing_of(node)
    except ProtocolError:
        raise
    except Exception as error:  # of whatever kind msgpack, NumPy and torch find
        raise ProtocolError(f"the bytes of an object are damaged: {error!r:.200}") from error


# ── to bytes ──


def _node_of(thing: Any, path: str, depth: int) -> Any:
    kind = type(thing)
    if depth > MAX_DEPTH:
        raise NotAllowed(f"{path[:80]}… is nested deeper than {MAX_DEPTH} times, or contains itself")
    if kind in _PLAIN:
        return thing
    if kind is int:
        if not -(1 << 63) <= thing < 1 << 64:
            raise NotAllowed(f"{path} is an integer of more than 64 bits")
        return thing
    if kind is list or kind is tuple:
        items = [_node_of(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(thing)]
        return [_LIST if kind is list else _TUPLE, *items]
    if kind is dict or kind is OrderedDict:
        return [_DICT, *_entries_of(thing, path, depth)]
    if isinstance(thing, torch.Tensor):
        return _packed(_TENSOR, *_tensor_parts(thing, path))
    if isinstance(thing, np.ndarray | np.generic):
        array = np.asarray(thing)
        if array.dtype.kind not in _NUMPY_KINDS and array.dtype != BFLOAT16:
            raise NotAllowed(f"{path} is an array of dtype {array.dtype}: arrays hold numbers or bools")
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        code = _ARRAY if isinstance(thing, np.ndarray) else _SCALAR
        return _packed(code, native.dtype.name, array.shape, native.tobytes())
    raise NotAllowed(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: an object consists of None, bool, int, float, str, bytes, "
        "tensors and NumPy arrays, in lists, tuples and dicts"
    )


def _entries_of(thing: dict[Any, Any], path: str, depth: int) -> list[Any]:
    nodes: list[Any] = []
    for key, value in thing.items():
        if type(key) not in _PLAIN and type(key) is not int:
            raise NotAllowed(f"{path} has a key of type {type(key).__qualname__}: keys are plain values")
        nodes.append(_node_of(key, f"the key {key!r:.40} of {path}", depth + 1))
        nodes.append(_node_of(value, f"{path}[{key!r:.40}]", depth + 1))
    return nodes


def _tensor_parts(tensor: torch.Tensor, path: str) -> tuple[str, Sequence[int], bytes]:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta" or name not in _TORCH_DTYPES:
        raise NotAllowed(
            f"{path} is a tensor of dtype {name}, layout {tensor.layout} and device {tensor.device}: tensors are "
            "dense, and have memory"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return name, tuple(tensor.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _packed(code: int, dtype: str, shape: Sequence[int], data: bytes) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb([dtype, list(shape), data], use_bin_type=True))


# ── and back ──


def _value_of(code: int, data: bytes) -> Any:
    dtype, shape, elements = msgpack.unpackb(data, raw=False)
    if code == _TENSOR:
        flat = (
            torch.frombuffer(bytearray(elements), dtype=torch.uint8) if elements else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(_TORCH_DTYPES[dtype]).reshape(shape)
    if code not in (_ARRAY, _SCALAR):
        raise ProtocolError(f"an object has no parts of the kind {code}")
    known = BFLOAT16 if dtype == BFLOAT16.name else np.dtype(dtype)
    if (known.kind not in _NUMPY_KINDS and known != BFLOAT16) or len(elements) != known.itemsize * prod(shape):
        raise ProtocolError(f"{len(elements)} bytes are no array of {dtype} with the shape {shape}")
    array = np.frombuffer(bytearray(elements), known).reshape(shape)
    return array if code == _ARRAY else array[()]


def _thing_of(node: Any) -> Any:
    if type(node) is not list:
        return node
    kind, *nodes = node
    items = [_thing_of(item) for item in nodes]
    if kind == _LIST:
        return items
    if kind == _TUPLE:
        return tuple(items)
    if kind == _DICT and len(items) % 2 == 0:
        return dict(zip(items[::2], items[1::2], strict=True))
    raise ProtocolError(f"an object has no containers of the kind {kind!r:.40}")
