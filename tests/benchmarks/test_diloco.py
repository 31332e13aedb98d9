"""What `benchmarks.diloco` counts and shows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import diloco
from benchmarks.diloco import COMPRESSED, DILOCO, SYNCHRONOUS, Point, first_to_reach, lines
from examples import gpt

CURVES = {
    SYNCHRONOUS: [Point(50, 1_000_000, 3.0), Point(100, 2_000_000, 2.0)],
    DILOCO: [Point(50, 20_000, 3.5), Point(100, 40_000, 2.0), Point(150, 60_000, 1.5)],
}


def test_the_first_point_with_the_loss_counts() -> None:
    assert first_to_reach(CURVES[DILOCO], 2.0) == (100, 40_000, 2.0)
    assert first_to_reach(CURVES[DILOCO], 1.0) is None
    assert lines(CURVES) == [
        (SYNCHRONOUS, "100", "2.0000", "2.00", "1.0000"),
        (DILOCO, "100", "2.0000", "0.04", "0.0200"),
    ]
    never = {**CURVES, DILOCO: CURVES[DILOCO][:1]}
    assert lines(never)[1] == (DILOCO, "50", "3.5000", "0.02", "never")


@pytest.mark.timeout(300)  # three processes import torch
def test_a_small_run_counts_the_bytes_of_every_exchange(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, svg = tmp_path / "out.csv", tmp_path / "out.svg"
    steps = ["--workers", "1", "--steps", "6", "--diloco-steps", "6", "--every", "2"]
    assert diloco.main([*steps, "--csv", str(csv), "--svg", str(svg)]) in (0, 1)
    heading, *rows = csv.read_text().splitlines()
    assert heading == "training,step,bytes,loss"
    found = [row.split(",") for row in rows]
    assert [(name, int(step)) for name, step, _, _ in found] == [
        (name, step) for name in (SYNCHRONOUS, DILOCO, COMPRESSED) for step in (2, 4, 6)
    ]
    model = gpt.GPT(width=48, layers=2, heads=4, context=48)
    value_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    counts = [int(nbytes) for _, _, nbytes, _ in found]
    for before, after in ((0, 1), (1, 2)):  # two steps; gradients out, means in
        assert 4 * value_bytes <= counts[after] - counts[before] <= 4.5 * value_bytes
    for before, after in ((3, 4), (4, 5)):  # one exchange
        assert 2 * value_bytes <= counts[after] - counts[before] <= 2.5 * value_bytes
    for before, after in ((6, 7), (7, 8)):  # a quarter out, all in
        assert 1.25 * value_bytes <= counts[after] - counts[before] <= 1.7 * value_bytes
    assert all(0 < float(loss) < 6 for *_, loss in found)
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    assert SYNCHRONOUS in capsys.readouterr().out
