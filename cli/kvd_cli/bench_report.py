"""The results of `kvd bench`: medians as a table, and as points of the chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from kvd_cli.bench_plot import is_plotted
from kvd_cli.bench_work import Row

HEADINGS: Final = ("work", "keys", "bytes", "p50 µs", "p99 µs", "steps/s", "MB/s")


def table_lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """A line of text for each work: medians over ranks and repetitions."""
    return [_line(name, same) for name, same in _by_name(rows).items()]


def curve(rows: Iterable[Row]) -> list[tuple[int, float]]:
    """Bytes and MB/s of each work that is a point of the chart."""
    return [(same[0]["bytes"], _mb_s(same)) for name, same in _by_name(rows).items() if is_plotted(name)]


def _by_name(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    return by_name


def _steps_per_s(rows: Sequence[Row]) -> float:
    return float(statistics.median(row["iterations"] / row["seconds"] for row in rows))


def _mb_s(rows: Sequence[Row]) -> float:
    """Throughput of one worker in one direction."""
    nbytes: int = rows[0]["bytes"]
    return nbytes * _steps_per_s(rows) / 1e6


def _line(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    return (
        name,
        str(rows[0]["keys"]),
        str(rows[0]["bytes"]),
        f"{statistics.median(row['p50_us'] for row in rows):.0f}",
        f"{statistics.median(row['p99_us'] for row in rows):.0f}",
        f"{_steps_per_s(rows):.1f}",
        f"{_mb_s(rows):.1f}",
    )
