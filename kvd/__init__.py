"""kvd, a parameter server for Python: `create` gives a store of values that the workers of a job share."""

from kvd import aio, errors, optimizer
from kvd.client.calls.backend import Node
from kvd.client.calls.handle import Handle
from kvd.client.facades.blocking import KVStore, create
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
)

__version__ = "0.1.0"

__all__ = [
    "create",
    "KVStore",
    "Handle",
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
]
