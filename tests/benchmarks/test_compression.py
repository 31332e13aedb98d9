"""`benchmarks.compression`: its figures and tables, on a small work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compression
from benchmarks.compression import CodecFigures, Step, codec_lines, step_lines
from kvd.compression import known_compressors


def test_the_tables() -> None:
    lines = codec_lines({"2bit": CodecFigures(0.25, 2e9, 1.5e9, 2.1e10)})
    assert lines == [("2bit", "0.25", "2 GB/s", "1.5 GB/s", "21 GB/s")]
    taken = {"none": [Step(0.4, 1), Step(0.2, 1.2), Step(0.3, 0.8)], "2bit": [Step(0.03, 0.5)]}
    assert step_lines(taken) == [
        ("none", "300 ms", "1.000", "1 s", "1.000"),
        ("2bit", "30 ms", "0.100", "500 ms", "0.500"),
    ]


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    options = ["--slice-mib", "0.01", "--tries", "2", "--types", "2bit", "--work", "64KiB", "--rounds", "1"]
    assert compression.main([*options, "--megabytes-per-s", "1000", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert list(found["codecs"]) == [*known_compressors(), *compression.VARIANTS]
    assert found["codecs"]["fp16"]["bytes_per_element"] == 2
    assert all(rate > 0 for figures in found["codecs"].values() for rate in figures.values())
    assert {name: len(times) for name, times in found["steps"].items()} == {"none": 1, "2bit": 1}
    assert "of a plain one" in capsys.readouterr().out
