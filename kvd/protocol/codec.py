"""Codec of messages to bytes and back.

A header is one msgpack list: version, kind, sender, generation, change, run, then the message's fields. Decoding is
total: any bytes either give a message within every limit of `kvd.protocol.messages`, or raise ProtocolError. The checks
are built once, at import, from the annotations of the messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from enum import Enum
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack

from kvd.errors import ProtocolError
from kvd.protocol import messages
from kvd.protocol.envelope import VERSION, Decoded
from kvd.protocol.fixed import PUSH_NBYTES, read_push, write_push, write_values
from kvd.protocol.messages import (
    BIGGEST,
    MAX_MEMBERS,
    MAX_TEXT_CHARS,
    MOST_COUNTED,
    NO_RUN,
    Epoch,
    Limit,
    Message,
    NotYet,
    PushBatch,
    Refused,
    Values,
)
from kvd.protocol.specs import (
    ANY_ROW,
    DTYPES,
    MAX_DIMENSIONS,
    MAX_KEPT_BYTES,
    MAX_KEY_CHARS,
    MAX_KEY_NBYTES,
    MAX_ROW_BYTES,
    MAX_SLICE_BYTES,
    MAX_TABLE_PARTS,
    MAX_UPDATES,
    MERGES,
    MIN_SLICE_BYTES,
    TABLE_DTYPES,
    Initial,
    Keeping,
    KeySpec,
    TableSpec,
)

MAX_HEADER_BYTES = 64 << 10
_WALKED_FROM_BYTES = 512  # shorter headers cannot promise enough entries to do harm
_ENVELOPE = 6  # entries before the message's own fields

Check = Callable[[object], object]


def encode(message: Message, sender: int, epoch: Epoch, run: int = NO_RUN) -> bytes:
    """Return the header of `message`; `epoch` is that of the run's view.

    Raises ProtocolError if it is longer than MAX_HEADER_BYTES.
    """
    kind = type(message)
    write_fixed = _FIXED.get(kind)
    fixed = None if write_fixed is None else write_fixed(message, sender, epoch, run)
    if fixed is not None:
        return fixed
    if isinstance(message, Refused):
        message = replace(message, text=_shortened(message.text), nodes=message.nodes[:MAX_MEMBERS])
    elif isinstance(message, NotYet):
        message = replace(message, text=_shortened(message.text))
    body = [VERSION, kind.KIND, sender, epoch[0], epoch[1], run, *_FIELDS[kind.KIND](message)]
    header: bytes = msgpack.packb(body, default=_plain_form)
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a {kind.__name__} of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    return header


def decode(header: bytes | memoryview) -> Decoded:
    """Return the message in `header`. Raises ProtocolError, which says what is wrong with it."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    if len(header) == PUSH_NBYTES and (push := read_push(header)) is not None:
        return push
    try:
        if len(header) > _WALKED_FROM_BYTES:
            _walk(header)
        body = msgpack.unpackb(header, use_list=True, strict_map_key=True, max_ext_len=0)
    except Exception as error:  # noqa: BLE001  msgpack raises many kinds, also for deep nesting
        raise ProtocolError(f"not a msgpack header: {type(error).__name__}") from None
    if type(body) is not list or len(body) < _ENVELOPE:
        raise ProtocolError(f"a header is a msgpack list of at least {_ENVELOPE} entries")
    version, kind, sender, generation, change, run = body[:_ENVELOPE]
    if version != VERSION or type(version) is not int:
        raise ProtocolError(
            f"protocol version {_short(version)}, this node speaks {VERSION}: run the same kvd version on every node"
        )
    if not (
        type(kind) is type(sender) is type(generation) is type(change) is type(run) is int
        and 0 <= kind <= BIGGEST
        and 0 <= sender <= BIGGEST
        and 0 <= generation <= BIGGEST
        and 0 <= change <= BIGGEST
        and 0 <= run <= BIGGEST
    ):
        raise ProtocolError(f"kind, sender, view and run are whole numbers from 0 to {BIGGEST}")
    build = _BUILDERS.get(kind)
    if build is None:
        raise ProtocolError(f"no message has kind {kind}")
    return Decoded(sender, Epoch(generation, change), build(body), run)


def _walk(header: bytes | memoryview) -> None:
    """Raise an error of msgpack if the header ends too early. Nothing is built: `unpackb` makes room for all entries
    that a list promises before it reads one, and a thousand nested promises in 4 KiB would take 33 MB and 25 ms."""
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_HEADER_BYTES)
    unpacker.feed(header)
    unpacker.skip()


