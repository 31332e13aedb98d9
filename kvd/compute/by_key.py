"""Cache of optimizers with the multipliers of a key applied: an update looks one up for each key."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.optimizer import Optimizer

_MANY_OPTIMIZERS = 1024
_MANY_KEYS = 1 << 16


class _ByKey:
    """One optimizer as it is for each key; keys with the same factors share one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._keys: dict[str, Optimizer] = {}
        self._same: dict[Optimizer, Optimizer] = {}

    def find(self, key: str) -> Optimizer:
        found = self._keys.get(key)
        if found is None:
            if len(self._keys) >= _MANY_KEYS:
                self._keys.clear()
            own = self._optimizer.for_key(key)
            found = self._keys[key] = self._same.setdefault(own, own)
        return found


# By identity, since hashing an optimizer takes longer than it saves. An entry keeps its optimizer alive, so that no
# other object can have its id.
_known: dict[int, _ByKey] = {}


def optimizer_for(optimizer: Optimizer, key: str) -> Optimizer:
    """Return the optimizer with the learning rate and decay of a key: one object for equal factors."""
    if not optimizer.differs_by_key:
        return optimizer
    own = _known.get(id(optimizer))
    if own is None:
        if len(_known) >= _MANY_OPTIMIZERS:
            _known.clear()
        own = _known[id(optimizer)] = _ByKey(optimizer)
    return own.find(key)


def first_of_runs(optimizer: Optimizer | None, keys: Sequence[str]) -> tuple[int, ...]:
    """Divide adjacent slices of these keys into runs that are updated in one go. Return the first position of each.

    Returns:
        Positions in ascending order, the first of them 0; empty if all can be updated in one go.
    """
    if optimizer is None or not (optimizer.is_by_slice or optimizer.differs_by_key):
        return ()
    if optimizer.is_by_slice:
        return tuple(range(len(keys)))
    found = []
    before: Optimizer | None = None
    for position, key in enumerate(keys):
        own = optimizer_for(optimizer, key)
        if own is not before:
            found.append(position)
        before = own
    return tuple(found)
