"""`delete` in a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvd.client.calls.handle import Handle
from kvd.client.calls.unobserved_errors import UnobservedErrors
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.engine import Engine
from kvd.client.cluster.transfers import nothing
from kvd.core import requests


class KeyCache(Protocol):
    """Something that this process keeps by the names of keys."""

    def forget(self, names: Sequence[str]) -> None:
        """Drop what is kept of these keys, which are deleted."""


class ClusterDeletion:
    """Deletes keys, and what this process keeps by their names.

    Args:
        caches: what is kept by their names.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: Arguments,
        unobserved: UnobservedErrors,
        caches: Sequence[KeyCache],
    ) -> None:
        self._engine = engine
        self._arguments = arguments
        self._watched = unobserved.watch
        self._caches = caches

    def delete(self, key: Any) -> Handle:
        names = self._arguments.named(key).names
        if not names:
            return Handle.of(None)
        handle = Handle(self._engine.submit(requests.DeleteKeys(tuple(names))), nothing, "delete", self._engine.wait)
        for cache in self._caches:
            cache.forget(names)
        return self._watched(names, handle)
