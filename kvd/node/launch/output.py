"""The output of a job's processes: each line is handed to a sink, with the name of its node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import IO, Final, Literal

MAX_LINE: Final = 64 * 1024
"""Bytes of a line that are held back until its end comes; a longer line is handed on in pieces."""

Stream = Literal["stdout", "stderr"]
Sink = Callable[[str, Stream, bytes], None]
"""Takes one line (without its end) of a node's output. Called from several threads. It may block, which slows the node
down; an OSError ends the job."""

SinkError = Callable[[Stream, OSError], None]
"""Told when the sink takes no more. Called from several threads."""


def say(sink: Sink, text: str) -> None:
    """Write a line of the launcher itself."""
    with contextlib.suppress(OSError):  # nobody reads it
        sink("launch", "stderr", text.encode())


class OutputRelay:
    """Hands the pipes of one process on, each in a thread of its own, until they end."""

    def __init__(self, name: str, pipes: Mapping[Stream, IO[bytes]], sink: Sink, on_sink_error: SinkError) -> None:
        self._name = name
        self._sink = sink
        self._on_sink_error = on_sink_error
        self._threads = [
            threading.Thread(target=self._relay, args=(stream, pipe), daemon=True) for stream, pipe in pipes.items()
        ]
        for thread in self._threads:
            thread.start()

    def join(self, limit_s: float) -> bool:
        """Wait until the last lines are out, each stream's for `limit_s` seconds at most. Whether all of them are.

        Returns at the first stream that is stuck: its reader may have stopped reading.
        """
        for thread in self._threads:
            thread.join(limit_s)
            if thread.is_alive():
                return False
        return True

    def _relay(self, stream: Stream, pipe: IO[bytes]) -> None:
        broken = False
        with pipe:
            while line := pipe.readline(MAX_LINE):
                if broken:
                    continue  # keep reading: a node must not stop because nobody listens
                try:
                    self._sink(self._name, stream, line.removesuffix(b"\n"))
                except OSError as error:
                    broken = True
                    self._on_sink_error(stream, error)
