"""The memory of a server's tables: what is pushed counts from its arrival on, and until it is applied or given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.core.machine import TableVersion
from kvd.core.server.memory_use import LEAST_SPARE_NBYTES, SPARE, rows_need
from kvd.errors import NotAllowed
from kvd.protocol.messages import Delete, ErrorCode, KeyId
from tests.core.fake_tables import ROW, table
from tests.core.fakes import init_of, member, uint8
from tests.core.server_harness import Harness, kinds, refusal, values
from tests.core.tables_harness import pull_rows, push_rows, with_table

TEN = range(10)
OF_TEN = 10 * (8 + ROW)  # bytes of a push of ten rows
NEED = rows_need(table(), OF_TEN, None)
OTHER_RUN = 999


def tight(pushes: int, **more: Any) -> Harness:
    """A server with memory for so many pushes of ten rows."""
    return with_table(memory=pushes * NEED, **more)


def granted(harness: Harness) -> int:
    """The bytes that no other run may use."""
    return harness.memory.of_others(OTHER_RUN)


def refused(effects: Any) -> bool:
    told = refusal(effects)
    assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "t")
    assert "server 0 has no memory for these row" in told.text
    assert "of table 't': they could take it to 0 MiB, its limit is 0 MiB: add servers, or raise" in told.text
    return True


def test_pushes_that_wait_for_others_count() -> None:
    harness = tight(2)
    assert kinds(push_rows(harness, 0, 1, TEN)) == ["Staged"]
    assert kinds(push_rows(harness, 0, 2, TEN)) == ["Staged"]
    assert refused(push_rows(harness, 1, 1, TEN))
    assert harness.explain()["bytes_staged"] == 2 * OF_TEN


def test_all_that_a_push_refuses_is_as_before() -> None:
    """The worker gives the clock of the refused push to another one."""
    harness = tight(2)
    push_rows(harness, 0, 1, TEN)
    push_rows(harness, 0, 2, TEN)
    assert refused(push_rows(harness, 1, 1, TEN, request=70))
    assert refused(push_rows(harness, 1, 1, TEN, request=70))  # the answer was lost
    assert kinds(push_rows(harness, 1, 1, [])) == ["Done", "Done"]
    assert [given.rank for given in harness.applied[0].contributions] == [0, 1]
    assert values(pull_rows(harness, 1, 1, [3])) == ((1,), [bytes([1]) * ROW])


def test_the_round_that_is_being_applied_counts() -> None:
    harness = tight(2)
    harness.hold = True
    push_rows(harness, 0, 1, TEN)
    push_rows(harness, 1, 1, TEN)
    assert refused(push_rows(harness, 0, 2, TEN))
    harness.finish(harness.jobs[0])
    assert harness.machine.table.table_nbytes == 20 * ROW
    assert kinds(push_rows(harness, 0, 2, TEN)) == ["Staged"]


def fails(harness: Harness) -> None:
    harness.error = NotAllowed("no")
    push_rows(harness, 1, 1, [])
    harness.error = None


def is_replaced(harness: Harness) -> None:
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)


def is_deleted(harness: Harness) -> None:
    for rank in range(2):
        harness.say(rank, Delete(harness.request(), (KeyId("t", 0),)))


ENDS: dict[str, Callable[[Harness], Any]] = {
    "applied": lambda harness: push_rows(harness, 1, 1, []),
    "failed": fails,
    "replaced": is_replaced,
    "deleted": is_deleted,
}


@pytest.mark.parametrize("end", ENDS)
def test_what_counts_no_more_is_free(end: str) -> None:
    harness = tight(1)
    harness.init("other", b"", table())
    push_rows(harness, 0, 1, TEN)
    assert refused_of_other(push_rows(harness, 1, 1, [5], key="other"))
    ENDS[end](harness)
    assert kinds(push_rows(harness, 1, 1, [5], key="other")) == ["Staged"]


def refused_of_other(effects: Any) -> bool:
    told = refusal(effects)
    return told.key == "other" and "no memory for these rows of table 'other'" in told.text


def test_a_push_that_is_applied_gives_its_memory_back_to_other_runs() -> None:
    harness = tight(3)
    push_rows(harness, 0, 1, TEN)
    assert granted(harness) == NEED
    push_rows(harness, 1, 1, [])
    version = harness.machine.table.slices["t", 0].log.current
    assert isinstance(version, TableVersion)
    assert granted(harness) == version.nbytes == harness.explain()["bytes_led"]


def test_small_pushes_take_what_is_spare() -> None:
    """So that what is used is not worked out for each of them."""
    harness = with_table(memory=1 << 30)
    push_rows(harness, 0, 1, TEN)
    push_rows(harness, 1, 1, [])
    first = granted(harness)
    for clock in (2, 3, 4):
        push_rows(harness, 0, clock, TEN)
        push_rows(harness, 1, clock, range(clock, 100))
    assert granted(harness) == first


def test_what_is_spare_is_used_up_and_asked_for_again() -> None:
    harness = with_table(memory=SPARE * LEAST_SPARE_NBYTES + 100 * NEED)
    spare_pushes = LEAST_SPARE_NBYTES // NEED
    push_rows(harness, 0, 1, TEN)
    push_rows(harness, 1, 1, [])
    assert granted(harness) >= LEAST_SPARE_NBYTES
    with harness.validated_once():
        for clock in range(2, spare_pushes + 4):
            assert kinds(push_rows(harness, 0, clock, TEN))[-1] == "Staged"
            push_rows(harness, 1, clock, [])
    version = harness.machine.table.slices["t", 0].log.current
    assert isinstance(version, TableVersion)
    assert version.nbytes <= granted(harness) <= harness.memory.limit_bytes


def test_what_is_spare_is_of_no_other_run() -> None:
    """And it is no reason to refuse what fits without it."""
    harness = with_table(memory=1 << 30)
    push_rows(harness, 0, 1, TEN)
    mine = granted(harness)
    assert not harness.memory.grant(OTHER_RUN, (1 << 30) - mine + 1)
    assert harness.memory.grant(OTHER_RUN, (1 << 30) - mine)
    some = range(mine // rows_need(table(), 8 + ROW, None))
    assert kinds(push_rows(harness, 1, 1, some[: len(some) - 10])) == ["Done", "Done"]
    assert granted(harness) <= mine
    assert "server 0 has no memory for these rows" in refusal(push_rows(harness, 0, 2, [*some, *TEN])).text


def test_a_deleted_table_leaves_its_memory_to_other_runs() -> None:
    harness = with_table(memory=1 << 30)
    for clock in (1, 2):
        push_rows(harness, 0, clock, TEN)
        push_rows(harness, 1, clock, [])
    is_deleted(harness)
    assert granted(harness) == (1 << 30) // SPARE


def test_a_push_that_comes_again_is_counted_once() -> None:
    harness = tight(1)
    push_rows(harness, 0, 1, TEN, request=70)
    assert kinds(push_rows(harness, 0, 1, TEN, request=70)) == ["Staged"]
    harness.look(member("worker", 0, "active"))  # nothing has changed
    assert granted(harness) == NEED


def test_other_keys_are_refused_what_rows_that_wait_need() -> None:
    harness = tight(2)
    push_rows(harness, 0, 1, TEN)
    push_rows(harness, 0, 2, TEN)
    told = refusal(harness.say(0, init_of(harness.request(), "w", uint8(8), 0), bytes(8)))
    assert (told.error, told.key) == (ErrorCode.NOT_ALLOWED, "w")


# ── ids ──


def test_ids_of_pulls_that_wait_count() -> None:
    harness = with_table(memory=10 * 8)
    assert pull_rows(harness, 0, 1, TEN) == []
    assert refused(pull_rows(harness, 1, 1, [5]))
    assert values(pull_rows(harness, 1, 0, range(20)))[0] == (0,)  # its version is there: it does not wait
    push_rows(harness, 0, 1, [])
    push_rows(harness, 1, 1, [])
    assert pull_rows(harness, 0, 2, TEN) == []
    assert granted(harness) == 10 * 8


def test_without_memory_for_a_push_what_is_there_can_be_read() -> None:
    harness = tight(1)
    push_rows(harness, 0, 1, TEN)
    assert refused(push_rows(harness, 1, 1, TEN))
    assert values(pull_rows(harness, 1, 0, TEN))[0] == (0,)


def test_in_an_asynchronous_cluster_nothing_waits_and_rows_count() -> None:
    harness = tight(1, mode="async")
    assert kinds(push_rows(harness, 0, 1, TEN)) == ["Done"]
    assert granted(harness) == 10 * ROW
    assert refused(push_rows(harness, 0, 2, TEN))
    assert kinds(push_rows(harness, 0, 2, [3])) == ["Done"]
