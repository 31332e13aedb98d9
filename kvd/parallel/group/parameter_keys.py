"""The parameters and states of a group as keys of a store."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvd.client.facades.blocking import KVStore
from kvd.errors import ConfigError, InputMismatch, KeyExists, MergeMismatch
from kvd.parallel.device import HostArray
from kvd.parallel.group.binding import Binding
from kvd.parallel.group.parameters import host_arrays, write_means
from kvd.tables.description import RowSparse

#: For each store that this process has trained with: key → the pipeline that has the bound arrays of the key. Two
#: pipelines with the same arrays would each write into what the other has sent.
_owners: weakref.WeakKeyDictionary[KVStore, weakref.WeakValueDictionary[str, object]] = weakref.WeakKeyDictionary()


class ParameterKeys:
    """Names the keys, makes them, and reads them.

    Attributes:
        params: parameter → key.
        states: state → key, ``aux:NAME``.

    Arguments:
        binding: whose parameters and states they are.
        names: parameter → key, of those whose key is not their name.

    Raises:
        InputMismatch: ``names`` has a name that is not a parameter.
        ConfigError: two parameters with one key.
    """

    def __init__(self, kv: KVStore, binding: Binding, names: Mapping[str, str | int]) -> None:
        params = binding.description.params
        unknown = [name for name in names if name not in params]
        if unknown:
            raise InputMismatch(f"names has {', '.join(unknown)}, not a parameter of the model", setting="names")
        self.params: dict[str, str | int] = {name: names.get(name, name) for name in params}
        if len(set(map(str, self.params.values()))) < len(self.params):
            raise ConfigError("two parameters have one key", setting="names")
        self.states = {name: f"aux:{name}" for name in binding.description.aux}
        self._tables = set(binding.description.row_sparse)
        self._kv = kv
        self._keys: dict[str, str | int] = {**self.params, **self.states}

    def init(self, binding: Binding, *, averaged: bool) -> None:
        """Make every key with rank 0's value, the mean over its devices. A key that is live keeps its value. Those of
        row-sparse parameters are tables.

        Args:
            averaged: gradients must be averaged over the workers, so a cluster that sums makes the keys of parameters
                with a merge of their own. Otherwise a key that is live keeps its merge, too.

        Raises:
            MergeMismatch: a live key has another merge, and its gradients must be averaged.
        """
        averaged = averaged and self._kv.num_servers > 0  # without a cluster there is nothing to average
        own_merge = "mean" if averaged and self._kv.merge == "sum" else None
        values: dict[str, Any] = {**host_arrays(binding, list(self._keys))}
        if self._kv.rank == 0:  # the others' are not read
            write_means(binding, values)
        for name in self._tables:
            value = values[name]
            given = value if self._kv.rank == 0 else None
            values[name] = RowSparse(shape=value.shape, dtype=value.dtype, values=given)
        errors: list[BaseException | None] = []
        handles = []
        for name, value in values.items():
            try:
                merge = own_merge if name in self.params else None
                handles.append(self._kv.init_async(self._keys[name], value, merge=merge))
            except KeyExists as error:  # a store in this process answers at once
                errors.append(error)
        errors += [handle.exception() for handle in handles]
        for failure in errors:
            if isinstance(failure, MergeMismatch):
                if averaged:
                    raise _merge_error(failure.key, own_merge or self._kv.merge) from failure
            elif failure is not None and not isinstance(failure, KeyExists):
                raise failure

    def pull(self, values: Mapping[str, HostArray]) -> None:
        """Fill these arrays, by parameter or state, with the values that the store has now."""
        handles = [self._kv.pull_async(self._keys[name], out=value) for name, value in values.items()]
        for handle in handles:
            handle.wait()

    def broadcast_states(self, values: Mapping[str, HostArray]) -> None:
        """Fill these arrays, by state, with those of rank 0."""
        self._kv.broadcast([self.states[name] for name in values], list(values.values()))

    def clocks(self, names: Sequence[str]) -> list[int]:
        """How many steps of this worker the store has counted for each of these parameters."""
        return [self._kv.clock(self.params[name]) for name in names]

    # ── the store's own arrays ──

    def was_used_here(self) -> bool:
        """Whether a pipeline of this process has trained with the store: then its counted steps are our own work."""
        return self._kv in _owners

    def bind(self, names: Sequence[str]) -> dict[str, tuple[HostArray, HostArray]]:
        """Name → the store's arrays for gradient and weight, of those parameters that no other pipeline owns."""
        owned: Collection[str] = _owners.get(self._kv, ())
        free = [name for name in names if str(self.params[name]) not in owned and name not in self._tables]
        gradients, weights = self._kv.bind([self.params[name] for name in free])
        return dict(zip(free, zip(gradients, weights, strict=True), strict=True))

    def claim(self, names: Sequence[str], owner: object) -> None:
        """From now on, and while it exists, ``owner`` alone writes into the store's arrays of these parameters."""
        owners = _owners.setdefault(self._kv, weakref.WeakValueDictionary())
        owners.update(dict.fromkeys([str(self.params[name]) for name in names], owner))


def _merge_error(key: str | int, merge: str) -> MergeMismatch:
    """The error of a live key that has another merge than a group with an optimizer needs."""
    text = f"key {key!r} exists with another merge than {merge!r}, which a group with an optimizer needs"
    remedy = f"make it with merge={merge!r}; or set the optimizer on the store, and bind the group without one"
    return MergeMismatch(f"{text}: {remedy}", key=key)
