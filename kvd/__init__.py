"""kvd, a parameter server for Python: `create` gives a store of values that the workers of a job share."""

from kvd import aio, errors, optimizer
from kvd.client.calls.backend import Node
from kvd.client.calls.handle import Handle
from kvd.client.cluster.observer import Reading
from kvd.client.facades.blocking import KVStore, create
from kvd.client.facades.observer import Observer
from kvd.client.registry import KVStoreBase, register_store
from kvd.config import Config
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
    NodeLost,
    NotAllowed,
    ProtocolError,
    RemoteError,
    RequestTimeout,
    ShapeMismatch,
    StoreClosed,
    VersionUnavailable,
)

__version__ = "0.1.0"

__all__ = [
    "create",
    "KVStore",
    "KVStoreBase",
    "register_store",
    "Handle",
    "Observer",
    "Reading",
    "Node",
    "Config",
    "aio",
    "errors",
    "optimizer",
    "KvdError",
    "ConfigError",
    "ConnectError",
    "RequestTimeout",
    "Deadlock",
    "ProtocolError",
    "NodeLost",
    "BarrierBroken",
    "JobEnded",
    "JobBusy",
    "StoreClosed",
    "RemoteError",
    "KeyNotFound",
    "KeyExists",
    "ShapeMismatch",
    "DtypeMismatch",
    "NotAllowed",
    "VersionUnavailable",
]
