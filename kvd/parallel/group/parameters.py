"""Parameters and states between the host and the devices of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvd.errors import InputMismatch
from kvd.parallel.device import Array, HostArray
from kvd.parallel.device_threads import Lane, run_on_all
from kvd.parallel.group.input_checks import fitting, writable_target
from kvd.parallel.models.model import Executor, ModelDescription


def copy_in(
    lanes: Sequence[Lane],
    executors: Sequence[Executor],
    description: ModelDescription,
    params: Mapping[str, Any],
    aux: Mapping[str, Any],
    allow_extra: bool,
) -> None:
    """Copy the given parameters and states to every device; see `DataParallelExecutorGroup.set_params`.

    Raises:
        InputMismatch, ShapeMismatch: see there. Nothing was changed then.
    """
    copies: list[tuple[str, Array]] = []
    for what, given, shapes in (
        ("parameter", params, description.params),
        ("auxiliary state", aux, description.aux),
    ):
        for name, value in given.items():
            if name in shapes:
                target = _array(executors[0], name)
                copies.append((name, fitting(name, value, shapes[name]).astype(target.dtype, copy=False)))
            elif not allow_extra:
                known = ", ".join(shapes) or "none"
                raise InputMismatch(f"the model has no {what} {name!r}; it has {known}", setting=name)

    def copy(index: int) -> None:
        for name, value in copies:
            lanes[index].device.put(_array(executors[index], name), value)

    run_on_all(lanes, copy)


def copy_out(
    executors: Sequence[Executor],
    description: ModelDescription,
    params: Mapping[str, HostArray],
    aux: Mapping[str, HostArray],
) -> None:
    """Write the mean over the devices into the given arrays; see `DataParallelExecutorGroup.get_params`.

    Raises:
        KeyNotFound, ShapeMismatch, ConfigError: see there. Nothing was written then.
    """
    pairs: list[tuple[HostArray, str]] = []
    for shapes, targets in ((description.params, params), (description.aux, aux)):
        pairs += [(writable_target(name, targets, shape), name) for name, shape in shapes.items()]
    for target, name in pairs:
        total = np.zeros(target.shape, np.float64)
        for executor in executors:
            total += executor.device.to_host(_array(executor, name))
        np.copyto(target, total / len(executors), casting="unsafe")


def host_arrays(executors: Sequence[Executor], names: Sequence[str]) -> dict[str, HostArray]:
    """New host arrays, shaped and typed as the parameters or states of these names; their content is undefined."""
    arrays = {}
    for name in names:
        array = _array(executors[0], name)
        arrays[name] = np.empty(array.shape, array.dtype)
    return arrays


def _array(executor: Executor, name: str) -> Array:
    return executor.params[name] if name in executor.params else executor.aux[name]