def _short(value: object) -> str:
    """Return the value in a few characters. Lists are not shown: they may be nested deeper than repr can go."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _shortened(text: str) -> str:
    """Return the text within its limit, which long names in it may exceed."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


# ── the checks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(limit: Limit) -> Check:
    low, high = limit

    def check(value: object) -> object:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"expected a whole number from {low} to {high}, got {_short(value)}")
        return value

    return check


def _text(limit: Limit) -> Check:
    low, high = limit

    def check(value: object) -> object:
        if type(value) is not str or not low <= len(value) <= high:
            raise ProtocolError(f"expected a text of {low} to {high} characters, got {_short(value)}")
        return value

    return check


def _flag(value: object) -> object:
    if type(value) is not bool:
        raise ProtocolError(f"expected true or false, got {_short(value)}")
    return value


def _real(value: object) -> object:
    if type(value) not in (float, int) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ProtocolError(f"expected a finite number, got {_short(value)}")
    return float(value)  # type: ignore[arg-type]


def _plain(value: object) -> object:
    return value


def _list_of(item: Check, limit: Limit) -> Check:
    low, high = limit

    def check(value: object) -> object:
        if type(value) is not list or not low <= len(value) <= high:
            raise ProtocolError(f"expected a list of {low} to {high} entries, got {_short(value)}")
        return tuple([item(entry) for entry in value])

    return check


def _record_of(build: Callable[..., object], checks: list[Check]) -> Check:
    count = len(checks)

    def check(value: object) -> object:
        if type(value) is not list or len(value) != count:
            raise ProtocolError(f"expected a list of {count} entries, got {_short(value)}")
        return build(*[test(entry) for test, entry in zip(checks, value, strict=True)])

    return check


def _optional(check_value: Check) -> Check:
    def check(value: object) -> object:
        return None if value is None else check_value(value)

    return check


_table = _record_of(
    TableSpec,
    [
        _whole(Limit(ANY_ROW, MAX_KEY_NBYTES)),
        _record_of(Initial, [_text(Limit(1, 16)), _list_of(_real, Limit(0, 4)), _whole(Limit(0, BIGGEST))]),
        _whole(Limit(1, MAX_TABLE_PARTS)),
        _record_of(
            Keeping,
            [
                _whole(Limit(1, MAX_UPDATES)),
                _whole(Limit(0, MAX_UPDATES)),
                _whole(Limit(0, MAX_KEY_NBYTES)),
                _whole(Limit(0, MAX_KEPT_BYTES)),
                _flag,
            ],
        ),
    ],
)
_spec_fields = _record_of(
    KeySpec,
    [
        _text(Limit(1, 16)),
        _list_of(_whole(Limit(0, MAX_KEY_NBYTES)), Limit(0, MAX_DIMENSIONS)),
        _whole(Limit(MIN_SLICE_BYTES, MAX_SLICE_BYTES)),
        _text(Limit(0, 8)),
        _optional(_table),
        _flag,
    ],
)


def _spec(value: object) -> object:
    spec = _spec_fields(value)
    assert isinstance(spec, KeySpec)
    if spec.dtype not in DTYPES:
        raise ProtocolError(f"no dtype is called {_short(spec.dtype)}; there are {', '.join(DTYPES)}")
    if spec.merge and spec.merge not in MERGES:
        raise ProtocolError(f"no merge is called {_short(spec.merge)}; there are {', '.join(MERGES)}")
    if spec.nbytes > MAX_KEY_NBYTES or spec.slice_bytes % 64:
        raise ProtocolError(f"a key of at most {MAX_KEY_NBYTES} bytes in slices of a multiple of 64, got {spec}")
    if spec.table and (spec.dtype not in TABLE_DTYPES or not 0 < spec.row_nbytes <= MAX_ROW_BYTES):
        raise ProtocolError(
            f"a row of a table has 1 to {MAX_ROW_BYTES} bytes of {' or '.join(TABLE_DTYPES)}, got {spec}"
        )
    return spec


def _member_of(kind: type[Enum]) -> Check:
    members = {member.value: member for member in kind}
    accepted = ", ".join(repr(value) for value in members)

    def check(value: object) -> object:
        member = members.get(value) if type(value) in (int, str) else None
        if member is None:
            raise ProtocolError(f"expected one of {accepted}, got {_short(value)}")
        return member

    return check


def _plain_form(value: KeySpec | Enum) -> object:
    """Convert the values in messages that msgpack cannot write."""
    if isinstance(value, Enum):
        return value.value
    return [value.dtype, value.shape, value.slice_bytes, value.merge, value.table, value.gradients]


