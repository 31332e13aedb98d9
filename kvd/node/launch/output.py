"""The output of a job's processes: handed to a sink piece by piece, with the name of its node.

A piece is a line with its end, ``\\n`` or ``\\r``, or a part of a line: of a very long one, or of one that the process
has begun and waits with, as prompts and progress bars do. A ``\\r`` that stands before text is a part of that piece, so
that nothing else is written between the two.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import IO, Final, Literal

MAX_LINE: Final = 64 * 1024
"""Bytes of a line that are held back until its end comes; a longer line is handed on in pieces."""

QUIET_S: Final = 0.05
"""Silence after which the output of a process is handed on: what it writes at once stays together."""

PASS_ON_S: Final = 0.15
"""How long output is held back at most, unless it is in the middle of a traceback."""

TRACEBACK_S: Final = 1.0
"""Silence after which even a traceback without an end is handed on."""

MAX_HELD_S: Final = 5.0
"""How long output is held back at most, even in the middle of a traceback."""

_READ_BYTES: Final = 64 * 1024
_END: Final = re.compile(rb"\r?\n|(?<=[^\r\n])\r(?=[^\n])")
_HEADER: Final = b"Traceback (most recent call last):"
_CHAINS: Final = (b"During handling of the above exception, ", b"The above exception was the direct cause ")
_ESCAPE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*)?\Z")
_MOST_ESCAPE: Final = 32

Stream = Literal["stdout", "stderr"]
Sink = Callable[[str, Stream, bytes], None]
"""Takes one piece of a node's output. Called from several threads. It may block, which slows the node down; an OSError
ends the job."""

SinkError = Callable[[Stream, OSError], None]
"""Called when the sink takes no more, from several threads."""


def say(sink: Sink, text: str) -> None:
    """Write a line of the launcher itself."""
    with contextlib.suppress(OSError):  # nobody reads it
        sink("launch", "stderr", text.encode() + b"\n")


class OutputRelay:
    """Hands the output of one process on, in a thread of its own, until its pipes end.

    Pieces that come within a short time are handed on together, and a traceback as a whole: the output of other
    processes comes before or after them.

    Args:
        name: the node id of the process.
        pipes: its streams.
        sink: takes the pieces.
        on_sink_error: called once per stream if the sink takes no more.
        turn: held while pieces are handed on that belong together. All relays of a job share it.
        shows_unfinished: whether the beginning of a line is handed on while its end has yet to come.
    """

    def __init__(
        self,
        name: str,
        pipes: Mapping[Stream, IO[bytes]],
        sink: Sink,
        on_sink_error: SinkError,
        turn: threading.Lock,
        *,
        shows_unfinished: bool = False,
    ) -> None:
        self._name = name
        self._pipes = pipes
        self._sink = sink
        self._on_sink_error = on_sink_error
        self._turn = turn
        self._shows_unfinished = shows_unfinished
        self._lines: dict[Stream, Lines] = {stream: Lines() for stream in pipes}
        self._held: list[tuple[Stream, bytes]] = []
        self._held_bytes = 0
        self._since: float | None = None  # when the first byte came that has to be handed on
        self._came_at = 0.0  # the last one
        self._broken: set[Stream] = set()
        self._thread = threading.Thread(target=self._relay, name=f"output of {name}", daemon=True)
        self._thread.start()

    def join(self, limit_s: float) -> bool:
        """Wait until the last piece is out, for `limit_s` seconds at most. Return whether it is.

        It is not if the reader has stopped reading.
        """
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _relay(self) -> None:
        streams = {pipe.fileno(): stream for stream, pipe in self._pipes.items()}
        poll = select.poll()
        for descriptor in streams:
            poll.register(descriptor, select.POLLIN)
        while streams:
            for descriptor, _ in poll.poll(self._wait_ms()):
                stream = streams[descriptor]
                data = os.read(descriptor, _READ_BYTES)
                if data:
                    self._take(stream, data)
                else:
                    poll.unregister(descriptor)
                    del streams[descriptor]
                    self._hold(stream, self._lines[stream].end())
            if self._wait_ms() == 0:
                self._hand_on()
        self._hand_on()
        for pipe in self._pipes.values():
            pipe.close()

    def _take(self, stream: Stream, data: bytes) -> None:
        self._came_at = time.monotonic()
        if self._since is None:
            self._since = self._came_at
        self._lines[stream] = lines = self._lines.pop(stream)  # what came last is handed on last
        for piece in lines.feed(data):
            self._hold(stream, piece)

    def _hold(self, stream: Stream, piece: bytes) -> None:
        if piece:
            if self._since is None:
                self._since = time.monotonic()  # the end of a line that was handed on
            self._held.append((stream, piece))
            self._held_bytes += len(piece)

    def _wait_ms(self) -> float | None:
        """How long to wait for more output before what is held is handed on; None: nothing is."""
        unfinished = self._shows_unfinished and any(lines.has_beginning for lines in self._lines.values())
        if self._since is None or not (self._held or unfinished):
            return None
        if self._held_bytes >= MAX_LINE:
            return 0
        if any(lines.in_traceback for lines in self._lines.values()):
            until = min(self._came_at + TRACEBACK_S, self._since + MAX_HELD_S)
        else:
            until = min(self._came_at + QUIET_S, self._since + PASS_ON_S)
        return max(0.0, until - time.monotonic()) * 1000

    def _hand_on(self) -> None:
        if self._shows_unfinished:
            for stream, lines in self._lines.items():
                self._hold(stream, lines.take_beginning())
        held, self._held, self._held_bytes, self._since = self._held, [], 0, None
        with self._turn:
            for stream, piece in held:
                if stream in self._broken:
                    continue  # it is read on all the same: a node must not stop because nobody listens
                try:
                    self._sink(self._name, stream, piece)
                except OSError as error:
                    self._broken.add(stream)
                    self._on_sink_error(stream, error)


class _Part(Enum):
    """Where a stream is with regard to tracebacks of Python."""

    OUTSIDE = "outside"
    FRAMES = "frames"  # after its first line
    AFTER = "after"  # after its last line: another one may follow, if that was raised in the handling of the first
    BETWEEN = "between"  # the line that announces the next one was seen


class Lines:
    """The lines of one stream, cut from what was read of it."""

    def __init__(self) -> None:
        self._rest = b""  # of the last line, as far as it was not given out
        self._begun = b""  # the beginning of that line, as far as it was
        self._part = _Part.OUTSIDE

    @property
    def in_traceback(self) -> bool:
        """Whether the next line belongs to the same traceback as the last one."""
        return self._part in (_Part.FRAMES, _Part.BETWEEN)

    @property
    def has_beginning(self) -> bool:
        """Whether `take_beginning` returns something."""
        return _whole(self._rest) > 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces that are complete with this data: lines, and parts of lines that are very long."""
        text, begin = self._rest + data, 0
        pieces: list[bytes] = []
        for match in _END.finditer(text):
            line, begin = text[begin : match.end()], match.end()
            pieces += _parts(line)
            self._note(line)
        self._rest = text[begin:]
        while len(self._rest) > MAX_LINE:
            cut = _whole(self._rest[:MAX_LINE]) or MAX_LINE
            pieces.append(self._give(cut))
        return pieces

    def take_beginning(self) -> bytes:
        """Return what there is of a line without an end. Characters and escape sequences are not cut."""
        return self._give(_whole(self._rest))

    def end(self) -> bytes:
        """Return the rest at the end of the stream. It ends its line, if one was begun."""
        return self._rest + b"\n" if self._rest or self._begun else b""

    def _give(self, size: int) -> bytes:
        piece, self._rest = self._rest[:size], self._rest[size:]
        self._begun = (self._begun + piece)[: len(_HEADER) + 64]
        return piece

    def _note(self, piece: bytes) -> None:
        """Note a complete line."""
        line, self._begun = self._begun + piece, b""
        if piece.endswith(b"\r"):
            self._begun = b"\r"  # the line is not left: its text is overwritten
            return
        line = line.rstrip()
        if line.endswith(_HEADER):
            self._part = _Part.FRAMES
        elif self._part is _Part.FRAMES and line[:1] not in (b" ", b"\t", b""):
            self._part = _Part.AFTER
        elif self._part is _Part.AFTER and line:
            self._part = _Part.BETWEEN if line.startswith(_CHAINS) else _Part.OUTSIDE
        elif self._part is _Part.BETWEEN and line:
            self._part = _Part.OUTSIDE


def _parts(line: bytes) -> list[bytes]:
    return [line[begin : begin + MAX_LINE] for begin in range(0, len(line), MAX_LINE)]


def _whole(text: bytes) -> int:
    """Return how many bytes of a text end before a character, an escape sequence or a ``\\r\\n`` that is cut."""
    size = len(text.rstrip(b"\r"))
    for back in range(1, min(4, size + 1)):
        byte = text[size - back]
        if byte >= 0xC0:  # the first byte of a character
            if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4):
                size -= back
            break
        if byte < 0x80:
            break
    escape = text.rfind(b"\x1b", max(0, size - _MOST_ESCAPE), size)
    return escape if escape >= 0 and _ESCAPE.match(text, escape, size) else size
