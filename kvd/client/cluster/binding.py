"""`bind` in a cluster: arrays for a key whose gradient is sent without a copy."""

from __future__ import annotations

from typing import Any

from kvd.client.calls.bound_arrays import BoundArrays, BoundList, bind_result
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import KeyList
from kvd.client.calls.tables import table_error
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.transfers import pull_into
from kvd.core import requests


class ClusterBinding:
    """New bound arrays begin with the key's value as their weight."""

    def __init__(self, engine: Engine, arguments: Arguments, bound: BoundKeys) -> None:
        self._engine = engine
        self._arguments = arguments
        self._bound = bound

    def bind(self, key: Any) -> Handle:
        keys = self._arguments.named(key)
        return Handle(self._engine.run(self._bind(keys.names)), lambda bound: bind_result(keys, bound), "bind")

    async def _bind(self, names: list[str]) -> list[BoundArrays]:
        bound = await self._make(names)
        fresh = self._bound.take_without_weight(names)
        if fresh:
            weights = [arrays.weight for arrays in fresh.values()]
            targets = self._arguments.targets(KeyList(list(fresh), True), weights)
            await self._engine.call(pull_into(list(fresh), targets, 0))
        return bound

    async def _make(self, names: list[str]) -> list[BoundArrays]:
        specs = {name: await self._engine.call(requests.DescribeKey(name)) for name in names}
        for name, spec in specs.items():
            if spec.table is not None:
                raise table_error(self._engine.written.of(name))
        self._bound.add(specs, self._engine.memory)
        return self._bound.arrays(names)

    def gradients(self, keys: KeyList) -> Handle:
        self._engine.written.note(keys)
        made = self._engine.run(self._make(keys.names))
        return Handle(made, lambda bound: BoundList.of(keys, bound), "bind")

    def is_bound(self, name: str) -> bool:
        return self._engine.is_well and self._bound.has(name)
