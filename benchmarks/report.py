"""The tables for people: drawn on a terminal, aligned plain text where the output is piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Ratio, Summary

HEADINGS = ("work", "mode", "system", "min", "median", "max", "p99", "MB/s", "kvd ÷ it", "p99 ÷ it")
EXPLANATION = "Times of one iteration: of each start its median; then the minimum, median and maximum of these."
LIMITS = {
    "copy_gb_s": "memory copy, one thread, GB/s read and written",
    "add_gb_s": "memory addition, one thread, GB/s read and written",
    "tcp_gb_s": "plain TCP socket on loopback, one way, GB/s",
    "round_trip_us": "bare socket round trip of 1 KiB, median µs",
}


def show(limits: dict[str, float], summaries: Sequence[Summary], ratios: Sequence[Ratio], console: Console) -> None:
    """Print the limits of the machine, then a line for each work, mode and system."""
    _print(console, ("limit of this machine", ""), [(LIMITS[name], f"{limits[name]:.3g}") for name in limits])
    _print(console, HEADINGS, lines(summaries, ratios))
    console.print(EXPLANATION, soft_wrap=True)


def lines(summaries: Sequence[Summary], ratios: Sequence[Ratio]) -> list[tuple[str, ...]]:
    """The cells of the comparison. A peer's line has kvd's ratio to it, of each transport of ours if there are more."""
    return [_line(summary, ratios) for summary in _by_work(summaries)]


def time_text(microseconds: float) -> str:
    """A time with three digits and a unit that suits it."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds)} µs"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _by_work(summaries: Sequence[Summary]) -> list[Summary]:
    """The lines of one work and mode together, whichever round first had them."""
    places: dict[tuple[str, str], int] = {}
    for summary in summaries:
        places.setdefault((summary.mode, summary.name), len(places))
    return sorted(summaries, key=lambda summary: places[summary.mode, summary.name])


def _line(summary: Summary, ratios: Sequence[Ratio]) -> tuple[str, ...]:
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
        _digits(summary.mb_s),
        _ratios_text([(ratio.system, ratio.p50) for ratio in about]),
        _ratios_text([(ratio.system, ratio.p99) for ratio in about]),
    )


def _ratios_text(found: Sequence[tuple[str, float]]) -> str:
    if len(found) == 1:
        return f"{found[0][1]:.2f}"
    return ", ".join(f"{system.split()[-1]} {value:.2f}" for system, value in found)


def _print(console: Console, headings: Sequence[str], cells: Iterable[Sequence[str]]) -> None:
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
