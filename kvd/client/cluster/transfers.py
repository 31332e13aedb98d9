"""The Transfer requests that several calls make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvd.client.calls.keys import KeyList
from kvd.client.calls.values import Source, Target, pulled_values
from kvd.core.requests import Item, TakenForm, Transfer
from kvd.protocol.messages import ABSENT, ASSIGN


def pull_into(
    names: Sequence[str], targets: Sequence[Target], priority: int, takes: TakenForm | None = None
) -> Transfer:
    """Pulls the values into the targets; `takes`: the form in which they may come."""
    items = tuple(Item(name, target.spec, None, target.data) for name, target in zip(names, targets, strict=True))
    return Transfer(items, push=False, pull=True, priority=priority, takes=takes)


def assignment(
    names: Sequence[str], sources: Sequence[Source], targets: Sequence[Target] | None, priority: int, place: int
) -> Transfer:
    """Replaces the values by these; pulls the result into the targets, if there are any."""
    places = [None] * len(names) if targets is None else [target.data for target in targets]
    items = tuple(
        Item(name, spec, data, place) for name, (data, spec), place in zip(names, sources, places, strict=True)
    )
    return Transfer(items, push=True, pull=targets is not None, priority=priority, how=ASSIGN, place=place)


def absence(names: Sequence[str], targets: Sequence[Target] | None, priority: int, place: int) -> Transfer:
    """Takes part in the round without a value; pulls the result into the targets, if there are any."""
    if targets is None:
        items = tuple(Item(name, None) for name in names)
    else:
        items = tuple(Item(name, target.spec, None, target.data) for name, target in zip(names, targets, strict=True))
    return Transfer(items, push=True, pull=targets is not None, priority=priority, how=ABSENT, place=place)


def pulled(keys: KeyList, targets: Sequence[Target], out: Any) -> Callable[[Any], Any]:
    """Makes the result of a call of its targets, when the bytes have arrived: the caller's arrays."""
    return lambda _: pulled_values(keys, targets, out)


def nothing(_: Any) -> None:
    """Makes the result of a call that has none."""
