"""Safe stdout and stderr: open, able to encode every character, with clear errors.

The streams that a program starts with may be closed, full, or have an old encoding. `prepare` repairs them once, so
that no command has to.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """Output cannot be written: the disk is full, or the terminal is gone."""

    def __str__(self) -> str:
        return f"cannot write to stdout: {self.strerror}; make room, or redirect it"


def prepare() -> None:
    """Make the streams of this process usable. The program calls this before anything is written."""
    for descriptor in (0, 1, 2):
        _open(descriptor)  # else the next socket or file would get this number, and receive what is printed
    sys.stdout = _text(_Stdout, 1, sys.stdout)
    sys.stderr = _text(_Stderr, 2, sys.stderr)


def flush() -> None:
    """Write the rest of stdout now: if that failed when the interpreter ends, nobody could report it.

    Raises:
        BrokenPipeError: nobody reads it.
        OutputError: it cannot be written.
    """
    sys.stdout.flush()


def forget_stdout() -> None:
    """Point stdout at nothing: the rest of its buffer would raise again when the interpreter ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


class _Stdout(io.FileIO):
    """Stdout with errors that differ from all other errors of the system."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # without an errno, by which click would recognise it and exit with its own code
            raise BrokenPipeError("nobody reads stdout any more") from None
        except OSError as error:
            raise OutputError(0, error.strerror or str(error)) from None


class _Stderr(io.FileIO):
    """Stderr that never fails: there is no other place to report an error."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _open(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        nothing = os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
        if nothing == descriptor:
            os.set_inheritable(nothing, True)
        else:
            os.dup2(nothing, descriptor)
            os.close(nothing)


def _text(raw: Callable[..., io.FileIO], descriptor: int, old: TextIO | None) -> TextIO:
    """Return a stream like the interpreter's own, if there is one."""
    binary = raw(descriptor, "w", closefd=False)
    unbuffered = isinstance(old, io.TextIOWrapper) and old.write_through
    by_line = descriptor == 2 or unbuffered or binary.isatty()
    encoding = "utf-8" if old is None else old.encoding
    return io.TextIOWrapper(io.BufferedWriter(binary), encoding, "backslashreplace", line_buffering=by_line)
