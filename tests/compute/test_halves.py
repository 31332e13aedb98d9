"""Large calculations on two processors."""

from __future__ import annotations

import threading

import pytest

from kvd.compute import halves
from kvd.compute.halves import WORTH_A_THREAD, in_halves

MANY = WORTH_A_THREAD


class Work:
    """Notes what it is called for; fails at some things."""

    def __init__(self, fails_at: int = -1) -> None:
        self.done: list[int] = []
        self.threads: set[int] = set()
        self._fails_at = fails_at

    def __call__(self, part: slice) -> None:
        self.threads.add(threading.get_ident())
        self.done += range(100)[part]
        if self._fails_at in range(100)[part]:
            raise ValueError(f"at {self._fails_at}")


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "processors", lambda: 2)


@pytest.mark.parametrize(("count", "elements", "threads"), [(7, MANY, 2), (2, MANY, 2), (1, MANY, 1), (7, MANY - 1, 1)])
def test_both_halves_are_done_once(count: int, elements: int, threads: int) -> None:
    work = Work()
    in_halves(work, count, elements)
    assert (sorted(work.done), len(work.threads)) == (list(range(count)), threads)


@pytest.mark.parametrize("place", [0, 9])
def test_an_error_of_either_half_is_raised_after_both_have_ended(place: int) -> None:
    work = Work(fails_at=place)
    with pytest.raises(ValueError, match=f"at {place}"):
        in_halves(work, 10, MANY)
    assert sorted(work.done) == list(range(10))


def test_one_processor_and_a_system_without_threads_do_it_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work = Work()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        in_halves(work, 10, MANY)
    monkeypatch.setattr(halves, "processors", lambda: 1)
    in_halves(work, 10, MANY)
    assert work.done == [*range(10), *range(10)]
    assert work.threads == {threading.get_ident()}
