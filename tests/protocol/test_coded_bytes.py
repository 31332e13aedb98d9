"""The bytes of messages about values that are encoded: nodes of one version understand each other."""

from __future__ import annotations

from kvd.protocol.codec import VERSION
from kvd.protocol.messages import Coding, Hold, MergedCoding, MergedForm, Part, Pull, Push, SliceId, Values
from tests.protocol.test_codec import fields_of


def test_the_bytes_of_what_is_said_of_encoded_values_are_fixed() -> None:
    method = ["2bit", {"threshold": 1.0}]
    part, head = Part("w", 0, 3), [VERSION, 42, 7, 3, 9, 0]
    assert fields_of(Pull(5, (part,), "2bit")) == [*head, 5, [["w", 0, 3, 0]], "2bit"]
    said = Coding(method, "float32", 4, MergedForm.FED_BACK)
    push = Push(5, (part,), 0, 1, True, coding=said)
    head[1] = 40
    wire = [method, "float32", 4, 2]
    assert fields_of(push) == [*head, 5, [["w", 0, 3, 0]], 0, 1, True, False, wire, 0, 0, 0]
    head[1] = 43
    assert fields_of(Values(5, (3,), said._replace(merged=MergedForm.PLAIN))) == [*head, 5, [3], [*wire[:3], 0]]
    head[1] = 81
    hold = Hold(5, 1, (SliceId("w", 0),), 3, (), True, None, 2, MergedCoding(method, True))
    assert fields_of(hold) == [*head, 5, 1, [["w", 0, 0]], 3, [], True, None, 2, [method, True], 0]
