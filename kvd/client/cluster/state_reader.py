"""Worker 0 reads the state of all keys between two steps, for a snapshot."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvd.client.calls.values import fresh_target
from kvd.client.cluster.answers import list_keys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.optimizer_states import fetch_optimizer, fetch_state
from kvd.client.cluster.stored_tables import fetch_table
from kvd.client.cluster.transfers import pull_into
from kvd.core import requests
from kvd.errors import NotAllowed
from kvd.optimizer import Optimizer
from kvd.protocol.specs import KeySpec, no_weights_text
from kvd.snapshots.layout import KeyMark
from kvd.snapshots.writer import KeyContent, table_content

AT_ONCE = 32  # keys whose states are on their way at the same time
CHANGED = "the values change while the snapshot is taken: all workers call snapshot between the same two steps"

T = TypeVar("T")
Array: TypeAlias = np.ndarray[Any, Any]


class StateReader:
    """The keys as they are when it is made by `begin`. Whoever pushes between that and `read` is noticed.

    Attributes:
        optimizer: with the hyperparameters that it has by now.
        specs: of all keys, by name; so are the clocks.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer | None,
        specs: Mapping[str, KeySpec],
        clocks: Mapping[str, int],
        nbytes: Mapping[str, int],
        weights: Mapping[str, Array],
    ) -> None:
        self.optimizer = optimizer
        self.specs = specs
        self.clocks = clocks
        self._engine = engine
        self._nbytes = nbytes
        self._weights = weights

    @classmethod
    async def begin(cls, engine: Engine, weights: Mapping[str, Array]) -> StateReader:
        """Looks up which keys there are.

        Args:
            weights: by key, what is read in place of merged gradients.

        Raises:
            NotAllowed: the slices of a key differ: others push; or there is a key of gradients without weights.
        """
        optimizer = await fetch_optimizer(engine)
        clocks: dict[str, int] = {}
        nbytes = Counter[str]()
        entries = sorted((entry for _, entry in await list_keys(engine)), key=lambda entry: entry.key)
        for entry in entries:
            nbytes[entry.key] += entry.bytes_led
            if clocks.setdefault(entry.key, entry.version) != entry.version:
                raise NotAllowed(CHANGED, key=entry.key)
        looked_up = await some_at_once([partial(engine.call, requests.DescribeKey(name)) for name in clocks])
        specs: dict[str, KeySpec] = dict(zip(clocks, looked_up, strict=True))
        for name, spec in specs.items():
            if spec.gradients and clocks[name] and name not in weights:
                raise NotAllowed(no_weights_text(name), key=name)
        return cls(engine, optimizer, specs, clocks, nbytes, weights)

    @property
    def marks(self) -> Mapping[str, KeyMark]:
        """What tells whether a key has changed."""
        return {name: KeyMark(self._nbytes[name], self.clocks[name]) for name in self.specs}

    async def read(self, names: Sequence[str]) -> list[KeyContent]:
        """The values and states of these keys.

        Raises:
            NotAllowed: one of them has changed.
        """
        tables = [name for name in names if self.specs[name].table]
        kept = [
            KeyContent(name, self._weights[name], self.clocks[name], 0, {}, spec.merge, gradients=spec.gradients)
            for name, spec in self.specs.items()
            if name in names and name in self._weights
        ]
        pulled = [name for name in names if not (self.specs[name].table or name in self._weights)]
        values = await self._read_values(pulled)
        return [*kept, *values, *await some_at_once([partial(self._read_table, name) for name in tables])]

    async def _read_table(self, name: str) -> KeyContent:
        spec, clock = self.specs[name], self.clocks[name]
        stored = await fetch_table(self._engine, name, spec)
        if any(entry.key == name and entry.version != clock for _, entry in await list_keys(self._engine)):
            raise NotAllowed(CHANGED, key=name)
        return table_content(name, spec, stored, clock)

    async def _read_values(self, names: Sequence[str]) -> list[KeyContent]:
        targets = [fresh_target(self.specs[name]) for name in names]
        pulled = self._engine.call(pull_into(names, targets, 0))
        versions, states = await asyncio.gather(pulled, self._states(names))
        for name, version in zip(names, versions, strict=True):
            if not version.oldest == version.newest == self.clocks[name]:
                raise NotAllowed(CHANGED, key=name)
        return [
            KeyContent(name, target.finish(), self.clocks[name], updates, state, spec.merge, gradients=spec.gradients)
            for name, target, (updates, state), spec in zip(
                names, targets, states, map(self.specs.__getitem__, names), strict=True
            )
        ]

    async def _states(self, names: Sequence[str]) -> Sequence[tuple[int, dict[str, Array]]]:
        if self.optimizer is None:
            return [(0, {}) for _ in names]
        return await some_at_once([partial(fetch_state, self._engine, name) for name in names])


async def some_at_once(work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of all, in order. The first error is raised, and what has begun is not left behind."""
    results: list[T] = []
    for start in range(0, len(work), AT_ONCE):
        begun = [each() for each in work[start : start + AT_ONCE]]
        ended = await asyncio.gather(*begun, return_exceptions=True)
        for result in ended:
            if isinstance(result, BaseException):
                raise result
            results.append(result)
    return results
