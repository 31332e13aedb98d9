"""One slice: staged, counted, committed."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Contribution, Span
from kvd.core.places import PlaceKind, place_of
from kvd.core.server.progress import PushRequest, Refusal
from kvd.core.server.rounds import NoVersion, PushStatus, SliceLog
from kvd.protocol.messages import ABSENT, ADD, ASSIGN, ErrorCode


def sync(rounds_ahead: int = 2) -> SliceLog:
    return SliceLog(True, rounds_ahead, -1, "v0")


def asynchronous(staleness: int = -1, rounds_ahead: int = 2) -> SliceLog:
    return SliceLog(False, rounds_ahead, staleness, "v0")


def given(rank: int, clock: int, how: int = ADD) -> Contribution:
    return Contribution(rank, clock, Span(f"{rank}@{clock}", 0, 4), 1, how)


def stage(log: SliceLog, contribution: Contribution) -> None:
    log.stage(contribution, PushRequest(contribution.rank, contribution.clock))


def numbers(log: SliceLog, rank: int) -> tuple[int, int, int]:
    return log.staged_clock(rank), log.counted_clock(rank), log.committed_clock(rank)


def who(record: Any) -> list[tuple[int, int]]:
    return [(contribution.rank, contribution.clock) for contribution in record.contributions]


def test_a_sync_round_step_by_step() -> None:
    log = sync()
    assert numbers(log, 0) == (0, 0, 0)
    stage(log, given(1, 1))
    assert log.close_next([0, 1]) is None
    assert log.missing(1, [0, 1]) == [0]
    assert (numbers(log, 0), numbers(log, 1)) == ((0, 0, 0), (1, 0, 0))
    stage(log, given(0, 1))
    record = log.close_next([0, 1])
    assert record is not None
    assert (record.number, who(record), record.assign) == (1, [(0, 1), (1, 1)], False)  # in rank order
    assert numbers(log, 0) == numbers(log, 1) == (1, 1, 0)
    assert (log.version, log.current) == (0, "v0")
    assert log.commit("v1") is record
    assert numbers(log, 0) == (1, 1, 1)
    assert (log.version, log.current, log.previous) == (1, "v1", "v0")


class Counted(list[int]):
    """Ranks that a round waits for, and how often it was asked for one of them."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("step", [1, -1, 7])
def test_a_round_looks_at_each_of_many_ranks_once(step: int) -> None:
    """A look at all of them at each push would grow with the square of their number."""
    log, required = sync(), Counted(range(100))
    for round_ in (1, 2):
        required.looks = 0
        for number in range(100):
            rank = (number * step) % 100
            assert log.close_next(required) is None
            stage(log, given(rank, round_))
        assert log.close_next(required) is not None
        log.commit(f"v{round_}")
        assert required.looks <= 400


def test_a_round_that_waits_for_fewer_ranks_than_before_looks_at_all_of_them() -> None:
    log = sync()
    for rank in (0, 1):
        stage(log, given(rank, 1))
    assert log.close_next([0, 1, 2]) is None
    assert log.close_next([0, 1, 3]) is None
    assert who(log.close_next([1, 0])) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("make", [sync, asynchronous])
@pytest.mark.parametrize(
    ("clock", "status"),
    [
        (1, PushStatus.NEXT),
        (2, PushStatus.OUT_OF_TURN),
        (3, PushStatus.OUT_OF_TURN),
        (0, PushStatus.OUT_OF_TURN),
        (-1, PushStatus.OUT_OF_TURN),
    ],
)
def test_the_status_of_the_first_push(make: Any, clock: int, status: PushStatus) -> None:
    assert make().status_of(0, clock) is status


@pytest.mark.parametrize("make", [sync, asynchronous])
def test_the_window_is_rounds_ahead(make: Any) -> None:
    log = make(rounds_ahead=2)
    for clock in (1, 2):
        assert log.status_of(0, clock) is PushStatus.NEXT
        stage(log, given(0, clock))
    assert [log.status_of(0, clock) for clock in (1, 2, 3, 4)] == [
        PushStatus.KNOWN,
        PushStatus.KNOWN,
        PushStatus.OUT_OF_TURN,
        PushStatus.OUT_OF_TURN,
    ]
    assert log.staged_nbytes == 8


def test_the_window_moves_when_a_round_closes() -> None:
    log = sync(rounds_ahead=1)
    stage(log, given(0, 1))
    assert log.status_of(0, 2) is PushStatus.OUT_OF_TURN
    stage(log, given(1, 1))
    log.close_next([0, 1])
    assert log.status_of(0, 2) is PushStatus.NEXT
    assert log.staged_nbytes == 0


def test_one_update_at_a_time_and_rounds_in_their_order() -> None:
    log = sync()
    for clock in (1, 2):
        stage(log, given(0, clock))
    first = log.close_next([0])
    assert first is not None
    assert log.close_next([0]) is None
    log.commit("v1")
    second = log.close_next([0])
    assert second is not None
    assert who(second) == [(0, 2)]


