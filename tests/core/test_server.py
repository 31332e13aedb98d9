"""The server: attaching, keys, and what it does not take."""

from __future__ import annotations

import pytest

from kvd.core.machine import (
    SCHEDULER,
    Apply,
    CallerPeer,
    Complete,
    Create,
    Halt,
    InvalidFrame,
    JobDone,
    LocalCall,
    Received,
    Span,
    Tick,
)
from kvd.core.server.machine import ServerMachine, ServerSettings
from kvd.errors import NotAllowed
from kvd.protocol.messages import (
    NO_KEY,
    Activate,
    Attach,
    ClockQuery,
    Clocks,
    Departure,
    Done,
    Epoch,
    ErrorCode,
    KeyInfo,
    KeyList,
    ListKeys,
    Made,
    NotYetReason,
    Part,
    Pull,
    Push,
    Refused,
    StatusQuery,
    StatusReport,
    Welcome,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import (
    SLICE,
    cluster,
    from_scheduler,
    info_of,
    init_of,
    lookup_of,
    member,
    of,
    one,
    publish_of,
    said,
    session,
    uint8,
    worker_id,
)
from tests.core.server_harness import Harness, kinds, not_yet, ready, refusal, values

# ── attaching ──


def test_a_worker_of_the_view_is_attached_at_once() -> None:
    harness = Harness(attach=False)
    assert said(harness.attach(0), worker_id(0)) == [Done(1)]
    assert said(harness.attach(0)) == [Done(1)]
    assert harness.explain()["workers"] == [0]


def test_a_worker_that_is_ahead_of_the_view_waits_for_it() -> None:
    harness = Harness(attach=False)
    assert harness.attach(1, life=1) == []
    assert said(harness.look(member("worker", 1, life=1))) == [Done(1)]


def test_the_strangers_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.attachments.MAX_ATTACHING", 1)
    harness = Harness(attach=False)
    harness.attach(1, life=1)
    harness.attach(0, life=1)
    assert said(harness.look(member("worker", 1, life=1), member("worker", 0, life=1))) == [Done(1)]


def test_a_server_or_a_stranger_is_no_worker() -> None:
    harness = Harness(attach=False)
    assert harness.step(Received(CallerPeer(b"x"), 1000, Epoch(0, 0), Attach(1, 0))) == []
    for message in (
        init_of(3, "w", uint8(1), 0),
        publish_of(3, "w", uint8(1)),
        ClockQuery(3, "w"),
        Activate(3, "w", 1),
        Push(3, (Part("w", 0, 1),), 0, 1, False),
        Pull(3, (Part("w", 0, 0),)),
    ):
        assert not_yet(harness.say(0, message, b"\0")).reason is NotYetReason.NOT_ATTACHED


# ── keys ──


def test_a_key_is_made_published_and_found() -> None:
    harness = Harness()
    assert said(harness.say(1, lookup_of(5, "w", False))) == [KeyInfo(5, (), (NO_KEY,))]
    assert harness.say(1, lookup_of(6, "w", True)) == []
    assert harness.say(1, lookup_of(6, "w", True)) == []
    spec = uint8(2)
    assert said(harness.say(0, init_of(7, "w", spec, 0), b"ab")) == [Done(7)]
    assert said(harness.say(1, lookup_of(5, "w", False))) == [KeyInfo(5, (), (NO_KEY,))]
    effects = harness.say(0, publish_of(8, "w", spec))
    info = info_of(6, spec)
    assert said(effects, worker_id(1)) == [info]
    assert said(effects, worker_id(0)) == [Done(8)]
    assert said(harness.say(0, publish_of(8, "w", spec))) == [Done(8)]
    assert said(harness.say(1, lookup_of(6, "w", True))) == [info]
    assert values(harness.pull(1, 0)) == ((0,), [b"ab"])


def test_an_init_that_is_sent_again_changes_nothing() -> None:
    harness = Harness()
    harness.hold = True
    first = one(of(Create, harness.say(0, init_of(7, "w", uint8(1), 0), b"a")))
    assert of(Create, harness.say(0, init_of(7, "w", uint8(1), 0), b"a")) == []
    assert said(harness.finish(first)) == [Done(7)]
    harness.hold = False
    for rank in (0, 1):
        harness.push(rank, 1)
    effects = harness.say(0, init_of(7, "w", uint8(1), 0), b"a")
    assert (said(effects), of(Create, effects)) == ([Done(7)], [])
    assert values(harness.pull(0, 1)) == ((1,), [b"\2"])


@pytest.mark.parametrize(
    ("rank", "index", "payload", "error"),
    [
        (1, 0, b"abcd", ErrorCode.NOT_ALLOWED),
        (0, 1, b"abcd", ErrorCode.PROTOCOL_ERROR),
        (0, 0, b"abc", ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_an_invalid_init_is_refused(rank: int, index: int, payload: bytes, error: ErrorCode) -> None:
    assert refusal(Harness().say(rank, init_of(3, "w", uint8(4), index), payload)).error is error


def test_only_worker_0_publishes_what_it_made() -> None:
    harness = Harness()
    assert refusal(harness.say(0, publish_of(3, "w", uint8(1)))).error is ErrorCode.NOT_ALLOWED
    harness.init("w", b"a", publish=False)
    assert refusal(harness.say(1, publish_of(3, "w", uint8(1)))).error is ErrorCode.NOT_ALLOWED
    assert refusal(harness.say(0, publish_of(3, "w", uint8(2)))).error is ErrorCode.NOT_ALLOWED  # not what it made


def test_a_failed_create_is_refused_with_its_error() -> None:
    harness = Harness()
    harness.error = NotAllowed("no memory")
    refused = refusal(harness.say(0, init_of(3, "w", uint8(1), 0), b"a"))
    assert (refused.error, refused.text, refused.key) == (ErrorCode.NOT_ALLOWED, "no memory", "w")
    harness.error = None
    assert said(harness.say(0, init_of(3, "w", uint8(1), 0), b"a")) == [Done(3)]


def test_a_new_incarnation_replaces_an_unpublished_key() -> None:
    harness = Harness()
    harness.init("w", b"x" * (2 * SLICE), publish=False)
    assert harness.explain()["slices"] == 2
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    harness.init("w", b"new", life=1)
    shown = harness.explain()
    assert (shown["slices"], shown["bytes_led"]) == (1, 3)  # nothing of the longer one is left
    assert values(harness.pull(1, 0)) == ((0,), [b"new"])
    for rank, life in ((0, 1), (1, 0)):
        harness.push(rank, 1, b"abc", life=life)
    assert said(harness.say(1, ClockQuery(4, "w"))) == [Clocks(4, 1, 1, 1, 1)]


def test_an_unfinished_key_of_a_replaced_worker_is_dropped() -> None:
    harness = Harness()
    harness.hold = True
    late = one(of(Create, harness.say(0, init_of(7, "w", uint8(1), 0), b"a")))
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert said(harness.finish(late)) == []
    assert harness.explain()["slices"] == 0


def test_a_live_key_is_not_made_again() -> None:
    harness = ready(b"a")
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert refusal(harness.say(0, init_of(3, "w", uint8(1), 0), b"b", life=1)).error is ErrorCode.KEY_EXISTS
    assert values(harness.pull(1, 0)) == ((0,), [b"a"])


def test_a_key_in_use_is_not_created_again_even_if_it_was_never_published() -> None:
    harness = Harness()
    harness.init("w", b"\0", publish=False)
    for rank in (0, 1):
        harness.push(rank, 1)
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    assert refusal(harness.say(0, init_of(3, "w", uint8(1), 0), b"b", life=1)).error is ErrorCode.KEY_EXISTS


def test_an_init_beyond_the_memory_bound_is_refused() -> None:
    # 3 copies, and 2 rounds ahead of 2 workers: 7 times the bytes led
    harness = Harness(memory=7 * 100)
    harness.init("a", bytes(60))
    refused = refusal(harness.say(0, init_of(3, "b", uint8(41), 0), bytes(41)))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert "4 staged" in refused.text
    assert said(harness.say(0, init_of(4, "b", uint8(40), 0), bytes(40))) == [Done(4)]
    assert said(harness.say(0, init_of(4, "b", uint8(40), 0), bytes(40))) == [Done(4)]  # asked again: it is there


def test_two_versions_that_a_worker_may_keep_count_where_it_stages_less() -> None:
    harness = Harness(cluster(2, rounds_ahead=1), memory=(3 + 2 * 2) * 100)
    refused = refusal(harness.say(0, init_of(3, "a", uint8(101), 0), bytes(101)))
    assert refused.error is ErrorCode.NOT_ALLOWED
    assert said(harness.say(0, init_of(4, "a", uint8(100), 0), bytes(100))) == [Done(4)]


def test_keys_that_are_being_created_count_towards_the_bound() -> None:
    harness = Harness(memory=7 * 100)
    harness.hold = True
    assert len(of(Create, harness.say(0, init_of(3, "a", uint8(60), 0), bytes(60)))) == 1
    assert refusal(harness.say(0, init_of(4, "b", uint8(60), 0), bytes(60))).error is ErrorCode.NOT_ALLOWED


def test_the_number_of_slices_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.key_creation.MAX_SLICES", 1)
    harness = ready()
    assert refusal(harness.say(0, init_of(3, "b", uint8(1), 0), b"a")).error is ErrorCode.NOT_ALLOWED


def test_keys_are_listed_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.server.keys.PAGE", 2)
    harness = Harness()
    for key in ("c", "a", "b"):
        harness.init(key, b"abc", publish=key != "b")
    (page,) = said(harness.say(1, ListKeys(3, "")))
    assert isinstance(page, KeyList)
    assert [(entry.key, entry.shape, entry.live, entry.bytes_led) for entry in page.entries] == [
        ("a", (3,), True, 3),
        ("b", (3,), False, 3),
    ]
    assert page.more
    (page,) = said(harness.say(1, ListKeys(3, "b")))
    assert ([entry.key for entry in page.entries], page.more) == (["c"], False)


def test_a_page_of_keys_fits_into_a_header() -> None:
    from kvd.protocol.codec import encode

    harness = Harness()
    names = [f"{number:03}" + "\U0001f600" * 197 for number in range(100)]
    for name in names:
        harness.init(name, b"a")
    found: list[str] = []
    more, after = True, ""
    while more:
        (page,) = said(harness.say(1, ListKeys(3, after)))
        encode(page, 1, Epoch(1, 1))
        found += [entry.key for entry in page.entries]
        more, after = page.more, found[-1]
    assert found == names


# ── worker clocks ──


def test_clocks_of_a_key() -> None:
    harness = ready()
    assert refusal(harness.say(0, ClockQuery(3, "v"))).error is ErrorCode.KEY_NOT_FOUND
    for clock in (1, 2):
        harness.push(0, clock)
    harness.push(1, 1)
    assert said(harness.say(0, ClockQuery(3, "w"))) == [Clocks(3, 1, 1, 1, 1)]  # staged is not counted


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_clocks_are_told_only_after_the_update_with_the_own_push(mode: str) -> None:
    harness = ready(settings=cluster(mode=mode))
    harness.hold = True
    effects = harness.push(0, 1)
    if mode == "sync":
        effects = harness.push(1, 1)
    else:
        assert said(harness.say(1, ClockQuery(2, "w"))) == [Clocks(2, 0, 0, 0, 0)]  # the update is another's
    apply = one(of(Apply, effects))
    answer = not_yet(harness.say(0, ClockQuery(3, "w")))
    assert answer.reason is NotYetReason.UPDATING  # the update may fail
    harness.error = NotAllowed("no")
    harness.finish(apply)
    assert said(harness.say(0, ClockQuery(3, "w"))) == [Clocks(3, 0, 0, 0, 0)]


def test_a_rank_that_comes_back_takes_part_after_its_clock() -> None:
    harness = ready()
    harness.look(member("worker", 1, "left"))
    for clock in (1, 2):
        assert kinds(harness.push(0, clock)) == ["Done"]
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)
    assert kinds(harness.push(0, 3)) == ["Staged"]
    assert Done(4) in said(harness.say(1, Activate(4, "w", 3), life=1))
    assert values(harness.pull(0, 3)) == ((3,), [b"\1"])
    assert kinds(harness.push(0, 4)) == ["Staged"]
    assert kinds(harness.push(1, 4, life=1)) == ["Done", "Done"]


# ── the rest ──


def test_messages_that_a_server_does_not_take() -> None:
    harness = Harness()
    refused = refusal(harness.say(0, Welcome(4, 0, None)))
    assert (refused.error, refused.request, refused.text) == (ErrorCode.PROTOCOL_ERROR, 4, "a server takes no Welcome")
    assert harness.say(0, Done(4)) == []
    assert harness.say(0, Refused(4, ErrorCode.REMOTE_ERROR, "y")) == []
    assert harness.step(JobDone(999)) == []
    assert harness.step(InvalidFrame(CallerPeer(b"someone"), "junk")) == []
    assert said(harness.say(0, StatusQuery(5))) == [StatusReport(5)]


def test_a_server_that_was_replaced_halts() -> None:
    harness = Harness()
    effects = harness.step(from_scheduler(Refused(0, ErrorCode.REPLACED, "stop")))
    assert isinstance(one(of(Halt, effects)).error, NotAllowed)
    assert harness.machine.next_deadline() is None
    assert harness.step(Tick(), 100.0) == []


def test_explain() -> None:
    harness = ready(b"abc")
    harness.push(0, 1, b"abc")
    shown = harness.explain()
    assert (shown["role"], shown["rank"], shown["keys"], shown["bytes_staged"]) == ("server", 0, 1, 3)
    assert (shown["requests_waiting"], shown["waiting_for"], shown["optimizer"]) == (1, ["worker 1"], None)
    assert harness.machine.epoch == (1, 1)


def test_an_empty_key_has_rounds_like_any_other() -> None:
    harness = ready(b"")
    harness.push(0, 1, b"")
    assert values(harness.push(1, 1, b"", pull=True)) == ((1,), [b""])


def test_a_float_key_keeps_its_spec() -> None:
    harness = Harness()
    spec = KeySpec("float32", (2, 1), SLICE)
    harness.init("w", bytes(8), spec)
    (info,) = said(harness.say(1, lookup_of(3, "w", True)))
    assert info.made == (Made(spec, 0),)
    assert Span(b"", 0, 0).nbytes == 0


def test_a_server_says_goodbye() -> None:
    harness = ready()
    effects = harness.step(LocalCall(1, None, 0.0))  # type: ignore[arg-type]
    assert [message.departure for message in said(effects, SCHEDULER)] == [Departure.LEFT]
    assert one(of(Complete, effects)) == Complete(1)
    assert harness.machine.next_deadline() is None


def test_a_key_created_by_a_successor_replaces_the_first_one() -> None:
    harness = Harness()
    harness.init("w", b"old", publish=False)
    harness.look(member("worker", 0, life=1))
    harness.attach(0, life=1)
    harness.init("w", b"new", life=1)
    assert harness.explain()["bytes_led"] == 3
    assert values(harness.pull(1, 0)) == ((0,), [b"new"])


def test_a_server_that_never_joined_just_stops_and_one_that_is_not_understood_halts() -> None:
    for event in (LocalCall(1, None, 0.0), InvalidFrame(SCHEDULER, "version 9")):  # type: ignore[arg-type]
        machine = ServerMachine(ServerSettings(1 << 30, True), session("server", 0))
        machine.step(Tick(), 0.0)
        effects = machine.step(event, 0.1)
        assert said(effects) == []
        assert machine.next_deadline() is None
        assert len(of(Halt, effects)) == isinstance(event, InvalidFrame)


def test_an_init_that_arrives_twice_creates_the_slice_once() -> None:
    """Before anybody has pushed: a second Create would put an older value in place of a newer one."""
    harness = Harness()
    for request, value in ((7, b"a"), (9, b"b")):  # the second was made with other values, after the first was given up
        assert len(of(Create, harness.say(0, init_of(request, "w", uint8(1), 0), value))) == 1
        for again in (request, 7):
            effects = harness.say(0, init_of(again, "w", uint8(1), 0), value)
            assert (said(effects), of(Create, effects)) == ([Done(again)], [])
    harness.say(0, publish_of(10, "w", uint8(1)))
    assert values(harness.pull(1, 0)) == ((0,), [b"b"])
