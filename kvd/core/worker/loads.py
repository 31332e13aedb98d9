"""What a call in the lane moves: the values of items, or those of a list of keys that calls repeat."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

from kvd.core.machine import Copy, Scatter, Span
from kvd.core.requests import Item, Listed, Transfer, Versions
from kvd.core.worker.keys import KeyTable, WorkerKey, windows_at_rest
from kvd.core.worker.list_moves import ListMove, ListMoves
from kvd.core.worker.message_plans import MessagePlan, MessagePlans
from kvd.core.worker.pulled_versions import note_versions
from kvd.core.worker.push_window import PushWindow, count_rounds
from kvd.protocol.specs import KeySpec

_spec = attrgetter("spec")


class Load(Protocol):
    """The keys are at rest, and nothing else moves them before the call has ended or was given up."""

    @property
    def keys(self) -> tuple[WorkerKey, ...]: ...

    @property
    def names(self) -> frozenset[str]:
        """Those of the keys."""

    @property
    def plans(self) -> list[MessagePlan]: ...

    @property
    def clock(self) -> int:
        """That of each key, when the call began."""

    def specs(self) -> list[KeySpec]:
        """Those of the keys."""

    def payload_of(self, plan: MessagePlan) -> tuple[Span, ...]:
        """What a message of this plan brings."""

    def take(self, plan: MessagePlan, payload: Any, versions: Sequence[int]) -> Copy | Scatter:
        """The values of a message have come: notes their versions. Returns what puts them where they belong."""

    def pushed(self) -> None:
        """A push of each key was made, and is settled."""

    def result(self) -> list[Versions | None]:
        """The versions of the values that have come, one per key."""


class ItemLoad:
    """The items of a call."""

    __slots__ = ("_items", "_versions", "_whole", "_windows", "clock", "keys", "names", "plans")

    def __init__(
        self,
        keys: tuple[WorkerKey, ...],
        windows: Sequence[PushWindow],
        plans: list[MessagePlan],
        items: Sequence[Item],
        whole: Any = None,
    ) -> None:
        self.keys = keys
        self.names = frozenset([item.key for item in items])
        self.plans = plans
        self._items = items
        self._whole = whole
        self._windows = windows
        self._versions: list[Versions | None] = [None] * len(items)
        self.clock = windows[0].clock

    def specs(self) -> list[KeySpec]:
        return [key.spec for key in self.keys if key.spec is not None]

    def payload_of(self, plan: MessagePlan) -> tuple[Span, ...]:
        return plan.payload_of(self._items, self._whole)

    def take(self, plan: MessagePlan, payload: Any, versions: Sequence[int]) -> Copy:
        note_versions(self._versions, plan, versions)
        items = self._items
        return Copy(payload, tuple([items[item].target for item in plan.items]), plan.rows)

    def pushed(self) -> None:
        count_rounds(self._windows)

    def result(self) -> list[Versions | None]:
        return self._versions


class ListLoad:
    """A call on a list."""

    __slots__ = ("_listed", "_move", "_versions", "clock", "keys", "names", "plans")

    def __init__(self, move: ListMove, listed: Listed) -> None:
        self.keys = move.group.keys
        self.names = move.names
        self.plans = move.plans
        self.clock = move.group.clock
        self._move = move
        self._listed = listed
        self._versions: list[tuple[MessagePlan, Sequence[int]]] = []

    def specs(self) -> list[KeySpec]:
        return [key.spec for key in self.keys if key.spec is not None]

    def payload_of(self, plan: MessagePlan) -> tuple[Span, ...]:
        whole, sources = self._move.wholes.get(plan), self._listed.sources
        if whole is None or sources is None:
            return plan.payload_of(self._listed.items())
        return (Span(whole.gathered(sources), 0, plan.nbytes),)

    def take(self, plan: MessagePlan, payload: Any, versions: Sequence[int]) -> Copy | Scatter:
        self._versions.append((plan, versions))
        whole, targets = self._move.wholes.get(plan), self._listed.targets
        if whole is None or targets is None:
            items = self._listed.items()
            return Copy(payload, tuple([items[item].target for item in plan.items]), plan.rows)
        return whole.scatter(payload, targets)

    def pushed(self) -> None:
        self._move.group.clock += 1

    def result(self) -> list[Versions | None]:
        found: list[Versions | None] = [None] * len(self._move.group.keys)
        if not self._versions:
            return found
        _, first = self._versions[0]
        if len(first) == 1 and all(versions == first for _, versions in self._versions):  # as it is in sync mode
            return [Versions(first[0], first[0])] * len(found)
        for plan, versions in self._versions:
            note_versions(found, plan, versions)
        return found


class Loads:
    """Finds what a call would move."""

    def __init__(self, keys: KeyTable, plans: MessagePlans) -> None:
        self._keys = keys
        self._plans = plans
        self._lists = ListMoves(keys, plans)

    def of_list(self, listed: Listed) -> Load | None:
        """What a call on a list moves, none of whose keys is in flight, if they are at rest under one clock and have
        plans."""
        move = self._lists.of(listed.keys)
        return None if move is None else ListLoad(move, listed)

    def of_slice(self, item: Item) -> tuple[WorkerKey, MessagePlan] | None:
        """The key of the item, and the plan of the message in which its one slice travels, if the key is at rest."""
        key = self._keys.by_name.get(item.key)
        plans = self._plans.known_of((key,))
        if key is None or plans is None or len(plans) != 1 or len(plans[0].slice_ids) != 1:
            return None
        return (key, plans[0]) if windows_at_rest((key,), (item.spec,)) is not None else None

    def of(self, transfer: Transfer) -> Load | None:
        """The same of a call with items."""
        known, items = self._keys.by_name, transfer.items
        keys: Any = tuple([known.get(item.key) for item in items])  # those that are at rest are known
        plans = self._plans.known_of(keys)
        windows = windows_at_rest(keys, map(_spec, items)) if plans else None
        return None if not plans or windows is None else ItemLoad(keys, windows, plans, items, transfer.whole)
