"""Many small buffers at once: a loop in C that joins them, and one that fills them."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from kvd.core.machine import Scatter, Span
from kvd.transport.base import NOTHING


def joined(span: Span) -> Span:
    """What is gathered for this span, as one buffer.

    Raises:
        ValueError: the buffers have other sizes than when they were given.
    """
    gathered, nbytes = span.buffer, span.nbytes
    buffers = gathered.buffers
    whole = b"".join(buffers if gathered.gaps is None else _in_turn(buffers, gathered.gaps))
    if len(whole) != nbytes:
        raise ValueError(f"the values of a list have {len(whole)} bytes, not {nbytes}: their arrays were changed")
    return Span(whole, 0, nbytes)


def scatter(effect: Scatter) -> None:
    """Copies received bytes into the buffers.

    Raises:
        ValueError: a buffer has another size than when it was given, or cannot be written to.
    """
    targets, sizes = effect.targets, effect.nbytes
    if effect.gaps is not None:
        targets = _in_turn(targets, [bytearray(len(gap)) for gap in effect.gaps])
        sizes = _in_turn(sizes, [len(gap) for gap in effect.gaps])
    source = BytesIO(NOTHING if effect.source is None else effect.source)
    if list(map(source.readinto, targets)) != list(sizes):
        raise ValueError("the arrays of a list were changed while values were on their way to them")


def _in_turn(entries: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The first of the one, the first of the other, and so on."""
    mixed = [None] * (2 * len(entries))
    mixed[::2], mixed[1::2] = list(entries), list(others)
    return mixed
