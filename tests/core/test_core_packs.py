"""Packs: lists of slices under a number of their sender's, and how a server remembers them."""

from __future__ import annotations

import pytest

from kvd.core import packs, servermoves
from kvd.core.packs import PackTable
from kvd.optimizer import SGD, to_wire
from kvd.protocol.codec import MAX_HEADER_BYTES, decode, encode
from kvd.protocol.messages import (
    ANY_CLOCK,
    BIGGEST,
    MAX_PARTS,
    DeclarePack,
    Place,
    PullPack,
    PushPack,
    SetOptimizer,
    ViewNumber,
)
from tests.core.core_fakes import cluster, member, worker_id
from tests.core.server_bench import kinds, packed, refusal, values

A, B = b"\1", b"\2"


def places(*keys: str) -> tuple[Place, ...]:
    return tuple(Place(key, 0) for key in keys)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_who_declare_the_same_places_have_the_same_pack() -> None:
    table = PackTable()
    table.declare(1, 7, places("a", "b"))
    table.declare(2, 3, places("a", "b"))
    table.declare(2, 4, places("b", "a"))
    assert table.find(1, 7) is table.find(2, 3) is not table.find(2, 4)
    assert table.find(1, 3) is None
    assert table.find(3, 7) is None


def test_a_number_means_what_it_meant_first() -> None:
    table = PackTable()
    table.declare(1, 7, places("a", "b"))
    table.declare(1, 7, places("c"))
    pack = table.find(1, 7)
    assert pack is not None
    assert pack.places == places("a", "b")


def test_so_many_places_are_remembered_of_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MAX_PLACES", 5)
    table = PackTable()
    table.declare(9, 1, places("a", "b"))
    for number in range(1, 4):
        table.declare(1, number, places(f"k{number}", "x"))
    assert [table.find(1, number) is None for number in range(1, 4)] == [True, False, False]
    assert table.find(9, 1) is not None
    table.declare(1, 4, places("m"))
    assert table.find(1, 2) is not None  # four places are there, and a fifth
    table.declare(1, 5, places(*"abcdefgh"))
    assert [number for number in range(6) if table.find(1, number)] == [5]  # however large, the newest is kept
    table.declare(1, 6, places("a"))
    assert [number for number in range(7) if table.find(1, number)] == [6]
    table.declare(1, 1, places("k1", "x"))
    assert table.find(1, 1) is not None


def test_a_pack_that_nobody_calls_by_a_number_is_forgotten() -> None:
    table = PackTable()
    table.declare(1, 1, places("a"))
    table.declare(1, 2, places("a"))
    table.declare(2, 1, places("a"))
    first = table.find(1, 1)
    assert first is not None
    first.is_apart = True
    table.drop_sender(1)
    assert table.find(1, 1) is table.find(1, 2) is None
    assert table.find(2, 1) is first
    table.drop_sender(2)
    table.drop_sender(2)
    table.declare(2, 1, places("a"))
    again = table.find(2, 1)
    assert again is not None
    assert not again.is_apart


# ── on a server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pack_is_declared_as_often_as_it_is_asked() -> None:
    bench = packed("a", "b", declare=False)
    for _ in range(2):
        assert kinds(bench.declare(0, 1, "a", "b")) == ["Done"]
    assert kinds(bench.push_pack(0, 1, A, B)) == ["Staged"]
    assert kinds(bench.declare(0, 1, "a", "b")) == ["Done"]
    assert kinds(bench.push_all(1, [("a", 0, 1), ("b", 0, 1)], [A, B])) == ["Done", "Done"]


def test_a_pack_of_two_is_not_one_of_other_places_later() -> None:
    bench = packed("a", "b", "c")
    bench.declare(0, 1, "a", "c")
    bench.push_pack(0, 1, A, B, A)
    assert bench.units == [["a", "b", "c"]]


def test_who_is_no_worker_has_no_packs() -> None:
    bench = packed("a", "b", attach=False, declare=False)
    for effects in (bench.declare(0, 1, "a"), bench.push_pack(0, 1, A), bench.pull_pack(0, ANY_CLOCK)):
        assert refusal(effects).error == "attach"


@pytest.mark.parametrize("number", [0, 2])
def test_a_pack_that_is_not_known_is_asked_for(number: int) -> None:
    bench = packed("a", "b")
    assert refusal(bench.push_pack(0, 1, A, B, pack=number)).error == "pack"
    assert refusal(bench.push_pack(0, 1, pack=number, probe=True)).error == "pack"
    assert refusal(bench.pull_pack(0, 0, pack=number)).error == "pack"
    assert bench.explain()["requests_waiting"] == 0


def test_a_pack_of_slices_that_are_not_there() -> None:
    bench = packed("a")
    assert kinds(bench.declare(0, 2, "a", "b")) == ["Done"]
    assert refusal(bench.push_pack(0, 1, A, B, pack=2)).error == "KeyNotFound"
    assert refusal(bench.pull_pack(0, 0, pack=2)).error == "KeyNotFound"
    bench.init("b", b"\0")
    assert kinds(bench.push_pack(0, 1, A, B, pack=2)) == ["Staged"]
    assert bench.units == [["a", "b"]]


