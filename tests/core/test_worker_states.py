"""The states of keys, requests and calls, and the parts that can be tried alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvd.core import requests
from kvd.core.machine import Complete, LocalCall, Send, ServerPeer
from kvd.core.outbox import ENTRY_TRANSITIONS, Entry, EntryState, Outbox
from kvd.core.worker.calls import CallBook
from kvd.core.worker.in_flight import CallState, InFlight
from kvd.core.worker.keys import KEY_TRANSITIONS, KeyState, WorkerKey
from kvd.core.worker.open_pushes import OpenPushes
from kvd.core.worker.push_window import (
    PushWindow,
    begin_pulls,
    begin_pushes,
    end_pulls,
    mark_failing,
    settle_pushes,
)
from kvd.errors import NotAllowed, RequestTimeout
from kvd.protocol.messages import Pull
from tests.core.fakes import session

# ── states ──


@pytest.mark.parametrize(("before", "after"), list(product(KeyState, KeyState)))
def test_a_key_changes_its_state_only_as_the_table_allows(before: KeyState, after: KeyState) -> None:
    key = WorkerKey("w", state=before)
    if after is before or after in KEY_TRANSITIONS[before]:
        key.move_to(after)
        assert key.state is after
    else:
        with pytest.raises(RuntimeError, match=f"'w' cannot become {after} when it is {before}"):
            key.move_to(after)
        assert key.state is before


@pytest.mark.parametrize(("before", "after"), list(product(EntryState, EntryState)))
def test_a_request_changes_its_state_only_as_the_table_allows(before: EntryState, after: EntryState) -> None:
    entry = Entry(Send(ServerPeer(1000), Pull(1, ())), lambda event: None, state=before)
    if after in ENTRY_TRANSITIONS[before]:
        entry.move_to(after)
        assert entry.state is after
    else:
        with pytest.raises(RuntimeError, match=f"cannot become {after} when it is {before}"):
            entry.move_to(after)
        assert entry.state is before


def test_a_call_starts_once() -> None:
    call = InFlight(1, requests.Flush(), 5.0, is_push=False)
    call.start()
    assert call.state is CallState.STARTED
    with pytest.raises(RuntimeError, match="cannot start when it is STARTED"):
        call.start()


# ── the push window ──


def test_a_window_opens_and_closes_with_its_pushes() -> None:
    windows = [PushWindow(), PushWindow(clock=4, base_clock=4)]
    assert begin_pushes(windows) == [1, 5]
    assert [window.holds_back(1) for window in windows] == [True, True]
    assert [window.holds_back(2) for window in windows] == [False, False]
    settle_pushes(windows, None, False)
    assert [(window.clock, window.open_pushes) for window in windows] == [(1, 0), (5, 0)]
    assert all(window.has_pushed for window in windows)


def test_a_failing_push_holds_back_the_next_and_gives_its_clock_back() -> None:
    windows = [PushWindow()]
    begin_pushes(windows)
    mark_failing(windows)
    assert windows[0].holds_back(9)
    settle_pushes(windows, NotAllowed("no"), True)

    assert windows[0].partial_failure is None
    assert (windows[0].clock, windows[0].holds_back(1)) == (0, False)


@pytest.mark.parametrize("is_untaken", [True, False])
def test_a_push_whose_clock_cannot_come_back_fails_the_key_until_rewind(is_untaken: bool) -> None:
    """It was taken in part, or a later push has taken the next clock."""
    (window,) = windows = [PushWindow()]
    begin_pushes(windows)
    if is_untaken:
        begin_pushes(windows)
    mark_failing(windows)
    error = NotAllowed("no")
    settle_pushes(windows, error, is_untaken)
    assert window.partial_failure is error
    assert window.clock == (2 if is_untaken else 1)
    window.rewind(0)
    assert window.clock == 0
    assert not window.partial_failure


def test_a_pull_holds_back_the_round_after_its_version() -> None:
    windows = [PushWindow(clock=3)]
    begin_pulls(windows)
    assert not windows[0].holds_back(2)  # the next round keeps the version before
    begin_pushes(windows)
    assert windows[0].holds_back(2)
    end_pulls(windows, [3])
    assert not windows[0].holds_back(2)


def test_rewind_goes_back_and_never_behind_the_clock_of_a_return() -> None:
    window = PushWindow()
    window.start_at(5)
    window.resume()
    begin_pushes([window])
    settle_pushes([window], None, False)
    window.rewind(9)
    assert (window.clock, window.has_pushed) == (6, True)
    window.rewind(2)
    assert (window.clock, window.has_pushed) == (5, False)


# ── calls and open pushes ──


class Book:
    """A book of calls, its open pushes, and what it emitted."""

    def __init__(self) -> None:
        self.effects: list[Any] = []
        self.calls = CallBook(session("worker", 0), Outbox(100), self.effects.append)
        self.pushes = OpenPushes(self.calls, lambda key: None)
        self.numbers = 0

    def accept(self, request: requests.Request, deadline: float = 9.0) -> InFlight:
        self.numbers += 1
        return self.calls.accept(LocalCall(self.numbers, request, deadline), 0.0)

    def push(self) -> InFlight:
        call = self.accept(requests.Transfer((), push=True, pull=False))
        self.pushes.accept(call)
        return call

    def completed(self) -> list[int]:
        return [effect.call for effect in self.effects if isinstance(effect, Complete)]


def test_a_call_is_completed_once_and_withdrawn_when_it_ends_early() -> None:
    book = Book()
    first, second = book.accept(requests.Flush(), 1.0), book.accept(requests.Flush(), 2.0)
    withdrawn: list[InFlight] = []
    second.hold(withdrawn.append)
    book.calls.complete(first)
    book.calls.complete(first)
    for call in book.calls.take_due(5.0):
        book.calls.abandon(call, RequestTimeout("late", outcome="not_sent"))
    assert book.completed() == [1, 2]
    assert withdrawn == [second]
    assert len(book.calls) == 0
    assert book.effects[1].error.outcome == "not_sent"


def test_a_flush_waits_for_the_pushes_that_are_open_when_it_comes() -> None:
    book = Book()
    one, two = book.push(), book.push()
    flush = book.accept(requests.Flush())
    book.pushes.flush(flush, requests.Flush())
    later = book.push()
    assert book.pushes.any_waiting()
    for push in (one, two, later):
        push.start()
    assert not book.pushes.any_waiting()
    book.pushes.settle(one)
    assert book.completed() == []
    book.pushes.settle(two)
    assert book.completed() == [flush.number]
    book.pushes.settle(two)
    assert len(book.pushes) == 1
