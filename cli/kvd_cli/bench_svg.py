"""A line chart with logarithmic or linear axes, drawn as SVG without further dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

WIDTH: Final = 860
HEIGHT: Final = 520
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 64, 68
"""The margins around the plotted area."""

LEGEND_COLUMN: Final = 200
"""The width of the legend on the right, if there is one."""

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Colours that people with colour blindness can tell apart. The shapes of the markers differ, too."""

INK: Final = "#222222"
FAINT: Final = "#666666"
GRID: Final = "#d9d9d9"
FINE_GRID: Final = "#f0f0f0"
FONT: Final = "Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Series:
    """One curve.

    Attributes:
        name: for the legend.
        points: (x, y) in drawing order; more than 0 on a logarithmic axis.
        marked: draw a marker with a tooltip at each point.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    marked: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """A vertical line with a caption.

    Attributes:
        x: its place on the x axis.
        caption: a few words, drawn to the right of the line.
    """

    x: float
    caption: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic or a linear axis.

    Attributes:
        label: the quantity and its unit.
        low: the smallest value, more than 0 if logarithmic.
        high: the largest value, more than `low`.
        ticks: values with a text and a grid line.
        fine: values with a faint grid line only.
        is_linear: linear instead of logarithmic.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    fine: tuple[float, ...] = ()
    is_linear: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 at `low` to 1 at `high`."""
        if self.is_linear:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


def chart(title: str, subtitle: str, x: Axis, y: Axis, series: Sequence[Series], events: Sequence[Event] = ()) -> str:
    """Return the whole chart as the text of an SVG file."""
    chosen = list(series)
    drawing = _Drawing(x, y, legend=len(chosen) > 1)
    drawing.text(LEFT, 28, title, size=18, weight="bold")
    drawing.text(LEFT, 48, subtitle, size=12, colour=FAINT)
    drawing.axes()
    for row, event in enumerate(events):
        drawing.event(event, row)
    for number, curve in enumerate(chosen):
        drawing.curve(curve, number)
    if len(chosen) > 1:
        drawing.legend_of(chosen)
    return drawing.finished()


def decades(label: str, smallest: float, largest: float) -> Axis:
    """An axis of plain numbers that includes these two. Ticks are at 1, 2 and 5, or at powers of ten if it is long."""
    low, high = _rounded(smallest, down=True), _rounded(largest, down=False)
    if not low < high:
        low, high = low / 10, high * 10
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    leading = (1, 2, 5) if high / low <= 1e4 else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in leading]
    fine = [digit * 10.0**power for power in powers for digit in range(1, 10)]
    return Axis(
        label,
        low,
        high,
        tuple((tick, f"{tick:,.10g}") for tick in ticks if _within(tick, low, high)),
        tuple(line for line in fine if _within(line, low, high)),
    )


def linear(label: str, largest: float) -> Axis:
    """Return a linear axis from 0 to a round number of at least `largest`, with five to ten ticks."""
    step = _rounded(largest / 10, down=False)
    count = math.ceil(largest / step)
    ticks = tuple((number * step, f"{number * step:,.10g}") for number in range(count + 1))
    return Axis(label, 0.0, count * step, ticks, is_linear=True)


def sizes(label: str, smallest: float, largest: float) -> Axis:
    """Return an axis of bytes that includes these two, with a tick at every second power of two."""
    first, last = math.floor(math.log2(smallest)), math.ceil(math.log2(largest))
    if first == last:
        first, last = first - 2, last + 2
    ticks = range(first, last + 1, 2)
    return Axis(
        label, 2.0**first, 2.0**last, tuple((2.0**power, size_text(2**power)) for power in ticks if power <= last)
    )


def size_text(nbytes: int) -> str:
    """Bytes in the largest unit that gives a whole number."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def _rounded(value: float, *, down: bool) -> float:
    """Return the next number that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1.0, 2.0, 5.0, 10.0)
    if down:
        return power * max(step for step in steps if step * power <= value * (1 + 1e-9))
    return power * min(step for step in steps if step * power >= value * (1 - 1e-9))


def _within(value: float, low: float, high: float) -> bool:
    return low * (1 - 1e-9) <= value <= high * (1 + 1e-9)


