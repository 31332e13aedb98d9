"""How stale pushes are in asynchronous training: how many updates a slice has had since its worker pulled it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core.membership import name_of
from kvd.core.server.groups import FusedGroup
from kvd.core.server.rounds import Record
from kvd.protocol.messages import ADD

LAST_BUCKET = 15  # for 2¹⁴ and more


@dataclass(slots=True)
class _Seen:
    """The pushes of one rank: how many counted, and of those whose staleness is known the number, the sum, the largest
    and a histogram."""

    counted: int = 0
    pushes: int = 0
    total: int = 0
    most: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (LAST_BUCKET + 1))


class SeenStaleness:
    """Counts, for each rank, the slices that it pushed to: one push of a thousand slices counts a thousand times.

    The staleness of a push is the number of updates that the slice got, whoever made them, between the version that its
    worker was sent last and the push. A push by a worker that has not pulled the slice has none, and is not counted;
    nor is one after a failover until the worker pulls again, as the new leader does not know what the worker has.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, _Seen] = {}

    def committed(self, group: FusedGroup, record: Record) -> None:
        """A push has become a version of the group."""
        for given in record.contributions:
            seen = self._by_rank.get(given.rank)
            if seen is None:
                seen = self._by_rank[given.rank] = _Seen()
            seen.counted += 1
            pulled = group.log.progress_of(given.rank).pulled
            if pulled < 0 or given.how != ADD:
                continue
            missed, slices = record.number - 1 - pulled, len(group.slices)
            seen.pushes += slices
            seen.total += missed * slices
            seen.most = max(seen.most, missed)
            seen.buckets[min(missed.bit_length(), LAST_BUCKET)] += slices

    def pushes_of(self, rank: int) -> int:
        """How many pushes of the rank have counted, those to several slices once for each group."""
        seen = self._by_rank.get(rank)
        return 0 if seen is None else seen.counted

    def explain(self) -> dict[str, object]:
        """By the name of the worker: how many pushes were counted, their mean and largest staleness, and how many had
        a staleness of 0, 1, 2–3, 4–7 and so on."""
        return {
            name_of("worker", rank): {
                "pushes": seen.pushes,
                "mean": seen.total / seen.pushes,
                "max": seen.most,
                "histogram": {_label(bucket): count for bucket, count in enumerate(seen.buckets) if count},
            }
            for rank, seen in sorted(self._by_rank.items())
            if seen.pushes
        }


def _label(bucket: int) -> str:
    low, high = (1 << bucket) >> 1, (1 << bucket) - 1
    if bucket == LAST_BUCKET:
        return f"{low}+"
    return str(low) if low >= high else f"{low}-{high}"
