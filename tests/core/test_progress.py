"""How far a worker has come with a slice: what is remembered of its pushes, and the invariants."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Contribution
from kvd.core.server.progress import NO_PROGRESS, PushRequest, Refusal, WorkerProgress
from kvd.core.server.rounds import SliceLog
from kvd.protocol.messages import ADD, ErrorCode


def refusal(sender: int, number: int) -> Refusal:
    return Refusal(PushRequest(sender, number), ErrorCode.NOT_ALLOWED, f"{sender}: {number}")


def test_a_refusal_holds_for_the_push_and_for_earlier_ones_of_the_same_sender() -> None:
    progress = WorkerProgress()
    assert progress.refusal_of(PushRequest(7, 10)) is None
    progress.refuse(refusal(7, 10))
    assert [progress.refusal_of(PushRequest(7, number)) for number in (9, 10, 11)] == [
        refusal(7, 10),
        refusal(7, 10),
        None,
    ]
    assert progress.refusal_of(PushRequest(8, 9)) is None


def test_the_latest_refusal_of_a_sender_is_kept() -> None:
    progress = WorkerProgress()
    for given, kept in ((10, 10), (9, 10), (12, 12)):
        progress.refuse(refusal(7, given))
        assert progress.last_refusal == refusal(7, kept)
    progress.refuse(refusal(8, 1))  # a successor
    assert progress.last_refusal == refusal(8, 1)


def test_a_push_before_the_last_one_that_was_taken_is_outdated() -> None:
    progress = WorkerProgress()
    assert not progress.is_outdated(PushRequest(7, 1))
    progress.last_request = PushRequest(7, 10)
    assert [progress.is_outdated(PushRequest(7, number)) for number in (9, 10, 11)] == [True, False, False]
    assert not progress.is_outdated(PushRequest(8, 9))


@pytest.mark.parametrize(
    ("mine", "theirs", "kept"),
    [
        (None, None, None),
        (None, (7, 3), (7, 3)),
        ((7, 3), None, (7, 3)),
        ((7, 3), (7, 4), (7, 4)),
        ((7, 4), (7, 3), (7, 4)),
        ((7, 3), (8, 4), (7, 3)),
    ],
)
def test_of_two_slices_the_later_request_is_kept(mine: Any, theirs: Any, kept: Any) -> None:
    one, other = (WorkerProgress(last_request=None if pair is None else PushRequest(*pair)) for pair in (mine, theirs))
    one.take_later_request(other)
    assert one.last_request == kept


@pytest.mark.parametrize(
    ("sync", "values"),
    [
        (True, {"counted": 1, "staged": 1}),
        (True, {"committed": 1, "staged": 1}),
        (True, {"skipped": 2, "staged": 1}),
        (True, {"skipped": -1}),
        (False, {"committed": 1}),
        (False, {"counted": 2, "staged": 1}),
        (False, {"committed": 2, "counted": 1, "staged": 3}),
        (False, {"committed": -1}),
    ],
)
def test_broken_invariants_are_found(sync: bool, values: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        WorkerProgress(**values).validate(sync=sync)  # type: ignore[arg-type]


def test_numbers_in_order_are_valid() -> None:
    WorkerProgress(staged=3, skipped=3).validate(sync=True)
    WorkerProgress(staged=3, counted=2, committed=1).validate(sync=False)


def log_with(sync: bool = True, **changes: Any) -> SliceLog:
    log = SliceLog(sync, 2, -1, "v0")
    for clock in (1, 2):
        log.stage(Contribution(0, clock, None, 1, ADD), PushRequest(7, clock))
    log.validate()
    for name, value in changes.items():
        setattr(log, name, value)
    return log


@pytest.mark.parametrize("sync", [True, False])
def test_a_log_finds_its_own_broken_invariants(sync: bool) -> None:
    broken: list[dict[str, Any]] = [
        {"closed": 1},
        {"version": 1},
        {"closing": object()},
        {"rounds_ahead": 1},
        {"progress": {}},
        {"progress": {0: WorkerProgress(staged=1)}},
        {"progress": {0: WorkerProgress(staged=2, skipped=1) if sync else WorkerProgress(staged=2, counted=1)}},
    ]
    for changes in broken:
        with pytest.raises(AssertionError):
            log_with(sync, **changes).validate()


def test_nobody_writes_to_the_progress_that_new_ranks_share() -> None:
    log = SliceLog(True, 2, -1, "v0")
    assert log.progress_of(3) is NO_PROGRESS
    log.refuse(3, refusal(7, 1))
    log.activate(4, 2)
    log.drop_unclosed(5)
    assert WorkerProgress() == NO_PROGRESS
    assert all(log.progress_of(rank) is not NO_PROGRESS for rank in (3, 4, 5))
