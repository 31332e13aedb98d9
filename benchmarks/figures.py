"""Summaries of many rows: one figure per start of a system, then the minimum, median and maximum of these.

Figures of one start hang together (where its processes run, how its memory lies) and differ from those of the next by
up to twice; therefore a start counts once, however many repetitions and ranks it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import Row

KVD = "kvd"
"""The names of our systems begin with this; the others are peers."""

EARLIER = "earlier"
"""The names of an earlier kvd's systems begin with this, and go on with the name of ours."""


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
        cpu_s_per_gb: processor seconds of workers and servers per gigabyte that left or reached a worker; the median of
            the starts. None where the system does not say.
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
    cpu_s_per_gb: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is kvd."""
        return self.system.startswith(KVD)

    @property
    def mb_s(self) -> float:
        """Megabytes that a worker pushes per second, by the mean time, because iterations may overlap."""
        return self.bytes / self.step_us.median


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our system against a peer: medians of the same work and run, ours divided by theirs."""

    mode: str
    name: str
    system: str
    peer: str
    p50: float
    p99: float
    step: float


def spread(figures: Iterable[float]) -> Spread:
    """The spread of at least one figure."""
    values = list(figures)
    return Spread(min(values), statistics.median(values), max(values))


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """A summary for each mode, work and system, in the order in which they first appear."""
    groups: dict[tuple[str, str, str], dict[int, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row.mode, row.name, row.system), {}).setdefault(row.round, []).append(row)
    return [_summary(key, starts) for key, starts in groups.items()]


def ratios(found: Iterable[Summary]) -> list[Ratio]:
    """Each of our systems against each peer, and against the same way to run an earlier kvd, by work and mode."""
    everything = list(found)
    ours = [summary for summary in everything if summary.is_ours]
    theirs = [summary for summary in everything if not summary.is_ours]
    return [_ratio(our, their) for our in ours for their in theirs if _are_comparable(our, their)]


def _are_comparable(our: Summary, their: Summary) -> bool:
    if (our.mode, our.name) != (their.mode, their.name):
        return False
    return not their.system.startswith(EARLIER) or their.system == f"{EARLIER} {our.system}"


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
        cpu_s_per_gb=_median_of_known(cpu_s_per_gb(rows) for rows in starts.values()),
    )


def cpu_s_per_gb(rows: Iterable[Row]) -> float | None:
    """Processor seconds of all workers and servers in one start, for each GB pushed and pulled in all repetitions."""
    same = list(rows)
    own = [row.cpu_s for row in same if row.cpu_s is not None]
    servers = [row.servers_cpu_s for row in same if row.servers_cpu_s is not None]
    if len(own) < len(same) or len(servers) < len({row.repetition for row in same}):
        return None  # a sum with a process missing would look better than it is
    return (sum(own) + sum(servers)) / (sum(2 * row.bytes * row.iterations for row in same) / 1e9)


def _median_of_known(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def peaks(roles: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], int]:
    """For each (system, mode, role) the largest memory of one such process in any start, in bytes."""
    found: dict[tuple[str, str, str], int] = {}
    for process in roles:
        nbytes = process.get("peak_bytes")
        if isinstance(nbytes, int):
            key = (str(process["system"]), str(process["mode"]), str(process["role"]))
            found[key] = max(nbytes, found.get(key, 0))
    return found


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
