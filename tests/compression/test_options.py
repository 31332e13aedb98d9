"""What a program may say about gradient compression, and what the wire may."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvd.compression import Compression, Compressor, OneBit, TopK, TwoBit, from_wire, known_compressors, parse, to_wire
from kvd.errors import ConfigError, ProtocolError


def test_a_dict_names_the_compressor_and_its_parameters() -> None:
    assert parse({"type": "none"}) is None
    assert parse({"type": "2bit"}) == Compression(TwoBit(None), 65536, True)
    said = {"type": "1bit", "threshold": -1, "min_bytes": 0, "ef": "none"}
    assert parse(said) == Compression(OneBit(-1.0), 0, False)
    momentum = {"type": "topk", "momentum": "nesterov"}
    assert parse(momentum) == Compression(TopK(), 65536, True, 0.9)
    assert parse({**momentum, "mu": 0.5}) == Compression(TopK(), 65536, True, 0.5)
    assert parse({**momentum, "momentum": "none"}) == Compression(TopK())
    assert said == {"type": "1bit", "threshold": -1, "min_bytes": 0, "ef": "none"}


REFUSED: dict[str, tuple[object, str, str]] = {
    "no dict": ("2bit", "type", 'gradient compression is a dict such as {"type": "2bit"}, not \'2bit\''),
    "no type": ({}, "type", "no type is given; there are fp16, bf16, fp8, int8"),
    "no such type": ({"type": "zip"}, "type", "no compressor is called 'zip'; there are fp16"),
    "a type that is no text": ({"type": ["2bit"]}, "type", "no compressor is called ['2bit']; there are"),
    "a misspelt option": (
        {"type": "2bit", "treshold": 1},
        "treshold",
        "the compressor 2bit has no option 'treshold': it has threshold, min_bytes, ef, momentum, mu",
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
    "too many levels": ({"type": "dithering", "partition": "natural", "k": 32}, "k", "k must be from 1 to 31, not 32"),
    "no such partition": (
        {"type": "dithering", "partition": "log"},
        "partition",
        'partition must be "linear" or "natural"',
    ),
    "no such norm": ({"type": "dithering", "normalize": "l1"}, "normalize", 'normalize must be "max" or "l2", not'),
    "a negative seed": ({"type": "randomk", "seed": -1}, "seed", "seed must be ≥ 0, not -1"),
    "half an element": (
        {"type": "topk", "k": 1.5},
        "k",
        "k must be a whole number ≥ 1, or a part > 0 and < 1, not 1.5",
    ),
    "no element": ({"type": "randomk", "k": 0}, "k", "k must be a whole number ≥ 1, or a part > 0 and < 1, not 0.0"),
    "a small block": ({"type": "int8", "block": 7}, "block", "block must be from 8 to 65536, not 7"),
    "a large block": ({"type": "fp8", "block": 65537}, "block", "block must be from 8 to 65536, not 65537"),
    "no flag": ({"type": "onebit", "scaling": 1}, "scaling", "scaling must be True or False, not 1"),
    "negative bytes": ({"type": "fp16", "min_bytes": -1}, "min_bytes", "min_bytes must be ≥ 0, not -1"),
    "half a byte": ({"type": "fp16", "min_bytes": 0.5}, "min_bytes", "min_bytes must be a whole number, not 0.5"),
    "another momentum": (
        {"type": "2bit", "momentum": 0.9},
        "momentum",
        'momentum must be "nesterov" or "none", not 0.9',
    ),
    "no momentum": ({"type": "2bit", "mu": 0.9}, "mu", 'mu must be given with momentum "nesterov" only, not 0.9'),
    "too much": ({"type": "2bit", "momentum": "nesterov", "mu": 1}, "mu", "mu must be > 0 and < 1, not 1.0"),
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
