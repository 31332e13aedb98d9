"""The chart of `--plot`: valid XML with everything in its place."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from kvd_cli.bench_plot import X_LABEL, Y_LABEL, counted, is_plotted, throughput_chart
from kvd_cli.bench_svg import Axis, Event, Series, chart, decades, linear, size_text, sizes

SVG = "{http://www.w3.org/2000/svg}"
CURVES = {"kvd": [(64 << 20, 500.0), (4 << 10, 3.0), (1 << 20, 400.0)], "a <peer> & more": [(4 << 10, 7.0)]}


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg.encode()).iter(SVG + name))


def words(svg: str) -> list[str | None]:
    return [element.text for element in elements(svg, "text")]


def test_a_picture_has_title_labels_ticks_and_a_legend() -> None:
    shown = words(throughput_chart(CURVES, "2 workers"))
    assert shown[:2] == ["Throughput by message size", "2 workers"]
    for text in (X_LABEL, Y_LABEL, "4 KiB", "1 MiB", "64 MiB", "2", "500", "kvd", "a <peer> & more"):
        assert text in shown


def test_a_single_curve_needs_no_legend() -> None:
    svg = throughput_chart({"kvd": CURVES["kvd"], "redis": []}, "")
    assert "kvd" not in words(svg)
    assert len(elements(svg, "polyline")) == 1


def test_points_lie_where_their_values_are() -> None:
    """Sorted by size; from the left edge to the right one, and higher for more."""
    [line] = elements(throughput_chart({"kvd": CURVES["kvd"]}, ""), "polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    [_, frame] = elements(throughput_chart({"kvd": CURVES["kvd"]}, ""), "rect")
    left, top = float(frame.attrib["x"]), float(frame.attrib["y"])
    width, height = float(frame.attrib["width"]), float(frame.attrib["height"])
    assert [x for x, _ in places] == pytest.approx([left, left + width * 8 / 14, left + width], abs=0.1)
    assert places[2][1] == pytest.approx(top, abs=0.1)  # 500 is the end of the axis
    assert top < places[1][1] < places[0][1] < top + height


def test_every_curve_has_a_look_of_its_own() -> None:
    svg = throughput_chart({f"system {number}": [(4 << 10, 1.0 + number)] for number in range(7)}, "")
    assert len({line.attrib["stroke"] for line in elements(svg, "polyline")}) == 7


def test_a_share_of_an_axis_is_logarithmic() -> None:
    axis = Axis("", 1.0, 100.0, ())
    assert [axis.share(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("smallest", "largest", "low", "high", "texts"),
    [
        (3.2, 652.0, 2, 1000, ["2", "5", "10", "20", "50", "100", "200", "500", "1,000"]),
        (0.3, 0.4, 0.2, 0.5, ["0.2", "0.5"]),
        (5.0, 5.0, 0.5, 50, ["0.5", "1", "2", "5", "10", "20", "50"]),
        (1.0, 1e6, 1, 1e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"]),
    ],
)
def test_an_axis_of_numbers_ends_at_round_ones(
    smallest: float, largest: float, low: float, high: float, texts: list[str]
) -> None:
    axis = decades("MB/s", smallest, largest)
    assert (axis.low, axis.high) == pytest.approx((low, high))
    assert [text for _, text in axis.ticks] == texts
    assert all(axis.low <= value * 1.0001 <= axis.high * 1.001 for value in axis.fine)


def test_an_axis_of_sizes_has_every_second_power_of_two() -> None:
    axis = sizes("size", 4096, 65536)
    assert [text for _, text in axis.ticks] == ["4 KiB", "16 KiB", "64 KiB"]
    assert sizes("size", 4096, 4096).low < 4096 < sizes("size", 4096, 4096).high
    assert [size_text(nbytes) for nbytes in (3, 1024, 1536, 5 << 20)] == ["3 B", "1 KiB", "1536 B", "5 MiB"]


def test_one_value_of_a_middle_size_is_a_point() -> None:
    works = ("1KiB", "4KiB", "16MiB", "64MiB", "128MiB", "4KiBx2", "resnet50")
    assert [name for name in works if is_plotted(name)] == ["4KiB", "16MiB", "64MiB"]


def test_numbers_of_things_read_well() -> None:
    assert (counted(1, "server"), counted(2, "server")) == ("1 server", "2 servers")


def test_a_linear_axis_begins_at_zero_and_ends_at_a_round_number() -> None:
    axis = linear("steps", 141.0)
    assert (axis.low, axis.high) == (0.0, 160.0)
    assert [text for _, text in axis.ticks] == ["0", "20", "40", "60", "80", "100", "120", "140", "160"]
    assert axis.share(40.0) == pytest.approx(0.25)


def test_events_are_lines_with_captions() -> None:
    axis = linear("", 10.0)
    svg = chart("", "", axis, axis, [Series("steps", ((0.0, 0.0), (10.0, 10.0)), marked=False)], [Event(5.0, "killed")])
    assert "killed" in words(svg)
    [dashed] = [line for line in elements(svg, "line") if "stroke-dasharray" in line.attrib]
    [frame] = [rect for rect in elements(svg, "rect") if rect.attrib["fill"] == "none"]
    middle = float(frame.attrib["x"]) + float(frame.attrib["width"]) / 2
    assert float(dashed.attrib["x1"]) == float(dashed.attrib["x2"]) == pytest.approx(middle, abs=0.1)
    assert not elements(svg, "circle")
