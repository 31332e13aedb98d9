"""Rows of tables that a worker reads for a snapshot, and puts into a new table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.optimizer import SGD, Adam
from kvd.protocol.messages import (
    Capture,
    Captured,
    CaptureDone,
    CaptureWhen,
    Done,
    ErrorCode,
    FetchCaptured,
    FetchState,
    Refused,
    SliceId,
    State,
    StoreState,
    Values,
)
from kvd.tables.stored_rows import StoredRows, page_of
from kvd.tables.wire import table_of_spec
from tests.core.replica_harness import A, B, Cluster
from tests.core.test_copies_of_tables import TABLE, WIDTH, after, both_push, drawn, make, read, with_table
from tests.core.test_promotion import OTHERS
from tests.core.test_records import ALONE, HELD


def memory(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def some_rows(first: int, count: int, updates: int = 7) -> StoredRows:
    ids = np.arange(first, first + count)
    rows = np.random.default_rng(abs(first)).standard_normal((count, WIDTH)).astype(np.float32)
    return StoredRows(ids, rows, {"momentum": rows + 1}, updates)


def store(run: Cluster, stored: StoredRows, *, request: int = 0, creation: int = 0) -> Any:
    payload = stored.to_bytes(memory).tobytes()
    return run.say(0, StoreState(request or run.request(), "t", 0, 0, (), creation), payload)[-1]


def fetch(run: Cluster, first: int = 0, key: str = "t", at: int = A) -> Any:
    """A page, or what else the server says."""
    before = len(run.answers)
    run.say(0, FetchState(run.request(), key, 0, first), at=at)
    _, message, payload = run.answers[before]
    if not isinstance(message, State):
        return message
    return page_of(np.frombuffer(payload, np.uint8), table_of_spec(TABLE), key)


def test_rows_are_stored_here_and_at_the_backup() -> None:
    run = with_table(HELD, SGD(0.5, momentum=0.5))
    for first in (0, 50, 100):
        assert store(run, some_rows(first, 50)) == Done(run._request)
        assert run.picture(A) == run.picture(B)
    page = fetch(run)
    assert page.stored.ids.tolist() == list(range(150))
    assert page.stored.updates == 7
    rows = read(run, 0)
    for first in (0, 50, 100):
        np.testing.assert_array_equal(rows[first : first + 50], some_rows(first, 50).rows)
        np.testing.assert_array_equal(page.stored.slots["momentum"][first : first + 50], some_rows(first, 50).rows + 1)
    assert (rows[150:] == 0.5).all()
    both_push(run, 1)
    assert run.picture(A) == run.picture(B)
    np.testing.assert_array_equal(read(run, 0), rows)  # the version before is still there
    newest = read(run, 1)
    run.kill(A)
    run.look([(B, -1, -1), *OTHERS])
    np.testing.assert_array_equal(read(run, 1, at=B), newest)


def test_a_new_backup_is_sent_what_was_stored() -> None:
    run = with_table(ALONE, Adam(0.1))
    store(run, some_rows(0, 50))
    run.look([(A, -1, B), *OTHERS])
    run.settle()
    assert run.picture(A) == run.picture(B)
    assert len(run.picture(B)["slices"]["t", 0]["state"][2]) > 0


def test_the_same_request_stores_once_and_a_successor_stores_again() -> None:
    run = with_table(HELD, None)
    request = run.request()
    assert store(run, some_rows(0, 5), request=request) == Done(request)
    version = run.nodes[A].table.slices["t", 0].log.current
    assert store(run, some_rows(0, 5), request=request) == Done(request)
    assert run.nodes[A].table.slices["t", 0].log.current == version
    assert store(run, some_rows(0, 5)) == Done(run._request)
    assert run.picture(A) == run.picture(B)
    np.testing.assert_array_equal(fetch(run).stored.rows, some_rows(0, 5).rows)


def test_pages_say_how_many_rows_come_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.slice_states.PAGE_NBYTES", 200)
    run = with_table(HELD, None)
    store(run, some_rows(0, 50))
    found, first, left = [], 0, 1
    while left:
        page = fetch(run, first)
        found += page.stored.ids.tolist()
        first, left = len(found), page.rows_after
        assert first + left == 50
    assert found == list(range(50))
    assert len(fetch(run, 50).stored.ids) == 0
    assert len(fetch(run, 1 << 40).stored.ids) == 0


def refusal(answer: Any) -> tuple[ErrorCode, str]:
    assert isinstance(answer, Refused), answer
    return answer.error, answer.text


def test_rows_are_refused_where_they_would_undo_a_push() -> None:
    run = with_table(HELD, SGD(0.5))
    both_push(run, 1)
    before = read(run, 1)
    error, text = refusal(store(run, some_rows(0, 5)))
    assert error == ErrorCode.NOT_ALLOWED
    assert "table 't' was pushed to: rows are stored in a new table, as restore makes it" in text
    np.testing.assert_array_equal(read(run, 1), before)
    assert refusal(store(run, some_rows(0, 5), creation=3))[0] == ErrorCode.KEY_NOT_FOUND


def test_rows_that_came_while_the_first_push_was_applied_do_not_undo_it() -> None:
    run = with_table(ALONE, SGD(0.5))
    node = run.nodes[A]
    node.holds_jobs = True
    both_push(run, 1)
    before = len(run.answers)
    ids, _ = drawn(0, 1)
    run.say(0, StoreState(run.request(), "t", 0, 0, ()), some_rows(int(ids[0]), 5).to_bytes(memory).tobytes())
    run.finish(node)
    (refused,) = [message for _, message, _ in run.answers[before:] if isinstance(message, Refused)]
    assert (refused.request, refused.error) == (run._request, ErrorCode.NOT_ALLOWED)
    assert "table 't' was pushed to: rows are stored in a new table, as restore makes it" in refused.text
    node.holds_jobs = False
    np.testing.assert_array_equal(read(run, 1), after(1))
    both_push(run, 2)
    np.testing.assert_array_equal(read(run, 2), after(2))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage!",
        bytes(64),
        some_rows(0, 5).to_bytes(memory).tobytes()[:-8],
        some_rows(0, 5).to_bytes(memory).tobytes() + bytes(8),
        some_rows(998, 5).to_bytes(memory).tobytes(),
        some_rows(-2, 5).to_bytes(memory).tobytes(),
        some_rows(0, 5)._replace(ids=np.array([1, 1, 2, 3, 4])).to_bytes(memory).tobytes(),
        some_rows(0, 5)._replace(updates=-1).to_bytes(memory).tobytes(),
        some_rows(0, 5)._replace(rows=np.zeros((5, WIDTH + 1), np.float32)).to_bytes(memory).tobytes(),
    ],
)
def test_what_is_no_rows_is_refused_and_changes_nothing(payload: bytes) -> None:
    run = with_table(HELD, SGD(0.5))
    answer = run.say(0, StoreState(run.request(), "t", 0, 0, ()), payload)[-1]
    assert refusal(answer)[0] == ErrorCode.PROTOCOL_ERROR
    assert len(fetch(run).stored.ids) == 0
    both_push(run, 1)
    assert run.picture(A) == run.picture(B)


def test_a_server_without_memory_for_the_rows_refuses_them() -> None:
    run = with_table(ALONE, None, memory=(1 << 17, 1 << 30, 1 << 30))
    error, text = refusal(
        store(run, some_rows(0, 900)._replace(slots={str(n): np.zeros((900, 9), np.float32) for n in range(9)}))
    )
    assert error == ErrorCode.NOT_ALLOWED
    assert "has no memory for these rows of table 't'" in text
    assert len(fetch(run).stored.ids) == 0


def test_captured_rows_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.captured.PAGE_NBYTES", 200)
    run = with_table(HELD, SGD(0.5))
    both_push(run, 1)
    before = read(run, 1)
    said = run.say(0, Capture(run.request(), 1, 1, CaptureWhen.AS_IT_IS, (SliceId("t", 0),)))
    assert isinstance(said[-1], Captured)
    assert run.nodes[A].machine._timed.captures.kept_nbytes > 0
    both_push(run, 2)
    found, first, left = np.full((1000, WIDTH), np.float32(0.5)), 0, 1
    while left:
        place = len(run.answers)
        run.say(0, FetchCaptured(run.request(), 1, (SliceId("t", 0),), first))
        _, message, payload = run.answers[place]
        assert isinstance(message, Values)
        page = page_of(np.frombuffer(payload, np.uint8), table_of_spec(TABLE), "t")
        found[page.stored.ids] = page.stored.rows
        first, left = first + len(page.stored.ids), page.rows_after
    assert first > 5
    np.testing.assert_array_equal(found, before)
    twice = run.say(0, FetchCaptured(run.request(), 1, (SliceId("t", 0), SliceId("t", 0))))
    assert refusal(twice[-1]) == (ErrorCode.PROTOCOL_ERROR, "the rows of a table are fetched one part at a time")
    run.say(0, CaptureDone(run.request(), 1))
    assert run.nodes[A].machine._timed.captures.kept_nbytes == 0


def test_other_keys_are_asked_as_before() -> None:
    run = with_table(HELD, SGD(0.5, momentum=0.5))
    make(run, "u")
    run.create("w", np.zeros(3, np.float32))
    before = len(run.answers)
    run.say(0, FetchState(run.request(), "w", 0))
    assert isinstance(run.answers[before][1], State)
    assert len(fetch(run, key="u").stored.ids) == 0
