"""Calls on several keys, told as calls on a list, as the client tells them to the machine of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvd.core.requests import Item, ListedKeys, ListTransfer, Request, Transfer
from kvd.protocol.specs import KeySpec


class ListedItems:
    """A `Listed` that has items from the beginning."""

    def __init__(self, keys: ListedKeys, items: tuple[Item, ...], *, push: bool, pull: bool) -> None:
        self.keys = keys
        self.sources: Sequence[Any] | None = [item.source for item in items] if push else None
        self.targets: Sequence[Any] | None = [item.target for item in items] if pull else None
        self._items = items

    def items(self) -> tuple[Item, ...]:
        return self._items


class Lists:
    """The lists that the program of one process has named."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, KeySpec], ...], ListedKeys] = {}

    def told(self, request: Request) -> Request:
        """The same request; a transfer of whole values of several keys is told as one on a list."""
        if not isinstance(request, Transfer) or not _is_on_a_list(request):
            return request
        named = tuple([(item.key, item.spec) for item in request.items if item.spec is not None])
        keys = self._known.get(named)
        if keys is None:
            keys = self._known[named] = ListedKeys([name for name, _ in named], [spec for _, spec in named])
        listed = ListedItems(keys, request.items, push=request.push, pull=request.pull)
        return ListTransfer(listed, replace(request, items=()))


def _is_on_a_list(transfer: Transfer) -> bool:
    items = transfer.items
    return (
        len(items) > 1
        and len({item.key for item in items}) == len(items)
        and not (transfer.cast or transfer.some_encoded or transfer.some_rows)
        and all(item.spec is not None and item.spec.table is None for item in items)
        and (not transfer.push or all(item.source is not None for item in items))
        and (not transfer.pull or all(item.target is not None for item in items))
    )