def test_a_round_does_not_wait_for_a_worker_that_left() -> None:
    log = sync()
    stage(log, given(0, 1))
    assert log.missing(1, [0]) == []
    assert log.close_next([0]) is not None


def test_no_round_closes_without_a_contribution() -> None:
    assert sync().close_next([]) is None
    assert asynchronous().close_next([]) is None


def test_a_push_made_before_leaving_still_counts() -> None:
    log = sync()
    stage(log, given(1, 1))
    stage(log, given(0, 1))
    record = log.close_next([0])  # 1 has left after its push
    assert record is not None
    assert who(record) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("first", "second", "mixed"),
    [(ADD, ADD, False), (ASSIGN, ABSENT, False), (ABSENT, ABSENT, False), (ADD, ABSENT, True), (ASSIGN, ADD, True)],
)
def test_a_round_assigns_or_adds_but_not_both(first: int, second: int, mixed: bool) -> None:
    log = sync()
    assert not log.mixes(1, second)
    stage(log, given(0, 1, first))
    assert log.mixes(1, second) is mixed
    assert not log.mixes(2, second)


@pytest.mark.parametrize(("how", "assign"), [(ADD, False), (ASSIGN, True), (ABSENT, True)])
def test_a_record_says_whether_it_assigns(how: int, assign: bool) -> None:
    log = sync()
    stage(log, given(0, 1, how))
    record = log.close_next([0])
    assert record is not None
    assert record.assign is assign


def test_versions_current_and_previous() -> None:
    log = sync()
    assert [log.at_version(version) for version in (-1, 0, 1)] == [None, "v0", None]
    for clock in (1, 2):
        stage(log, given(0, clock))
        log.close_next([0])
        log.commit(f"v{clock}")
    assert [log.at_version(version) for version in (0, 1, 2, 3)] == [None, "v1", "v2", None]


def with_steps(log: SliceLog, *steps: int) -> SliceLog:
    """Commits a version for each of these steps."""
    for clock, step in enumerate(steps, 1):
        stage(log, given(0, clock)._replace(step=step))
        log.close_next([0])
        log.commit(f"v{clock}")
    return log


def test_the_version_of_a_step() -> None:
    """Versions 1, 2, 3 are of steps 1, 4, 6; version 1 is not kept any more."""
    log = with_steps(sync(), 1, 4, 6)
    gone, later = NoVersion.GONE, NoVersion.LATER
    assert [log.version_at(step, 0) for step in range(9)] == [gone, gone, gone, gone, 2, 2, later, later, later]
    assert [log.version_at(step, 7) for step in range(9)] == [gone, gone, gone, gone, 2, 2, 3, 3, later]


def test_no_pushes_of_an_earlier_step_follow_a_version_with_its_number() -> None:
    log = with_steps(sync(), 1, 2)
    assert [log.version_at(step, 0) for step in (1, 2, 3)] == [1, 2, NoVersion.LATER]


def test_an_asynchronous_version_is_named_by_its_number() -> None:
    log = with_steps(asynchronous(), 5, 5)
    assert [log.version_at(number, 9) for number in range(4)] == [NoVersion.GONE, 1, 2, NoVersion.LATER]


def test_a_successor_starts_where_its_predecessor_was_counted() -> None:
    log = sync()
    for rank in (0, 1):
        stage(log, given(rank, 1))
    log.close_next([0, 1])
    log.commit("v1")
    stage(log, given(1, 2))
    stage(log, given(1, 3))
    log.drop_unclosed(1)
    assert numbers(log, 1) == (1, 1, 1)
    stage(log, given(0, 2))
    assert log.close_next([0, 1]) is None
    assert log.status_of(1, 2) is PushStatus.NEXT
    stage(log, given(1, 2))
    assert log.close_next([0, 1]) is not None


def test_what_a_predecessor_was_refused_does_not_keep_slices_apart() -> None:
    log, other = sync(), sync()
    log.refuse(1, Refusal(PushRequest(5, 11), ErrorCode.NOT_ALLOWED, "no"))
    assert not log.is_level_with(other)
    log.drop_unclosed(1)
    assert log.is_level_with(other)


def test_a_closed_round_keeps_the_push_of_the_predecessor() -> None:
    log = sync()
    stage(log, given(0, 1))
    stage(log, given(1, 1))
    record = log.close_next([0, 1])
    log.drop_unclosed(1)
    assert record is not None
    assert who(record) == [(0, 1), (1, 1)]
    assert log.status_of(1, 1) is PushStatus.KNOWN


