"""Calls that were prepared take a limited amount of memory."""

from __future__ import annotations

from typing import Any

from kvd.client.cluster.small_frames import MOST_PREPARED, MOST_PREPARED_BYTES, PreparedCalls


def test_beyond_a_number_all_are_prepared_again() -> None:
    calls: Any = PreparedCalls()
    for number in range(MOST_PREPARED):
        calls.keep(str(number), number, 1)
    assert len(calls.by_key) == MOST_PREPARED
    calls.keep("one more", 7, 1)
    assert calls.by_key == {"one more": 7}


def test_beyond_some_memory_too() -> None:
    calls: Any = PreparedCalls()
    most = 128 << 10
    for number in range(MOST_PREPARED_BYTES // most):
        calls.keep(number, number, most)
    assert len(calls.by_key) == MOST_PREPARED_BYTES // most
    calls.keep("one more", 7, 1)
    assert calls.by_key == {"one more": 7}


def test_what_was_dropped_counts_until_all_are() -> None:
    calls: Any = PreparedCalls()
    for _ in range(2):
        calls.keep("a", 1, MOST_PREPARED_BYTES // 2)
        calls.drop("a")
    assert calls.by_key == {}
    calls.keep("b", 2, 1)
    calls.keep("c", 3, MOST_PREPARED_BYTES // 2)
    assert calls.by_key == {"b": 2, "c": 3}
