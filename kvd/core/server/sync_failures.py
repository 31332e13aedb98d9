"""Servers that could not become a backup, or were none although the view said so: when it is tried again.

Each attempt sends a whole partition, so the pauses grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.machine import ServerPeer
from kvd.core.membership import name_of

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
FORGOTTEN_S = 600.0  # a failure that is so long ago does not count any more
MOST_KEPT = 1000


@dataclass(slots=True)
class _Failure:
    """The newest failure of a server with a partition.

    Attributes:
        in_a_row: how many there were, each soon after the one before.
    """

    rank: int
    why: str
    at: float
    in_a_row: int

    @property
    def again_at(self) -> float:
        doublings = min(self.in_a_row - 1, 30)
        return self.at + min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)


class SyncFailures:
    """The failures of one leader, by partition and server."""

    def __init__(self) -> None:
        self._failures: dict[tuple[int, ServerPeer], _Failure] = {}

    def add(self, partition: int, peer: ServerPeer, rank: int, why: str, now: float) -> float:
        """It has failed. Returns the seconds until it may be tried again."""
        before = self._failures.pop((partition, peer), None)
        in_a_row = 1 if before is None or now - before.at > FORGOTTEN_S else before.in_a_row + 1
        if len(self._failures) >= MOST_KEPT:
            del self._failures[next(iter(self._failures))]
        self._failures[partition, peer] = failure = _Failure(rank, why, now, in_a_row)
        return failure.again_at - now

    def again_at(self, partition: int, peer: ServerPeer) -> float:
        """When it may be tried (again)."""
        failure = self._failures.get((partition, peer))
        return 0.0 if failure is None else failure.again_at

    def describe(self, partition: int, peer: ServerPeer, now: float) -> dict[str, object]:
        """For `kvd status`: why this server is not the backup yet, and the seconds until it is tried again."""
        failure = self._failures[partition, peer]
        again_s = round(max(0.0, failure.again_at - now), 1)
        return {
            "partition": partition,
            "server": name_of("server", failure.rank),
            "why": failure.why,
            "again_s": again_s,
        }