def check_for(annotation: Any) -> Check:
    """Return the check for a field's annotation. It gives the value for plain data, or raises ProtocolError."""
    limit = Limit(0, BIGGEST)
    if get_origin(annotation) is Annotated:
        annotation, mark = get_args(annotation)
        if not isinstance(mark, Limit):
            return _plain
        limit = mark
    if annotation is int:
        return _whole(limit)
    if annotation is str:
        return _text(limit)
    if annotation is bool:
        return _flag
    if annotation is float:
        return _real
    if annotation is KeySpec:
        return _spec
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _member_of(annotation)
    if isinstance(annotation, UnionType):
        kind, _none = get_args(annotation)
        return _optional(check_for(kind))
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            return _list_of(check_for(inner[0]), limit)
        return _record_of(lambda *entries: entries, [check_for(entry) for entry in inner])
    hints = get_type_hints(annotation, vars(messages), include_extras=True)
    return _record_of(annotation, [check_for(hints[name]) for name in annotation._fields])


def _part(value: object) -> object:
    """Return the check of a Part, written out because a header holds up to a thousand of them."""
    if type(value) is not list or len(value) != 4:
        raise ProtocolError(f"expected [key, index, clock, creation], got {_short(value)}")
    key, index, clock, creation = value
    if (
        type(key) is not str
        or not 0 < len(key) <= MAX_KEY_CHARS
        or type(index) is not int
        or not 0 <= index <= BIGGEST
        or type(clock) is not int
        or not -1 <= clock <= MOST_COUNTED
        or type(creation) is not int
        or not 0 <= creation <= MOST_COUNTED
    ):
        raise ProtocolError(f"expected [key, index, clock, creation], got {_short(value)}")
    return messages.Part(key, index, clock, creation)


def _fields_of(kind: type[Any]) -> Callable[[Message], Iterable[object]]:
    """Return a function that gives the values of a message's fields in order."""
    names = [field.name for field in fields(kind)]
    if len(names) == 1:
        return lambda message: (getattr(message, names[0]),)
    return attrgetter(*names)


def _limits_of(annotation: Any) -> Limit | None:
    """Return the limits of a whole number; None for another type."""
    if get_origin(annotation) is not Annotated:
        return Limit(0, BIGGEST) if annotation is int else None
    base, mark = get_args(annotation)
    return mark if base is int and isinstance(mark, Limit) else None


def _builder_of_numbers(kind: type[Any], limits: list[Limit | None]) -> Callable[[list[object]], Message]:
    """Return a builder for messages of whole numbers and flags (limits None), the most frequent ones.

    No call per number.
    """
    count = len(limits) + _ENVELOPE
    numbers = [(at, *limit) for at, limit in enumerate(limits, _ENVELOPE) if limit is not None]
    flags = [at for at, limit in enumerate(limits, _ENVELOPE) if limit is None]

    def build(body: list[object]) -> Message:
        if len(body) != count:
            raise ProtocolError(f"a {kind.__name__} has {count} entries, got {len(body)}")
        for at, low, high in numbers:
            value = body[at]
            if type(value) is not int or not low <= value <= high:
                raise ProtocolError(f"expected a whole number from {low} to {high}, got {_short(value)}")
        for at in flags:
            _flag(body[at])
        message: Message = kind(*body[_ENVELOPE:])
        return message

    return build


def _builder(kind: type[Any]) -> Callable[[list[object]], Message]:
    hints = get_type_hints(kind, vars(messages), include_extras=True)
    names = [field.name for field in fields(kind)]
    limits = [_limits_of(hints[name]) for name in names]
    if all(limit is not None or hints[name] is bool for name, limit in zip(names, limits, strict=True)):
        return _builder_of_numbers(kind, limits)
    checks = [_parts if hints[name] == messages.Parts else check_for(hints[name]) for name in names]
    count = len(checks) + _ENVELOPE

    def build(body: list[object]) -> Message:
        if len(body) != count:
            raise ProtocolError(f"a {kind.__name__} has {count} entries, got {len(body)}")
        message: Message = kind(*[test(entry) for test, entry in zip(checks, body[_ENVELOPE:], strict=True)])
        return message

    return build


_parts = _list_of(_part, Limit(1, messages.MAX_PARTS))
_KINDS: tuple[type[Any], ...] = get_args(Message)
_FIXED: dict[type[Any], Callable[[Any, int, Epoch, int], bytes | None]] = {PushBatch: write_push, Values: write_values}
_FIELDS: dict[int, Callable[[Message], Iterable[object]]] = {kind.KIND: _fields_of(kind) for kind in _KINDS}
_BUILDERS: dict[int, Callable[[list[object]], Message]] = {kind.KIND: _builder(kind) for kind in _KINDS}
