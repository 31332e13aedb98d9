"""What becomes of the payload of a push when it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvd.compression import Compressor, TwoBit, to_wire
from kvd.node.shell.payloads import CodedSlice, arrived
from kvd.protocol.messages import Coding, Done, Message, Part, Push

TWO_BIT = to_wire(TwoBit(0.5))


def push(method: Any, wanted: str = "float32", size: int = 4) -> Push:
    return Push(1, (Part("w", 0, 1),), 0, 1, False, coding=Coding(method, wanted, size))


def decoded(message: Message, payload: bytes) -> np.ndarray[Any, Any]:
    values, nbytes, fault = arrived(message, memoryview(payload))
    assert fault == ""
    assert isinstance(values, CodedSlice)
    array = values.decoded()
    assert array.nbytes == nbytes
    return array


def test_values_of_another_dtype_are_converted() -> None:
    values = np.array([1.5, -2, 1e30, np.nan], np.float64)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        with np.errstate(over="ignore"):
            assert decoded(push("float64", name), values.tobytes()).tobytes() == values.astype(dtype).tobytes()


@pytest.mark.parametrize("wanted", ["float16", "bfloat16", "float32", "float64"])
def test_compressed_values_are_decoded_into_the_dtype_of_the_key(wanted: str) -> None:
    array = decoded(push(TWO_BIT, wanted), b"\xe3")
    assert (str(array.dtype), array.tolist()) == (wanted, [0.5, -0.5, 0, 0.5])


FAULTS: dict[str, tuple[Push, bytes, str]] = {
    "no such dtype": (push("float8"), bytes(4), "nothing is made of 'float8': it is no floating dtype"),
    "to no such dtype": (push("float32", "float8"), bytes(16), "nothing becomes 'float8': it is no floating dtype"),
    "whole numbers": (push("int32"), bytes(16), "nothing is made of 'int32': it is no floating dtype"),
    "to whole numbers": (push("float32", "int32"), bytes(16), "nothing becomes 'int32': it is no floating dtype"),
    "half an element": (push("float64"), bytes(28), "4 elements of float64 have 32 bytes"),
    "too few bytes": (push(TWO_BIT, size=5), bytes(1), "5 elements are encoded in 2 bytes, not in 1"),
    "too many bytes": (push(TWO_BIT), bytes(2), "4 elements are encoded in 1 bytes, not in 2"),
    "none": (push(TWO_BIT), b"", "4 elements are encoded in 1 bytes, not in 0"),
    "more than a slice": (
        push(TWO_BIT, size=1 << 23),
        bytes(1 << 21),
        "a slice has at most 16777216 bytes, not 33554432",
    ),
    "no such compressor": (
        push(["zip", {}]),
        bytes(1),
        "no compressor is called 'zip'; known are ",
    ),
    "no such field": (push(["2bit", {"level": 2}]), bytes(1), "TwoBit: these fields are unknown or missing: "),
    "a field out of range": (push(["2bit", {"threshold": -1}]), bytes(1), "TwoBit: threshold must be > 0 in float32"),
    "no compressor": (push([1, 2, 3]), bytes(1), "a compressor is [name, fields], not a list of 3"),
    "nothing": (push(None), bytes(1), "a compressor is [name, fields], not None"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_cannot_be_decoded_is_told(what: str) -> None:
    message, payload, text = FAULTS[what]
    _, _, fault = arrived(message, memoryview(payload))
    assert fault.startswith(text)


def test_other_payloads_stay_as_they_are() -> None:
    payload = memoryview(bytes(12))
    for message in (Done(1), Push(1, (Part("w", 0, 1),), 0, 1, False)):
        assert arrived(message, payload) == (payload, 12, "")
    assert arrived(push(TWO_BIT), None) == (None, 0, "")  # a probe


@dataclass(frozen=True)
class Faulty(Compressor):
    """One of another distribution, with errors."""

    where: str = ""

    def codec(self) -> Any:
        if self.where == "codec":
            raise ImportError("no library")
        return self

    def check(self, *data: Any) -> None:
        if data and self.where == "check":
            raise IndexError("no such byte")


@pytest.mark.parametrize(
    ("where", "text"), [("codec", "ImportError: no library"), ("check", "IndexError: no such byte")]
)
def test_errors_of_installed_compressors_are_told_too(where: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message may end a daemon."""
    for module in ("wire", "registry"):
        monkeypatch.setattr(f"kvd.compression.{module}.known_compressors", lambda: {"faulty": Faulty})
    _, _, fault = arrived(push(["faulty", {"where": where}]), memoryview(bytes(1)))
    assert fault == f"the compressor faulty cannot decode it: {text}"
