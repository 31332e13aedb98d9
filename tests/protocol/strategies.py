"""Strategies for every message, built from the annotations of its fields."""

from __future__ import annotations

import dataclasses
from enum import Enum
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from kvd.protocol import messages
from kvd.protocol.messages import BIGGEST, Limit, Message
from kvd.protocol.specs import (
    ANY_ROW,
    DTYPES,
    MAX_KEPT_BYTES,
    MAX_KEY_NBYTES,
    MAX_TABLE_PARTS,
    MAX_UPDATES,
    TABLE_DTYPES,
    Initial,
    Keeping,
    KeySpec,
    TableSpec,
)

KINDS: tuple[type[Any], ...] = get_args(Message)

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
_slice_bytes = st.integers(64, 1024).map(lambda blocks: blocks * 64)
_values = st.builds(
    KeySpec,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
    _slice_bytes,
    gradients=st.booleans(),
)
_initials = st.builds(
    Initial,
    st.sampled_from(["Zeros", "Normal", "x" * 16]),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4).map(tuple),
    st.sampled_from([0, 7, BIGGEST]),
)
_tables = st.builds(
    KeySpec,
    st.sampled_from(TABLE_DTYPES),
    st.lists(st.integers(1, 9), max_size=5).map(tuple),
    _slice_bytes,
    st.sampled_from(["", "mean"]),
    st.builds(
        TableSpec,
        st.sampled_from([ANY_ROW, 0, MAX_KEY_NBYTES]),
        _initials,
        st.sampled_from([1, 3, MAX_TABLE_PARTS]),
        st.just(Keeping())
        | st.builds(
            Keeping,
            st.sampled_from([1, 3, MAX_UPDATES]),
            st.sampled_from([0, MAX_UPDATES]),
            st.sampled_from([0, MAX_KEY_NBYTES]),
            st.sampled_from([0, 1, MAX_KEPT_BYTES]),
            st.booleans(),
        ),
    ),
)
_specs = _values | _tables


def numbers(limit: Limit) -> st.SearchStrategy[int]:
    return st.sampled_from([limit.low, limit.high]) | st.integers(limit.low, limit.high)


def strategy(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that an annotation of a field allows, both ends of its limits among them."""
    limit = Limit(0, BIGGEST)
    if get_origin(annotation) is Annotated:
        annotation, mark = get_args(annotation)
        if not isinstance(mark, Limit):
            return _plain
        limit = mark
    if annotation is int:
        return numbers(limit)
    if annotation is str:
        ends = st.sampled_from(["x" * limit.low, "x" * limit.high])
        some = _texts.filter(lambda text: limit.low <= len(text) <= limit.high)
        return ends | some
    if annotation is bool:
        return st.booleans()
    if annotation is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if annotation is KeySpec:
        return _specs
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    if isinstance(annotation, UnionType):
        return st.none() | strategy(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if inner[-1] is Ellipsis:
            count = min(limit.high, limit.low + 3)
            return st.lists(strategy(inner[0]), min_size=limit.low, max_size=count).map(tuple)
        return st.tuples(*[strategy(entry) for entry in inner])
    hints = get_type_hints(annotation, vars(messages), include_extras=True)
    return st.builds(annotation, *[strategy(hints[name]) for name in annotation._fields])


def messages_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, vars(messages), include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    return st.builds(kind, *[strategy(hints[name]) for name in names])


any_message = st.one_of([messages_of(kind) for kind in KINDS])
