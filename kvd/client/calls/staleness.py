"""How stale the pushes of each worker were, put together from what the servers say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Staleness(NamedTuple):
    """How stale the pushes of one worker were in `dist_async`: how many updates a slice got, whoever made them, between
    the version that the worker pulled last and its push.

    Attributes:
        pushes: how many were measured, each slice by itself. A push before the first pull has no staleness.
        mean: of them.
        max: the largest.
        histogram: how many had a staleness of ``"0"``, ``"1"``, ``"2-3"``, ``"4-7"`` … ``"16384+"``; without those
            that none had.
    """

    pushes: int
    mean: float
    max: int
    histogram: Mapping[str, int]


def put_together(reports: Iterable[Mapping[str, Any]]) -> dict[str, Staleness]:
    """The figures of each worker, such as ``"worker 0"``, from the status of the servers."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for report in reports:
        for worker, seen in report.get("staleness", {}).items():
            parts.setdefault(worker, []).append(seen)
    found = {}
    for worker in sorted(parts, key=lambda name: (len(name), name)):
        pushes = sum(part["pushes"] for part in parts[worker])
        mean = sum(part["mean"] * part["pushes"] for part in parts[worker]) / pushes
        histogram = Counter[str]()
        for part in parts[worker]:
            histogram.update(part["histogram"])
        ordered = {label: histogram[label] for label in sorted(histogram, key=_low)}
        found[worker] = Staleness(pushes, mean, max(part["max"] for part in parts[worker]), ordered)
    return found


def _low(label: str) -> int:
    return int(label.rstrip("+").partition("-")[0])
