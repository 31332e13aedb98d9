"""Values collected as they arrive."""

from __future__ import annotations

from itertools import permutations

from kvd.core.machine import Span
from kvd.node.shell.payloads import ReassemblyBuffer


def collected(*parts: tuple[int, Span]) -> ReassemblyBuffer:
    buffer = ReassemblyBuffer()
    for part in parts:
        buffer.add(*part)
    return buffer


def test_parts_that_lie_in_one_buffer_as_in_the_value_are_one_span() -> None:
    payload = bytes(range(100))
    parts = [(0, Span(payload, 10, 8)), (8, Span(payload, 18, 8)), (16, Span(payload, 26, 3))]
    for order in permutations(parts):
        whole = collected(*order).whole()
        assert whole == Span(payload, 10, 19)
        assert whole.buffer is payload
    assert collected(parts[1]).whole() == Span(payload, 18, 8)


def test_parts_that_lie_elsewhere_or_otherwise_are_not() -> None:
    payload, other = bytes(range(100)), bytes(range(100))
    first = (0, Span(payload, 10, 8))
    assert collected().whole() is None
    assert collected(first, (8, Span(other, 18, 8))).whole() is None
    assert collected(first, (8, Span(payload, 20, 8))).whole() is None
    assert collected(first, (8, Span(payload, 2, 8))).whole() is None
    assert collected(first, (16, Span(payload, 18, 8))).whole() is None
    assert collected(first, (0, Span(payload, 10, 8))).whole() is None  # which came twice
