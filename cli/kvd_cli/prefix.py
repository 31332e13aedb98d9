"""Output of many processes on one terminal, each line prefixed with the name of its node."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Final

from kvd.config import terminal_colour
from kvd.node.launch import Stream

_COLOURS: Final = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_DESCRIPTOR: Final = {"stdout": 1, "stderr": 2}
_PLAIN: Final = b"\x1b[0m"


class Prefixer:
    """Writer of prefixed lines to stdout and stderr, for any thread.

    A piece is written at once, straight to the descriptor: nothing is buffered. A slow reader slows the nodes down;
    nothing piles up here. If a node has begun a line and another one writes, that line is ended first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """
        Args:
            names: the nodes whose lines are expected; others may come too.
        """
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        out = _Cursor(terminal_colour(None, sys.stdout))
        # on one terminal, or in one file, both have one place where they write
        same = os.path.sameopenfile(1, 2)
        self._cursors = {"stdout": out, "stderr": out if same else _Cursor(terminal_colour(None, sys.stderr))}

    def write(self, node: str, stream: Stream, piece: bytes) -> None:
        """Write a line with its end, or a part of a line.

        Raises:
            OSError: nobody reads the stream any more.
        """
        prefix = f"{node:<{self._width}} | "
        cursor = self._cursors[stream]
        if cursor.is_coloured:
            prefix = f"\x1b[{self._colours.get(node, 1)}m{prefix}\x1b[0m"
        cursor.write((node, stream), prefix.encode(), piece)


class _Cursor:
    """Position of the next output on one terminal or in one file."""

    def __init__(self, is_coloured: bool) -> None:
        self.is_coloured = is_coloured
        self._lock = threading.Lock()
        self._owner: tuple[str, str] | None = None  # of the line that was begun; None: at the beginning of a new one
        self._is_at_begin = False  # of that line, after a carriage return
        self._ended: set[tuple[str, str]] = set()  # owners of lines that were ended for others

    def write(self, owner: tuple[str, str], prefix: bytes, piece: bytes) -> None:
        """Write a piece. A ``\\r`` in front of text returns to the start of the line first."""
        line = piece.lstrip(b"\r")
        with self._lock:
            if len(line) < len(piece) and line.strip(b"\r\n"):
                self._write_part(owner, prefix, b"\r")
                piece = line
            self._write_part(owner, prefix, piece)

    def _write_part(self, owner: tuple[str, str], prefix: bytes, part: bytes) -> None:
        text = part.rstrip(b"\r\n")
        end = part[len(text) :]
        data = self._before(owner, prefix, text, end)
        if data is None:
            return
        if self.is_coloured and b"\x1b" in text and end:
            text += _PLAIN  # the colour of one node is not that of the next
        self._write(owner, data + text + end)
        self._is_at_begin = end == b"\r"
        self._owner = None if end.endswith(b"\n") else owner

    def _before(self, owner: tuple[str, str], prefix: bytes, text: bytes, end: bytes) -> bytes | None:
        """Return what comes before the text; None if nothing is to be written."""
        if owner == self._owner:
            return prefix if self._is_at_begin and text else b""
        if not text and end == b"\r":
            return None  # as progress bars begin
        was_ended = owner in self._ended
        self._ended.discard(owner)
        if was_ended and not text:
            return None  # the end of the line that was ended already
        if self._owner is None:
            return prefix
        self._ended.add(self._owner)
        return b"\n" + prefix

    def _write(self, owner: tuple[str, str], data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(_DESCRIPTOR[owner[1]], rest) :]
