"""Output of many processes on one terminal: each line whole, with the name of the node in front."""

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


class Prefixer:
    """Writes lines to stdout and stderr, with the name of their node in front. From any thread.

    A line is one write under a lock, straight to the descriptor: nothing is buffered, and no line is torn. A slow
    reader slows the nodes down; nothing piles up here.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """
        Args:
            names: the nodes whose lines are expected; others may come too.
        """
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._coloured = {
            "stdout": terminal_colour(None, sys.stdout),
            "stderr": terminal_colour(None, sys.stderr),
        }
        self._lock = threading.Lock()

    def write(self, node: str, stream: Stream, line: bytes) -> None:
        """Write one line.

        Raises:
            OSError: nobody reads the stream any more.
        """
        prefix = f"{node:<{self._width}} | "
        if self._coloured[stream]:
            prefix = f"\x1b[{self._colours.get(node, 1)}m{prefix}\x1b[0m"
        rest = memoryview(prefix.encode() + line + b"\n")
        with self._lock:
            while rest:
                rest = rest[os.write(_DESCRIPTOR[stream], rest) :]
