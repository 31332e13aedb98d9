"""Which versions a call has pulled."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.core.requests import Versions
from kvd.core.worker.message_plans import MessagePlan


def versions_of(taken: Sequence[tuple[MessagePlan, Sequence[int]]], count: int) -> list[Versions | None]:
    """The oldest and the newest version of each of `count` items; None for those that were not pulled.

    Args:
        taken: the messages that have come, each with the version of all its slices, or one per slice.
    """
    found: list[Versions | None] = [None] * count
    if not taken:
        return found
    first = taken[0][1]
    if len(first) == 1 and all(versions == first for _, versions in taken):  # as it is in sync mode
        only = Versions(first[0], first[0])
        for plan, _ in taken:
            if plan.is_all:
                return [only] * count
            for item in plan.items:
                found[item] = only
        return found
    for plan, versions in taken:
        shared = [versions[0]] * len(plan.items) if len(versions) == 1 else versions
        for item, version in zip(plan.items, shared, strict=True):
            oldest, newest = found[item] or (version, version)
            found[item] = Versions(min(oldest, version), max(newest, version))
    return found
