"""Where a pulled value is collected while its size is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from kvd.core.machine import Span
from kvd.node.shell.decoding import CodedSlice


class ReassemblyBuffer:
    """Keeps received bytes where they arrived, without a copy and as they travelled, until they are put into an
    array."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Span]] = []

    def add(self, offset: int, span: Span) -> None:
        """Keep the bytes of the span, which begin at byte `offset` of the value."""
        self._parts.append((offset, span))

    @property
    def parts(self) -> Sequence[tuple[int, Span]]:
        """What was added."""
        return self._parts

    def whole(self) -> Span | None:
        """All that was added as one span, if it lies in one buffer as in the value: side by side, in order."""
        parts = self._parts
        if len(parts) < 2:
            return parts[0][1] if parts else None
        parts = sorted(parts, key=itemgetter(0))
        begin, first = parts[0]
        end = begin
        for offset, span in parts:
            if span.buffer is not first.buffer or offset != end or span.offset - first.offset != offset - begin:
                return None
            end += span.nbytes
        return first._replace(nbytes=end - begin)

    def move_to(self, target: Any) -> None:
        """Copy all bytes into the target, a contiguous writable buffer, and forget them."""
        whole = memoryview(target).cast("B")
        for offset, span in self._parts:
            if isinstance(span.buffer, CodedSlice):
                span.buffer.decode_into(whole, offset)
            elif span.nbytes:
                part = memoryview(span.buffer).cast("B")[span.offset : span.offset + span.nbytes]
                whole[offset : offset + span.nbytes] = part
        self.clear()

    def clear(self) -> None:
        """Forget all bytes."""
        self._parts = []
