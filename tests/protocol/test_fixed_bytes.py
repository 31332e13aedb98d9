"""The bytes of some messages, worked out by hand: a change of them raises VERSION."""

from __future__ import annotations

from typing import Any

import msgpack

from kvd.protocol.codec import encode
from kvd.protocol.envelope import VERSION
from kvd.protocol.messages import (
    Coding,
    Done,
    Epoch,
    Hold,
    Init,
    MergedCoding,
    MergedForm,
    NewSlice,
    Part,
    Pull,
    Push,
    SliceId,
    Values,
)
from kvd.protocol.specs import KeySpec

VIEW = Epoch(3, 9)


def body_of(message: Any) -> list[Any]:
    body: list[Any] = msgpack.unpackb(encode(message, 7, VIEW))
    return body


def test_the_version() -> None:
    assert VERSION == 12


def test_the_bytes_of_a_message_are_fixed() -> None:
    assert encode(Done(5), 7, VIEW, 2) == bytes([0x97, VERSION, 16, 7, 3, 9, 2, 5])
    spec = KeySpec("int8", (2, 3), 4096)
    assert msgpack.unpackb(encode(Init(5, (spec,), (NewSlice("w", 1, 0),)), 7, VIEW)) == [
        VERSION, 33, 7, 3, 9, 0, 5, [["int8", [2, 3], 4096, "", None, False]], [["w", 1, 0]], 0,
    ]  # fmt: skip


def test_the_bytes_of_what_is_said_of_encoded_values_are_fixed() -> None:
    method = ["2bit", {"threshold": 1.0}]
    part, head = Part("w", 0, 3), [VERSION, 42, 7, 3, 9, 0]
    assert body_of(Pull(5, (part,), "2bit")) == [*head, 5, [["w", 0, 3, 0]], "2bit"]
    said = Coding(method, "float32", 4, MergedForm.FED_BACK)
    push = Push(5, (part,), 0, 1, True, coding=said)
    head[1] = 40
    wire = [method, "float32", 4, 2]
    assert body_of(push) == [*head, 5, [["w", 0, 3, 0]], 0, 1, True, False, wire, 0, 0, 0]
    head[1] = 43
    assert body_of(Values(5, (3,), said._replace(merged=MergedForm.PLAIN))) == [*head, 5, [3], [*wire[:3], 0]]
    head[1] = 81
    hold = Hold(5, 1, (SliceId("w", 0),), 3, (), True, None, 2, 0, MergedCoding(method, True))
    assert body_of(hold) == [*head, 5, 1, [["w", 0, 0]], 3, [], True, None, 2, 0, [method, True]]
