"""A worker that declares what it moves together again and again, and names it by a number from then on."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import calls, workermoves
from kvd.core.calls import Versions
from kvd.core.machine import Copy, Span
from kvd.core.outbox import RETRY_FIRST_S, RETRY_SOON_S
from kvd.core.worker import MAX_CLOCK_REFUSALS
from kvd.core.workerkeys import WorkerKey, packings
from kvd.errors import NodeLost, NotAllowed, ProtocolError, RequestTimeout
from kvd.protocol.codec import MAX_HEADER_BYTES, encode
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    MAX_PARTS,
    Command,
    CommandResult,
    DeclarePack,
    Done,
    Part,
    Place,
    Pull,
    PullPack,
    Push,
    PushPack,
    Refused,
    Staged,
    ViewNumber,
)
from kvd.protocol.specs import MAX_KEY_CHARS, KeySpec
from tests.core.core_fakes import SLICE, copies, of, one, server_id, uint8
from tests.core.worker_bench import Bench, ready


def bench_of(*keys: str, **more: Any) -> Bench:
    return ready(*keys, packs=True, **more)


def kinds(bench: Bench) -> list[str]:
    return [type(send.message).__name__ for send in bench.sent]


def declared(bench: Bench) -> DeclarePack:
    """The oldest DeclarePack is answered."""
    send = bench.take(DeclarePack)
    bench.reply(send, Done)
    assert isinstance(send.message, DeclarePack)
    return send.message


def settle(bench: Bench, kind: Any = PushPack) -> None:
    bench.reply(bench.take(kind), Done)


def test_a_push_of_many_slices_is_a_pack_at_once() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b", samples=5, how=0, pull=True)
    assert kinds(bench) == ["DeclarePack", "PushPack"]
    pack = declared(bench)
    assert pack.places == (Place("a", 0), Place("b", 0))
    send = bench.take(PushPack)
    assert send.message == PushPack(send.message.request, pack.pack, 1, 0, 5, True)  # type: ignore[union-attr]
    assert send.payload == (Span("source a", 0, 1), Span("source b", 0, 1))
    bench.sent.append(send)
    effects = bench.values(PushPack, (1,), b"x", b"y")
    assert [(target, source.offset) for target, _, source in copies(effects)] == [("target a", 0), ("target b", 8)]
    assert bench.result(call) == [Versions(1, 1)] * 2


def test_what_is_pushed_alone_or_pulled_is_a_pack_at_its_second_use() -> None:
    bench = bench_of("a", "b")
    bench.push("a")
    bench.settle()
    bench.push("a")
    assert kinds(bench) == ["DeclarePack", "PushPack"]
    assert declared(bench).places == (Place("a", 0),)
    settle(bench)
    for kind in ("Pull", "PullPack"):
        call = bench.pull("b", "a")
        assert kinds(bench)[-1] == "Pull"  # the clocks of a and b differ: no pack can say so
        bench.values(Pull, (0, 2), b"x", b"y")
        assert bench.result(call) == [Versions(0, 0), Versions(2, 2)], kind
    for expected in (["Pull"], ["DeclarePack", "PullPack"], ["PullPack"]):
        call = bench.pull("b")
        assert kinds(bench) == expected
        if "DeclarePack" in expected:
            declared(bench)
        bench.values(PullPack if "PullPack" in expected else Pull, (0,), b"x")
        assert bench.result(call) == [Versions(0, 0)]


def test_a_pack_is_declared_once_and_the_same_keys_in_another_order_are_another() -> None:
    bench = bench_of("a", "b")
    numbers = []
    for keys in (("a", "b"), ("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
        bench.push(*keys)
        while bench.waiting(DeclarePack):
            declared(bench)
        numbers.append(bench.waiting(PushPack)[0].pack)
        settle(bench)
    assert numbers == [1, 1, 2, 1, 2]
    assert bench.machine.explain(0.0)["clocks"] == {"a": 5, "b": 5}


def test_keys_whose_clocks_differ_are_named_one_by_one() -> None:
    bench = bench_of("a", "b")
    bench.push("a")
    bench.settle()
    bench.push("a", "b")
    assert bench.clocks() == [("a", 0, 2), ("b", 0, 1)]
    assert kinds(bench) == ["Push"]


def test_any_version_by_pack() -> None:
    bench = bench_of("a", "b")
    for _ in range(2):
        bench.pull("a", "b", any_version=True)
    assert bench.waiting(PullPack)[0].clock == ANY_CLOCK


def test_an_observer_declares_nothing() -> None:
    bench = bench_of("a", role="observer")
    for _ in range(3):
        bench.pull("a")
    assert kinds(bench) == ["Pull"] * 3


def test_a_pack_goes_to_each_server_with_its_own_slices() -> None:
    bench = Bench(servers=2, packs=True)
    spec = uint8(2 * SLICE)
    bench.know("v", "w", spec=spec)
    bench.push("v", "w", spec=spec)
    packs = {message.pack: message.places for message in bench.waiting(DeclarePack)}
    pushed = [message.pack for message in bench.waiting(PushPack)]
    assert sorted(place for pack in pushed if pack in packs for place in packs[pack]) == sorted(
        place for message in bench.waiting(DeclarePack) for place in message.places
    )
    everything = [place for places in packs.values() for place in places]
    everything += [place[:2] for place in bench.clocks(Push)]
    assert sorted(everything) == [("v", 0), ("v", 1), ("w", 0), ("w", 1)]


# ── when the server does not know it ──────────────────────────────────────────────────────────────────────────────────


def test_a_pack_that_the_server_does_not_know_is_declared_again_under_its_number() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b")
    first = bench.take(DeclarePack).message  # lost
    original = bench.waiting(PushPack)[0]
    bench.refuse(PushPack, "pack")
    again = declared(bench)
    assert (again.pack, again.places) == (first.pack, first.places)  # type: ignore[union-attr]
    bench.wait(RETRY_SOON_S)
    assert bench.waiting(PushPack) == [original]
    settle(bench)
    assert bench.result(call) == [None, None]
    bench.wait(10 * RETRY_FIRST_S)
    assert set(kinds(bench)) <= {"DeclarePack", "Heartbeat", "Join"}
    assert len({message.pack for message in bench.waiting(DeclarePack)}) == 1  # the lost one is said until it is heard


def test_a_pack_is_declared_again_though_its_plan_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workermoves, "MAX_PLANS", 1)
    bench = bench_of("a", "b", "c", "d")
    bench.push("a", "b")
    bench.push("c", "d")  # the plan of the first is forgotten
    first = bench.waiting(PushPack)[0]
    declared(bench)
    bench.refuse(PushPack, "pack")
    packs = {message.pack: message.places for message in bench.waiting(DeclarePack)}
    assert packs[first.pack] == (Place("a", 0), Place("b", 0))
    settle(bench)
    bench.wait(RETRY_SOON_S)
    assert bench.waiting(PushPack) == [first]
    settle(bench)
    bench.push("a", "b")
    assert bench.waiting(PushPack)[0].pack not in packs  # a new plan has a new number


def test_a_staged_push_of_a_pack_that_was_forgotten_is_sent_whole() -> None:
    """The server forgot the pack, not the bytes; the worker cannot tell, and the clock tells the server."""
    bench = bench_of("a", "b")
    bench.push("a", "b")
    declared(bench)
    send = bench.take(PushPack)
    bench.reply(send, Staged)
    bench.wait(RETRY_FIRST_S)
    assert [message.probe for message in bench.waiting(PushPack)] == [True]
    bench.refuse(PushPack, "pack")
    declared(bench)
    bench.wait(3 * RETRY_SOON_S)
    whole = bench.take(PushPack)
    assert (whole.message, whole.payload) == (send.message, send.payload)
    bench.reply(whole, Staged)
    assert bench.machine._outbox.unstaged == 0


def test_a_pull_of_a_pack_that_is_not_known_is_asked_again() -> None:
    bench = bench_of("a")
    bench.pull("a")
    bench.values(Pull, (0,), b"x")
    call = bench.pull("a")
    declared(bench)
    bench.refuse(PullPack, "pack")
    declared(bench)
    bench.wait(RETRY_SOON_S)
    bench.values(PullPack, (0,), b"x")
    assert bench.result(call) == [Versions(0, 0)]


def test_a_server_that_never_knows_the_pack_is_given_up() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b", timeout_s=1e9)
    for _ in range(MAX_CLOCK_REFUSALS + 1):
        bench.refuse(PushPack, "pack")
        bench.wait(1.0)
        if call in bench.done:
            break
    assert isinstance(bench.error(call), NotAllowed)
    assert not bench.waiting(PushPack)
    again = bench.push("a", "b")  # what was sent may still arrive, so its clock is not given to another push
    assert isinstance(bench.error(again), NotAllowed)
    assert not bench.waiting(PushPack)


def test_a_pack_that_never_gets_its_turn_times_out_and_goes_on() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b", timeout_s=1.0)
    bench.refuse(PushPack, "clock")
    bench.wait(1.0)
    error = bench.error(call)
    assert isinstance(error, RequestTimeout)
    assert (error.outcome, error.waiting_for) == ("unknown", ("server 0",))
    flush = bench.call(calls.Flush())
    bench.wait(1.0)
    settle(bench)
    assert bench.result(flush) is None


def test_a_pack_belongs_to_an_incarnation_of_its_server() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b")
    bench.restart_server()
    assert isinstance(bench.error(call), NodeLost)
    assert isinstance(bench.error(bench.push("a", "b")), NodeLost)
    assert len(bench.machine._outbox) == 0  # nothing is said any more to the one that is gone


def test_keys_that_are_placed_anew_are_cut_anew() -> None:
    bench = bench_of("a", "b")
    bench.push("a", "b")
    settle(bench)
    bench.know("c")
    bench.push("a", "b")
    assert len(bench.waiting(DeclarePack)) == 2
    assert bench.waiting(PushPack)[0].pack == 2


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("versions", [(3, 3, 3), (3, 3)])
def test_an_answer_has_one_version_or_one_for_each_slice(versions: tuple[int, ...]) -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b", pull=True)
    effects = bench.values(PushPack, versions, b"x", b"y")
    if len(versions) == 2:
        assert bench.result(call) == [Versions(3, 3)] * 2
    else:
        assert of(Copy, effects) == []
        assert isinstance(bench.error(call), ProtocolError)


def test_slices_of_one_key_by_pack_report_the_oldest_and_the_newest() -> None:
    bench = Bench(packs=True)
    spec = uint8(2 * SLICE)
    bench.know("v", "w", spec=spec)
    bench.pull("v", "w", spec=spec)
    for _ in range(4):
        bench.values(Pull, (0,), bytes(SLICE))
    call = bench.pull("v", "w", spec=spec)
    answers = iter((5, 7, 7, 7))
    while bench.waiting(PullPack):
        bench.values(PullPack, (next(answers),), bytes(SLICE))
    assert next(answers, None) is None
    assert bench.result(call) == [Versions(5, 7), Versions(7, 7)]


def test_who_takes_no_part_brings_no_bytes_by_pack() -> None:
    bench = bench_of("a", "b")
    bench.push("a", "b", how=ABSENT, pull=True)
    assert bench.take(PushPack).payload == ()


def test_a_late_answer_to_a_pack_is_not_copied() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b", pull=True, timeout_s=1.0)
    bench.wait(1.0)
    assert isinstance(bench.error(call), RequestTimeout)
    assert of(Copy, bench.values(PushPack, (1,), b"x", b"y")) == []
    assert bench.result(bench.call(calls.Flush())) is None


# ── pushes that fail ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pack_that_nobody_took_gives_its_clocks_back() -> None:
    bench = bench_of("a", "b")
    call = bench.push("a", "b")
    bench.refuse(PushPack, "NotAllowed")
    assert isinstance(bench.error(call), NotAllowed)
    bench.push("a", "b")
    assert bench.waiting(PushPack)[0].clock == 1


@pytest.mark.parametrize("packs", [False, True])
def test_a_message_that_was_carried_out_for_some_of_its_slices_breaks_its_keys(packs: bool) -> None:
    """To use the clock again would have the slices that took the first push take the second for the same one."""
    bench = ready("a", "b", packs=packs)
    kind = PushPack if packs else Push
    call = bench.push("a", "b")
    bench.refuse(kind, "NotAllowed", expected=1)
    assert isinstance(bench.error(call), NotAllowed)
    error = bench.error(bench.push("b"))
    assert isinstance(error, NotAllowed)
    assert "rewind" in str(error)
    bench.result(bench.call(calls.Rewind(0)))
    bench.push("a", "b")
    assert bench.machine.explain(0.0)["clocks"] == {"a": 1, "b": 1}


def test_a_push_refused_in_part_holds_back_later_pushes_until_it_is_settled() -> None:
    bench = Bench(servers=2, packs=True)
    spec = uint8(2 * SLICE)
    bench.know("w", spec=spec)
    first = bench.push("w", spec=spec)
    bench.refuse(Push, "NotAllowed")
    assert isinstance(bench.error(first), NotAllowed)
    second = bench.push("w", spec=spec)
    assert [clock for _, _, clock in bench.clocks()] == [1]  # the window is two, but whose clock is next is open
    assert second not in bench.done
    bench.refuse(Push, "NotAllowed")
    assert [clock for _, _, clock in bench.clocks()] + [m.clock for m in bench.waiting(PushPack)] == [1, 1]


def test_later_pushes_fail_when_the_one_before_turns_out_to_be_taken_in_part() -> None:
    bench = Bench(servers=2, packs=True)
    spec = uint8(2 * SLICE)
    bench.know("w", spec=spec)
    bench.push("w", spec=spec)
    bench.refuse(Push, "NotAllowed")
    second = bench.push("w", spec=spec)
    bench.settle()
    assert "in part" in str(bench.error(second))
    assert not bench.waiting(PushPack)


# ── small pushes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_control_asks_for_small_pushes_and_waits_until_they_are_staged() -> None:
    bench = bench_of("a", "b", small=100)
    for _ in range(2):
        bench.push("a", "b")
    declared(bench)
    assert [message.probe for message in bench.waiting(PushPack)] == [False, False]
    sent = [bench.take(PushPack) for _ in range(2)]
    call = bench.call(calls.Control((Command(0, "x"),), staged_first=True))
    assert [message.probe for message in bench.waiting(PushPack)] == [True, True]
    bench.push("a", "b")  # over the window: it was not there yet when control was called, and yet it is waited for
    probes = [bench.take(PushPack) for _ in range(2)]
    assert [probe.payload for probe in probes] == [(), ()]
    bench.reply(probes[0], Staged)
    bench.reply(probes[1], Staged)
    assert not bench.waiting(Command)
    bench.reply(sent[0], Done)
    assert [message.probe for message in bench.waiting(PushPack)] == [False, True]  # the third, and its probe
    bench.reply(bench.take(PushPack), Staged)
    assert len(bench.waiting(Command)) == 1
    bench.say(server_id(0), CommandResult(one(bench.waiting(Command)).request))
    assert len(bench.result(call)) == 1
    bench.sent.clear()
    bench.reply(sent[1], Done)
    bench.push("a", "b")
    assert [message.probe for message in bench.waiting(PushPack)] == [False]  # nobody asks any more


def test_nobody_asks_for_small_pushes_when_the_control_that_waited_is_over() -> None:
    bench = bench_of("a", "b", small=100)
    bench.push("a", "b")
    call = bench.call(calls.Control((Command(0, "x"),), staged_first=True), timeout_s=1.0)
    bench.wait(1.0)
    assert isinstance(bench.error(call), RequestTimeout)
    bench.sent.clear()
    bench.push("a", "b")
    assert [message.probe for message in bench.waiting(PushPack)] == [False]


def test_a_small_push_that_was_not_taken_is_asked_for_again() -> None:
    """It was refused when it was asked for; sent again it is staged in silence, so it is asked for once more."""
    bench = bench_of("a", "b", small=100)
    bench.push("a", "b")
    declared(bench)
    push = bench.take(PushPack)
    bench.call(calls.Control((Command(0, "x"),), staged_first=True))
    bench.take(PushPack)
    bench.reply(push, lambda request: Refused(request, "clock", "because"))
    bench.wait(RETRY_SOON_S)
    assert [message.probe for message in bench.waiting(PushPack)] == [False, True]
    bench.reply(bench.take(PushPack), Staged)
    assert len(bench.waiting(Command)) == 1


# ── how calls are cut ─────────────────────────────────────────────────────────────────────────────────────────────────


def keys_of(names: list[str], spec: KeySpec, servers: int = 1) -> list[WorkerKey]:
    return [WorkerKey(name, spec, servers=tuple(index % servers for index in range(spec.num_slices))) for name in names]


def test_no_pack_is_longer_than_a_header() -> None:
    """The longest names there are, of the longest characters, and many short ones."""
    for names in ([f"{number:04}" + "𝄞" * (MAX_KEY_CHARS - 4) for number in range(300)], [str(n) for n in range(3000)]):
        plan = packings(keys_of(names, uint8(1)), 1 << 20)
        assert sum(len(packing.places) for packing in plan) == len(names)
        for packing in plan:
            assert len(packing.places) <= MAX_PARTS
            header = encode(DeclarePack(1 << 61, 1 << 61, packing.places), 1 << 61, ViewNumber(1 << 61, 1 << 61))
            assert len(header) <= MAX_HEADER_BYTES
            parts = tuple(Part(key, index, 1 << 61) for key, index in packing.places)
            header = encode(Push(1 << 61, parts, 0, 1 << 61, True), 1 << 61, ViewNumber(1 << 61, 1 << 61))
            assert len(header) <= MAX_HEADER_BYTES


def test_packings_cover_every_byte_once_and_start_at_multiples_of_eight() -> None:
    sizes = [0, 1, 7, 8, SLICE, SLICE + 1, 3 * SLICE, 2, 0]
    keys = [
        WorkerKey(str(number), uint8(size), servers=tuple(number % 2 for _ in range(uint8(size).num_slices)))
        for number, size in enumerate(sizes)
    ]
    plan = packings(keys, SLICE)
    covered: dict[int, int] = {}
    for packing in plan:
        assert packing.nbytes <= SLICE
        assert len({keys[item].servers[0] for item in packing.items}) == 1
        ends = 0
        for row, (start, nbytes), item in zip(packing.rows, packing.ranges, packing.items, strict=True):
            assert (row.start, row.nbytes) == (start, nbytes)
            assert row.offset % 8 == 0
            assert row.offset >= ends
            ends = row.offset + nbytes
            covered[item] = covered.get(item, 0) + nbytes
        assert ends == packing.nbytes
    assert [covered[item] for item in range(len(sizes))] == sizes
