"""Messages with arbitrary field values, fast and by seed: for runs of millions, where hypothesis is too slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from random import Random
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from kvd.protocol import messages
from kvd.protocol.messages import BIGGEST, Limit, Message
from kvd.protocol.specs import ANY_ROW, DTYPES, MERGES, Initial, KeySpec, TableSpec

KINDS: tuple[type[Any], ...] = get_args(Message)
NUMBERS = (0, 1, 2, 3, 4, 7, 63, 64, 4095, 4096, 1 << 31, 1 << 32, BIGGEST - 1, BIGGEST)
TEXTS = (
    "a",
    "b",
    "w",
    "worker",
    "server",
    "observer",
    "sync",
    "async",
    "sum",
    "mean",
    "tcp://h:1",
    "default",
    "kvd:exit",
)
LETTERS = "abwé \0%@:/\n\u2028\U0001f600"
SPECS = [KeySpec(dtype, shape, 4096) for dtype in sorted(DTYPES) for shape in ((), (1,), (2, 3), (1500,), (0, 4))]
SPECS += [KeySpec(dtype, (2, 3), 4096, merge) for dtype in ("float32", "int64") for merge in MERGES]
SPECS += [
    KeySpec(dtype, shape, 4096, "", TableSpec(rows, initial, parts))
    for dtype, shape in (("float32", (3,)), ("float64", ()))
    for rows, initial, parts in (
        (95, Initial("Constant", (3.0,)), 2),
        (ANY_ROW, Initial("Normal", (0.5,), 7), 1),
        (0, Initial("Ones", (1.0,) * 4), 200),
    )
]


def _fields_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind, vars(messages), include_extras=True)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    return tuple((name, hints[name]) for name in names)


_FIELDS: dict[type[Any], tuple[tuple[str, Any], ...]] = {kind: _fields_of(kind) for kind in KINDS}


def fields_of(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Name and annotation of each field of a message, or of a record within one."""
    if kind not in _FIELDS:
        _FIELDS[kind] = _fields_of(kind)
    return _FIELDS[kind]


def limit_of(annotation: Any) -> tuple[Any, Limit | None]:
    """The annotation without its mark, and the limit that it sets; None for plain data."""
    if get_origin(annotation) is not Annotated:
        return annotation, Limit(0, BIGGEST)
    inner, mark = get_args(annotation)
    return inner, mark if isinstance(mark, Limit) else None


class Maker:
    """Values that the annotations of messages allow; their ends, and values that mean something, come often.

    Args:
        random: where all choices come from.
        numbers, texts: values that mean something to the receiver, such as ranks, incarnations, clocks and keys.
    """

    def __init__(self, random: Random, numbers: Sequence[int] = NUMBERS, texts: Sequence[str] = TEXTS) -> None:
        self.random = random
        self._numbers = numbers
        self._texts = texts

    def message(self, kinds: Sequence[type[Any]] = KINDS, **given: Any) -> Any:
        """A message of one of these kinds; `given` are fields that it gets if it has them."""
        kind = self.random.choice(kinds)
        return self.record(kind, **given)

    def record(self, kind: type[Any], **given: Any) -> Any:
        return kind(*[given[name] if name in given else self.value(hint) for name, hint in fields_of(kind)])

    def value(self, annotation: Any) -> Any:
        annotation, limit = limit_of(annotation)
        if limit is None:
            return self.plain()
        simple = self._simple.get(annotation)
        if simple is not None:
            return simple(self, limit)
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            return self.random.choice(list(annotation))
        if isinstance(annotation, UnionType):
            return None if self.random.random() < 0.5 else self.value(get_args(annotation)[0])
        if get_origin(annotation) is tuple:
            inner = get_args(annotation)
            if inner[-1] is Ellipsis:
                return tuple(self.value(inner[0]) for _ in range(self._count(limit)))
            return tuple(self.value(entry) for entry in inner)
        return self.record(annotation)

    def number(self, limit: Limit) -> int:
        chance = self.random.random()
        if chance < 0.75:
            number = self.random.choice(self._numbers)
            if limit.low <= number <= limit.high:
                return number
        return self.random.choice(limit) if chance < 0.9 else self.random.randint(limit.low, limit.high)

    def text(self, limit: Limit) -> str:
        chance = self.random.random()
        if chance < 0.8:
            text = self.random.choice(self._texts)
            if limit.low <= len(text) <= limit.high:
                return text
        if chance < 0.85:
            return "x" * self.random.choice(limit)
        return "".join(self.random.choices(LETTERS, k=min(limit.high, limit.low + self.random.randrange(9))))

    def plain(self, depth: int = 0) -> object:
        """What msgpack can say, wrong numbers and bytes among it."""
        choice = self.random.randrange(12 if depth < 3 else 9)
        if choice < 9:
            return self._plain[choice](self.random)
        inner = [self.plain(depth + 1) for _ in range(self.random.randrange(5))]
        return inner if choice < 11 else {self.text(Limit(0, 9)): entry for entry in inner}

    def _count(self, limit: Limit) -> int:
        if self.random.random() < 0.01:
            return min(limit.high, 300)
        return min(limit.high, limit.low + self.random.choice((0, 0, 1, 1, 2, 3)))

    _simple: dict[Any, Callable[[Maker, Limit], Any]] = {  # noqa: RUF012  never changed
        int: number,
        str: text,
        bool: lambda self, _: self.random.random() < 0.5,
        float: lambda self, _: self.random.choice((0.0, -1.0, 0.5, 1e308, 5e-324)),
        KeySpec: lambda self, _: self.random.choice(SPECS),
    }
    _plain: tuple[Callable[[Random], object], ...] = (
        lambda random: random.choice(NUMBERS),
        lambda random: random.choice((-1, 1 << 63, (1 << 64) - 1, -(1 << 63))),
        lambda random: None,
        lambda random: True,
        lambda random: random.choice((0.5, float("nan"), float("inf"))),
        lambda random: random.randbytes(5),
        lambda random: "x" * random.choice((0, 1, 64, 201, 1001)),
        lambda random: random.choice(("SGD", "name", "learning_rate", "momentum")),
        lambda random: [],
    )
