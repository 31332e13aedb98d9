"""Tables on a server: what is answered to requests about their parts, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, Effect, JobDone, ReadRows, Send, Span
from kvd.core.server import targets
from kvd.errors import NotAllowed
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    ASSIGN,
    Coding,
    DeclareBatch,
    Done,
    ErrorCode,
    NotYet,
    Part,
    Pull,
    PullBatch,
    PullRows,
    Push,
    PushBatch,
    ReadSlices,
    Refused,
    SliceId,
    Survey,
    Values,
)
from kvd.protocol.specs import table_text
from tests.core.fake_tables import ROW, packed_ids, pushed, table
from tests.core.fakes import member, of, said
from tests.core.server_harness import Harness, kinds, refusal, values
from tests.core.tables_harness import pull_rows, push_rows, with_table

T = SliceId("t", 0)


def with_a_value() -> Harness:
    """A server with table "t" and key "w"."""
    harness = with_table()
    harness.init("w", b"\0")
    return harness


def goes_on(harness: Harness) -> None:
    """The next round of the table closes, and can be read."""
    clock = harness.machine.table.slices["t", 0].log.version + 1
    for rank in range(2):
        push_rows(harness, rank, clock, [3])
    assert values(pull_rows(harness, 0, clock, [3])) == ((clock,), [bytes([clock]) * ROW])


# ── what is for whole values ──


def whole(request: int) -> list[Any]:
    """Requests for whole values. Those of batches name one that was declared before the table was made."""
    return [
        Pull(request, (Part("t", 0, 0),)),
        Pull(request, (Part("t", 0, ANY_CLOCK),)),
        Pull(request, (Part("w", 0, 0), Part("t", 0, 0))),
        Push(request, (Part("t", 0, 1),), 0, 1, pull=True),
        Push(request, (Part("t", 0, 1),), ASSIGN, 1, pull=False),
        Push(request, (Part("t", 0, 1),), ABSENT, 1, pull=False),
        DeclareBatch(request, 2, (SliceId("w", 0), T)),
        PushBatch(request, 1, 1, 0, 1, pull=False),
        PullBatch(request, 1, 0),
        ReadSlices(request, 1, 0, False, (T,)),
        ReadSlices(request, 1, 0, False, (SliceId("w", 0), T)),
    ]


@pytest.mark.parametrize("number", range(len(whole(1))))
def test_what_is_for_whole_values_is_refused_by_name(number: int) -> None:
    harness = Harness()
    harness.declare(0, 1, "w", "t")
    harness.init("w", b"\0")
    harness.init("t", b"", table())
    told = refusal(harness.say(0, whole(50)[number]))
    assert (told.error, told.key, told.text) == (ErrorCode.NOT_ALLOWED, "t", table_text("t"))
    assert not harness.applied
    goes_on(harness)


def test_a_batch_without_the_table_is_declared_and_used() -> None:
    harness = with_a_value()
    assert said(harness.declare(0, 1, "w")) == [Done(harness._request)]
    assert kinds(harness.push_batch(0, 1, b"\1")) == ["Staged"]


def test_a_survey_of_everything_counts_the_rounds_of_tables() -> None:
    harness = with_a_value()
    goes_on(harness)
    assert kinds(harness.say(0, Survey(9, ()))) == ["Surveyed"]


# ── what a push has to be ──


@pytest.mark.parametrize("nbytes", [1, 8, 15, 17, 24])
def test_bytes_that_are_no_rows_are_refused(nbytes: int) -> None:
    harness = with_table()
    told = refusal(harness.push(0, 1, bytes(nbytes), key="t"))
    assert (told.error, told.key) == (ErrorCode.PROTOCOL_ERROR, "t")
    assert f"{nbytes} bytes are no row ids and rows of one part of table 't'" in told.text
    goes_on(harness)


def test_a_push_of_rows_has_one_part_and_no_coding() -> None:
    harness = with_table(table(2))
    harness.init("w", b"\0")
    parts = (Part("t", 0, 1), Part("t", 1, 1))
    for message in (
        Push(harness.request(), parts, 0, 1, pull=False),
        Push(harness.request(), (Part("w", 0, 1), Part("t", 0, 1)), 0, 1, pull=False),
        Push(harness.request(), (Part("t", 0, 1),), 0, 1, pull=False, coding=Coding("float32", "float64", 1)),
    ):
        assert refusal(harness.say(0, message, pushed([3]))).error is ErrorCode.PROTOCOL_ERROR
    assert kinds(push_rows(harness, 0, 1, [3])) == ["Staged"]


def test_a_push_without_rows_takes_part() -> None:
    harness = with_table()
    push_rows(harness, 0, 1, [])
    assert kinds(push_rows(harness, 1, 1, [7])) == ["Done", "Done"]
    assert [given.span.nbytes for given in harness.applied[0].contributions if given.span] == [0, 16]


# ── what a pull has to be ──


def test_a_pull_without_ids_is_answered_with_no_rows() -> None:
    assert values(pull_rows(with_table(), 0, 0, [])) == ((0,), [b""])


@pytest.mark.parametrize("nbytes", [1, 7, 12])
def test_bytes_that_are_no_ids_are_refused(nbytes: int) -> None:
    harness = with_table()
    told = refusal(harness.say(0, PullRows(9, Part("t", 0, 0)), bytes(nbytes)))
    assert (told.error, told.text, told.key) == (ErrorCode.PROTOCOL_ERROR, f"{nbytes} bytes are no row ids", "t")


def test_rows_of_another_key_are_refused_by_name() -> None:
    told = refusal(pull_rows(with_a_value(), 0, 0, [1], key="w"))
    assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "w")
    assert "'w' is no table" in told.text


def test_more_rows_than_a_message_carries_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MAX_PAYLOAD_BYTES", 4 * ROW)
    harness = with_table()
    assert values(pull_rows(harness, 0, 0, [1, 2, 3, 4])) == ((0,), [bytes(4 * ROW)])
    effects = pull_rows(harness, 0, 0, [1, 2, 3, 4, 5])
    assert not of(ReadRows, effects)
    told = refusal(effects)
    assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "t")
    assert "rows of table 't'" in told.text
    assert "in pieces" in told.text


def test_a_reader_gets_what_is_there_and_waits_for_nothing() -> None:
    harness = with_table()
    for rank in (0, 1):
        push_rows(harness, rank, 1, [3])
    for clock, version in ((ANY_CLOCK, 1), (1, 1), (0, 0)):
        effects = harness.say(5, PullRows(harness.request(), Part("t", 0, clock)), packed_ids([3]))
        assert values(effects)[0] == (version,)
    late = harness.say(5, PullRows(harness.request(), Part("t", 0, 2)), packed_ids([3]))
    assert [type(message) for message in said(late)] == [NotYet]  # a worker would attach, and wait


def test_what_waits_for_rows_has_to_be_a_worker() -> None:
    harness = Harness(attach=False)
    assert [type(message) for message in said(harness.say(0, PullRows(9, Part("t", 0, 0)), packed_ids([1])))] == [
        NotYet
    ]


@pytest.mark.parametrize("message", [PullRows(9, Part("t", 5, 0)), Push(9, (Part("t", 5, 1),), 0, 1, pull=False)])
def test_parts_that_are_not_here_are_not_found(message: Any) -> None:
    told = refusal(with_table().say(0, message, packed_ids([1, 2])))
    assert (told.error, told.key) == (ErrorCode.KEY_NOT_FOUND, "t")


# ── reading ──


def answers(effects: list[Effect]) -> list[Any]:
    return [message for message in said(effects) if isinstance(message, Values | Refused)]


def test_a_pull_waits_for_its_version_and_gets_that_one() -> None:
    harness = with_table()
    assert not answers(pull_rows(harness, 0, 1, [5, 6], request=70))
    push_rows(harness, 0, 1, [5])
    harness.hold = True
    push_rows(harness, 1, 1, [6])
    (apply,) = harness.jobs
    assert isinstance(apply, Apply)
    effects = harness.finish(apply)
    (reading,) = of(ReadRows, effects)
    assert reading.version.number == 1
    push_rows(harness, 0, 2, [5])
    push_rows(harness, 1, 2, [6])  # the next round is applied while the rows of this one are read
    assert values(harness.finish(reading)) == ((1,), [bytes([1]) * 2 * ROW])


def test_all_who_wait_for_a_version_have_their_rows_read_in_one_job() -> None:
    harness = with_table()
    for rank in range(2):
        pull_rows(harness, rank, 1, [5] * (rank + 1), request=70 + rank)
    push_rows(harness, 0, 1, [5])
    harness.hold = True
    push_rows(harness, 1, 1, [6])
    (reading,) = of(ReadRows, harness.finish(harness.jobs[0]))
    assert [ids.nbytes for ids in reading.ids] == [8, 16]
    effects = harness.finish(reading)
    sent = [(getattr(send.message, "request", 0), send.payload[0].nbytes) for send in of(Send, effects)]
    assert sent == [(70, ROW), (71, 2 * ROW)]


def test_one_who_cannot_have_its_rows_is_told_and_the_others_get_theirs() -> None:
    harness = with_table()
    for rank in range(2):
        pull_rows(harness, rank, 1, [5], request=70 + rank)
    push_rows(harness, 0, 1, [5])
    harness.hold = True
    push_rows(harness, 1, 1, [6])
    (reading,) = of(ReadRows, harness.finish(harness.jobs[0]))
    harness.jobs.remove(reading)
    rows = Span(bytes(ROW), 0, ROW)
    effects = harness.step(JobDone(reading.job, (NotAllowed("no such row"), rows)))
    told, values_ = said(effects)
    assert (told.request, told.error, told.text) == (70, ErrorCode.NOT_ALLOWED, "no such row")
    assert (values_.request, values_.versions) == (71, (1,))


def test_the_version_before_can_be_read_and_no_earlier_one() -> None:
    harness = with_table()
    for clock in (1, 2):
        for rank in range(2):
            push_rows(harness, rank, clock, [5])
    assert values(pull_rows(harness, 0, 1, [5])) == ((1,), [bytes([1]) * ROW])
    assert "not kept" in refusal(pull_rows(harness, 0, 0, [5])).text


def test_a_pull_that_comes_again_while_its_rows_are_read_is_answered_once() -> None:
    harness = with_table()
    harness.hold = True
    pull_rows(harness, 0, 0, [5], request=70)
    assert not pull_rows(harness, 0, 0, [5], request=70)
    (reading,) = harness.jobs
    assert [message.request for message in answers(harness.finish(reading))] == [70]


def test_rows_that_cannot_be_read_are_refused_by_name() -> None:
    harness = with_table()
    harness.error = NotAllowed("table 't' has no row 1000: it has 1000", key="t")
    told = refusal(pull_rows(harness, 0, 0, [1000]))
    assert (told.error, told.key, told.text) == (ErrorCode.NOT_ALLOWED, "t", "table 't' has no row 1000: it has 1000")
    harness.error = None
    goes_on(harness)


def test_who_is_replaced_while_its_rows_are_read_is_not_answered() -> None:
    harness = with_table()
    harness.hold = True
    pull_rows(harness, 1, 0, [5])
    (reading,) = harness.jobs
    harness.look(member("worker", 1, life=1))
    assert not answers(harness.finish(reading))
