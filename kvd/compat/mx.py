"""MXNet's KVStore for arrays of MXNet: ``import kvd.compat.mx as kvstore`` in place of ``from mxnet import kvstore``.

``kvstore.create("dist_sync")`` gives a store whose calls take NDArrays, and write results into them. Everything else is
kvd: the types, the optimizers of `kvd.optimizer`, ``kvd launch``. A program that calls ``mx.nd`` still needs MXNet.
`docs/migrating-from-mxnet.md` says what else is different.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvd
from kvd.client.registry import KVStoreBase
from kvd.errors import NotAllowed

__all__ = ["create", "KVStore"]


def create(name: str = "local", **settings: Any) -> KVStore:
    """Make a store for NDArrays; see `kvd.create` for types, settings and errors."""
    return KVStore(kvd.create(name, **settings))


class KVStore(KVStoreBase):
    """A `kvd.KVStore` whose arrays may be anything with MXNet's ``asnumpy()`` and ``[:] =``.

    Lists of keys take lists of arrays, and a value may be a list with an array for each device, as in MXNet. Members
    that are not listed here are those of `kvd.KVStore`, such as `kvd.KVStore.steps` and `kvd.KVStore.close`.

    Args:
        store: makes the calls.
    """

    def __init__(self, store: kvd.KVStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def type(self) -> str:
        """The type of the store."""
        return self._store.type

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._store.num_workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return True if the store has a capability; see `kvd.KVStore.is_capable`."""
        return kvd.KVStore.is_capable(capability)

    # ── arrays ──

    def init(self, key: Any, value: Any) -> None:
        """Make keys with the values of worker 0."""
        self._store.init(key, _host(value))

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Send values; the values of a list of devices are summed first."""
        self._store.push(key, _host(value), priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write values into `out`. Unlike in MXNet they are there when this returns.

        Raises:
            NotAllowed: there is no `out`.
        """
        _check_out(out)
        self._filled(out, lambda arrays: self._store.pull(key, out=arrays, priority=priority))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push values, and write the results into `out`, or into the values."""
        sent = _host(value)
        self._filled(value if out is None else out, lambda to: self._store.pushpull(key, sent, to, priority))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write worker 0's values into everyone's `out`, and make the keys that are new."""
        sent = _host(value)
        self._filled(value if out is None else out, lambda to: self._store.broadcast(key, sent, to, priority))

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Refuse: rows of MXNet's sparse arrays cannot be written without MXNet.

        Raises:
            NotAllowed: always; it says what to use.
        """
        raise NotAllowed("use rows = kvd.create(...).row_sparse_pull(key, row_ids), which returns an array of the rows")

    # ── MXNet's other names ──

    def get_num_dead_node(self, node_id: int, timeout: int = 60) -> int:
        """See `kvd.KVStore.num_dead_node`."""
        return self._store.num_dead_node(node_id, timeout)

    def set_optimizer(self, optimizer: Any) -> None:
        """Have the servers update the values; see `kvd.KVStore.set_optimizer`.

        Raises:
            NotAllowed: it is one of MXNet's, which travel as pickles.
        """
        if type(optimizer).__module__.partition(".")[0] == "mxnet":
            name = type(optimizer).__name__
            raise NotAllowed(f"mx.optimizer.{name} is not sent: pass one of kvd.optimizer (docs/optimizers.md)")
        self._store.set_optimizer(optimizer)

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        """See `kvd.KVStore.save_optimizer_states`."""
        self._store.save_optimizer_states(fname, dump_optimizer)

    def load_optimizer_states(self, fname: Any) -> None:
        """See `kvd.KVStore.load_optimizer_states`."""
        self._store.load_optimizer_states(fname)

    def _set_updater(self, updater: Callable[[Any, Any, Any], None]) -> None:
        self._store.set_updater(updater)

    def _barrier(self) -> None:
        self._store.barrier("mxnet")

    def _send_command_to_servers(self, head: int, body: str) -> None:
        self._store.send_command_to_servers(head, body)

    def _filled(self, out: Any, call: Callable[[Any], Any]) -> None:
        """Make a call with arrays of NumPy, and copy them into those of the program."""
        arrays = _like(out)
        call(arrays)
        _copy(arrays, out)


def _host(value: Any) -> Any:
    """Return NDArrays, also in lists, as arrays of NumPy."""
    if isinstance(value, list | tuple):
        return [_host(entry) for entry in value]
    return value.asnumpy() if hasattr(value, "asnumpy") else value


def _like(out: Any) -> Any:
    """Return new arrays for NDArrays, also in lists; others are filled themselves."""
    if isinstance(out, list | tuple):
        return [_like(entry) for entry in out]
    return np.empty(out.shape, out.dtype) if hasattr(out, "asnumpy") else out


def _copy(arrays: Any, out: Any) -> None:
    if isinstance(out, list | tuple):
        for array, entry in zip(arrays, out, strict=True):
            _copy(array, entry)
    elif hasattr(out, "asnumpy"):
        out[:] = arrays


def _check_out(out: Any) -> None:
    if out is None:
        raise NotAllowed("pull writes into out, as in MXNet: pass one, or use the store of kvd.create")
