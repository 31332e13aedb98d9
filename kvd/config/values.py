"""Parsers and texts for each kind of setting.

Sizes are whole bytes, or numbers with ``KiB``, ``MiB``, ``GiB``, ``TiB`` (``8M`` is ``8MiB``: powers of 1024 only).
Durations are seconds, or numbers with ``ms``, ``s``, ``m``, ``h``. Whole numbers and sizes are read exactly, never
through a float, and fit a signed integer of 64 bits.

Each reader returns None for what it cannot read: its caller knows the setting and its origin, and raises.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

Kind = Literal["text", "boolean", "integer", "size", "duration"]
Value = str | int | float | bool | None

KiB: Final = 1 << 10
MiB: Final = 1 << 20

ACCEPTED: Final[Mapping[Kind, str]] = {
    "text": "text",
    "boolean": "true or false (also 1 0, yes no, on off)",
    "integer": "a whole number that fits 64 bits",
    "size": "a whole number of bytes that fits 64 bits, or a number with KiB, MiB or GiB, such as 512KiB",
    "duration": "seconds, or a number with ms, s, m or h, such as 500ms",
}
"""What each kind accepts, in words."""

_LIMIT: Final = 1 << 63
_INTEGER: Final = re.compile("[+-]?[0-9]{1,19}")  # _LIMIT has 19 digits
_SIZE: Final = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,19}))?\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_SIZE_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*(ms|s|m|h)?", re.IGNORECASE)
_BOOLEANS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def read_text(raw: object) -> str | None:
    """Read a text or a path. No text holds a zero byte."""
    text = os.fspath(raw) if isinstance(raw, os.PathLike) else raw
    return text.strip() if isinstance(text, str) and "\0" not in text else None


def read_boolean(raw: object) -> bool | None:
    """Read a boolean, or a word for one."""
    if isinstance(raw, bool):
        return raw
    return _BOOLEANS.get(raw.strip().lower()) if isinstance(raw, str) else None


def read_integer(raw: object) -> int | None:
    """Read a whole number exactly."""
    number = raw
    if isinstance(raw, str):
        text = raw.strip()
        number = int(text) if _INTEGER.fullmatch(text) else None
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if abs(number) < _LIMIT else None


def read_size(raw: object) -> int | None:
    """Read a number of bytes exactly. Fractions are accepted if they give whole bytes: ``0.5KiB``."""
    if not isinstance(raw, str):
        return read_integer(raw)
    match = _SIZE.fullmatch(raw.strip())
    if match is None:
        return None
    digits, decimals, unit = match[1], match[2] or "", (match[3] or "").upper()
    size, rest = divmod(int(digits + decimals) * _SIZE_UNITS[unit], 10 ** len(decimals))
    return size if rest == 0 and size < _LIMIT else None


def read_duration(raw: object) -> float | None:
    """Read a finite number of seconds."""
    if isinstance(raw, str):
        match = _DURATION.fullmatch(raw.strip())
        if match is None:
            return None
        number = float(match[1])
        unit = (match[2] or "s").lower()
        # 300 / 1000 is exactly the float 0.3; 300 * 0.001 need not be
        seconds = number / 1000 if unit == "ms" else number * {"s": 1, "m": 60, "h": 3600}[unit]
    elif isinstance(raw, int | float) and not isinstance(raw, bool):
        try:
            seconds = float(raw)
        except OverflowError:  # an integer beyond every float
            return None
    else:
        return None
    return seconds if math.isfinite(seconds) else None


READERS: Final[Mapping[Kind, Callable[[object], str | int | float | bool | None]]] = {
    "text": read_text,
    "boolean": read_boolean,
    "integer": read_integer,
    "size": read_size,
    "duration": read_duration,
}


def size_text(size: int) -> str:
    """Return the text of a size with the largest unit that divides it."""
    for suffix, unit in (("GiB", 1 << 30), ("MiB", MiB), ("KiB", KiB)):
        if size and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


def quoted(raw: object) -> str:
    """Return a value as an error quotes it: its repr, shortened."""
    if isinstance(raw, int) and abs(raw) >= _LIMIT:
        return f"an integer of {raw.bit_length()} bits"  # Python refuses to print the longest ones
    text = repr(raw)
    return text if len(text) <= 200 else f"{text[:200]}…"
