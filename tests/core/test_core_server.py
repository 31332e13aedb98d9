"""The server: attaching, keys, pushes and pulls."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, Create, Garbled, Halt, JobDone, Note, Received, Send, Span, Tick
from kvd.errors import NotAllowed
from kvd.protocol.messages import (
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Done,
    Init,
    KeyInfo,
    KeyList,
    ListKeys,
    Lookup,
    Part,
    Publish,
    Pull,
    Push,
    Refused,
    StatusQuery,
    StatusReport,
    Values,
    ViewNumber,
    Welcome,
)
from kvd.protocol.specs import KeySpec
from tests.core.core_fakes import SLICE, cluster, from_scheduler, member, of, one, read, said, uint8, worker_id
from tests.core.server_bench import Bench, kinds


def ready(value: bytes = b"\0", settings: Any = None, **more: Any) -> Bench:
    """A server of two workers, with one key."""
    bench = Bench(settings, **more)
    bench.init("w", value)
    return bench


def refusal(effects: Any) -> Refused:
    return one([message for message in said(effects) if isinstance(message, Refused)])


def values(effects: Any, peer: Any = None) -> tuple[tuple[int, ...], list[bytes]]:
    """The versions and the bytes of the one Values that is sent."""
    send = one([send for send in of(Send, effects) if isinstance(send.message, Values) and peer in (None, send.peer)])
    assert isinstance(send.message, Values)
    return send.message.versions, [read(span) for span in send.payload]


# ── attaching ──


def test_a_worker_of_the_view_is_attached_at_once() -> None:
    bench = Bench(attach=False)
    assert said(bench.attach(0), worker_id(0)) == [Done(1)]
    assert said(bench.attach(0)) == [Done(1)]
    assert bench.explain()["workers"] == [0]


def test_a_worker_that_is_ahead_of_the_view_waits_for_it() -> None:
    bench = Bench(attach=False)
    assert bench.attach(1, life=1) == []
    assert said(bench.look(member("worker", 1, life=1))) == [Done(1)]


def test_so_many_strangers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.MAX_ATTACHING", 1)
    bench = Bench(attach=False)
    bench.attach(1, life=1)
    bench.attach(0, life=1)
    assert said(bench.look(member("worker", 1, life=1), member("worker", 0, life=1))) == [Done(1)]


def test_a_server_or_a_stranger_is_no_worker() -> None:
    bench = Bench(attach=False)
    assert bench.step(Received("x", 1000, ViewNumber(0, 0), Attach(1, 0))) == []
    for message in (
        Init(3, "w", uint8(1), 0),
        Publish(3, "w", uint8(1)),
        ClockQuery(3, "w"),
        Activate(3, "w", 1),
        Push(3, (Part("w", 0, 1),), 0, 1, False),
        Pull(3, (Part("w", 0, 0),)),
    ):
        assert refusal(bench.say(0, message, b"\0")).error == "attach"


# ── keys ──


def test_a_key_is_made_published_and_found() -> None:
    bench = Bench()
    assert refusal(bench.say(1, Lookup(5, "w", False))).error == "KeyNotFound"
    assert bench.say(1, Lookup(6, "w", True)) == []
    assert bench.say(1, Lookup(6, "w", True)) == []
    spec = uint8(2)
    assert said(bench.say(0, Init(7, "w", spec, 0), b"ab")) == [Done(7)]
    assert refusal(bench.say(1, Lookup(5, "w", False))).error == "KeyNotFound"
    effects = bench.say(0, Publish(8, "w", spec))
    info = KeyInfo(6, spec, worker_id(0))
    assert said(effects, worker_id(1)) == [info]
    assert said(effects, worker_id(0)) == [Done(8)]
    assert said(bench.say(0, Publish(8, "w", spec))) == [Done(8)]
    assert said(bench.say(1, Lookup(6, "w", True))) == [info]
    assert values(bench.pull(1, 0)) == ((0,), [b"ab"])


def test_an_init_that_is_sent_again_makes_nothing_anew() -> None:
    bench = Bench()
    bench.hold = True
    first = one(of(Create, bench.say(0, Init(7, "w", uint8(1), 0), b"a")))
    assert of(Create, bench.say(0, Init(7, "w", uint8(1), 0), b"a")) == []
    assert said(bench.finish(first)) == [Done(7)]
    bench.hold = False
    for rank in (0, 1):
        bench.push(rank, 1)
    effects = bench.say(0, Init(7, "w", uint8(1), 0), b"a")
    assert (said(effects), of(Create, effects)) == ([Done(7)], [])
    assert values(bench.pull(0, 1)) == ((1,), [b"\2"])


@pytest.mark.parametrize(
    ("rank", "index", "payload", "error"),
    [(1, 0, b"abcd", "NotAllowed"), (0, 1, b"abcd", "ProtocolError"), (0, 0, b"abc", "ProtocolError")],
)
def test_an_init_that_cannot_be(rank: int, index: int, payload: bytes, error: str) -> None:
    assert refusal(Bench().say(rank, Init(3, "w", uint8(4), index), payload)).error == error


def test_only_worker_0_publishes_what_it_made() -> None:
    bench = Bench()
    assert refusal(bench.say(0, Publish(3, "w", uint8(1)))).error == "NotAllowed"
    bench.init("w", b"a", publish=False)
    assert refusal(bench.say(1, Publish(3, "w", uint8(1)))).error == "NotAllowed"
    assert refusal(bench.say(0, Publish(3, "w", uint8(2)))).error == "NotAllowed"  # not what it made


def test_a_create_that_fails_is_told() -> None:
    bench = Bench()
    bench.error = NotAllowed("no memory")
    refused = refusal(bench.say(0, Init(3, "w", uint8(1), 0), b"a"))
    assert (refused.error, refused.text, refused.key) == ("NotAllowed", "no memory", "w")
    bench.error = None
    assert said(bench.say(0, Init(3, "w", uint8(1), 0), b"a")) == [Done(3)]


def test_until_it_is_published_a_new_incarnation_makes_the_key_anew() -> None:
    bench = Bench()
    bench.init("w", b"x" * (2 * SLICE), publish=False)
    assert bench.explain()["slices"] == 2
    bench.look(member("worker", 0, life=1))
    bench.attach(0, life=1)
    bench.init("w", b"new", life=1)
    shown = bench.explain()
    assert (shown["slices"], shown["bytes_led"]) == (1, 3)  # nothing of the longer one is left
    assert values(bench.pull(1, 0)) == ((0,), [b"new"])
    for rank, life in ((0, 1), (1, 0)):
        bench.push(rank, 1, b"abc", life=life)
    assert said(bench.say(1, ClockQuery(4, "w"))) == [Clocks(4, 1, 1, 1, 1)]


def test_what_a_replaced_worker_began_to_make_does_not_come_to_be() -> None:
    bench = Bench()
    bench.hold = True
    late = one(of(Create, bench.say(0, Init(7, "w", uint8(1), 0), b"a")))
    bench.look(member("worker", 0, life=1))
    bench.attach(0, life=1)
    assert said(bench.finish(late)) == []
    assert bench.explain()["slices"] == 0


def test_a_live_key_is_not_made_again() -> None:
    bench = ready(b"a")
    bench.look(member("worker", 0, life=1))
    bench.attach(0, life=1)
    assert refusal(bench.say(0, Init(3, "w", uint8(1), 0), b"b", life=1)).error == "KeyExists"
    assert values(bench.pull(1, 0)) == ((0,), [b"a"])


def test_a_key_in_use_is_not_made_again_even_where_nobody_knows_that_it_is_live() -> None:
    bench = Bench()
    bench.init("w", b"\0", publish=False)
    for rank in (0, 1):
        bench.push(rank, 1)
    bench.look(member("worker", 0, life=1))
    bench.attach(0, life=1)
    assert refusal(bench.say(0, Init(3, "w", uint8(1), 0), b"b", life=1)).error == "KeyExists"


def test_the_memory_is_bounded_and_the_bound_known_at_init() -> None:
    # 3 copies, and 2 rounds ahead of 2 workers: 7 times the bytes led
    bench = Bench(memory=7 * 100)
    bench.init("a", bytes(60))
    refused = refusal(bench.say(0, Init(3, "b", uint8(41), 0), bytes(41)))
    assert refused.error == "NotAllowed"
    assert "4 staged" in refused.text
    assert said(bench.say(0, Init(4, "b", uint8(40), 0), bytes(40))) == [Done(4)]
    assert said(bench.say(0, Init(4, "b", uint8(40), 0), bytes(40))) == [Done(4)]  # asked again: it is there


def test_what_is_being_made_counts_towards_the_bound() -> None:
    bench = Bench(memory=7 * 100)
    bench.hold = True
    assert len(of(Create, bench.say(0, Init(3, "a", uint8(60), 0), bytes(60)))) == 1
    assert refusal(bench.say(0, Init(4, "b", uint8(60), 0), bytes(60))).error == "NotAllowed"


def test_so_many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.MAX_SLICES", 1)
    bench = ready()
    assert refusal(bench.say(0, Init(3, "b", uint8(1), 0), b"a")).error == "NotAllowed"


def test_keys_are_listed_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.keytable.PAGE", 2)
    bench = Bench()
    for key in ("c", "a", "b"):
        bench.init(key, b"abc", publish=key != "b")
    (page,) = said(bench.say(1, ListKeys(3, "")))
    assert isinstance(page, KeyList)
    assert [(entry.key, entry.shape, entry.live, entry.bytes_led) for entry in page.entries] == [
        ("a", (3,), True, 3),
        ("b", (3,), False, 3),
    ]
    assert page.more
    (page,) = said(bench.say(1, ListKeys(3, "b")))
    assert ([entry.key for entry in page.entries], page.more) == (["c"], False)


def test_a_page_of_keys_fits_into_a_header() -> None:
    from kvd.protocol.codec import encode

    bench = Bench()
    names = [f"{number:03}" + "\U0001f600" * 197 for number in range(100)]
    for name in names:
        bench.init(name, b"a")
    found: list[str] = []
    more, after = True, ""
    while more:
        (page,) = said(bench.say(1, ListKeys(3, after)))
        encode(page, 1, ViewNumber(1, 1))
        found += [entry.key for entry in page.entries]
        more, after = page.more, found[-1]
    assert found == names


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


def test_the_answer_goes_to_where_it_was_asked_last() -> None:
    bench = ready()
    bench.push(0, 1, request=11)
    assert kinds(bench.push(0, 1, request=11, peer="new"), "new") == ["Staged"]
    assert kinds(bench.pull(0, 1, request=12)) == []
    bench.pull(0, 1, request=12, peer="newer")
    effects = bench.push(1, 1)
    assert kinds(effects, "new") == ["Done"]
    assert kinds(effects, "newer") == ["Values"]
    assert kinds(effects, worker_id(0)) == []


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
    monkeypatch.setattr("kvd.core.server.MAX_PENDING", 1)
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


# ── worker clocks ──


def test_clocks_of_a_key() -> None:
    bench = ready()
    assert refusal(bench.say(0, ClockQuery(3, "v"))).error == "KeyNotFound"
    for clock in (1, 2):
        bench.push(0, clock)
    bench.push(1, 1)
    assert said(bench.say(0, ClockQuery(3, "w"))) == [Clocks(3, 1, 1, 1, 1)]  # staged is not counted


def test_a_rank_that_comes_back_takes_part_after_its_clock() -> None:
    bench = ready()
    bench.look(member("worker", 1, "left"))
    for clock in (1, 2):
        assert kinds(bench.push(0, clock)) == ["Done"]
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)
    assert kinds(bench.push(0, 3)) == ["Staged"]
    assert Done(4) in said(bench.say(1, Activate(4, "w", 3), life=1))
    assert values(bench.pull(0, 3)) == ((3,), [b"\1"])
    assert kinds(bench.push(0, 4)) == ["Staged"]
    assert kinds(bench.push(1, 4, life=1)) == ["Done", "Done"]


# ── the rest ──


def test_what_a_server_does_not_take() -> None:
    bench = Bench()
    refused = refusal(bench.say(0, Welcome(4, 0, "")))
    assert (refused.error, refused.request, refused.text) == ("ProtocolError", 4, "a server takes no Welcome")
    assert bench.say(0, Done(4)) == []
    assert bench.say(0, Refused(4, "x", "y")) == []
    assert bench.step(JobDone(999)) == []
    assert bench.step(Garbled("someone", "junk")) == []
    assert said(bench.say(0, StatusQuery(5))) == [StatusReport(5)]


def test_a_server_that_was_replaced_halts() -> None:
    bench = Bench()
    effects = bench.step(from_scheduler(Refused(0, "replaced", "stop")))
    assert isinstance(one(of(Halt, effects)).error, NotAllowed)
    assert bench.machine.next_deadline() is None
    assert bench.step(Tick(), 100.0) == []


def test_explain() -> None:
    bench = ready(b"abc")
    bench.push(0, 1, b"abc")
    shown = bench.explain()
    assert (shown["role"], shown["rank"], shown["keys"], shown["bytes_staged"]) == ("server", 0, 1, 3)
    assert (shown["requests_waiting"], shown["waiting_for"], shown["optimizer"]) == (1, ["worker 1"], None)
    assert bench.machine.view_number == (1, 1)


def test_an_empty_key_has_rounds_like_any_other() -> None:
    bench = ready(b"")
    bench.push(0, 1, b"")
    assert values(bench.push(1, 1, b"", pull=True)) == ((1,), [b""])


def test_a_float_key_keeps_its_spec() -> None:
    bench = Bench()
    spec = KeySpec("float32", (2, 1), SLICE)
    bench.init("w", bytes(8), spec)
    (info,) = said(bench.say(1, Lookup(3, "w", True)))
    assert info.spec == spec
    assert Span(b"", 0, 0).nbytes == 0
