"""What the lane has to know of a list of keys that calls repeat. It is found out once, and holds for call after call.

The keys of a list are a group (`kvd.core.worker.keys.KeyGroup`), which parts as soon as one of them moves alone. Small
values that lie whole in a message are gathered and scattered by the shell, all in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvd.core.machine import Gathered, Scatter
from kvd.core.requests import ListedKeys
from kvd.core.worker.keys import KeyGroup, KeyTable, WorkerKey, windows_at_rest
from kvd.core.worker.message_plans import MessagePlan, MessagePlans
from kvd.protocol.specs import padded

MAX_LISTS = 64  # one more, and all are forgotten
SMALL_VALUE_BYTES = 16 << 10  # on average: larger values are copied one by one, which saves a copy of them all


class Whole:
    """A message that brings small values of a list, each of them whole.

    Attributes:
        nbytes: of each value.
        gaps: what lies between them, see `Gathered`.
    """

    __slots__ = ("_pick", "gaps", "nbytes")

    def __init__(self, plan: MessagePlan) -> None:
        self._pick: Callable[[Sequence[Any]], Any] = itemgetter(*plan.items)
        if len(plan.items) == 1:
            self._pick = itemgetter(slice(plan.items[0], plan.items[0] + 1))
        self.nbytes = [nbytes for _, nbytes in plan.ranges]
        gaps = [bytes(padded(nbytes) - nbytes) for nbytes in self.nbytes]
        gaps[-1] = b""
        self.gaps = gaps if any(gaps) else None

    def gathered(self, sources: Sequence[Any]) -> Gathered:
        return Gathered(self._pick(sources), self.gaps)

    def scatter(self, payload: Any, targets: Sequence[Any]) -> Scatter:
        return Scatter(payload, self._pick(targets), self.nbytes, self.gaps)


@dataclass(slots=True, eq=False)
class ListMove:
    """A list whose keys move together.

    Attributes:
        names: those of the keys.
        changes: `MessagePlans.changes` when the plans were taken.
        wholes: one for each of the plans that has one.
    """

    group: KeyGroup
    names: frozenset[str]
    plans: list[MessagePlan]
    changes: int
    wholes: dict[MessagePlan, Whole]


class ListMoves:
    """The lists that calls of the lane repeat."""

    def __init__(self, keys: KeyTable, plans: MessagePlans) -> None:
        self._keys = keys
        self._plans = plans
        self._moves: dict[ListedKeys, ListMove] = {}

    def of(self, listed: ListedKeys) -> ListMove | None:
        """What there is to know, if all keys are at rest under one clock, fit the specs of the list, and have plans.

        Call it while none of them is in flight in the lane.
        """
        move = self._moves.get(listed)
        if move is not None and not move.group.is_parted and move.changes == self._plans.changes:
            return move
        return self._find_out(listed)

    def _find_out(self, listed: ListedKeys) -> ListMove | None:
        known = self._keys.by_name
        keys = tuple([known.get(name) for name in listed.names])
        plans = self._plans.known_of(keys)
        if not plans or windows_at_rest(keys, listed.specs) is None:
            return None
        if len(self._moves) >= MAX_LISTS:
            self._moves.clear()
        group = KeyGroup(tuple([key for key in keys if key is not None]))
        wholes = {plan: Whole(plan) for plan in plans if _is_whole(plan, group.keys)}
        move = self._moves[listed] = ListMove(group, frozenset(listed.names), plans, self._plans.changes, wholes)
        return move


def _is_whole(plan: MessagePlan, keys: Sequence[WorkerKey]) -> bool:
    """Whether the message brings whole values, which are small."""
    if plan.nbytes > SMALL_VALUE_BYTES * len(plan.items):
        return False
    return all(len(keys[item].partitions) == 1 for item in plan.items)