def test_a_worker_that_comes_back_takes_part_after_its_clock() -> None:
    log = sync()
    stage(log, given(0, 1))
    log.close_next([0])
    log.commit("v1")
    stage(log, given(0, 2))
    stage(log, given(0, 3))
    log.activate(1, 2)
    assert (log.missing(2, [0, 1]), log.missing(3, [0, 1])) == ([], [1])
    assert log.status_of(1, 3) is PushStatus.NEXT
    log.activate(1, 1)  # said twice, or late: nothing goes back
    assert log.staged_clock(1) == 2


def test_a_step_in_which_nothing_was_pushed_begins_after_the_rounds_that_are_skipped() -> None:
    """A successor that made it again from an earlier clock would push to rounds that are closed."""
    step = place_of(PlaceKind.STEP, 2)
    log = sync()
    log.activate(1, 1, step)
    log.activate(1, 2)
    assert log.begun_at(1, step) == 2
    stage(log, given(1, 3)._replace(place=step))
    log.activate(1, 5)
    assert log.begun_at(1, step) == 2  # what was pushed in it counts as a push of this step


def test_async_activation_sets_all_three_clocks() -> None:
    log = asynchronous()
    log.activate(1, 7)
    assert numbers(log, 1) == (7, 7, 7)
    assert log.status_of(1, 8) is PushStatus.NEXT


def test_a_failed_update_counts_for_no_worker() -> None:
    log = sync()
    for rank, clock in ((0, 1), (1, 1), (0, 2)):
        stage(log, given(rank, clock))
    record = log.close_next([0, 1])
    assert log.give_up() is record
    assert (log.version, log.closed, log.current) == (0, 0, "v0")
    assert numbers(log, 0) == numbers(log, 1) == (0, 0, 0)
    assert log.staged_nbytes == 0  # the later push of rank 0 stood on the failed one
    assert (log.status_of(0, 1), log.status_of(0, 2)) == (PushStatus.NEXT, PushStatus.OUT_OF_TURN)


def test_async_a_failed_update_affects_no_other_worker() -> None:
    log = asynchronous()
    stage(log, given(0, 1))
    stage(log, given(1, 1))
    stage(log, given(0, 2))
    log.close_next([0, 1])
    log.give_up()
    assert numbers(log, 0) == (0, 0, 0)
    record = log.close_next([0, 1])
    assert record is not None
    assert who(record) == [(1, 1)]


def test_async_pushes_close_one_by_one_as_they_arrive() -> None:
    log = asynchronous()
    order = [(1, 1), (0, 1), (1, 2)]
    for rank, clock in order:
        stage(log, given(rank, clock))
    for number, expected in enumerate(order, 1):
        record = log.close_next([0, 1, 2])
        assert record is not None
        assert (record.number, who(record)) == (number, [expected])
        log.commit(f"v{number}")
    assert numbers(log, 1) == (2, 2, 2)
    assert log.committed_clock(2) == 0
    assert not log.mixes(1, ASSIGN)


def test_async_drop_forgets_what_has_not_closed() -> None:
    log = asynchronous()
    stage(log, given(0, 1))
    stage(log, given(1, 1))
    log.close_next([0, 1])
    log.commit("v1")
    stage(log, given(0, 2))
    log.drop_unclosed(0)
    log.drop_unclosed(1)
    assert numbers(log, 0) == (1, 1, 1)
    assert numbers(log, 1) == (0, 0, 0)
    assert log.close_next([0, 1]) is None


def closes(log: SliceLog, required: list[int]) -> list[tuple[int, int]]:
    """Everything that may close now, committed at once."""
    closed = []
    while (record := log.close_next(required)) is not None:
        closed += who(record)
        log.commit("v")
    return closed


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_worker_leads_the_slowest_by_more_than_the_staleness(staleness: int) -> None:
    log = asynchronous(staleness, rounds_ahead=9)
    for clock in range(1, 5):
        stage(log, given(0, clock))
    assert closes(log, [0, 1]) == [(0, clock) for clock in range(1, 1 + staleness)]
    assert log.close_next([0, 1]) is None
    stage(log, given(1, 1))
    assert sorted(closes(log, [0, 1])) == sorted([(0, 1 + staleness), (1, 1)])
    assert log.counted_clock(0) - log.counted_clock(1) == staleness


def test_with_staleness_only_active_workers_can_be_the_slowest() -> None:
    log = asynchronous(1)
    stage(log, given(0, 1))
    stage(log, given(0, 2))
    assert closes(log, [0, 1]) == [(0, 1)]
    assert closes(log, [0]) == [(0, 2)]
    stage(log, given(1, 1))
    stage(log, given(1, 2))
    assert closes(log, [0]) == [(1, 1), (1, 2)]  # one that has left: its last pushes hold nobody up
    assert log.slowest([]) == 0


def test_a_late_copy_of_an_activation_does_not_make_count_what_is_staged_only() -> None:
    log = asynchronous()
    log.activate(1, 3)
    assert numbers(log, 1) == (3, 3, 3)
    stage(log, given(1, 4))
    log.activate(1, 3)
    assert numbers(log, 1) == (4, 3, 3)
