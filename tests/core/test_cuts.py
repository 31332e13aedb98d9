"""Which step a reader asks for."""

from __future__ import annotations

import pytest

from kvd.core.cuts import FARTHEST_AHEAD, FIRST_PATIENCE_S, LONGEST_PATIENCE_S, Available, Choice, Chooser, available
from kvd.protocol.messages import Surveyed


def surveyed(lowest: int, highest: int, kept: int, over: int, *, level: bool = True) -> Surveyed:
    return Surveyed(1, lowest, highest, kept, level, over)


@pytest.mark.parametrize(
    ("surveys", "expected"),
    [
        ([], (0, 0, True, 0)),
        ([surveyed(5, 5, 4, 4)], (4, 5, False, 5)),  # every slice has the version of the step
        ([surveyed(5, 6, 5, 4)], (5, 5, False, 6)),  # some have the next one already
        ([surveyed(5, 5, 4, 4), surveyed(6, 6, 5, 5)], (5, 5, True, 6)),
        ([surveyed(0, 9, 8, 8)], (8, 8, True, 9)),  # a key that is pushed less often
        ([surveyed(9, 9, 8, 8, level=False)], (8, 8, True, 9)),  # one that was made later
        ([surveyed(3, 3, 2, 2), surveyed(9, 9, 8, 8)], (8, 8, True, 9)),
        ([surveyed(3, 3, 2, 7), surveyed(9, 9, 8, 6)], (8, 7, True, 9)),  # one server has moved on
        ([surveyed(2, 2, 1, 9)], (1, 9, True, 9)),
    ],
)
def test_what_the_servers_can_give(surveys: list[Surveyed], expected: tuple[int, int, bool, int]) -> None:
    assert available(surveys, one_key=False) == Available(*expected)


def test_one_key_is_complete_at_any_version() -> None:
    assert available([surveyed(5, 6, 5, 2, level=False)], one_key=True) == Available(5, 5, True, 6)


def test_a_reader_goes_farther_ahead_until_it_is_in_time() -> None:
    chooser, there = Chooser(), Available(7, 8, True, 9)
    assert chooser.choose(there) == Choice(8, True, None)
    for ahead in (1, 2, 4):
        chooser.was_too_late()
        assert chooser.choose(there) == Choice(9 + ahead, False, FIRST_PATIENCE_S)
    chooser.has_waited()  # training has stopped: it reads what there is
    assert chooser.choose(there) == Choice(8, True, None)
    assert chooser.choose(Available(8, 7, True, 9)) == Choice(10, False, 2 * FIRST_PATIENCE_S)


def test_how_far_and_how_long_is_bounded() -> None:
    chooser, there = Chooser(), Available(0, 0, True, 0)
    for _ in range(40):
        chooser.was_too_late()
    assert chooser.choose(there).step == FARTHEST_AHEAD
    for _ in range(40):
        chooser.has_waited()
    chooser.was_too_late()
    assert chooser.choose(there).patience_s == LONGEST_PATIENCE_S