class _Drawing:
    """The chart while it is drawn."""

    def __init__(self, x: Axis, y: Axis, *, legend: bool) -> None:
        self._x, self._y = x, y
        self._right = WIDTH - RIGHT - (LEGEND_COLUMN if legend else 0)
        self._bottom = HEIGHT - BOTTOM
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {WIDTH} {HEIGHT}",
                "width": str(WIDTH),
                "height": str(HEIGHT),
                "font-family": FONT,
            },
        )
        self._add("rect", width=WIDTH, height=HEIGHT, fill="#ffffff")

    def finished(self) -> str:
        """Return the text of the file."""
        ElementTree.indent(self._root)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def axes(self) -> None:
        """Grid, ticks and labels."""
        for value in self._y.fine:
            self._line(LEFT, self._at_y(value), self._right, self._at_y(value), FINE_GRID)
        for value, text in self._y.ticks:
            height = self._at_y(value)
            self._line(LEFT, height, self._right, height, GRID)
            self._line(LEFT - 5, height, LEFT, height, INK)
            self.text(LEFT - 9, height + 4, text, anchor="end")
        for value, text in self._x.ticks:
            place = self._at_x(value)
            self._line(place, TOP, place, self._bottom, GRID)
            self._line(place, self._bottom, place, self._bottom + 5, INK)
            self.text(place, self._bottom + 20, text, anchor="middle")
        frame = {"width": self._right - LEFT, "height": self._bottom - TOP}
        self._add("rect", x=LEFT, y=TOP, **frame, fill="none", stroke=INK)
        self.text((LEFT + self._right) / 2, HEIGHT - 18, self._x.label, size=13, anchor="middle")
        middle = (TOP + self._bottom) / 2
        self.text(22, middle, self._y.label, size=13, anchor="middle", turned=True)

    def curve(self, series: Series, number: int) -> None:
        """Draw a line through the points, and the markers if there are any."""
        places = [(self._at_x(x), self._at_y(y)) for x, y in series.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self._add("polyline", points=joined, fill="none", stroke=_colour(number), stroke_width=2)
        if not series.marked:
            return
        for (x, y), (value_x, value_y) in zip(places, series.points, strict=True):
            marker = self._marker(x, y, number)
            title = ElementTree.SubElement(marker, "title")
            title.text = f"{series.name}: {size_text(int(value_x))}, {value_y:.4g}"

    def event(self, event: Event, row: int) -> None:
        """Draw a dashed line over the height of the plot, with its caption in a row of its own."""
        place, height = self._at_x(event.x), TOP + 18 + 17 * row
        self._add(
            "line", x1=place, y1=TOP, x2=place, y2=self._bottom, stroke=FAINT, stroke_width=1.2, stroke_dasharray="5 4"
        )
        self.text(place + 6, height, event.caption, size=12)

    def legend_of(self, series: Sequence[Series]) -> None:
        """A sample of each curve with its name, to the right of the area."""
        left = self._right + 20
        for number, curve in enumerate(series):
            height = TOP + 16 + 24 * number
            self._add("line", x1=left, y1=height, x2=left + 30, y2=height, stroke=_colour(number), stroke_width=2)
            if curve.marked:
                self._marker(left + 15, height, number)
            self.text(left + 40, height + 4, curve.name)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        anchor: str = "start",
        weight: str = "normal",
        colour: str = INK,
        turned: bool = False,
    ) -> None:
        """One line of text; `turned`: it reads from bottom to top."""
        look: dict[str, object] = {"font_size": size, "text_anchor": anchor, "font_weight": weight, "fill": colour}
        if turned:
            look["transform"] = f"rotate(-90 {x:.1f} {y:.1f})"
        self._add("text", x=x, y=y, **look).text = words

    def _marker(self, x: float, y: float, number: int) -> ElementTree.Element:
        """Draw a disc, a square, a triangle or a diamond."""
        fill, radius = _colour(number), 4.5
        if number % 4 == 0:
            return self._add("circle", cx=x, cy=y, r=radius, fill=fill)
        corners = (
            ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)),
            ((0.0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
            ((0.0, -1.4), (1.4, 0.0), (0.0, 1.4), (-1.4, 0.0)),
        )[number % 4 - 1]
        points = " ".join(f"{x + radius * dx:.1f},{y + radius * dy:.1f}" for dx, dy in corners)
        return self._add("polygon", points=points, fill=fill)

    def _line(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour)

    def _at_x(self, value: float) -> float:
        return LEFT + self._x.share(value) * (self._right - LEFT)

    def _at_y(self, value: float) -> float:
        return self._bottom - self._y.share(value) * (self._bottom - TOP)

    def _add(self, kind: str, **attributes: object) -> ElementTree.Element:
        named = {name.replace("_", "-"): _attribute(value) for name, value in attributes.items()}
        return ElementTree.SubElement(self._root, kind, named)


def _attribute(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
