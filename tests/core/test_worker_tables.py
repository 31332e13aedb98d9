"""The worker: rows that it pushes to the parts of a table, and pulls from them."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Copy, Span
from kvd.core.outbox import RETRY_FIRST_S
from kvd.core.requests import Item, UncountedVersions, Versions
from kvd.core.worker.keys import WorkerKey
from kvd.core.worker.message_plans import header_nbytes
from kvd.errors import DtypeMismatch, KeyExists, KvdError, NodeLost, NotAllowed, ProtocolError, ShapeMismatch
from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    ANY_CLOCK,
    ClockQuery,
    Clocks,
    Done,
    Epoch,
    ErrorCode,
    Init,
    MemberState,
    NewKey,
    NotYet,
    NotYetReason,
    Part,
    Publish,
    PullRows,
    Push,
    PushBatch,
    Taken,
    Uncounted,
    Values,
)
from kvd.protocol.specs import (
    MAX_KEPT_BYTES,
    MAX_KEY_CHARS,
    MAX_KEY_NBYTES,
    MAX_UPDATES,
    Initial,
    Keeping,
    KeySpec,
    TableSpec,
)
from tests.core.fakes import copies, of, server_id, uint8
from tests.core.worker_harness import Harness, replicated

ROW = 8  # bytes of a row of the table
TABLE = KeySpec("float32", (2,), 4096, table=TableSpec(10, Initial("Zeros"), 2))
PUSHED = ((0, 3 * (8 + ROW)), (48, 8 + ROW))  # three rows for the first part, one for the second
WANTED = ((0, 16), (16, 8))  # two rows of the first part, and one of the second


def harness_of(**more: Any) -> Harness:
    """A worker of two servers, who knows table "t"."""
    harness = Harness(servers=2, **more)
    harness.know("t", spec=TABLE)
    return harness


def push(harness: Harness, ranges: Any = PUSHED, spec: KeySpec = TABLE, **more: Any) -> int:
    item = Item("t", spec, "rows", ranges=ranges)
    return harness.call(requests.Transfer((item,), push=True, pull=False, some_rows=True, **more))


def pull(harness: Harness, ranges: Any = WANTED, **more: Any) -> int:
    item = Item("t", TABLE, "ids", "target", ranges=ranges)
    return harness.call(requests.Transfer((item,), push=False, pull=True, some_rows=True, **more))


def answer_rows(harness: Harness, version: int, rows: int) -> list[Any]:
    return copies(harness.values(PullRows, (version,), bytes(rows * ROW)))


# ── push ──


def test_a_push_has_a_message_for_each_part_with_its_ids_and_rows() -> None:
    harness = harness_of()
    call = push(harness, samples=3)
    sends = [harness.take(Push), harness.take(Push)]
    place = harness.machine.view.partition_of
    assert [send.peer for send in sends] == [server_id(place("t", index)) for index in range(2)]
    assert [send.payload for send in sends] == [(Span("rows", 0, 48),), (Span("rows", 48, 16),)]
    for index, send in enumerate(sends):
        message: Any = send.message
        assert message.parts == (Part("t", index, 1),)
        assert (message.samples, message.coding, message.pull, message.step) == (3, None, False, 1)
    harness.reply(sends[1], Done)
    assert call not in harness.done
    harness.reply(sends[0], Done)
    assert harness.result(call) == [None]


def test_a_push_without_rows_goes_to_every_part() -> None:
    harness = harness_of()
    call = push(harness, ((0, 0), (0, 0)))
    assert harness.clocks() == [("t", 0, 1), ("t", 1, 1)]
    assert [send.payload for send in harness.sent] == [(Span("rows", 0, 0),)] * 2
    for _ in range(2):
        harness.settle()
    assert harness.result(call) == [None]


def test_rows_go_with_other_keys_in_one_call_and_never_in_a_batch() -> None:
    harness = harness_of(batches=True)
    harness.know("a", "b")
    items = (Item("a", uint8(1), "a"), Item("t", TABLE, "rows", ranges=PUSHED), Item("b", uint8(1), "b"))
    for step in (1, 2):
        call = harness.call(requests.Transfer(items, push=True, pull=False, some_rows=True))
        assert harness.clocks() == [("t", 0, step), ("t", 1, step), *harness.clocks()[2:]]
        for _ in range(2):
            harness.settle()
        assert call not in harness.done
        while harness.waiting(Push) or harness.waiting(PushBatch):
            kind = Push if harness.waiting(Push) else PushBatch
            harness.reply(harness.take(kind), Done)
        assert harness.result(call) == [None] * 3


def test_a_push_that_a_part_refuses_untaken_gives_its_clock_back() -> None:
    harness = harness_of()
    call = push(harness)
    for _ in range(2):
        harness.refuse(Push, ErrorCode.NOT_ALLOWED, key="t", taken=Taken.NOTHING)
    assert isinstance(harness.error(call), NotAllowed)
    push(harness)
    assert harness.clocks() == [("t", 0, 1), ("t", 1, 1)]


def test_a_push_that_one_part_took_and_another_refused_needs_a_rewind() -> None:
    harness = harness_of()
    call = push(harness)
    harness.refuse(Push, ErrorCode.NOT_ALLOWED, key="t", taken=Taken.NOTHING)
    assert isinstance(harness.error(call), NotAllowed)
    harness.settle()
    assert "taken in part only" in str(harness.error(push(harness)))
    harness.result(harness.call(requests.Rewind(0)))
    push(harness)
    assert harness.clocks() == [("t", 0, 1), ("t", 1, 1)]


def test_an_unanswered_push_is_sent_again_with_the_same_rows() -> None:
    harness = harness_of()
    push(harness)
    first = [harness.take(Push), harness.take(Push)]
    harness.reply(first[0], Done)
    harness.wait(RETRY_FIRST_S * 1.5)
    probe: Any = harness.take(Push)
    assert probe.message.probe
    assert not probe.payload
    harness.say(probe.peer, NotYet(probe.message.request, NotYetReason.OUT_OF_TURN, "", "t", 1))
    harness.wait(1.0)
    again = harness.take(Push)
    assert again == first[1]
    assert again.payload == (Span("rows", 48, 16),)


def test_rows_that_the_rounds_did_not_wait_for_do_not_count() -> None:
    harness = harness_of()
    call = push(harness)
    send = harness.take(Push)
    message: Any = send.message
    harness.say(send.peer, Uncounted(message.request, (1,)))
    harness.settle()
    assert isinstance(harness.result(call), UncountedVersions)


# ── pull ──


def test_a_pull_names_rows_of_the_parts_that_have_some() -> None:
    harness = harness_of()
    call = pull(harness)
    sends = list(harness.sent)
    assert [send.payload for send in sends] == [(Span("ids", 0, 16),), (Span("ids", 16, 8),)]
    assert [message.part for message in harness.waiting(PullRows)] == [Part("t", 0, 0), Part("t", 1, 0)]
    assert [(target, start, span.nbytes) for target, start, span in answer_rows(harness, 0, 2)] == [("target", 0, 16)]
    assert [(target, start, span.nbytes) for target, start, span in answer_rows(harness, 0, 1)] == [("target", 16, 8)]
    assert harness.result(call) == [Versions(0, 0)]
    pull(harness, ((0, 0), (0, 8)))
    assert [message.part for message in harness.waiting(PullRows)] == [Part("t", 1, 0)]


def test_a_pull_of_no_rows_asks_nobody() -> None:
    harness = harness_of()
    assert harness.result(pull(harness, ((0, 0), (0, 0)))) == [None]
    assert not harness.sent


def test_a_pull_waits_for_the_own_push_and_holds_back_the_next_but_one() -> None:
    harness = harness_of()
    push(harness)
    for _ in range(2):
        harness.settle()
    call = pull(harness)
    assert [message.part.clock for message in harness.waiting(PullRows)] == [1, 1]
    push(harness)
    push(harness)
    assert harness.clocks() == [("t", 0, 2), ("t", 1, 2)]  # the round of the third would replace what is being pulled
    for _ in range(2):
        harness.settle()
    assert not harness.waiting(Push)
    answer_rows(harness, 1, 2)
    answer_rows(harness, 1, 1)
    assert harness.result(call) == [Versions(1, 1)]
    assert harness.clocks() == [("t", 0, 3), ("t", 1, 3)]


def test_an_asynchronous_pull_of_one_that_takes_no_part_takes_any_version() -> None:
    harness = harness_of(role="observer")
    pull(harness, any_version=True)
    assert [message.part.clock for message in harness.waiting(PullRows)] == [ANY_CLOCK] * 2


def test_ids_take_no_credit_so_that_the_push_that_a_pull_waits_for_gets_through() -> None:
    harness = harness_of(credit=64)
    push(harness, priority=0)
    pull(harness, ((0, 64), (64, 64)), priority=9)
    push(harness, priority=0)
    assert len(harness.waiting(PullRows)) == 2
    for _ in range(2):
        harness.settle()
    assert sorted(harness.clocks()) == [("t", 0, 2), ("t", 1, 2)]


@pytest.mark.parametrize("rows", [1, 3])
def test_an_answer_with_another_number_of_rows_is_an_error(rows: int) -> None:
    harness = harness_of()
    call = pull(harness)
    assert not answer_rows(harness, 0, rows)
    assert isinstance(harness.error(call), ProtocolError)


def test_a_pull_that_is_given_up_lets_rounds_go_on_and_writes_no_more() -> None:
    harness = harness_of()
    item = Item("t", TABLE, "ids", "target", ranges=WANTED)
    call = harness.call(requests.Transfer((item,), push=False, pull=True, some_rows=True), timeout_s=1.0)
    send = harness.sent[0]
    harness.wait(2.0)
    assert "row_sparse_pull of 't'" in str(harness.error(call))
    message: Any = send.message
    effects = harness.say(send.peer, Values(message.request, (0,)), bytes(2 * ROW))
    assert not of(Copy, effects)
    for _ in range(2):
        push(harness)
        harness.settle()
        harness.settle()
    assert harness.clocks() == []


def test_after_a_failover_rows_and_ids_go_to_the_new_leader() -> None:
    harness = replicated()
    harness.know("t", spec=TABLE)
    push(harness)
    pull(harness)
    first = harness.machine.view.partition_of("t", 0)
    before = [(send.message, send.payload) for send in harness.sent if send.peer == server_id(first)]
    harness.sent.clear()
    harness.fail_over(first)
    assert [(send.message, send.payload) for send in harness.sent] == before
    assert {type(message) for message, _ in before} == {Push, PullRows}


def test_a_table_of_a_server_that_is_gone_is_lost() -> None:
    harness = harness_of()
    call = pull(harness)
    rank = harness.machine.view.partition_of("t", 0)
    gone = harness.members["server", rank]
    harness.look(gone._replace(state=MemberState.DEAD, reason="no heartbeat", last_seen_s=5.0))
    harness.restart_server(rank)
    assert isinstance(harness.error(call), NodeLost)


# ── a worker that comes back ──


def test_a_restarted_worker_goes_on_at_the_clock_of_its_predecessor() -> None:
    harness = Harness(servers=2, predecessor="dead")
    call = harness.call(requests.DescribeKey("t"))
    harness.found(TABLE)
    while harness.waiting(ClockQuery):
        send = harness.take(ClockQuery)
        message: Any = send.message
        harness.say(send.peer, Clocks(message.request, 4, 4, 4, 4, 4))
    assert harness.result(call) == TABLE
    harness.result(harness.call(requests.Rewind(3)))
    pull(harness)
    assert [message.part.clock for message in harness.waiting(PullRows)] == [3, 3]
    push(harness)
    assert harness.clocks() == [("t", 0, 4), ("t", 1, 4)]


# ── init ──


def test_worker_0_makes_a_part_on_each_server_and_publishes_the_table() -> None:
    harness = Harness(servers=2)
    call = harness.call(requests.InitKeys((Item("t", TABLE, "nothing"),)))
    for index in range(2):
        send = harness.take(Init)
        message: Any = send.message
        assert [entry.slice_index for entry in message.slices] == [index]
        assert message.specs == (TABLE,)
        assert send.payload == (Span("nothing", 0, 0),)
        harness.reply(send, Done)
    harness.reply(harness.take(Publish), Done)
    assert harness.result(call) is None
    again = harness.call(requests.InitKeys((Item("t", TABLE, "nothing"),)))
    assert isinstance(harness.error(again), KeyExists)


FULL = Keeping(MAX_UPDATES, MAX_UPDATES, MAX_KEY_NBYTES, MAX_KEPT_BYTES, True)
OTHERS: list[tuple[KeySpec, type[KvdError], str]] = [
    (KeySpec("float32", (2,), 4096, table=TableSpec(11, Initial("Zeros"), 2)), ShapeMismatch, "10 rows.*11 rows"),
    (KeySpec("float32", (2,), 4096, table=TableSpec(-1, Initial("Zeros"), 2)), ShapeMismatch, "any number of rows"),
    (KeySpec("float32", (3,), 4096, table=TableSpec(10, Initial("Zeros"), 2)), ShapeMismatch, r"shape \(2,\).*\(3,\)"),
    (KeySpec("float64", (2,), 4096, table=TableSpec(10, Initial("Zeros"), 2)), DtypeMismatch, "float64"),
    (
        KeySpec("float32", (2,), 4096, table=TableSpec(10, Initial("Normal", (0.5,), 7), 2)),
        NotAllowed,
        r"begin as Zeros\(\), those of the given one as Normal\(0.5, seed=7\)",
    ),
    (
        KeySpec("float32", (2,), 4096, table=TableSpec(10, Initial("Zeros"), 2, Keeping(3, max_rows=9))),
        NotAllowed,
        "'t' keeps these rows: all that were updated; the given one: admit_after=3, max_rows=9. Give it the same",
    ),
    (KeySpec("float32", (2,), 4096), NotAllowed, "'t' is a table, of which calls name rows"),
]


@pytest.mark.parametrize(("other", "kind", "text"), OTHERS)
def test_another_worker_that_makes_another_table_is_told(other: KeySpec, kind: type[KvdError], text: str) -> None:
    harness = Harness(rank=1, servers=2)
    call = harness.call(requests.InitKeys((Item("t", other, "value"),)))
    harness.found(TABLE)
    with pytest.raises(kind, match=text):
        raise harness.error(call)


def test_the_number_of_parts_is_no_part_of_what_a_program_says() -> None:
    harness = Harness(rank=1, servers=2)
    spec = KeySpec("float32", (2,), 4096, table=TableSpec(10, Initial("Zeros"), 5))
    call = harness.call(requests.InitKeys((Item("t", spec, "value"),)))
    harness.found(TABLE)
    assert harness.result(call) is None


# ── calls that do not fit ──


def test_whole_values_do_not_go_to_a_table_nor_rows_to_another_key() -> None:
    """Also when the worker learns only now what the key is."""
    for known in (True, False):
        harness = Harness(servers=2)
        if known:
            harness.know("t", spec=TABLE)
            harness.know("w", spec=KeySpec("float32", (2,), 4096))
        dense = requests.Item("t", KeySpec("float32", (2,), 4096), "value", "target")
        calls = [
            harness.call(requests.Transfer((dense,), push=True, pull=False)),
            harness.call(requests.Transfer((dense,), push=True, pull=True, cast=True)),
            harness.call(requests.Transfer((dense._replace(spec=None),), push=False, pull=True)),
        ]
        if not known:
            harness.found(TABLE)
        rows = Item("w", TABLE, "rows", ranges=PUSHED)
        calls.append(harness.call(requests.Transfer((rows,), push=True, pull=False, some_rows=True)))
        if not known:
            harness.found(KeySpec("float32", (2,), 4096))
        assert not harness.sent
        texts = [str(harness.error(call)) for call in calls]
        assert all(isinstance(harness.error(call), NotAllowed) for call in calls)
        assert all("'t' is a table, of which calls name rows" in text for text in texts[:3])
        assert "'w' is no table" in texts[3]
        harness.machine.validate()


# ── headers ──


def test_the_spec_of_a_table_is_counted_in_a_header() -> None:
    name = "𝄞" * MAX_KEY_CHARS
    table = TableSpec((1 << 40) - 1, Initial("Uniform" + "x" * 9, (1 / 3,) * 4, (1 << 63) - 1), 200, FULL)
    for spec in (
        KeySpec("float64", (1 << 20,), 16 << 20, "weighted", table),
        KeySpec("float32", (1,), 4096, "", table),
    ):
        key = WorkerKey(name, spec, creation=1 << 61)
        message = Publish(0, (spec,), (NewKey(name, 0),), 1 << 61)
        without = encode(Publish(0, (), (), 0), 1, Epoch(1, 1))
        assert len(encode(message, 1, Epoch(1, 1))) - len(without) <= header_nbytes(key, with_spec=True)
