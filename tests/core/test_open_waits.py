"""Ages of waits and the usual time of a step, measured by looks."""

from __future__ import annotations

import pytest

from kvd.core.open_waits import RECENT, OpenWaits, Pace


def paced(*looks: tuple[int, float]) -> Pace:
    """The pace after looks that found so many steps at these times, the first of them right after a look at 0."""
    pace, last = Pace(), 0.0
    for steps, now in looks:
        if pace.steps != steps or pace.since is None:
            pace = pace.seen(steps, now, last)
        last = now
    return pace


def test_the_age_of_a_wait_counts_from_its_present_mark() -> None:
    waits = OpenWaits()
    waits.look({"a": 1, "b": 1}, 1.0)
    waits.look({"a": 2, "b": 1}, 2.0)
    assert (waits.since("a", 2), waits.since("b", 1), waits.since("c", 1)) == (2.0, 1.0, None)
    assert waits.since("a", 3) is None  # it has gone on since the last look
    assert waits.oldest_first() == ["b", "a"]
    waits.look({"a": 2}, 3.0)
    assert (waits.since("a", 2), waits.since("b", 1)) == (2.0, None)
    waits.look({"a": 2, "b": 1}, 4.0)
    assert waits.since("b", 1) == 4.0


@pytest.mark.parametrize(
    ("usual_s", "standstill_s"), [(0.01, 10.0), (1.0, 10.0), (2.0, 20.0), (60.0, 600.0), (None, 120.0)]
)
def test_ten_times_the_usual_time_and_ten_seconds(usual_s: float | None, standstill_s: float) -> None:
    assert OpenWaits().standstill_s(usual_s) == standstill_s


def test_a_pause_that_has_happened_twice_is_no_standstill() -> None:
    waits = OpenWaits()
    limits = []
    for pause in range(3):
        start = 100.0 * pause
        for second in range(31):
            waits.look({"w": pause}, start + second)
        waits.look({}, start + 31)
        limits.append(waits.standstill_s(0.1))
    assert limits == [10.0, 62.0, 62.0]


def test_the_pace_of_fast_and_of_slow_steps() -> None:
    assert paced((100, 1.0), (200, 2.0)).usual_s == pytest.approx(0.01)
    slow = paced((0, 1.0), (1, 60.0), (1, 61.0), (2, 120.0))
    assert slow.usual_s == pytest.approx(60.0)
    assert slow.since == 120.0
    assert paced((0, 1.0)).usual_s is None
    assert paced((5, 1.0)).usual_s == pytest.approx(0.2)  # all steps were made between two looks


def test_one_long_pause_does_not_change_the_usual_time() -> None:
    looks = [(10 * second, float(second)) for second in range(1, 20)]
    looks += [(200, 60.0), *((200 + 10 * second, 60.0 + second) for second in range(1, 4))]
    pace = paced(*looks)
    assert pace.usual_s == pytest.approx(0.1)
    assert len(pace.recent_s) == RECENT


def test_an_update_that_was_taken_back_is_no_step() -> None:
    assert paced((3, 1.0), (2, 2.0)) == Pace(2, 1.0, (1 / 3,))
