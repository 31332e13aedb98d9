"""What a program may say about gradient compression, and what the wire may."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvd.compression import Compression, Compressor, OneBit, TwoBit, from_wire, known_compressors, parse, to_wire
from kvd.errors import ConfigError, ProtocolError


def test_a_dict_names_the_compressor_and_its_parameters() -> None:
    assert parse({"type": "none"}) is None
    assert parse({"type": "2bit"}) == Compression(TwoBit(0.5), 65536, True)
    said = {"type": "1bit", "threshold": -1, "min_bytes": 0, "ef": "none"}
    assert parse(said) == Compression(OneBit(-1.0), 0, False)
    assert said == {"type": "1bit", "threshold": -1, "min_bytes": 0, "ef": "none"}


REFUSED: dict[str, tuple[object, str, str]] = {
    "no dict": ("2bit", "type", 'gradient compression is a dict such as {"type": "2bit"}, not \'2bit\''),
    "no type": ({}, "type", "no type is given; there are fp16, bf16, 2bit, 1bit"),
    "no such type": ({"type": "zip"}, "type", "no compressor is called 'zip'; there are fp16"),
    "a type that is no text": ({"type": ["2bit"]}, "type", "no compressor is called ['2bit']; there are"),
    "a misspelt option": (
        {"type": "2bit", "treshold": 1},
        "treshold",
        "the compressor 2bit has no option 'treshold': it has threshold, min_bytes, ef",
    ),
    "an option that is no text": ({"type": "2bit", 3: 1}, "3", "the compressor 2bit has no option 3"),
    "options of none": (
        {"type": "none", "ef": "none"},
        "ef",
        "the compressor none has no option 'ef': it has no options",
    ),
    "a text": ({"type": "2bit", "threshold": "1"}, "threshold", "threshold must be a number, not '1'"),
    "zero": ({"type": "2bit", "threshold": 0}, "threshold", "threshold must be > 0 in float32, not 0.0"),
    "NaN": ({"type": "1bit", "threshold": float("nan")}, "threshold", "threshold must be finite, not nan"),
    "too large": ({"type": "1bit", "threshold": 1e39}, "threshold", "threshold must be a number of float32"),
    "too small": ({"type": "2bit", "threshold": 1e-60}, "threshold", "threshold must be > 0 in float32"),
    "negative bytes": ({"type": "fp16", "min_bytes": -1}, "min_bytes", "min_bytes must be ≥ 0, not -1"),
    "half a byte": ({"type": "fp16", "min_bytes": 0.5}, "min_bytes", "min_bytes must be a whole number, not 0.5"),
    "another feedback": ({"type": "2bit", "ef": True}, "ef", 'ef must be "vanilla" or "none", not True'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_options_are_refused_by_name(what: str) -> None:
    said, setting, text = REFUSED[what]
    with pytest.raises(ConfigError) as raised:
        parse(said)
    assert raised.value.setting == setting
    assert str(raised.value).startswith(text)


def test_every_compressor_crosses_the_wire() -> None:
    for name, cls in known_compressors().items():
        wire = to_wire(cls())
        assert wire[0] == name
        assert from_wire(wire) == cls()


@pytest.mark.parametrize("wire", [None, 3, "2bit", [], ["2bit"], ["2bit", []], ["2bit", {}], ["2bit", {1: 2}]])
def test_garbage_on_the_wire_is_a_protocol_error(wire: object) -> None:
    with pytest.raises(ProtocolError):
        from_wire(wire)


@dataclass(frozen=True)
class Halves(Compressor):
    """A compressor of another distribution."""

    def codec(self) -> Any:
        raise NotImplementedError


def test_installed_compressors_are_found(caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        EntryPoint("halves", f"{__name__}:Halves", "kvd.compressors"),
        EntryPoint("2bit", f"{__name__}:Halves", "kvd.compressors"),
        EntryPoint("missing", f"{__name__}:Missing", "kvd.compressors"),
        EntryPoint("bare", "kvd.compression:TwoBit", "kvd.compressors"),
    ]
    found = {"kvd.compressors": entries}
    known_compressors.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "kvd.compression"):
            patch.setattr("importlib.metadata.entry_points", lambda group: found[group])
            assert parse({"type": "halves"}) == Compression(Halves())
            assert to_wire(Halves()) == ["halves", {}]
            assert not {"missing", "bare"} & known_compressors().keys()
            assert known_compressors()["2bit"] is TwoBit
    finally:
        known_compressors.cache_clear()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the compressor '2bit' is not used",
        "the compressor 'missing' is not used",
        "the compressor 'bare' is not used",
    ]
    with pytest.raises(ConfigError, match="Halves is no known compressor: install it as an entry point"):
        to_wire(Halves())
