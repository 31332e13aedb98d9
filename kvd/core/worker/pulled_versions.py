"""Which versions a call has pulled."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.core.requests import Versions
from kvd.core.worker.message_plans import MessagePlan


def note_versions(seen: list[Versions | None], plan: MessagePlan, versions: Sequence[int]) -> None:
    """Notes those of one message: of each of its slices, or one for all of them.

    Args:
        seen: the oldest and the newest so far, one pair per item of the call.
    """
    if len(versions) == 1:
        version = versions[0]
        only = Versions(version, version)
        for item in plan.items:
            before = seen[item]
            if before is None:
                seen[item] = only
            elif before != only:
                seen[item] = Versions(min(before.oldest, version), max(before.newest, version))
        return
    for item, version in zip(plan.items, versions, strict=True):
        oldest, newest = seen[item] or (version, version)
        seen[item] = Versions(min(oldest, version), max(newest, version))
