"""Report of `kvd bench`: tables of medians and counts, and points of the chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from kvd_cli.bench_plot import is_plotted
from kvd_cli.bench_work import Row

HEADINGS: Final = ("work", "keys", "bytes", "p50 µs", "p99 µs", "steps/s", "MB/s")

COUNT_HEADINGS: Final = ("work", "of a step", "CPU µs", "context switches", "system calls", "functions")


def table_lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Return a line for each work with medians over ranks and repetitions."""
    return [_line(name, same) for name, same in _by_name(rows).items()]


def curve(rows: Iterable[Row]) -> list[tuple[int, float]]:
    """Return bytes and MB/s of each work that is a point of the chart."""
    return [(same[0]["bytes"], _mb_s(same)) for name, same in _by_name(rows).items() if is_plotted(name)]


def _by_name(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    return by_name


def _steps_per_s(rows: Sequence[Row]) -> float:
    return float(statistics.median(row["iterations"] / row["seconds"] for row in rows))


def _mb_s(rows: Sequence[Row]) -> float:
    """Return the throughput of one worker in one direction."""
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


def count_lines(rows: Sequence[Row], counts: Iterable[Row]) -> list[tuple[str, ...]]:
    """Return two lines for each work: counts of a step for a worker (mean), and for all servers together."""
    timed = _by_name(rows)
    return [
        (
            name,
            "a worker" if process == "worker" else "all servers",
            _number([_cpu_us(timed[name], "cpu_s" if process == "worker" else "servers_cpu_s")]),
            *(_number([row[kind] for row in same if row["process"] == process]) for kind in _KINDS),
        )
        for name, same in _by_name(counts).items()
        for process in ("worker", "servers")
        if any(row["process"] == process for row in same)
    ]


def count_notes(counts: Iterable[Row]) -> list[str]:
    """Return the reasons for missing numbers, each once."""
    return list(dict.fromkeys(row["note"] for row in counts if row["note"]))


_KINDS: Final = ("switches", "system_calls", "functions")


def _cpu_us(rows: Sequence[Row], field: str) -> float | None:
    known = [row for row in rows if field in row]
    return 1e6 * sum(row[field] for row in known) / sum(row["iterations"] for row in known) if known else None


def _number(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = statistics.mean(known)
    return f"{mean:.1f}" if mean < 100 else f"{mean:.0f}"
