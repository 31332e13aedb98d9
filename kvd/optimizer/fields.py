"""Checks for every field of an optimizer or a schedule, whether a person or a peer wrote it."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping

from kvd.errors import ConfigError

MAX_COUNT = 2**53
"""The largest whole number that a field may hold: a float64 would round larger ones."""


def shown(value: object) -> str:
    """The repr of ``value`` for a message: short, and never an error of its own."""
    try:
        return repr(value)[:80]
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a huge {type(value).__name__}"


def number(setting: str, value: object) -> float:
    """Return ``value`` as a finite Python float.

    Raises:
        ConfigError: it is not a real number (a bool is not one), or it is NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{setting} must be a number, not {shown(value)}", setting=setting)
    try:
        result = float(value)
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"{setting} is too large for a float", setting=setting) from error
    if not math.isfinite(result):
        raise ConfigError(f"{setting} must be finite, not {result}", setting=setting)
    return result


def count(setting: str, value: object) -> int:
    """Return ``value`` as a Python int of at most ``MAX_COUNT`` in size.

    Raises:
        ConfigError: it is not a whole number (a bool is not one), or is too large.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{setting} must be a whole number, not {shown(value)}", setting=setting)
    if not -MAX_COUNT <= int(value) <= MAX_COUNT:
        raise ConfigError(f"{setting} must not be larger than 2**53", setting=setting)
    return int(value)


def text(setting: str, value: object) -> str:
    """Return ``value`` if it is a string, else raise ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{setting} must be a string, not {shown(value)}", setting=setting)
    return value


def flag(setting: str, value: object) -> bool:
    """Return ``value`` if it is a bool, else raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{setting} must be True or False, not {shown(value)}", setting=setting)
    return value


def require(setting: str, holds: bool, rule: str, value: object) -> None:
    """Raise ConfigError with the ``rule`` in words unless it ``holds``."""
    if not holds:
        raise ConfigError(f"{setting} must be {rule}, not {shown(value)}", setting=setting)


_CHECKS = {float: number, int: count, bool: flag, str: text}


# Resolving annotations is slow, and there are few classes, which live until the process ends.
_KINDS: dict[type, dict[str, tuple[type, ...]]] = {}


def kinds(cls: type) -> Mapping[str, tuple[type, ...]]:
    """The fields of a dataclass, each with the types that its annotation admits, in the order of declaration."""
    if cls not in _KINDS:
        _KINDS[cls] = _resolve(cls)
    return _KINDS[cls]


def _resolve(cls: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    found: dict[str, tuple[type, ...]] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        found[field.name] = typing.get_args(hint) if is_union else (hint,)
    return found


def normalise(instance: object) -> None:
    """Check the fields of a frozen dataclass against their annotations and replace numbers by plain Python ones.

    Annotations may be ``float``, ``int``, ``bool``, ``str``, dataclasses such as schedules, and unions of these with
    None: exactly what can cross the wire. An int is accepted where a float is expected, and becomes one.

    Raises:
        ConfigError: a value has another type, or is NaN or infinite.
    """
    for name, allowed in kinds(type(instance)).items():
        value = getattr(instance, name)
        object.__setattr__(instance, name, _normalised(name, value, allowed))


def _normalised(name: str, value: object, allowed: tuple[type, ...]) -> object:
    if value is None and type(None) in allowed:
        return None
    for kind in allowed:
        if dataclasses.is_dataclass(kind) and isinstance(value, kind):
            return value
    plain = next((kind for kind in allowed if kind in _CHECKS), None)
    if plain is None:
        names = " or ".join(kind.__name__ for kind in allowed)
        raise ConfigError(f"{name} must be {names}, not {shown(value)}", setting=name)
    return _CHECKS[plain](name, value)
