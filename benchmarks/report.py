"""Tables for people: drawn on a terminal, aligned plain text in a pipe."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Ratio, Summary

HEADINGS = (
    *("work", "mode", "system", "min", "median", "max", "p99", "MB/s"),
    *("CPU s/GB", "÷ limit", "kvd ÷ it", "p99 ÷ it"),
)
PEAK_HEADINGS = ("system", "mode", "process", "peak memory, MB")
EXPLANATION = (
    "Times of one iteration: of each start its median; then the minimum, median and maximum of these. "
    "CPU s/GB: of workers and servers, per GB pushed and pulled. "
    "÷ limit: the median by the time in which this machine's memory can move what a step must move (benchmarks.floor)."
)
LIMITS = {
    "copy_gb_s": "memory copy, one thread, GB/s read and written",
    "add_gb_s": "memory addition, one thread, GB/s read and written",
    "cores": "cores that can move bytes at once",
    "all_copy_gb_s": "memory copy, all these cores, GB/s read and written",
    "all_add_gb_s": "memory addition, all these cores, GB/s read and written",
    "tcp_gb_s": "plain TCP socket on loopback, one way, GB/s",
    "round_trip_us": "bare socket round trip of 1 KiB, median µs",
}


@dataclass(frozen=True, slots=True)
class Findings:
    """What a comparison found.

    Attributes:
        limits: of the machine.
        floors_us: the least time of a step of a work; only of works and modes that have such a limit.
        peaks: (system, mode, role) → peak memory in bytes.
        cores_gb_s: system → GB/s from core to core before and after its starts (`benchmarks.distance`).
    """

    limits: dict[str, float]
    summaries: Sequence[Summary]
    ratios: Sequence[Ratio]
    floors_us: Mapping[tuple[str, str], float]
    peaks: Mapping[tuple[str, str, str], int]
    cores_gb_s: Mapping[str, Sequence[float]]


def show(found: Findings, console: Console) -> None:
    """Print the limits of the machine, a line for each work, mode and system, and the memory of our processes."""
    known = [name for name in LIMITS if name in found.limits]
    print_table(console, ("limit of this machine", ""), [(LIMITS[name], f"{found.limits[name]:.3g}") for name in known])
    print_table(console, HEADINGS, lines(found.summaries, found.ratios, found.floors_us))
    console.print(EXPLANATION, soft_wrap=True)
    if found.cores_gb_s:
        console.print()
        print_spreads(console, "core to core, GB/s", found.cores_gb_s, 0)
    if found.peaks:
        console.print()
        print_table(console, PEAK_HEADINGS, [(*key, f"{nbytes / 1e6:.0f}") for key, nbytes in found.peaks.items()])


def lines(
    summaries: Sequence[Summary], ratios: Sequence[Ratio], floors_us: Mapping[tuple[str, str], float]
) -> list[tuple[str, ...]]:
    """The cells of the comparison. A peer's line has the ratio of kvd to it, one for each way to run kvd."""
    return [_line(summary, ratios, floors_us.get((summary.mode, summary.name))) for summary in _by_work(summaries)]


def time_text(microseconds: float) -> str:
    """A time with three digits and a unit that suits it."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{digits(microseconds / size)} {unit}"
    return f"{digits(microseconds)} µs"


def digits(value: float) -> str:
    """Three digits, or all digits of a larger whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _by_work(summaries: Sequence[Summary]) -> list[Summary]:
    """The lines grouped by work and mode, in whichever round they first appeared."""
    places: dict[tuple[str, str], int] = {}
    for summary in summaries:
        places.setdefault((summary.mode, summary.name), len(places))
    return sorted(summaries, key=lambda summary: places[summary.mode, summary.name])


def _line(summary: Summary, ratios: Sequence[Ratio], floor_us: float | None) -> tuple[str, ...]:
    about = [
        ratio
        for ratio in ratios
        if (ratio.mode, ratio.name, ratio.peer) == (summary.mode, summary.name, summary.system)
    ]
    return (
        summary.name,
        summary.mode,
        summary.system,
        time_text(summary.p50_us.minimum),
        time_text(summary.p50_us.median),
        time_text(summary.p50_us.maximum),
        time_text(summary.p99_us.median),
        digits(summary.mb_s),
        "" if summary.cpu_s_per_gb is None else f"{summary.cpu_s_per_gb:.3g}",
        "" if floor_us is None or not summary.is_ours else f"{summary.p50_us.median / floor_us:.2f}",
        _ratios_text([(ratio.system, ratio.p50) for ratio in about]),
        _ratios_text([(ratio.system, ratio.p99) for ratio in about]),
    )


def _ratios_text(found: Sequence[tuple[str, float]]) -> str:
    if len(found) == 1:
        return f"{found[0][1]:.2f}"
    return ", ".join(f"{system.split()[-1]} {value:.2f}" for system, value in found)


def print_table(console: Console, headings: Sequence[str], cells: Iterable[Sequence[str]]) -> None:
    """Print cells under headings, followed by an empty line in a pipe."""
    everything = list(cells)
    if not console.is_terminal:
        console.print(_plain([headings, *everything]), soft_wrap=True, highlight=False, markup=False)
        return
    table = Table(*headings)
    for row in everything:
        table.add_row(*row)
    console.print(table)


def _plain(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(texts) + "\n"


def print_spreads(console: Console, title: str, found: Mapping[str, Sequence[float]], digits: int) -> None:
    """Print the minimum, median and maximum of several measurements."""
    rows = [
        (name, str(len(values)), *[f"{it:.{digits}f}" for it in (min(values), statistics.median(values), max(values))])
        for name, values in found.items()
    ]
    print_table(console, (title, "times", "min", "median", "max"), rows)
