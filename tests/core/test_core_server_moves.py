"""The server: pushes and pulls."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, Effect, Note, Received
from kvd.errors import NotAllowed
from kvd.protocol.messages import (
    Done,
    Part,
    Pull,
    Push,
    Refused,
    Values,
    ViewNumber,
)
from tests.core.core_fakes import SLICE, cluster, of, one, padded_bytes, read, said, uint8, worker_id
from tests.core.server_bench import Bench, kinds, ready, refusal, values

# ── pushes ──


def test_a_round_is_merged_in_rank_order_and_acknowledged_at_commit() -> None:
    bench = ready()
    bench.hold = True
    assert kinds(bench.push(1, 1, b"\2", request=21)) == ["Staged"]
    effects = bench.push(0, 1, b"\1", request=11)
    apply = one(of(Apply, effects))
    assert [(given.rank, given.clock, given.samples) for given in apply.contributions] == [(0, 1, 1), (1, 1, 1)]
    assert [read(given.span) for given in apply.contributions if given.span] == [b"\1", b"\2"]
    assert (apply.merge, apply.assign, apply.optimizer, apply.current) == ("sum", False, None, b"\0")
    assert Done(21) not in said(effects)
    effects = bench.finish(apply)
    assert said(effects, worker_id(0)) == [Done(11)]
    assert said(effects, worker_id(1)) == [Done(21)]
    assert values(bench.pull(0, 1)) == ((1,), [b"\3"])


def test_a_pushpull_is_answered_with_the_new_version() -> None:
    bench = ready()
    bench.push(0, 1, b"\5", pull=True)
    effects = bench.push(1, 1, b"\6", pull=True)
    for rank in (0, 1):
        assert values(effects, worker_id(rank)) == ((1,), [b"\x0b"])


def test_a_pull_waits_for_its_version_and_gets_exactly_it() -> None:
    bench = ready()
    bench.push(0, 1)
    assert said(bench.pull(0, 1)) == []
    assert values(bench.pull(1, 0)) == ((0,), [b"\0"])
    effects = bench.push(1, 1, b"\2")
    assert values(effects, worker_id(0)) == ((1,), [b"\3"])
    assert values(bench.pull(1, 0)) == ((0,), [b"\0"])  # the previous version is kept
    for rank in (0, 1):
        bench.push(rank, 2, b"\4")
    assert values(bench.pull(1, 1)) == ((1,), [b"\3"])
    refused = refusal(bench.pull(1, 0))
    assert (refused.error, refused.expected) == ("NotAllowed", 2)
    assert values(bench.pull(1, -1)) == ((2,), [b"\x08"])


def test_who_is_no_worker_pulls_what_is_committed() -> None:
    bench = ready(b"a")
    anyone = Received("cli", 77, ViewNumber(0, 0), Pull(3, (Part("w", 0, -1),)))
    assert values(bench.step(anyone)) == ((0,), [b"a"])
    exact = Received("cli", 77, ViewNumber(0, 0), Pull(3, (Part("w", 0, 1),)))
    assert refusal(bench.step(exact)).error == "attach"


def test_a_push_that_is_sent_again_is_counted_once() -> None:
    bench = ready()
    for _ in range(3):
        assert kinds(bench.push(0, 1, b"\1", request=11)) == ["Staged"]
    effects = bench.push(1, 1, b"\1", request=21)
    assert said(effects, worker_id(0)) == [Done(11)]
    for _ in range(2):
        assert said(bench.push(0, 1, b"\1", request=11)) == [Done(11)]
    assert len(bench.applied) == 1
    assert values(bench.pull(0, 1)) == ((1,), [b"\2"])


def test_the_answer_goes_to_where_it_was_asked_first_and_last() -> None:
    bench = ready()
    bench.push(0, 1, request=11)
    assert kinds(bench.push(0, 1, request=11, peer="new"), "new") == ["Staged"]
    assert kinds(bench.pull(0, 1, request=12)) == []
    bench.pull(0, 1, request=12, peer="newer")
    effects = bench.push(1, 1)
    assert kinds(effects, "new") == ["Done"]
    assert kinds(effects, "newer") == ["Values"]
    assert kinds(effects, worker_id(0)) == ["Done", "Values"]


def test_a_probe_asks_without_bytes() -> None:
    bench = ready()
    refused = refusal(bench.push(0, 1, None, probe=True))
    assert (refused.error, refused.expected) == ("clock", 1)  # nothing is here: send it
    bench.push(0, 1, request=11)
    assert kinds(bench.push(0, 1, None, probe=True, request=11)) == ["Staged"]
    bench.push(1, 1)
    assert said(bench.push(0, 1, None, probe=True, request=11)) == [Done(11)]
    assert refusal(bench.push(0, 2, b"\1", probe=True)).error == "ProtocolError"  # a probe with bytes


@pytest.mark.parametrize(("clock", "expected"), [(2, 1), (5, 1), (0, 1), (-1, 1)])
def test_a_push_out_of_turn_is_told_whose_turn_it_is(clock: int, expected: int) -> None:
    refused = refusal(ready().push(0, clock))
    assert (refused.error, refused.expected, refused.key) == ("clock", expected, "w")


def test_the_window_is_rounds_ahead() -> None:
    bench = ready()
    for clock in (1, 2):
        assert kinds(bench.push(0, clock)) == ["Staged"]
    assert (refusal(bench.push(0, 3)).error, bench.explain()["bytes_staged"]) == ("clock", 2)
    bench.push(1, 1)
    assert kinds(bench.push(0, 3)) == ["Staged"]


@pytest.mark.parametrize(
    ("parts", "payload", "error"),
    [
        ([("w", 0, 1), ("v", 0, 1)], [b"\1", b""], "ProtocolError"),
        ([("w", 0, 1), ("v", 0, 1)], [b"\1", b"\1\1"], "ProtocolError"),
        ([("w", 0, 1), ("v", 0, 2)], [b"\1", b"\1"], "clock"),
        ([("w", 0, 1), ("x", 0, 1)], [b"\1", b"\1"], "KeyNotFound"),
        ([("w", 0, 1), ("w", 1, 1)], [b"\1", b"\1"], "KeyNotFound"),
    ],
)
def test_a_push_is_taken_as_a_whole_or_not_at_all(parts: Any, payload: list[bytes], error: str) -> None:
    bench = ready()
    bench.init("v", b"\0")
    assert refusal(bench.push_all(0, parts, payload)).error == error
    assert bench.explain()["bytes_staged"] == 0
    assert bench.explain()["requests_waiting"] == 0


def test_a_message_of_many_parts_is_answered_when_the_last_is_committed() -> None:
    bench = Bench()
    spec = uint8(SLICE + 3)
    bench.init("w", bytes(SLICE + 3), spec)
    bench.init("v", b"\0")
    parts = [("v", 0, 1), ("w", 1, 1), ("w", 0, 1)]
    bench.push_all(0, parts, [b"\7", b"abc", b"\1" * SLICE], pull=True)
    bench.push_all(1, parts[1:], [b"\0\0\1", b"\2" * SLICE])
    effects = bench.push(1, 1, b"\1", key="v")
    versions, got = values(effects, worker_id(0))
    assert versions == (1, 1, 1)
    assert got == [b"\x08", b"abd", b"\3" * SLICE]


def test_a_round_of_assignment_takes_rank_0_s_value() -> None:
    bench = ready()
    bench.push(1, 1, None, how=2, pull=True)
    assert refusal(bench.push(0, 1, b"\1", how=0)).error == "NotAllowed"  # the others broadcast
    effects = bench.push(0, 1, b"\7", how=1, pull=True)
    assert one(bench.applied).assign
    assert values(effects, worker_id(1)) == ((1,), [b"\7"])


def test_so_many_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.servermoves.MAX_PENDING", 1)
    bench = ready()
    bench.push(0, 1)
    assert refusal(bench.push(1, 1)).error == "NotAllowed"
    assert refusal(bench.pull(1, 1)).error == "NotAllowed"


def test_weighted_merge_and_whole_numbers_do_not_go_together() -> None:
    bench = ready(settings=cluster(merge="weighted"))
    refused = refusal(bench.push(0, 1))
    assert refused.error == "NotAllowed"
    assert "weighted merge takes float keys only" in refused.text


def test_an_update_that_fails_gives_the_pushes_back() -> None:
    bench = ready()
    bench.push(0, 1, request=11)
    bench.push(0, 2, request=12)
    bench.pull(0, 1, request=13)
    bench.error = NotAllowed("a bad optimizer")
    effects = bench.push(1, 1, request=21)
    told = {message.request: message for message in said(effects) if isinstance(message, Refused)}
    assert set(told) == {11, 12, 13, 21}
    assert "the update of 'w' failed: a bad optimizer" in told[11].text
    assert any(note.level == "error" for note in of(Note, effects))
    bench.error = None
    bench.push(0, 1)
    effects = bench.push(1, 1)
    assert kinds(effects) == ["Done", "Done"]
    assert values(bench.pull(0, 1)) == ((1,), [b"\2"])


@pytest.mark.parametrize("sync", [True, False])
def test_a_refused_push_that_comes_again_does_not_take_the_clock_of_the_next(sync: bool) -> None:
    bench = ready(settings=cluster() if sync else cluster(mode="async"))

    def others(number: int, request: int) -> list[Effect]:
        return bench.push(1, number, b"\1", request=request) if sync else []

    bench.error = NotAllowed("a bad optimizer")
    effects = bench.push(0, 1, b"\7", request=11) + others(1, 21)
    assert 11 in {message.request for message in said(effects) if isinstance(message, Refused)}
    bench.error = None
    again = refusal(bench.push(0, 1, b"\7", request=11))  # the refusal was on its way when it was sent
    assert (again.request, again.error, again.expected) == (11, "NotAllowed", 0)
    assert "the update of 'w' failed: a bad optimizer" in again.text
    assert refusal(bench.push(0, 1, None, request=11, probe=True)).error == "NotAllowed"
    bench.push(0, 1, b"\5", request=12)
    others(1, 22)
    assert values(bench.pull(0, 1)) == ((1,), [b"\6" if sync else b"\5"])


def test_pushes_ahead_of_a_failed_one_are_refused_for_good_too() -> None:
    bench = ready()
    bench.push(0, 1, request=11)
    bench.push(0, 2, request=12)
    bench.error = NotAllowed("no")
    bench.push(1, 1, request=21)
    bench.error = None
    for request, clock in ((12, 2), (11, 1)):
        assert refusal(bench.push(0, clock, b"\7", request=request)).error == "NotAllowed"
    assert kinds(bench.push(0, 1, b"\7", request=13)) == ["Staged"]
    assert refusal(bench.push(0, 3, request=14)).error == "clock"  # a later request may be out of turn, and try again


def test_a_push_that_was_refused_before_it_was_staged_stays_refused() -> None:
    bench = ready()
    bench.push(1, 1, None, how=2)
    assert refusal(bench.push(0, 1, b"\1", how=0, request=11)).error == "NotAllowed"  # the others broadcast
    bench.push(0, 1, b"\7", how=1, request=12)
    assert refusal(bench.push(0, 2, b"\1", how=0, request=11)).error == "NotAllowed"


def test_a_push_refused_for_one_of_its_slices_says_so_again() -> None:
    bench = ready(settings=cluster(mode="async"))
    bench.init("v", b"\0")
    bench.hold = True
    push = Push(11, (Part("w", 0, 1), Part("v", 0, 1)), 0, 1, False)
    first, second = of(Apply, bench.say(0, push, padded_bytes([b"\1", b"\2"])))
    bench.error = NotAllowed("no")
    assert refusal(bench.finish(first)).expected == 1
    bench.error = None
    bench.finish(second)
    again = refusal(bench.say(0, push, padded_bytes([b"\1", b"\2"])))
    assert (again.error, again.expected) == ("NotAllowed", 1)


def test_a_push_that_counts_is_answered_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ready()
    bench.push(0, 1, request=11)
    bench.push(1, 1)
    bench.push(0, 2, request=12)
    monkeypatch.setattr("kvd.core.servermoves.MAX_PENDING", 1)
    assert said(bench.push(0, 1, request=11)) == [Done(11)]
    other = refusal(bench.push(0, 2, request=13))  # it is staged, and can wait no more: to be asked again
    assert other.error == "clock"


# ── async ──


def asynchronous(**more: Any) -> Bench:
    return ready(settings=cluster(mode="async", **more))


def test_async_pushes_are_applied_at_once_and_seen_by_the_pusher() -> None:
    bench = asynchronous()
    assert kinds(bench.push(0, 1, b"\5")) == ["Done"]
    assert values(bench.pull(0, 1)) == ((1,), [b"\5"])
    assert values(bench.pull(1, 0)) == ((1,), [b"\5"])
    bench.hold = True
    effects = bench.push(1, 1, b"\6")
    assert said(bench.pull(1, 1)) == []
    assert values(bench.pull(0, 1)) == ((1,), [b"\5"])
    assert values(bench.finish(one(of(Apply, effects))), worker_id(1)) == ((2,), [b"\6"])


def test_async_an_update_that_fails_does_not_hold_up_the_others() -> None:
    bench = asynchronous()
    bench.hold = True
    first = one(of(Apply, bench.push(0, 1, request=11)))
    bench.push(1, 1, b"\6", request=21)
    bench.error = NotAllowed("no")
    effects = bench.finish(first)
    assert refusal(effects).request == 11
    bench.error = None
    assert said(bench.finish(one(of(Apply, effects)))) == [Done(21)]
    assert values(bench.pull(1, 1)) == ((1,), [b"\6"])


@pytest.mark.parametrize("staleness", [0, 1])
def test_staleness_holds_the_fast_back_until_the_slow_come(staleness: int) -> None:
    bench = asynchronous(staleness=staleness)
    for clock in range(1, staleness + 1):
        assert kinds(bench.push(0, clock)) == ["Done"]
    assert kinds(bench.push(0, staleness + 1)) == ["Staged"]
    assert bench.explain()["waiting_for"] == ["worker 1"]
    effects = bench.push(1, 1)
    assert [kinds(effects, worker_id(rank)).count("Done") for rank in (0, 1)] == [1, 1]
    assert bench.explain()["waiting_for"] == []


def test_a_pull_of_what_is_not_here() -> None:
    assert refusal(ready().pull(0, 0, key="v")).error == "KeyNotFound"


def test_async_a_pull_for_a_push_that_has_not_come_waits_for_nobody_else() -> None:
    bench = asynchronous()
    assert said(bench.pull(0, 1)) == []
    assert bench.explain()["waiting_for"] == []
    effects = bench.push(0, 1, b"\5")
    assert values(effects, worker_id(0)) == ((1,), [b"\5"])


def test_a_request_that_failed_in_one_slice_is_not_answered_from_another() -> None:
    bench = ready()
    bench.init("v", b"\0")
    for clock in (1, 2):
        for rank in (0, 1):
            bench.push(rank, clock)
    parts = (Part("v", 0, 1), Part("w", 0, 0))  # v waits for its first round, w has forgotten version 0
    assert refusal(bench.say(0, Pull(99, parts))).error == "NotAllowed"
    for rank in (0, 1):
        effects = bench.push(rank, 1, key="v")
    assert [message.request for message in said(effects) if isinstance(message, Values)] == []
