"""What many rows come down to: one figure per start of a system, and of these the minimum, median and maximum.

Figures of one start hang together (where its processes run, how its memory lies) and differ from those of the next by
up to twice; therefore a start counts once, however many repetitions and ranks it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.rows import Row

KVD = "kvd"
"""Every system of ours has a name that begins so; the others are peers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The smallest, middle and largest of some figures."""

    minimum: float
    median: float
    maximum: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One work in one mode on one system, over all rounds.

    Attributes:
        p50_us: of the median time of an iteration.
        p99_us: of the 99th percentile.
        step_us: of the mean time.
    """

    mode: str
    name: str
    system: str
    keys: int
    bytes: int
    rounds: int
    p50_us: Spread
    p99_us: Spread
    step_us: Spread

    @property
    def mb_s(self) -> float:
        """Megabytes that a worker pushes per second; the mean time counts, as iterations may overlap."""
        return self.bytes / self.step_us.median


@dataclass(frozen=True, slots=True)
class Ratio:
    """A system of ours against a peer: medians of the same work and run, ours divided by theirs."""

    mode: str
    name: str
    system: str
    peer: str
    p50: float
    p99: float
    step: float


def spread(figures: Iterable[float]) -> Spread:
    """Of at least one figure."""
    values = list(figures)
    return Spread(min(values), statistics.median(values), max(values))


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """A summary for each mode, work and system, in the order in which they first appear."""
    groups: dict[tuple[str, str, str], dict[int, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row.mode, row.name, row.system), {}).setdefault(row.round, []).append(row)
    return [_summary(key, starts) for key, starts in groups.items()]


def ratios(found: Iterable[Summary]) -> list[Ratio]:
    """Every system of ours against every peer that did the same work in the same mode."""
    everything = list(found)
    ours = [summary for summary in everything if summary.system.startswith(KVD)]
    theirs = [summary for summary in everything if not summary.system.startswith(KVD)]
    return [_ratio(our, their) for our in ours for their in theirs if (our.mode, our.name) == (their.mode, their.name)]


def _summary(key: tuple[str, str, str], starts: dict[int, list[Row]]) -> Summary:
    mode, name, system = key
    first = next(iter(starts.values()))[0]

    def over_starts(figure: Callable[[Row], float]) -> Spread:
        return spread(statistics.median(figure(row) for row in rows) for rows in starts.values())

    return Summary(
        mode=mode,
        name=name,
        system=system,
        keys=first.keys,
        bytes=first.bytes,
        rounds=len(starts),
        p50_us=over_starts(lambda row: row.p50_us),
        p99_us=over_starts(lambda row: row.p99_us),
        step_us=over_starts(lambda row: row.step_us),
    )


def _ratio(our: Summary, their: Summary) -> Ratio:
    return Ratio(
        mode=our.mode,
        name=our.name,
        system=our.system,
        peer=their.system,
        p50=our.p50_us.median / their.p50_us.median,
        p99=our.p99_us.median / their.p99_us.median,
        step=our.step_us.median / their.step_us.median,
    )
