"""Optimizers as plain values and back: lists, strings, numbers, bools and None, nothing that could be executed.

::

    optimizer   [name, {field: value, …}]                   without the multipliers if there are none
    changes     {field: value, …}
    value       None | bool | int | float | str | ["schedule", name, {field: value, …}] | {key: factor, …}
"""

from __future__ import annotations

from collections.abc import Mapping

from kvd.errors import ConfigError, ProtocolError
from kvd.optimizer.fields import kinds, shown
from kvd.optimizer.multipliers import NO_MULTIPLIERS, Multipliers
from kvd.optimizer.registry import known_optimizers
from kvd.optimizer.rules import Optimizer
from kvd.optimizer.schedule import SCHEDULES, Schedule

_SCHEDULE_TAG = "schedule"

# The deepest nesting is a Warmup around another schedule.
_MAX_DEPTH = 2


def to_wire(optimizer: Optimizer) -> list[object]:
    """Return ``optimizer`` as ``[name, {field: value}]``, of values that msgpack and JSON know.

    Raises:
        ConfigError: its class is neither built in nor an installed entry point, so no server can know it.
    """
    for name, cls in known_optimizers().items():
        if cls is type(optimizer):
            return [name, _fields_to_wire(optimizer)]
    raise ConfigError(
        f"{type(optimizer).__name__} is no known optimizer: install it as an entry point of the group kvd.optimizers",
        setting="optimizer",
    )


def from_wire(obj: object) -> Optimizer:
    """Return the optimizer that ``to_wire`` wrote.

    Raises:
        ProtocolError: for any other input; no input raises another error.
    """
    if not isinstance(obj, list | tuple) or len(obj) != 2:
        raise ProtocolError(f"an optimizer is [name, fields], not {short(obj)}")
    name, fields = obj
    classes = known_optimizers()
    if not isinstance(name, str) or name not in classes:
        raise ProtocolError(f"no optimizer is called {short(name)}; known are {', '.join(sorted(classes))}")
    optimizer = construct(classes[name], fields, depth=_MAX_DEPTH)
    if not isinstance(optimizer, Optimizer):
        raise ProtocolError(f"{name} is no optimizer")
    return optimizer


def with_hyperparameters(optimizer: Optimizer, changes: Mapping[str, object]) -> Optimizer:
    """Return a copy of ``optimizer`` with some fields changed, such as ``{"learning_rate": 0.01}``.

    Raises:
        ConfigError: a name is no field of this optimizer, or a value is not allowed; ``setting`` names it.
    """
    known = kinds(type(optimizer))
    for name in changes:
        if name not in known:
            raise ConfigError(
                f"{type(optimizer).__name__} has no {shown(name)}; it has {', '.join(known)}", setting=str(name)
            )
    values = {name: getattr(optimizer, name) for name in known} | dict(changes)
    return type(optimizer)(**values)


def changes_to_wire(changes: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of ``update_optimizer`` as plain values."""
    return {name: _value_to_wire(value) for name, value in changes.items()}


def changes_from_wire(obj: object) -> dict[str, object]:
    """Return what ``changes_to_wire`` wrote. Does not check that an optimizer has these fields.

    Raises:
        ProtocolError: for any other input.
    """
    return _fields_from_wire(obj, depth=_MAX_DEPTH)


def _fields_to_wire(instance: object) -> dict[str, object]:
    values = {name: getattr(instance, name) for name in kinds(type(instance))}
    return {name: _value_to_wire(value) for name, value in values.items() if value != NO_MULTIPLIERS}


def _value_to_wire(value: object) -> object:
    if isinstance(value, Schedule):
        return [_SCHEDULE_TAG, type(value).__name__, _fields_to_wire(value)]
    if isinstance(value, Multipliers):
        return dict(value)
    return value


def _fields_from_wire(obj: object, depth: int) -> dict[str, object]:
    if not isinstance(obj, dict):
        raise ProtocolError(f"fields are a map, not {short(obj)}")
    for name in obj:
        if not isinstance(name, str):
            raise ProtocolError(f"the name of a field is a string, not {short(name)}")
    return {name: _value_from_wire(value, depth) for name, value in obj.items()}


def _value_from_wire(value: object, depth: int) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return value  # the optimizer checks it, as what a person wrote
    if not isinstance(value, list | tuple) or len(value) != 3 or value[0] != _SCHEDULE_TAG:
        raise ProtocolError(f"{short(value)} is no value of a field")
    _, name, fields = value
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ProtocolError(f"no schedule is called {short(name)}; known are {', '.join(SCHEDULES)}")
    if depth == 0:
        raise ProtocolError("schedules are nested too deeply")
    return construct(SCHEDULES[name], fields, depth - 1)


def construct(cls: type, obj: object, depth: int) -> object:
    fields = _fields_from_wire(obj, depth)
    known = kinds(cls)
    needed = {name for name, allowed in known.items() if Multipliers not in allowed}
    if not needed <= fields.keys() <= known.keys():
        wrong = sorted((fields.keys() - known.keys()) | (needed - fields.keys()))
        raise ProtocolError(f"{cls.__name__}: these fields are unknown or missing: {', '.join(map(short, wrong[:8]))}")
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ProtocolError(f"{cls.__name__}: {error}") from error
    except Exception as error:  # an installed class may raise anything, and no input may stop a daemon
        raise ProtocolError(f"{cls.__name__} refuses its fields: {type(error).__name__}") from error


def short(value: object) -> str:
    """Return a short description of what a peer sent; its cost and its length are limited."""
    if isinstance(value, str | bytes):
        return repr(value[:40])
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    return shown(value)
