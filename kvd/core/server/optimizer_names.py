"""Optimizers as other servers name them: the same form on the wire is one object here, with what is prepared for it."""

from __future__ import annotations

from collections import OrderedDict

from kvd.errors import KvdError
from kvd.optimizer import Optimizer, from_wire

MOST_KEPT = 256


class OptimizerNames:
    """The optimizers that were named lately."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Optimizer] = OrderedDict()

    def find(self, wire: object) -> Optimizer | KvdError | None:
        """The optimizer, or why there is none of this form; None for None."""
        if wire is None:
            return None
        name = repr(wire)
        known = self._found.get(name)
        if known is None:
            try:
                known = self._found[name] = from_wire(wire)
            except KvdError as error:
                return error
            if len(self._found) > MOST_KEPT:
                self._found.popitem(last=False)
        return known
