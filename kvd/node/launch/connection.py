"""The connection to one process on another host: what goes in through stdin, and what comes out first."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import IO, Final

from kvd.node.launch.output import MAX_LINE, Sink, Stream
from kvd.node.remote import ALIVE, GREETING, INPUT, INPUT_SIZE_BYTES

ALIVE_EVERY_S: Final = 5.0

MOST_INPUTS: Final = 4
"""Pieces of stdin that are on their way to a process at a time. Commands follow them."""


class Lifeline:
    """Writes the order, signs of life, commands and stdin to a pipe, in a thread of its own: the pipe may be full."""

    def __init__(self, pipe: IO[bytes], order: bytes) -> None:
        self._pipe = pipe
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._queue.put(order)
        self._changed = threading.Condition()
        self._inputs = 0  # pieces of stdin on their way
        self._has_ended = False
        threading.Thread(target=self._write, name="lifeline", daemon=True).start()

    def send(self, command: bytes) -> None:
        """Send a command, unless the connection has ended."""
        self._queue.put(command)

    def send_input(self, data: bytes) -> None:
        """Send a piece of stdin, empty at its end. Wait while earlier ones are on their way.

        Raises:
            BrokenPipeError: the connection has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._inputs < MOST_INPUTS)
            if self._has_ended:
                raise BrokenPipeError
            self._inputs += 1
        self._queue.put(INPUT + len(data).to_bytes(INPUT_SIZE_BYTES, "big") + data)

    def close(self) -> None:
        """End the connection, if it has not ended."""
        self._queue.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._pipe:  # the other side has ended
            while (data := self._next()) is not None:
                self._pipe.write(data)
                self._pipe.flush()
                if data.startswith(INPUT):
                    self._note(inputs=-1)
        self._note(has_ended=True)

    def _note(self, *, inputs: int = 0, has_ended: bool = False) -> None:
        with self._changed:
            self._inputs += inputs
            self._has_ended |= has_ended
            self._changed.notify_all()

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
        self._line = b""  # before the greeting, as far as it has come

    def write(self, node: str, stream: Stream, piece: bytes) -> None:
        """Take one piece.

        Raises:
            OSError: the sink takes no more.
        """
        if stream == "stderr" or self._was_greeted:
            self._sink(node, stream, piece)
            return
        self._line += piece
        if self._line.endswith(GREETING + b"\n"):  # the shell may have left a line without an end
            self._was_greeted = True
            self._on_greeting()
        elif piece.endswith((b"\n", b"\r")) or len(self._line) >= MAX_LINE:
            self._sink(node, "stderr", self._line)
            self._line = b""
