"""Verdicts that are kept: what an admission (`kvd.core.server.admission`) finds out that holds for the next push too.

A worker pushes the same slices round after round. Who the sender is, that it takes part and that the key may be pushed
stays the same until the regime changes: with each message that may change any of it, such as a view, an optimizer or a
deletion. Pushes and pulls change none of it, nor does a heartbeat's answer.

A verdict is kept with its group, so it ends with it: when the group is fused with others, parted or deleted.
"""

from __future__ import annotations

from collections.abc import Collection

from kvd.core.machine import Peer
from kvd.core.server.batches import BatchTable
from kvd.core.server.groups import FusedGroup, Verdict
from kvd.core.server.keys import KeyTable

MAX_VERDICTS = 1 << 12  # on pushes to one group; one more, and all are dropped


class Regime:
    """Counter of the changes that an admission may depend on: of views, optimizers, keys and workers.

    Attributes:
        number: of the changes so far.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def change(self) -> None:
        """Let no verdict count that was kept before."""
        self.number += 1


class Verdicts:
    """Admissions of contributions in synchronous mode that hold for the next push too, by group and sender.

    The clock, the size and the request number of each push are checked all the same.

    Args:
        leaving: the partitions that are handed over: their pushes are for another server.
    """

    def __init__(self, regime: Regime, table: KeyTable, batches: BatchTable, leaving: Collection[int]) -> None:
        self._regime = regime
        self._table = table
        self._batches = batches
        self._leaving = leaving

    def find(
        self, peer: Peer, sender: int, batch: int, group: FusedGroup | None = None
    ) -> tuple[FusedGroup, Verdict] | None:
        """Return a group and the verdict on contributions of the sender to it over this connection, if one holds.

        Args:
            batch: number of the sender's batch, if its slices are one group.
            group: the group, if no batch names it.
        """
        if group is None:
            declared = self._batches.of.get(sender)
            known = None if declared is None else declared.get(batch)
            if known is None or known.group is None:
                return None
            group = self._table.groups.get(known.group)
            if group is None:
                return None
        verdict = group.verdicts.get(sender)
        if (
            verdict is None
            or verdict.regime != self._regime.number
            or verdict.peer != peer
            or verdict.generation != group.generation
            or (self._leaving and group.partition in self._leaving)
        ):
            return None
        return group, verdict

    def keep(self, group: FusedGroup, sender: int, peer: Peer, rank: int) -> None:
        """Keep the admission of a contribution to the group."""
        if len(group.verdicts) >= MAX_VERDICTS:
            group.verdicts.clear()
        group.verdicts[sender] = Verdict(self._regime.number, group.generation, peer, rank)
