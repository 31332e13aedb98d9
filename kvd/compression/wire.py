"""Compressors as plain values and back: ``[name, {field: value, …}]``."""

from __future__ import annotations

from kvd.compression.registry import known_compressors, name_of
from kvd.compression.rules import Compressor
from kvd.errors import ProtocolError
from kvd.optimizer.fields import kinds
from kvd.optimizer.wire import construct, short


def to_wire(compressor: Compressor) -> list[object]:
    """Return ``compressor`` in values that msgpack and JSON know.

    Raises:
        ConfigError: its class is neither built in nor an installed entry point.
    """
    return [name_of(compressor), {field: getattr(compressor, field) for field in kinds(type(compressor))}]


def from_wire(obj: object) -> Compressor:
    """Return the compressor that ``to_wire`` wrote.

    Raises:
        ProtocolError: for any other input; no input raises another error.
    """
    if not isinstance(obj, list | tuple) or len(obj) != 2:
        raise ProtocolError(f"a compressor is [name, fields], not {short(obj)}")
    name, fields = obj
    classes = known_compressors()
    if not isinstance(name, str) or name not in classes:
        raise ProtocolError(f"no compressor is called {short(name)}; known are {', '.join(classes)}")
    compressor = construct(classes[name], fields, depth=0)
    assert isinstance(compressor, Compressor)
    return compressor