def test_a_pack_that_was_forgotten_and_is_declared_again_is_the_unit_that_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = packed("a", "b", workers=1)
    bench.push_pack(0, 1, A, B)
    monkeypatch.setattr(packs, "MAX_PLACES", 2)
    bench.declare(0, 2, "b")
    assert refusal(bench.push_pack(0, 2, A, B)).error == "pack"
    bench.declare(0, 1, "a", "b")
    assert kinds(bench.push_pack(0, 2, A, B)) == ["Done"]
    assert bench.units == [["a", "b"]]


def test_a_push_by_a_number_of_the_one_before_is_not_taken() -> None:
    """What a pack means goes with its incarnation: the successor counts anew."""
    bench = packed("a", "b", "c")
    bench.look(member("worker", 0, life=1))
    bench.attach(0, life=1)
    assert refusal(bench.push_pack(0, 1, A, B, A, life=1)).error == "pack"
    bench.declare(0, 1, "c", "b", life=1)
    bench.push_pack(0, 1, b"\x10", b"\x20", life=1)
    bench.push_pack(1, 1, A, B, A)
    assert (bench.value("c"), bench.value("b"), bench.value("a")) == (b"\x11", b"\x22", b"\0")


def test_packs_that_overlap() -> None:
    bench = packed("a", "b", "c", declare=False, workers=1)
    bench.declare(0, 1, "a", "b")
    bench.declare(0, 2, "b", "c")
    bench.push_pack(0, 1, A, A)
    assert bench.units == [["c"], ["a", "b"]]
    refused = refusal(bench.push_pack(0, 2, B, B, pack=2))
    assert (refused.key, refused.expected) == ("c", 1)
    assert bench.units == [["c"], ["a"], ["b"]]
    bench.push(0, 1, A, key="c")
    bench.push_pack(0, 2, B, B, pack=2)
    assert bench.units == [["a"], ["b", "c"]]
    bench.push(0, 2, B, key="a")
    bench.push_pack(0, 3, A, A)
    assert bench.units == [["a"], ["b"], ["c"]]
    assert [bench.value(key) for key in "abc"] == [A, A, B]


def test_a_pack_of_one_slice_is_its_unit() -> None:
    bench = packed("a", "b")
    for rank in (0, 1):
        bench.declare(rank, 2, "a")
        effects = bench.push_pack(rank, 1, A, pack=2, pull=True)
    assert values(effects, worker_id(0)) == ((1,), [B])
    assert bench.units == [["a"], ["b"]]
    for rank in (0, 1):
        bench.push(rank, 1, B, key="b")
    for rank in (0, 1):
        bench.push_pack(rank, 2, A, B)
    assert bench.units == [["a", "b"]]
    assert values(bench.pull_pack(0, 2, pack=2)) == ((2,), [B])
    bench.push_pack(0, 3, A, pack=2)  # alone: parts it from b
    assert bench.units == [["a"], ["b"]]


def test_small_pushes_are_not_answered_by_staged_unless_they_are_asked_for() -> None:
    bench = packed("a", "b", small=9)
    assert kinds(bench.push_pack(0, 1, A, B, request=50)) == []
    assert kinds(bench.push_pack(0, 1, request=50, probe=True)) == ["Staged"]
    assert kinds(bench.push_pack(0, 1, A, B, request=50)) == ["Staged"]  # sent again: it has not heard of it
    assert kinds(bench.push(0, 2, A, key="a", request=51)) == []
    assert kinds(bench.push(0, 2, None, key="a", request=52, probe=True)) == ["Staged"]
    bench.init("c", bytes(10))
    assert kinds(bench.push(0, 1, bytes(10), key="c")) == ["Staged"]
    bench.hold = True
    bench.push(1, 1, A, key="a", request=60)
    assert kinds(bench.push(1, 1, None, key="a", request=61, probe=True)) == []  # counted: the answer is on its way
    assert kinds(bench.finish(bench.jobs[0])) == ["Done", "Done"]


def test_so_many_requests_wait_counts_packs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servermoves, "MAX_PENDING", 1)
    bench = packed("a", "b")
    bench.push_pack(0, 1, A, B)
    assert refusal(bench.push_pack(1, 1, A, B)).error == "NotAllowed"
    assert refusal(bench.pull_pack(1, 1)).error == "NotAllowed"
    assert bench.explain()["bytes_staged"] == 9  # what was refused was not staged


def test_whole_numbers_in_a_pack_are_neither_weighted_nor_optimized() -> None:
    bench = packed("a", "b", settings=cluster(2, merge="weighted"))
    assert refusal(bench.push_pack(0, 1, A, B)).error == "NotAllowed"
    bench = packed("a", "b")
    for rank in (0, 1):
        bench.push_pack(rank, 1, A, B)
    bench.say(0, SetOptimizer(1, to_wire(SGD(1.0))))
    assert refusal(bench.push_pack(0, 2, A, B)).error == "NotAllowed"
    assert bench.explain()["bytes_staged"] == 0


# ── on the wire ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pack_of_a_thousand_keys_fits_into_a_header() -> None:
    message = DeclarePack(7, BIGGEST, tuple(Place(f"layer{number:06}", BIGGEST) for number in range(MAX_PARTS)))
    header = encode(message, 1, ViewNumber(1, 1))
    assert len(header) < MAX_HEADER_BYTES
    assert decode(header).message == message


@pytest.mark.parametrize("message", [PushPack(1, 2, 3, 0, 1, True, True), PullPack(1, 2, ANY_CLOCK)])
def test_pack_messages_go_there_and_back(message: PushPack | PullPack) -> None:
    assert decode(encode(message, 1, ViewNumber(1, 1))).message == message
