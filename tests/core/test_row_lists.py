"""A server says which rows a part of a table has: when, to whom, and what it refuses."""

from __future__ import annotations

import pytest

from kvd.core.machine import Apply, Send, Span
from kvd.core.machine import ListRows as ListRowsJob
from kvd.core.server.row_lists import IDS_AT_ONCE
from kvd.errors import NotAllowed
from kvd.protocol.messages import ALL_ROWS, ErrorCode, ListRows, RowList
from tests.core.fake_tables import packed_ids
from tests.core.fakes import of, one
from tests.core.server_harness import refusal
from tests.core.tables_harness import push_rows, with_table


def test_a_page_of_row_ids() -> None:
    harness = with_table()
    effects = harness.say(0, ListRows(60, "t", 0, 4, 2, True))
    assert one(of(ListRowsJob, effects))[1:] == ("t", 0, 4, 2, True, IDS_AT_ONCE)
    send = one([send for send in of(Send, effects) if isinstance(send.message, RowList)])
    assert send.message == RowList(60, 5, True)
    assert send.payload == (Span(packed_ids([3, 9]), 0, 16),)


def test_rows_are_listed_between_two_updates() -> None:
    harness = with_table()
    harness.hold = True
    push_rows(harness, 0, 1, [3])
    apply = one(of(Apply, push_rows(harness, 1, 1, [3])))
    assert of(ListRowsJob, harness.say(0, ListRows(60, "t", 0, ALL_ROWS, -1, False))) == []
    job = one(of(ListRowsJob, harness.finish(apply)))
    for rank in (0, 1):
        assert of(Apply, push_rows(harness, rank, 2, [4])) == []
    assert len(of(Apply, harness.finish(job))) == 1


@pytest.mark.parametrize(("key", "index", "code"), [("t", 1, ErrorCode.KEY_NOT_FOUND), ("w", 0, ErrorCode.NOT_ALLOWED)])
def test_what_has_no_rows_is_refused_by_name(key: str, index: int, code: ErrorCode) -> None:
    harness = with_table()
    harness.init("w", b"0")
    refused = refusal(harness.say(0, ListRows(60, key, index, ALL_ROWS, -1, False)))
    assert (refused.error, refused.key) == (code, key)


def test_what_the_table_does_not_know_is_refused_and_the_rounds_go_on() -> None:
    harness = with_table()
    harness.error = NotAllowed("it does not track updates")
    assert refusal(harness.say(0, ListRows(60, "t", 0, 1, -1, False))).text == "it does not track updates"
    harness.error = None
    push_rows(harness, 0, 1, [3])
    assert len(of(Apply, push_rows(harness, 1, 1, [3]))) == 1
