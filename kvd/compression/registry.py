"""The compressors that this process knows: the built-in ones and those of other installed distributions."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping

from kvd.compression.rules import (
    BF16,
    FP8,
    FP16,
    Compressor,
    Dithering,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    Signs,
    TopK,
    TwoBit,
)
from kvd.errors import ConfigError
from kvd.optimizer.fields import kinds

ENTRY_POINT_GROUP = "kvd.compressors"
"""The group of entry points in which compressors of your own are installed."""

_BUILT_IN: dict[str, type[Compressor]] = {
    "fp16": FP16,
    "bf16": BF16,
    "fp8": FP8,
    "int8": Int8,
    "2bit": TwoBit,
    "1bit": OneBit,
    "onebit": Signs,
    "topk": TopK,
    "randomk": RandomK,
    "dithering": Dithering,
    "powersgd": PowerSGD,
}

_log = logging.getLogger(__name__)


@functools.cache
def known_compressors() -> Mapping[str, type[Compressor]]:
    """Return the compressors by name.

    An unusable entry point is left out with a warning in the log: it must not keep a server from starting.
    """
    from importlib.metadata import entry_points  # takes a while, and most processes compress nothing

    found = dict(_BUILT_IN)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            cls = entry.load()
        except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
            reason = f"it cannot be loaded: {error}"
        else:
            reason = _unusable(entry.name, cls)
        if reason:
            _log.warning("the compressor %r is not used: %s", entry.name, reason)
        else:
            found[entry.name] = cls
    return found


def name_of(compressor: Compressor) -> str:
    """Return the name of a compressor.

    Raises:
        ConfigError: its class is neither built in nor an installed entry point.
    """
    for name, cls in known_compressors().items():
        if cls is type(compressor):
            return name
    text = f"{type(compressor).__name__} is no known compressor: install it as an entry point of the group"
    raise ConfigError(f"{text} {ENTRY_POINT_GROUP}", setting="type")


def _unusable(name: str, cls: object) -> str:
    """Return the reason why an entry point is no compressor; empty if it is one."""
    if name in _BUILT_IN or name == "none":
        return "the name belongs to kvd"
    if not (isinstance(cls, type) and issubclass(cls, Compressor) and dataclasses.is_dataclass(cls)):
        return "it is no dataclass derived from kvd.compression.Compressor"
    if not callable(getattr(cls, "codec", None)):
        return "it has no codec()"
    try:
        kinds(cls)
    except Exception as error:  # noqa: BLE001 - resolving foreign annotations evaluates them
        return f"the types of its fields cannot be resolved: {error}"
    return ""
