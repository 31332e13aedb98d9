"""Parameters and states between the host and the devices of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvd.errors import InputMismatch
from kvd.parallel.device import HostArray
from kvd.parallel.device_threads import DeviceThread, run_on_all
from kvd.parallel.group.binding import Binding
from kvd.parallel.group.input_checks import fitting, writable_target
from kvd.parallel.models.model import Executor


def copy_in(
    threads: Sequence[DeviceThread],
    binding: Binding,
    params: Mapping[str, Any],
    aux: Mapping[str, Any],
    allow_extra: bool,
) -> None:
    """Copy the given parameters and states to every device; see `DataParallelExecutorGroup.set_params`.

    Raises:
        InputMismatch, ShapeMismatch: see there. Nothing has changed then.
    """
    description = binding.description
    copies: dict[str, Any] = {}
    for what, given, shapes in (
        ("parameter", params, description.params),
        ("auxiliary state", aux, description.aux),
    ):
        for name, value in given.items():
            if name in shapes:
                dtype = binding.arrays(name)[0].dtype
                copies[name] = fitting(name, value, shapes[name]).astype(dtype, copy=False)
            elif not allow_extra:
                known = ", ".join(shapes) or "none"
                raise InputMismatch(f"the model has no {what} {name!r}; it has {known}", setting=name)
    put_on_devices(threads, binding.executors, copies)


def put_on_devices(
    threads: Sequence[DeviceThread], executors: Sequence[Executor], values: Mapping[str, HostArray]
) -> None:
    """Copy these values to every device. Names that an executor does not have are skipped."""

    def copy(index: int) -> None:
        executor = executors[index]
        for name, value in values.items():
            target = executor.params.get(name)
            if target is None:
                target = executor.aux.get(name)
            if target is not None:
                threads[index].device.put(target, value)

    run_on_all(threads, copy)


def copy_out(binding: Binding, params: Mapping[str, HostArray], aux: Mapping[str, HostArray]) -> None:
    """Write the mean over the devices into the given arrays; see `DataParallelExecutorGroup.get_params`.

    Raises:
        KeyNotFound, ShapeMismatch, ConfigError: see there. Nothing has been written then.
    """
    description = binding.description
    targets = {name: writable_target(name, params, shape) for name, shape in description.params.items()}
    targets |= {name: writable_target(name, aux, shape) for name, shape in description.aux.items()}
    write_means(binding, targets)


def write_means(binding: Binding, targets: Mapping[str, HostArray]) -> None:
    """Write the mean over the devices of each of these parameters or states into its array, computed in float64."""
    for name, target in targets.items():
        total = np.zeros(target.shape, np.float64)
        for executor, array in zip(binding.executors, binding.arrays(name), strict=True):
            total += executor.device.to_host(array)
        np.copyto(target, total / len(binding.executors), casting="unsafe")


def host_arrays(binding: Binding, names: Sequence[str]) -> dict[str, HostArray]:
    """New host arrays, shaped and typed as the parameters or states of these names; their content is undefined."""
    arrays = {}
    for name in names:
        array = binding.arrays(name)[0]
        arrays[name] = np.empty(array.shape, array.dtype)
    return arrays
