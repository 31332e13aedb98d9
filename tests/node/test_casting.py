"""What becomes of the payload of a push when it arrives."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvd.node.casting import arrived
from kvd.protocol.messages import Cast, Done, Message, Part, Push
from kvd.transport import base


def push(given: str, wanted: str) -> Push:
    return Push(1, (Part("w", 0, 1),), 0, 1, False, cast=Cast(given, wanted))


def test_a_payload_is_converted() -> None:
    values = np.array([1.5, -2, 1e30, np.nan], np.float64)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        result = arrived(push("float64", name), memoryview(values.tobytes()))
        assert result is not None
        with np.errstate(over="ignore"):
            assert bytes(result) == values.astype(dtype).tobytes()


NOT_CONVERTED: dict[str, Message] = {
    "another message": Done(1),
    "no cast": Push(1, (Part("w", 0, 1),), 0, 1, False),
    "no such dtype": push("float8", "float32"),
    "to no such dtype": push("float32", "float8"),
    "whole numbers": push("int32", "float32"),
    "to whole numbers": push("float32", "int32"),
    "half an element": push("float64", "float32"),
}


@pytest.mark.parametrize("what", NOT_CONVERTED)
def test_what_cannot_be_converted_stays_as_it_is(what: str) -> None:
    payload = memoryview(bytes(range(12)))
    assert arrived(NOT_CONVERTED[what], payload) is payload


def test_a_payload_does_not_become_larger_than_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.node.casting.MAX_PAYLOAD_BYTES", 15)
    payload: Any = memoryview(bytes(8))
    assert arrived(push("float16", "float32"), payload) is payload
    assert base.MAX_PAYLOAD_BYTES > 15


def test_no_payload() -> None:
    assert arrived(push("float16", "float32"), None) is None
    empty = memoryview(b"")
    assert arrived(push("float16", "float32"), empty) is empty
