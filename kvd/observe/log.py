"""The log: text for a person at a terminal, one JSON object per line for everything else.

Code logs through the standard ``logging``; `event` adds fields. No value that is logged raises, breaks a line in two or
sends control characters to a terminal, however odd it is: many came from a socket.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TextIO

from kvd.config import terminal_colour

MAX_TEXT: Final = 8192
"""Characters of a message or a field that are kept."""

MAX_ITEMS: Final = 64
"""Items of a list or a mapping that are kept."""

_MAX_DEPTH: Final = 4
_RESERVED: Final = frozenset({"ts", "level", "node", "logger", "message", "exception", "traceback"})
_TEXT_LINE: Final = re.compile(rb"\d\d:\d\d:\d\d \S.{0,100}?  (?:(warning|error|critical): )?")
_DIM, _CYAN, _YELLOW, _RED, _PLAIN = "\x1b[2m", "\x1b[36m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def configure(
    format: str,  # noqa: A002 - the word of the setting
    level: str,
    role_name: str,
    stream: TextIO | None = None,
    *,
    colour: bool | None = None,
) -> None:
    """Send everything that is logged in this process to one stream. A second call replaces the first.

    Args:
        format: ``"text"``, ``"json"`` or ``"auto"``, which is text if the stream is a terminal.
        level: the lowest level that is written: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
        role_name: the name in each line, such as ``"server 1"``.
        stream: where it goes; ``None``: stderr.
        colour: whether text has colours; ``None``: if the stream is a terminal that shows them and ``NO_COLOR`` is not
            set.

    Raises:
        ValueError: there is no such format or level.
    """
    stream = sys.stderr if stream is None else stream
    if format not in ("auto", "text", "json"):
        raise ValueError(f"log format {format!r}: expected auto, text or json")
    root = logging.getLogger()
    root.setLevel(level.upper())
    handler = _Handler(stream)
    if format == "text" or (format == "auto" and stream.isatty()):
        handler.setFormatter(TextFormatter(role_name, terminal_colour(None, stream) if colour is None else colour))
    else:
        handler.setFormatter(JsonFormatter(role_name))
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)


def event(logger: logging.Logger, level: int, message: str, /, **fields: object) -> None:
    """Log a message with fields, such as ``event(log, logging.INFO, "joined", rank=1)``.

    The message is literal: a percent sign in it means itself.
    """
    logger.log(level, message, extra={"kvd": fields}, stacklevel=2)


def level_of(line: bytes) -> int | None:
    """Return the level of a line that `configure` wrote without colours, in either format; None: it is no such line.

    Text names no level below a warning: such a line counts as ``logging.INFO``.
    """
    if line.startswith(b'{"ts":'):
        try:
            name = json.loads(line)["level"]
        except (ValueError, KeyError, TypeError):
            return None
        return logging.getLevelNamesMapping().get(str(name).upper())
    match = _TEXT_LINE.match(line)
    if match is None:
        return None
    return logging.INFO if match[1] is None else logging.getLevelNamesMapping()[match[1].decode().upper()]


class Throttle:
    """Rate limit of warnings: one of each kind per interval; suppressed ones are counted.

    A peer that sends garbage must not fill the log, nor the memory with ever new kinds: beyond `max_keys` kinds, the
    one that was let through longest ago is forgotten.

    Attributes:
        total_swallowed: how many warnings of all kinds were swallowed so far.
    """

    def __init__(self, interval_s: float, *, max_keys: int = 1024) -> None:
        self.total_swallowed = 0
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()  # the one let through longest ago comes first

    def allow(self, now: float, key: str = "") -> bool:
        """Return whether a warning of the kind `key` may be written at the time `now` (seconds of any steady clock)."""
        kind = self._kinds.get(key)
        if kind is not None and now - kind.allowed_at < self._interval_s:
            kind.held_back += 1
            self.total_swallowed += 1
            return False
        self._kinds[key] = _Kind(now, 0 if kind is None else kind.held_back)
        self._kinds.move_to_end(key)
        if len(self._kinds) > self._max_keys:
            self._kinds.popitem(last=False)
        return True

    def swallowed(self, key: str = "") -> int:
        """Return the number of suppressed warnings of the kind `key` before the last written one."""
        kind = self._kinds.get(key)
        return 0 if kind is None else kind.held_back_before


class _Kind:
    """State of a `Throttle` for one kind of warning."""

    __slots__ = ("allowed_at", "held_back", "held_back_before")

    def __init__(self, allowed_at: float, held_back_before: int) -> None:
        self.allowed_at = allowed_at
        self.held_back = 0
        self.held_back_before = held_back_before


class JsonFormatter(logging.Formatter):
    """One JSON object per record, in ASCII: ``ts`` (UTC), ``level``, ``node``, ``logger``, ``message``, the fields.

    An exception adds ``exception`` (its type and text) and ``traceback``. A field that has one of these names gets an
    underscore at its end.
    """

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "ts": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "node": self._node,
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            line[f"{name}_" if name in _RESERVED else name] = _plain(value)
        if (error := _error(record)) is not None:
            line["exception"] = _text(error, prefix=f"{type(error).__name__}: ")
            line["traceback"] = _traceback(error)
        return json.dumps(line, separators=(",", ":"), allow_nan=False)


class TextFormatter(logging.Formatter):
    """``HH:MM:SS role  message key=value …``; warnings and errors name their level, a traceback follows indented."""

    def __init__(self, node: str, colour: bool) -> None:
        super().__init__()
        self._node = node
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line for a person."""
        moment = self._paint(_DIM, time.strftime("%H:%M:%S", time.localtime(record.created)))
        message = _printable(_message(record))
        if record.levelno >= logging.WARNING:
            tint = _YELLOW if record.levelno < logging.ERROR else _RED
            message = self._paint(tint, f"{record.levelname.lower()}: {message}")
        words = [f"{moment} {self._paint(_CYAN, self._node)}  {message}"]
        for name, value in _fields(record).items():
            words.append(f"{self._paint(_DIM, f'{_printable(name)}=')}{_word(value)}")
        text = " ".join(words)
        if (error := _error(record)) is not None:
            text += "".join(f"\n    {_printable(line)}" for line in _traceback(error).splitlines())
        return text

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colour else text


