"""Arrays in files, and arrays in words."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvd.errors import ConfigError
from kvd_cli.output import ago, print_table, printable, size
from kvd_cli.values import read_array, summarise, write_array


def test_an_array_survives_a_file_of_any_name(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    file = tmp_path / "weights"
    write_array(file, array)
    assert os.listdir(tmp_path) == ["weights"], "no extension is added, and nothing is left beside it"
    np.testing.assert_array_equal(read_array(file), array)
    assert read_array(file).dtype == np.float16
    assert read_array(file, "bfloat16").dtype == ml_dtypes.bfloat16
    assert read_array(file, "int8").dtype == np.int8


def test_bfloat16_is_written_as_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_array(tmp_path / "w.npy", np.array([1.5, -2], dtype=ml_dtypes.bfloat16))
    written = read_array(tmp_path / "w.npy")
    assert written.dtype == np.float32
    assert written.tolist() == [1.5, -2.0]
    assert "bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"is not a complete \.npy file"),
        (b"text", r"is not a complete \.npy file"),
        (b"\x93NUMPY\x01\x00", r"is not a complete \.npy file"),
        (None, "No such file"),
    ],
)
def test_files_that_hold_no_array(content: bytes | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "w.npy"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_array(file)


def test_nothing_in_a_file_is_unpickled(tmp_path: Path) -> None:
    file = tmp_path / "w.npy"
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"is not a complete \.npy file"):
        read_array(file)


def test_archives_and_texts_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", a=np.zeros(1))
    with pytest.raises(ConfigError, match="archive"):
        read_array(tmp_path / "w.npz")
    np.save(tmp_path / "t.npy", np.array(["a"]))
    with pytest.raises(ConfigError, match="numbers"):
        read_array(tmp_path / "t.npy")


@pytest.mark.parametrize("dtype", ["bool", "uint16", "int16"])
def test_dtypes_that_no_value_has(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.ones(2, dtype=dtype))
    with pytest.raises(ConfigError, match=rf"w\.npy has the dtype {dtype}: give --dtype with one of float16, "):
        read_array(tmp_path / "w.npy")
    assert read_array(tmp_path / "w.npy", "float32").tolist() == [1.0, 1.0]


def test_a_terminal_without_colour_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for no_colour in ("1", ""):
        monkeypatch.setenv("NO_COLOR", no_colour)
        monkeypatch.setenv("TERM", "xterm-256color")
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        print_table(["NODE", "STATE"], [["server 0", "dead"]])
        assert ("\x1b" in terminal.getvalue()) == (no_colour == "")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_array(tmp_path / "nowhere" / "w.npy", np.zeros(1))


def test_a_summary_holds_what_json_can_hold() -> None:
    summary = summarise("w", np.array([np.inf, -1, np.nan], dtype=np.float32))
    assert summary == {
        "key": "w", "shape": [3], "dtype": "float32", "bytes": 12, "min": "nan", "max": "nan", "mean": "nan",
    }  # fmt: skip
    empty = summarise("e", np.zeros((0, 2), dtype=np.int8))
    assert (empty["min"], empty["mean"]) == (None, None)
    assert summarise("b", np.ones(2, dtype=ml_dtypes.bfloat16))["max"] == 1.0


def test_figures_in_words() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 TiB"]
    assert [ago(s) for s in (0.2, 5, 600, 8000)] == ["now", "5 s ago", "10 min ago", "2 h ago"]
    assert printable("a\x1b[2Jé\n") == "a\\x1b[2Jé\\n"
