"""Which changes are on stable storage."""

from __future__ import annotations

from kvd.core.machine import Persist
from kvd.core.scheduler.runs.record import MAX_UNDER_WAY, Saving


def test_a_record_saves_what_came_before_it() -> None:
    saving = Saving()
    assert not saving.is_due
    saving.changed(7, 1)
    assert saving.begin({"a": 1}) == Persist(1, {"a": 1})
    assert not saving.is_due
    saving.changed(7, 2)
    saving.changed(8, 1)
    saving.begin({})
    saving.changed(7, 3)
    saving.begin({})
    saving.failed("disk full")
    assert saving.problem == "disk full"
    assert saving.saved(2) == {7: 2, 8: 1}
    assert saving.problem == ""
    assert saving.saved(2) == {}
    assert saving.saved(3) == {7: 3}


def test_what_waits_while_nothing_can_be_saved_is_bounded() -> None:
    saving = Saving()
    for token in range(1, 4 * MAX_UNDER_WAY + 1):
        saving.changed(token % 3, token)
        saving.begin({})
    assert len(saving._under_way) == MAX_UNDER_WAY
    last = 4 * MAX_UNDER_WAY
    assert saving.saved(last) == {token % 3: token for token in range(last - 2, last + 1)}
