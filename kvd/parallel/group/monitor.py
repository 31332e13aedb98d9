"""`Monitor`: statistics of outputs, weights and gradients, every so many batches."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from kvd.errors import ConfigError
from kvd.optimizer.fields import shown
from kvd.parallel.device import Array, Device, HostArray

#: Makes the statistic of an array in host memory: a number, or an array of a few.
Statistic: TypeAlias = Callable[[HostArray], Any]


class MonitorEntry(NamedTuple):
    """One statistic.

    Attributes:
        step: the number of the batch, from 1 on.
        name: of the array, as MXNet calls it.
        value: what the statistic function returned.
    """

    step: int
    name: str
    value: Any


class Watched(Protocol):
    """What a monitor looks at besides outputs."""

    def arrays(self) -> Iterable[tuple[str, HostArray]]:
        """Weights, states and gradients, by their names in the monitor, device by device."""
        ...


def root_mean_square(array: HostArray) -> float:
    """MXNet's statistic: the norm of the array, divided by the root of its size. 0 for an empty array."""
    values = array.astype(np.float64, copy=False).ravel()
    return float(np.sqrt(np.dot(values, values) / values.size)) if values.size else 0.0


class Monitor:
    """Collects statistics of every `interval`-th batch, from the first on. After MXNet's class of this name.

    ::

        monitor = Monitor(100, pattern=".*weight|.*output")
        group.install_monitor(monitor)  # of several groups, if wanted
        for batch in batches:
            monitor.tic()
            group.forward_backward(batch)
            monitor.toc_print()

    Names are MXNet's: ``fc1_output`` is the output of layer ``fc1``, ``fc1_weight`` its weight, and
    ``fc1_backward_weight`` the gradient of that; ``.`` and ``/`` in the names of a model become ``_``. With several
    devices each has an entry of its own, in their order, so names repeat: a plain function in place of a monitor is
    told the device (`DataParallelExecutorGroup.install_monitor`). Inputs and gradients of inputs are not shown. A group
    that is bound to a store gets its new weights in the next forward: `toc` shows those that the batch was computed
    with.

    Args:
        interval: in batches.
        stat_func: makes the statistic of a NumPy array; None: MXNet's, the norm divided by the root of the size.
        pattern: a regular expression; only names that it matches from their beginning on are shown.
        sort: sort the entries of a batch by name.

    Raises:
        ConfigError: ``interval`` is not a whole number from 1 on, ``stat_func`` not a function, or ``pattern`` not a
            regular expression.
    """

    def __init__(
        self, interval: int, stat_func: Statistic | None = None, pattern: str = ".*", sort: bool = False
    ) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int | np.integer) or interval < 1:
            text = f"interval is a number of batches, a whole number from 1 on, not {shown(interval)}"
            raise ConfigError(text, setting="interval")
        if stat_func is not None and not callable(stat_func):
            text = f"stat_func is a function of an array, not {shown(stat_func)}"
            raise ConfigError(text, setting="stat_func")
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            text = f"pattern is a regular expression, not {shown(pattern)}: {error}"
            raise ConfigError(text, setting="pattern") from None
        self.interval = int(interval)
        self.step = 0
        """The number of batches that `tic` has begun."""
        self._statistic = root_mean_square if stat_func is None else stat_func
        self._sorts = bool(sort)
        self._watched: list[Watched] = []
        self._entries: list[MonitorEntry] = []
        self._active = False
        self._lock = threading.Lock()

    def tic(self) -> None:
        """A batch begins: call it before forward."""
        with self._lock:
            if self.step % self.interval == 0:
                self._entries, self._active = [], True
            self.step += 1

    def toc(self) -> list[MonitorEntry]:
        """The batch has ended. Returns its entries; none, if it is not one of those that are looked at.

        Outputs come first, in the order in which they were computed; then weights, states and gradients.
        """
        if not self._active:
            return []
        for watched in self._watched:
            for name, array in watched.arrays():
                self._note(name, array)
        with self._lock:
            entries, self._entries, self._active = self._entries, [], False
        return sorted(entries, key=lambda entry: entry.name) if self._sorts else entries

    def toc_print(self) -> None:
        """`toc`, and prints its entries as MXNet does, one per line."""
        for step, name, value in self.toc():
            print(f"Batch: {step:7d} {name:30s} {_text(value)}")

    # ── the side of a group ──

    def watch(self, watched: Watched) -> None:
        """A group shows its arrays from now on."""
        if not any(entry is watched for entry in self._watched):
            self._watched.append(watched)

    def forget(self, watched: Watched) -> None:
        """The group has another monitor, or none."""
        self._watched = [entry for entry in self._watched if entry is not watched]

    def output(self, device: Device, name: str, array: Array) -> None:
        """A layer has computed its output. Called on the thread of the device."""
        if self._active and self._pattern.match(name := mxnet_name(name)):
            self._note(name, device.to_host(array))

    def _note(self, name: str, array: HostArray) -> None:
        if self._pattern.match(name):
            value = self._statistic(array)
            with self._lock:
                self._entries.append(MonitorEntry(self.step, name, value))


def mxnet_name(name: str) -> str:
    """The name of an output, weight or state in a monitor."""
    return name.replace(".", "_").replace("/", "_")


def gradient_name(name: str) -> str:
    """The name of the gradient of a parameter in a monitor: ``fc1_backward_weight`` for ``fc1_weight``."""
    end = max(name.rfind("."), name.rfind("/"))
    if end < 0:
        end = name.rfind("_")
    layer = f"{mxnet_name(name[:end])}_" if end > 0 else ""
    return f"{layer}backward_{mxnet_name(name[end + 1 :])}"


def _text(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return "\t".join([str(np.asarray(entry).item() if np.size(entry) == 1 else entry) for entry in values])
