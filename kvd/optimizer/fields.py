"""Checks of the fields of optimizers and schedules, from programs and from peers."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping

from kvd.errors import ConfigError
from kvd.optimizer.multipliers import MAX_MULTIPLIERS, MAX_NAMES_BYTES, Multipliers
from kvd.protocol.specs import MAX_KEY_CHARS

MAX_COUNT = 2**53
"""The largest whole number that a field may hold: a float64 would round larger ones."""


def shown(value: object) -> str:
    """Return a short repr of ``value`` for a message; it never raises."""
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


def multipliers(setting: str, value: object) -> Multipliers:
    """Return ``value`` as factors by name.

    Raises:
        ConfigError: it is not a mapping of names of keys, or patterns, to numbers ≥ 0, or it is too large.
    """
    if isinstance(value, Multipliers):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'{setting} must map keys to factors, as {{"*_bias": 0.0}}, not {shown(value)}', setting=setting
        )
    if len(value) > MAX_MULTIPLIERS:
        text = f"{setting} has at most {MAX_MULTIPLIERS} entries, not {len(value)}: use patterns, such as '*_bias'"
        raise ConfigError(text, setting=setting)
    found = Multipliers({_key(setting, key): _factor(setting, key, factor) for key, factor in value.items()})
    if found.names_nbytes > MAX_NAMES_BYTES:
        text = f"the names in {setting} have at most {MAX_NAMES_BYTES} bytes in all, not {found.names_nbytes}"
        raise ConfigError(f"{text}: use patterns, such as '*_bias'", setting=setting)
    return found


def _key(setting: str, key: object) -> str:
    if isinstance(key, numbers.Integral) and not isinstance(key, bool) and -MAX_COUNT <= int(key) <= MAX_COUNT:
        key = str(int(key))
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
        rule = f"names of keys of 1 to {MAX_KEY_CHARS} characters, or patterns of them"
        raise ConfigError(f"{setting} has {rule}, not {shown(key)}", setting=setting)
    return key


def _factor(setting: str, key: object, value: object) -> float:
    factor = number(f"{setting}[{shown(key)}]", value)
    require(f"{setting}[{shown(key)}]", factor >= 0, "≥ 0", value)
    return factor


def require(setting: str, holds: bool, rule: str, value: object) -> None:
    """Raise ConfigError with the ``rule`` in words unless it ``holds``."""
    if not holds:
        raise ConfigError(f"{setting} must be {rule}, not {shown(value)}", setting=setting)


_CHECKS = {float: number, int: count, bool: flag, str: text, Multipliers: multipliers}


# Resolving annotations is slow, and there are few classes, which live until the process ends.
_KINDS: dict[type, dict[str, tuple[type, ...]]] = {}


def kinds(cls: type) -> Mapping[str, tuple[type, ...]]:
    """Return the fields of a dataclass, each with the types that its annotation admits, in the order of declaration."""
    if cls not in _KINDS:
        _KINDS[cls] = _resolve(cls)
    return _KINDS[cls]


def _resolve(cls: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    found: dict[str, tuple[type, ...]] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        origin = typing.get_origin(hint)
        if origin is Mapping:
            found[field.name] = (Multipliers,)
        else:
            found[field.name] = typing.get_args(hint) if origin in (typing.Union, types.UnionType) else (hint,)
    return found


def normalise(instance: object) -> None:
    """Check the fields of a frozen dataclass against their annotations and replace numbers by plain Python ones.

    Annotations may be ``float``, ``int``, ``bool``, ``str``, dataclasses such as schedules, and unions of these with
    None, or mappings of keys to factors: exactly what can cross the wire. An int is accepted where a float is
    expected, and becomes one.

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
