"""Where a pulled value goes as long as nobody knows how large it is."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import Span


class Pieces:
    """Keeps the received bytes as they came, without a copy, until they are put into an array."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Span]] = []

    def add(self, offset: int, span: Span) -> None:
        """Takes the bytes of the span, which lie at `offset` in the whole."""
        self._pieces.append((offset, span))

    def move_to(self, target: Any) -> None:
        """Copies all bytes into the target, and forgets them."""
        whole = memoryview(target).cast("B")
        for offset, span in self._pieces:
            if span.nbytes:
                piece = memoryview(span.buffer).cast("B")[span.offset : span.offset + span.nbytes]
                whole[offset : offset + span.nbytes] = piece
        self._pieces = []
