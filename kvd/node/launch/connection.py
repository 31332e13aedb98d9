"""The connection to one process on another host: what goes in through stdin, and what comes out first."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import IO, Final

from kvd.node.launch.output import Sink, Stream
from kvd.node.remote import ALIVE, GREETING

ALIVE_EVERY_S: Final = 5.0


class Lifeline:
    """Writes the order, signs of life and commands to a pipe, in a thread of its own: the pipe may be full."""

    def __init__(self, pipe: IO[bytes], order: bytes) -> None:
        self._pipe = pipe
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._queue.put(order)
        threading.Thread(target=self._write, name="lifeline", daemon=True).start()

    def send(self, command: bytes) -> None:
        """Send a command, unless the connection has ended."""
        self._queue.put(command)

    def close(self) -> None:
        """End the connection, if it has not ended."""
        self._queue.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._pipe:  # the other side has ended
            while (data := self._next()) is not None:
                self._pipe.write(data)
                self._pipe.flush()

    def _next(self) -> bytes | None:
        try:
            return self._queue.get(timeout=ALIVE_EVERY_S)
        except queue.Empty:
            return ALIVE


class Greeted:
    """A sink for the output of a process on another host, which begins with a greeting.

    What comes on stdout before that is the login shell's; it goes to stderr, where it tells why no greeting came.
    """

    def __init__(self, sink: Sink, on_greeting: Callable[[], object]) -> None:
        self._sink = sink
        self._on_greeting = on_greeting
        self._was_greeted = False

    def write(self, node: str, stream: Stream, line: bytes) -> None:
        """Take one line.

        Raises:
            OSError: the sink takes no more.
        """
        if stream == "stderr" or self._was_greeted:
            self._sink(node, stream, line)
        elif line.endswith(GREETING):  # the shell may have left a line without an end
            self._was_greeted = True
            self._on_greeting()
        else:
            self._sink(node, "stderr", line)
