"""Looking into a group: monitors of every layer's output, and metrics of every device's outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvd.errors import ConfigError, InputMismatch, NotAllowed
from kvd.parallel.device import Array, Device, HostArray
from kvd.parallel.group.binding import Binding
from kvd.parallel.group.input_checks import fitting, part_of
from kvd.parallel.group.monitor import Monitor, gradient_name, mxnet_name
from kvd.parallel.group.results import Results
from kvd.parallel.models.model import Executor, MonitorHook
from kvd.parallel.models.row_gradients import elements_of

#: Called with (place of the device in the group, device, name, array) for the output of every layer.
GroupMonitor: TypeAlias = Callable[[int, Device, str, Array], None]
#: An array (NumPy, CuPy, torch …), or a list or tuple of them, one per output.
Arrays: TypeAlias = Any


@runtime_checkable
class Metric(Protocol):
    """What a group can update and `fit` can show. Objects such as those of torchmetrics fit with these two methods."""

    def update(self, labels: Arrays, outputs: Arrays) -> None:
        """Take in the labels and outputs of a batch, or of a device's part of it."""
        ...

    def get(self) -> Any:
        """(name, value); for several, (names, values)."""
        ...


class Monitors:
    """Passes the outputs of every device's layers to one monitor; to a function in one call at a time."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._monitor: Monitor | GroupMonitor | None = None
        self._executors: Sequence[Executor] = ()
        self._lock = threading.Lock()

    def install(self, monitor: Monitor | GroupMonitor | None, executors: Sequence[Executor]) -> None:
        """From now on these executors show their outputs to ``monitor``, or to none."""
        if monitor is not None and not isinstance(monitor, Monitor) and not callable(monitor):
            text = f"monitor is a Monitor, a function or None, not a {type(monitor).__name__}"
            raise ConfigError(text, setting="monitor")
        if isinstance(self._monitor, Monitor):
            self._monitor.forget(self)
        if isinstance(monitor, Monitor):
            monitor.watch(self)
        self._monitor = monitor
        self.attach(executors)

    def arrays(self) -> Iterator[tuple[str, HostArray]]:
        """See `kvd.parallel.group.monitor.Watched`."""
        for executor in self._executors:
            to_host = executor.device.to_host
            yield from ((mxnet_name(name), to_host(array)) for name, array in executor.params.items())
            yield from ((mxnet_name(name), to_host(array)) for name, array in executor.aux.items())
            yield from ((gradient_name(name), to_host(elements_of(array))) for name, array in executor.grads.items())

    def attach(self, executors: Sequence[Executor]) -> None:
        """These executors, one per device, take the place of those before."""
        self._executors = executors
        for index, executor in enumerate(executors):
            executor.set_monitor(None if self._monitor is None else self._hook(index, self._monitor))

    def _hook(self, index: int, monitor: Monitor | GroupMonitor) -> MonitorHook:
        if isinstance(monitor, Monitor):
            return partial(monitor.output, self._devices[index])

        def show(name: str, array: Array) -> None:
            with self._lock:
                monitor(index, self._devices[index], name, array)

        return show


def update_metric(metric: Metric, binding: Binding, results: Results, labels: Sequence[Any]) -> None:
    """Update ``metric`` once per device, in order; see `kvd.parallel.DataParallelExecutorGroup.update_metric`."""
    if not binding.labels:
        raise NotAllowed("no labels are bound: give label_shapes, which say how labels are split")
    if len(labels) != len(binding.labels):
        raise InputMismatch(f"{len(labels)} labels for {len(binding.labels)} bound", setting="labels")
    arrays = [fitting(d.name, array, d.shape) for d, array in zip(binding.labels, labels, strict=True)]
    outputs = results.outputs()
    axis = binding.description.outputs[0].batch_axis
    for index, part in enumerate(binding.slices):
        own = []
        for desc, array in zip(binding.labels, arrays, strict=True):
            label = part_of(array, desc.batch_axis, part)
            own.append(np.moveaxis(label, desc.batch_axis, axis) if min(axis, desc.batch_axis) >= 0 else label)
        metric.update(own, [parts[index] for parts in outputs])
