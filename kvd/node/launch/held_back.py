"""Output that is held back while all is well: what the daemons log below a warning."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from typing import Final

from kvd.node.launch.output import Sink, Stream
from kvd.observe.log import level_of

KEPT_LINES: Final = 30
"""Lines of each daemon that are kept, in case it fails."""

KEPT_BYTES: Final = 2048
"""Bytes of such a line that are kept."""


class HeldBack:
    """Passes on the output of a job, but for what its daemons log below a warning.

    The output of daemons has to come in whole lines. A line that is no log line is passed on: it may be why the
    interpreter did not start.
    """

    def __init__(self, sink: Sink, daemons: Collection[str]) -> None:
        """
        Args:
            sink: takes what is passed on.
            daemons: the nodes whose log is held back.
        """
        self._sink = sink
        self._kept: dict[str, deque[tuple[Stream, bytes]]] = {name: deque(maxlen=KEPT_LINES) for name in daemons}
        self._hidden: set[str] = set()  # those whose last record was held back: what is indented belongs to it
        self._shown_from = logging.WARNING
        self._lock = threading.Lock()

    def write(self, node: str, stream: Stream, line: bytes) -> None:
        """Take one line. May be called from several threads.

        Raises:
            OSError: the sink takes no more.
        """
        if node not in self._kept or not self._is_held_back(node, line):
            self._sink(node, stream, line)
            return
        with self._lock:
            self._kept[node].append((stream, line[:KEPT_BYTES].removesuffix(b"\n") + b"\n"))

    def expect_ends(self) -> None:
        """Hold back warnings, too: the job is ending, and daemons warn of each process that ends."""
        self._shown_from = logging.ERROR

    def release(self, node: str) -> None:
        """Pass on the last lines that were held back of this node, if it is a daemon: it failed.

        Raises:
            OSError: the sink takes no more.
        """
        with self._lock:
            kept = list(self._kept.get(node, ()))
            self._kept.get(node, deque()).clear()
        for stream, line in kept:
            self._sink(node, stream, line)

    def _is_held_back(self, node: str, line: bytes) -> bool:
        level = level_of(line)
        if level is None:
            return line.startswith(b"    ") and node in self._hidden
        if level < self._shown_from:
            self._hidden.add(node)
            return True
        self._hidden.discard(node)
        return False
