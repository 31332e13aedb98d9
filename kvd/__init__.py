"""kvd, a parameter server for Python: `create` gives a store of values that the workers of a job share.

The errors are here from the start. Everything else is imported when it is first used: a program that only wants to know
the version, or to catch a KvdError, does not wait for NumPy and ZeroMQ.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvd import errors
from kvd.errors import (
    BarrierBroken,
    ConfigError,
    ConnectError,
    Deadlock,
    DtypeMismatch,
    JobBusy,
    JobEnded,
    KeyExists,
    KeyNotFound,
    KvdError,
    MergeMismatch,
    NodeLost,
    NotAllowed,
    NotCopyable,
    NotInitialized,
    NotResumed,
    ProtocolError,
    RemoteError,
    RequestTimeout,
    ShapeMismatch,
    SnapshotError,
    StateLost,
    StoreClosed,
    VersionUnavailable,
)
from kvd.version import __version__ as __version__

if TYPE_CHECKING:
    from kvd import aio, initializer, optimizer
    from kvd.client.calls.backend import Node
    from kvd.client.calls.handle import Handle
    from kvd.client.calls.staleness import Staleness
    from kvd.client.cluster.observer import Reading
    from kvd.client.facades.blocking import KVStore, create
    from kvd.client.facades.observer import Observer
    from kvd.client.registry import KVStoreBase, register_store
    from kvd.config import Config
    from kvd.tables.description import RowSparse
    from kvd.tables.row_values import RowSparseArray

__all__ = [
    "create",
    "KVStore",
    "KVStoreBase",
    "register_store",
    "Handle",
    "Observer",
    "Reading",
    "Node",
    "RowSparse",
    "RowSparseArray",
    "Staleness",
    "Config",
    "aio",
    "errors",
    "initializer",
    "optimizer",
    "KvdError",
    "ConfigError",
    "ConnectError",
    "RequestTimeout",
    "Deadlock",
    "ProtocolError",
    "NodeLost",
    "BarrierBroken",
    "NotResumed",
    "StateLost",
    "JobEnded",
    "JobBusy",
    "StoreClosed",
    "SnapshotError",
    "RemoteError",
    "KeyNotFound",
    "KeyExists",
    "ShapeMismatch",
    "DtypeMismatch",
    "MergeMismatch",
    "NotAllowed",
    "NotCopyable",
    "NotInitialized",
    "VersionUnavailable",
]

# Name → the module that it is imported from when it is first used. A name without one is a module of this package.
_WHEN_USED = {
    "create": "kvd.client.facades.blocking",
    "KVStore": "kvd.client.facades.blocking",
    "Handle": "kvd.client.calls.handle",
    "Node": "kvd.client.calls.backend",
    "Staleness": "kvd.client.calls.staleness",
    "Config": "kvd.config",
    "RowSparse": "kvd.tables.description",
    "RowSparseArray": "kvd.tables.row_values",
    "Observer": "kvd.client.facades.observer",
    "Reading": "kvd.client.cluster.observer",
    "KVStoreBase": "kvd.client.registry",
    "register_store": "kvd.client.registry",
    "aio": "",
    "initializer": "",
    "optimizer": "",
}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _WHEN_USED[name]
    value = getattr(import_module(home), name) if home else import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
