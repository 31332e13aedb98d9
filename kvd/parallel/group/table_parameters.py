"""The row-sparse parameters of a group as tables of a store: rows of gradients there, rows of weights back.

A gradient leaves when the backward of all devices is done: a layer that looks rows up is among the first, whose
gradients are the last to be complete. Rows come in the forward that reads them: only its batch says which they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import numpy as np

from kvd.client.calls.handle import Handle
from kvd.client.facades.blocking import KVStore
from kvd.parallel.device import Array
from kvd.parallel.device_threads import run_on_all
from kvd.parallel.group.binding import BoundModel
from kvd.parallel.models.model import Executor, ModelDescription, ReadsRows

FETCHED_AT_ONCE_NBYTES = 16 << 20


class TableParameters:
    """Of one gradient pipeline.

    Arguments:
        keys: parameter → key of its table.
        priorities: of their pushes and pulls.
    """

    def __init__(self, kv: KVStore, keys: Mapping[str, str | int], priorities: Mapping[str, int]) -> None:
        self._kv = kv
        self._keys = dict(keys)
        self._priorities = dict(priorities)
        self._pushed: list[Handle] = []

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    # ── gradients to the store ──

    def push(self, bound: BoundModel, samples: int) -> None:
        """Send the gradients of the last backward, which is done on all devices."""
        for name, key in self._keys.items():
            gradients = [executor.grads[name] for executor in bound.executors if name in executor.grads]
            if gradients:
                handle = self._kv.push(key, gradients, self._priorities[name], samples=samples)
                self._pushed.append(handle)

    def wait(self) -> None:
        """Return when the store has taken what was sent. Raises what it raised, also when it is called again."""
        for handle in self._pushed:
            handle.wait()
        self._pushed = []

    # ── weights to the devices ──

    def read_in(self, executor: Executor, description: ModelDescription) -> None:
        """From now on each forward of this executor brings the rows that it reads first."""
        if description.row_sparse:
            cast(ReadsRows, executor).set_row_reader(partial(self._read, executor))

    def _read(self, executor: Executor, name: str, ids: Array) -> None:
        """Write the newest rows of these ids into a parameter of a device, in the thread of the device."""
        if name not in self._keys:
            return
        xp = executor.device.xp
        distinct = xp.unique(ids)
        host = executor.device.to_host(distinct)
        rows = self._kv.row_sparse_pull(self._keys[name], host, priority=self._priorities[name])
        executor.params[name][distinct] = xp.asarray(rows)

    def fetch_all(self, bound: BoundModel) -> None:
        """Bring all rows to every device, some at a time."""
        for name in self._keys:
            if name not in bound.binding.description.params:
                continue
            weight = bound.executors[0].params[name]
            step = max(1, FETCHED_AT_ONCE_NBYTES * len(weight) // max(1, weight.nbytes))
            for first in range(0, len(weight), step):
                self._bring(bound, name, slice(first, min(first + step, len(weight))))

    def _bring(self, bound: BoundModel, name: str, part: slice) -> None:
        rows = self._kv.row_sparse_pull(self._keys[name], np.arange(part.start, part.stop))
        run_on_all(
            bound.threads,
            lambda index: bound.threads[index].device.put(bound.executors[index].params[name][part], rows),
        )
