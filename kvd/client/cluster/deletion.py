"""`delete` in a cluster."""

from __future__ import annotations

from typing import Any

from kvd.client.calls.handle import Handle
from kvd.client.calls.restored_keys import RestoredKeys
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.bound_keys import BoundKeys
from kvd.client.cluster.broadcast import ClusterAssignments
from kvd.client.cluster.compression import GradientCompression
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.tables import ClusterTables
from kvd.client.cluster.transfers import nothing
from kvd.core import requests


class ClusterDeletion:
    """Deletes keys, and what this process keeps by their names."""

    def __init__(
        self,
        engine: Engine,
        arguments: Arguments,
        bound: BoundKeys,
        assignments: ClusterAssignments,
        restored: RestoredKeys,
        unobserved: UnobservedErrors,
        compression: GradientCompression,
        tables: ClusterTables,
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._bound = bound
        self._assignments = assignments
        self._restored = restored
        self._watched = unobserved.watch
        self._compression = compression
        self._tables = tables

    def delete(self, key: Any) -> Handle:
        names = self._arguments.named(key).names
        if not names:
            return Handle.of(None)
        handle = Handle(self._engine.submit(requests.DeleteKeys(tuple(names))), nothing, "delete", self._engine.wait)
        self._arguments.forget(names)
        self._bound.forget(names)
        self._assignments.forget(names)
        self._restored.forget(names)
        self._compression.forget(names)
        self._tables.forget(names)
        return self._watched(names, handle)