class _Handler(logging.StreamHandler[TextIO]):
    """Log handler that escapes unencodable text, and gives up silently when its stream is gone."""

    def format(self, record: logging.LogRecord) -> str:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return super().format(record).encode(encoding, "backslashreplace").decode(encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        pass


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()[:MAX_TEXT]
    except Exception:  # noqa: BLE001 - a message must not be lost because its arguments do not fit its format
        return f"{_text(record.msg)} {_text(record.args)}"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "kvd", None)
    if not isinstance(fields, Mapping):
        return {}
    return {_text(name): value for name, value in list(fields.items())[:MAX_ITEMS]}


def _traceback(error: BaseException) -> str:
    """Return the end of the traceback, which is more useful than its beginning."""
    try:
        return "".join(traceback.format_exception(error)).rstrip("\n")[-MAX_TEXT:]
    except Exception:  # noqa: BLE001 - a message must not be lost because its exception is broken
        return _text(error)


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _text(value: object, prefix: str = "") -> str:
    """Return the text of any value, cut to `MAX_TEXT` characters."""
    try:
        return f"{prefix}{value}"[:MAX_TEXT]
    except Exception:  # noqa: BLE001 - its __str__ may raise anything
        return f"{prefix}<{type(value).__name__} without text>"


def _plain(value: object, depth: int = 0) -> Any:
    """Return a value in a form that JSON can hold."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if depth < _MAX_DEPTH and type(value) is dict:
        return {_text(name): _plain(item, depth + 1) for name, item in list(value.items())[:MAX_ITEMS]}
    if depth < _MAX_DEPTH and type(value) in (list, tuple):
        return [_plain(item, depth + 1) for item in list(value)[:MAX_ITEMS]]  # type: ignore[call-overload]
    return _text(value)


def _word(value: object) -> str:
    """Return a value as one word of a line."""
    text = _printable(_text(value))
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=') else text


def _printable(text: str) -> str:
    """Return the text with line ends and escape sequences made visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
