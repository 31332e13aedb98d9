"""Whether this server can use an optimizer for the keys that it has."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.refusals import refusal_of
from kvd.core.server.keys import KeyTable
from kvd.core.server.optimizer_fit import check_fit
from kvd.errors import KvdError
from kvd.optimizer import Optimizer, from_wire
from kvd.protocol.messages import Done, Refused, SetOptimizer


class UsableOptimizers:
    """`check_memory` raises NotAllowed if there is none for what an optimizer makes the server keep."""

    def __init__(self, table: KeyTable, check_memory: Callable[[Optimizer | None], None]) -> None:
        self._table = table
        self._check_memory = check_memory

    def of(self, message: SetOptimizer) -> Optimizer | None:
        """The optimizer that a worker sets.

        Raises:
            ProtocolError: it is not known here.
            NotAllowed: it cannot update the keys that are here, or there is no memory for it.
        """
        optimizer = None if message.optimizer is None else from_wire(message.optimizer)
        self._check_memory(optimizer)
        check_fit(optimizer, ((slice_.key, slice_.spec) for slice_ in self._table.slices.values()))
        return optimizer

    def answer(self, message: SetOptimizer) -> Done | Refused:
        """What a worker is told that only asks."""
        try:
            self.of(message)
        except KvdError as error:
            return refusal_of(message.request, error)
        return Done(message.request)
