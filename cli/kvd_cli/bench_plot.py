"""Curve of `kvd bench --plot`: megabytes per second by the size of a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvd_cli.bench_svg import Series, chart, decades, sizes
from kvd_cli.bench_work import VALUE_NBYTES, sizes_of

TITLE: Final = "Throughput by message size"
X_LABEL: Final = "size of the value that each worker pushes and gets back"
Y_LABEL: Final = "MB/s that one worker pushes"
SMALLEST_BYTES: Final = 4 << 10
LARGEST_BYTES: Final = 64 << 20


def is_plotted(work: str) -> bool:
    """Return whether a work is a point of the curve: one value from 4 KiB to 64 MiB."""
    sizes = sizes_of(work)
    return len(sizes) == 1 and SMALLEST_BYTES <= sizes[0] * VALUE_NBYTES <= LARGEST_BYTES


def throughput_chart(found: Mapping[str, Iterable[tuple[int, float]]], subtitle: str) -> str:
    """Return the chart as SVG.

    Args:
        found: for each system, by name, its points: bytes of the value, MB/s. At least one point in all.
        subtitle: how it was measured.
    """
    series = [Series(name, tuple(sorted(points))) for name, points in found.items()]
    series = [curve for curve in series if curve.points]
    every = [point for curve in series for point in curve.points]
    nbytes, mb_s = [x for x, _ in every], [y for _, y in every]
    x = sizes(X_LABEL, min(nbytes), max(nbytes))
    return chart(TITLE, subtitle, x, decades(Y_LABEL, min(mb_s), max(mb_s)), series)


def counted(number: int, what: str) -> str:
    """Return a number with its noun, such as `1 server` or `2 servers`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
