"""Trees of arrays as keys of a store: names, checks and the exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np

from kvd.client.facades.blocking import KVStore
from kvd.client.facades.exchange import Exchange
from kvd.compute.tensors import dtype_name
from kvd.errors import DtypeMismatch, KeyExists, KvdError, MergeMismatch, NotAllowed, ShapeMismatch
from kvd.parallel.models.jax.model import path_name

Op = Literal["mean", "sum"]
OPS: tuple[Op, ...] = ("mean", "sum")
ONLY_LEAF = "value"
"""The path of a tree that is a single array."""


class Leaf(NamedTuple):
    """The description of a leaf: equal on all workers and in all calls.

    Attributes:
        key: prefix and path.
        shape: of the array.
        dtype: name of its dtype, such as ``"bfloat16"``.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str


class TreeExchange:
    """One tree of a store, whose keys are made by the first call.

    It does not hold the store: what belongs to a store must not keep it alive.

    Args:
        prefix: the beginning of each key.
        op: how the workers' values become one.

    Raises:
        NotAllowed: there is no such op, or the prefix is no str.
    """

    def __init__(self, prefix: str, op: Op) -> None:
        if not isinstance(prefix, str):
            raise NotAllowed(f"prefix is a str, not {type(prefix).__name__}")
        if op not in OPS:
            raise NotAllowed(f'op is "mean" or "sum", not {op!r:.40}')
        self.prefix = prefix
        self.op = op
        self._leaves: list[Leaf] = []  # in the order of the tree; empty before the first call
        self._lock = threading.Lock()

    def describe(self, tree: Any) -> tuple[list[Leaf], list[Any], Any]:
        """Return the leaves of a tree, their arrays or tracers, and its structure.

        Raises:
            NotAllowed: a leaf is no array, or a part of it is in another process; or two leaves have one name.
            DtypeMismatch: no key can have the dtype of a leaf.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [_leaf(self.prefix + (path_name(path) or ONLY_LEAF), value) for path, value in paths]
        if len({leaf.key for leaf in leaves}) != len(leaves):
            keys = [leaf.key for leaf in leaves]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise NotAllowed(f"two leaves of the tree are called {twice!r}: rename one of them", key=twice)
        return leaves, [value for _, value in paths], structure

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Compare the leaves with those of the first call.

        Raises:
            ShapeMismatch, DtypeMismatch: a leaf had another shape or dtype.
            NotAllowed: a leaf is new, missing, or at another place.
        """
        if self._leaves and list(leaves) != self._leaves:
            raise self._changed(leaves)

    def run(self, store: KVStore, leaves: Sequence[Leaf], values: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Exchange the values, and return new read-only arrays of the same shapes and dtypes."""
        for value in values:
            if isinstance(value, jax.Array):
                value.copy_to_host_async()  # all copies from a device are under way before the first is waited for
        self._make(store, leaves)
        keys = [leaf.key for leaf in leaves]
        return list(store.pushpull(keys, [np.asarray(value) for value in values], copy=False))

    def callback(self, store: KVStore, leaves: Sequence[Leaf]) -> Callable[..., list[np.ndarray[Any, Any]]]:
        """Return the function that XLA calls with the arrays of these leaves, in a thread of its own."""

        def called(*values: Any) -> list[np.ndarray[Any, Any]]:
            try:
                return self.run(store, leaves, values)
            except KvdError as error:
                Exchange(store).keep_error([leaf.key for leaf in leaves], error)
                raise

        return called

    def _make(self, store: KVStore, leaves: Sequence[Leaf]) -> None:
        """Make the keys unless an earlier call has made them."""
        with self._lock:
            self.check(leaves)
            if self._leaves:
                return
            zeros = [np.zeros(leaf.shape, jax.numpy.dtype(leaf.dtype)) for leaf in leaves]
            try:
                store.init([leaf.key for leaf in leaves], zeros, merge=self.op)
            except (KeyExists, MergeMismatch) as error:
                error.add_note("kvd.jax makes a key for each leaf: give this tree another prefix")
                raise
            self._leaves = list(leaves)

    def _changed(self, leaves: Sequence[Leaf]) -> KvdError:
        """The error of a tree that is not the one of the first call."""
        remedy = "a tree keeps its leaves from step to step; give another tree another prefix"
        first, now = {leaf.key: leaf for leaf in self._leaves}, {leaf.key: leaf for leaf in leaves}
        for key in (*now, *first):
            if key not in first:
                return NotAllowed(f"the tree has a leaf {key!r} that it did not have before: {remedy}", key=key)
            if key not in now:
                return NotAllowed(f"the tree has lost its leaf {key!r}: {remedy}", key=key)
            old, new = first[key], now[key]
            if old.shape != new.shape:
                text = f"the leaf {key!r} has the shape {new.shape}, and had {old.shape} before: {remedy}"
                return ShapeMismatch(text, key=key)
            if old.dtype != new.dtype:
                text = f"the leaf {key!r} has the dtype {new.dtype}, and had {old.dtype} before: {remedy}"
                return DtypeMismatch(text, key=key)
        return NotAllowed(f"the leaves of the tree have changed places: {remedy}")


class StoreTrees:
    """The trees of one store, by prefix."""

    def __init__(self) -> None:
        self._trees: dict[str, TreeExchange] = {}
        self._lock = threading.Lock()

    def tree(self, prefix: str, op: Op) -> TreeExchange:
        """Return the tree with this prefix.

        Raises:
            NotAllowed: it is exchanged by another op; see also `TreeExchange`.
        """
        with self._lock:
            tree = self._trees.get(prefix)
            if tree is None:
                tree = self._trees[prefix] = TreeExchange(prefix, op)
        if tree.op != op:
            raise NotAllowed(f"the tree with the prefix {prefix!r} has op={tree.op!r}: give op={op!r} another prefix")
        return tree


_trees: WeakKeyDictionary[KVStore, StoreTrees] = WeakKeyDictionary()  # what belongs to a store goes with it
_trees_lock = threading.Lock()


def tree_of(store: KVStore, prefix: str, op: Op) -> TreeExchange:
    """Return the tree of a store with this prefix.

    Raises:
        NotAllowed: the store has no rounds; see also `StoreTrees.tree`.
    """
    if not isinstance(store, KVStore):
        raise NotAllowed(f"store is a {type(store).__name__}: pass what kvd.create returned")
    if not Exchange(store).versioned:
        raise NotAllowed(
            f"a store of type {store.type!r} has no rounds, so there is no {op} over the workers: "
            f'create it as "dist_sync"'
        )
    with _trees_lock:
        trees = _trees.setdefault(store, StoreTrees())
    return trees.tree(prefix, op)


def pushpull(tree: Any, *, store: KVStore, op: Op, prefix: str = "") -> Any:
    """Sum or average a tree of arrays over the workers, outside of ``jax.jit``.

    All workers call it with trees of the same structure. The whole tree is one call of the store, and copies of all
    leaves from their devices start before the first is waited for. The first call makes the keys.

    Args:
        tree: arrays of JAX or NumPy, of floats, bfloat16 or integers, of any shape. A None stays as it is.
        store: of type `dist_sync`, or one in this process.
        op: ``"mean"`` or ``"sum"``, as in `kvd.KVStore.init`: the mean of integers is rounded down.
        prefix: the beginning of each key; another tree of the store needs another one.

    Returns:
        The same structure. A JAX array becomes one on the same devices, a NumPy array a new read-only one.

    Raises:
        NotAllowed: a leaf is no array, or a part of it is in another process; the tree has other leaves than before;
            the store has no rounds; or this is inside ``jax.jit``, where `mean_over_workers` belongs.
        ShapeMismatch, DtypeMismatch: a leaf has changed; its key is in the error.
        NotResumed: this worker was restarted, see `kvd.KVStore.steps`.
    """
    exchange = tree_of(store, prefix, op)
    leaves, values, structure = exchange.describe(tree)
    _check_concrete(values, "pushpull")
    if not leaves:
        return tree
    results = exchange.run(store, leaves, values)
    return structure.unflatten([_like(value, result) for value, result in zip(values, results, strict=True)])


def broadcast(tree: Any, *, store: KVStore, prefix: str = "start.") -> Any:
    """Give worker 0's tree of arrays to all workers, such as the parameters with which they begin.

    All workers call it with trees of the same structure, outside of ``jax.jit``. The servers keep a copy.

    Args:
        tree, store: as in `pushpull`.
        prefix: the beginning of each key.

    Returns:
        The same structure, with the arrays of worker 0, as in `pushpull`.

    Raises:
        NotAllowed: a leaf is no array, or a part of it is in another process; or this is inside ``jax.jit``.
        ShapeMismatch, DtypeMismatch: worker 0 has another leaf; its key is in the error.
        NodeLost: worker 0 is gone.
    """
    leaves, values, structure = TreeExchange(prefix, "sum").describe(tree)
    _check_concrete(values, "broadcast")
    if not leaves:
        return tree
    hosts = [np.asarray(value) for value in values]
    outs = [np.empty(leaf.shape, host.dtype) for leaf, host in zip(leaves, hosts, strict=True)]
    store.broadcast([leaf.key for leaf in leaves], hosts, out=outs)
    return structure.unflatten([_like(value, out) for value, out in zip(values, outs, strict=True)])


def _check_concrete(values: Sequence[Any], call: str) -> None:
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise NotAllowed(f"kvd.jax.{call} is called inside jax.jit or jax.grad: use kvd.jax.mean_over_workers there")


def _leaf(key: str, value: Any) -> Leaf:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        text = f"the leaf {key!r} is a {type(value).__name__}, not an array: wrap it in jax.numpy.asarray"
        raise NotAllowed(text, key=key)
    if isinstance(value, jax.Array) and not (isinstance(value, jax.core.Tracer) or value.is_fully_addressable):
        raise NotAllowed(
            f"a part of the leaf {key!r} is in another process: exchange arrays that lie on devices of this process",
            key=key,
        )
    try:
        return Leaf(key, tuple(value.shape), dtype_name(value.dtype))
    except DtypeMismatch as error:
        error.name_key(key)
        raise


def _like(value: Any, result: np.ndarray[Any, Any]) -> Any:
    return jax.device_put(result, value.sharding) if isinstance(value, jax.Array) else result
