"""Slices that are staged and updated as one, and how they part: each push counts once, and for the right slice."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core.machine import Apply, Create, Export, Load, Rope, Send, Span
from kvd.core.slicelog import SliceLog
from kvd.core.units import Slice, Unit, fused, parted
from kvd.errors import NotAllowed
from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    ASSIGN,
    Activate,
    ClockQuery,
    Clocks,
    FetchState,
    Init,
    Place,
    Publish,
    SetOptimizer,
    StoreState,
    UpdateOptimizer,
)
from kvd.protocol.specs import KeySpec
from tests.core.core_fakes import cluster, member, of, one, read, said, uint8, worker_id
from tests.core.server_bench import Bench, kinds, packed, refusal, values

A, B, C = b"\1", b"\2", b"\3"


def together(*keys: str, **more: Any) -> Bench:
    """A server on which the keys are one unit, after one round in which everybody pushed 1, 2, 3 …"""
    bench = packed(*keys, **more)
    for rank in range(bench.settings.num_workers):
        bench.push_pack(rank, 1, *[bytes([number]) for number in range(1, len(keys) + 1)])
    assert bench.units == [list(keys)]
    return bench


# ── the functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def slice_of(key: str, nbytes: int, dtype: str = "uint8", optimizer: Any = None, current: Any = None) -> Slice:
    log = SliceLog(True, 2, -1, current or key.encode() * nbytes)
    unit = Unit(0, log, dtype, optimizer)
    made = Slice(key, 0, KeySpec(dtype, (nbytes,), 4096), nbytes, 1, unit)
    unit.take([made])
    return made


def test_slices_lie_one_after_the_other_at_multiples_of_eight() -> None:
    slices = [slice_of("a", 3), slice_of("b", 0), slice_of("c", 8), slice_of("d", 1)]
    unit = fused(7, slices)
    assert unit is not None
    assert [(entry.key, entry.offset, entry.nbytes) for entry in unit.layout] == [
        ("a", 0, 3),
        ("b", 8, 0),
        ("c", 8, 8),
        ("d", 16, 1),
    ]
    assert unit.nbytes == 17
    assert all(entry.unit is unit for entry in slices)
    assert [read(entry.span(unit.log.current)) for entry in slices] == [b"aaa", b"", b"cccccccc", b"d"]
    whole = bytes(range(17))
    assert [read(entry.span(whole)) for entry in slices] == [whole[:3], b"", whole[8:16], whole[16:]]


def test_what_has_not_come_equally_far_is_not_fused() -> None:
    def differs(change: Any) -> bool:
        first, second = slice_of("a", 1), slice_of("b", 1)
        old = second.unit
        change(second)
        return fused(1, [first, second]) is None and not first.unit.is_gone and not old.is_gone

    assert not differs(lambda entry: None)
    for name, value in (("version", 1), ("closed", 1), ("previous", b"v"), ("closing", object())):
        assert differs(lambda entry, name=name, value=value: setattr(entry.unit.log, name, value)), name
    for name in ("staged", "counted", "committed"):
        assert differs(lambda entry, name=name: getattr(entry.unit.log, name).update({1: 1})), name
    for name in ("waiting", "changes", "tasks"):
        assert differs(lambda entry, name=name: getattr(entry.unit, name).append(object())), name
    assert differs(lambda entry: setattr(entry.unit, "working", True))
    assert differs(lambda entry: setattr(entry.unit, "dtype", "int8"))
    assert differs(lambda entry: setattr(entry.unit, "optimizer", SGD(0.5)))


def test_parting_gives_each_its_bytes_of_both_versions() -> None:
    slices = [slice_of("a", 2), slice_of("b", 1)]
    unit = fused(1, slices)
    assert unit is not None
    unit.log.previous, unit.log.current = unit.log.current, b"xx......y"
    numbers = iter((8, 9))
    parts = parted(unit, lambda: next(numbers))
    assert unit.is_gone
    assert [(part.number, part.nbytes, [entry.key for entry in part.slices]) for part in parts] == [
        (8, 2, ["a"]),
        (9, 1, ["b"]),
    ]
    assert [entry.unit for entry in slices] == parts
    assert [read(entry.span(entry.log.current)) for entry in slices] == [b"xx", b"y"]
    assert [read(entry.span(entry.log.previous)) for entry in slices] == [b"aa", b"b"]
    again = fused(10, list(reversed(slices)))
    assert again is not None
    assert isinstance(again.log.current, Rope)
    assert [read(entry.span(again.log.current)) for entry in slices] == [b"xx", b"y"]


# ── fusing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pack_is_one_apply_and_one_answer() -> None:
    bench = packed("a", "b", "c")
    assert bench.units == [["a"], ["b"], ["c"]]
    assert kinds(bench.push_pack(0, 1, A, B, C)) == ["Staged"]
    effects = bench.push_pack(1, 1, A, B, C, pull=True)
    apply = one(bench.applied)
    assert [tuple(entry) for entry in apply.layout] == [("a", 0, 0, 1), ("b", 0, 8, 1), ("c", 0, 16, 1)]
    assert apply.nbytes == 17
    assert [read(span) for span in apply.current.spans] == [b"\0"] * 3
    assert kinds(effects, worker_id(0)) == ["Done"]
    versions, parts = values(effects, worker_id(1))
    assert versions == (1,)
    assert parts == [b"\2" + bytes(7) + b"\4" + bytes(7) + b"\6"]
    assert bench.units == [["a", "b", "c"]]


def test_a_pull_by_name_and_by_pack_see_the_same_bytes() -> None:
    bench = together("a", "b")
    assert values(bench.pull(0, 1, key="b")) == ((1,), [b"\4"])
    versions, (whole,) = values(bench.pull_pack(0, 1))
    assert (versions, whole[0], whole[8]) == ((1,), 2, 4)
    assert values(bench.pull_pack(0, 0)) == ((0,), [b"\0", b"\0"])  # the version before: it lay in two buffers
    assert values(bench.pull(0, 0, key="b")) == ((0,), [b"\0"])
    bench.declare(1, 2, "b", "a")
    assert values(bench.pull_pack(1, 1, pack=2)) == ((1, 1), [b"\4", b"\2"])
    assert values(bench.pull_pack(1, ANY_CLOCK, pack=2)) == ((1, 1), [b"\4", b"\2"])
    assert bench.units == [["a", "b"]]  # a pull parts nobody


def test_keys_of_different_dtypes_are_pushed_together_and_stay_apart() -> None:
    bench = Bench()
    bench.init("a", b"\0")
    bench.init("f", bytes(4), KeySpec("float32", (1,), 4096))
    for rank in (0, 1):
        bench.declare(rank, 1, "a", "f")
        effects = bench.push_pack(rank, 1, A, b"\1\1\1\1")
    assert kinds(effects) == ["Done", "Done"]
    assert bench.units == [["a"], ["f"]]
    assert bench.value("f") == b"\2\2\2\2"


def test_empty_slices_are_fused_like_any_other() -> None:
    bench = packed("a")
    for key in ("e", "f"):
        bench.init(key, b"")
    for rank in (0, 1):
        bench.declare(rank, 2, "e", "a", "f")
        effects = bench.push_pack(rank, 1, b"", A, b"", pack=2, pull=True)
    assert bench.units == [["e", "a", "f"]]
    assert values(effects, worker_id(0))[0] == (1,)
    assert (bench.value("a"), bench.value("e"), bench.value("f")) == (b"\2", b"", b"")
    bench.push(0, 2, b"", key="e")
    assert kinds(bench.push(1, 2, b"", key="e")) == ["Done", "Done"]
    assert bench.units == [["e"], ["a"], ["f"]]


def test_only_empty_slices() -> None:
    bench = Bench()
    for key in ("e", "f"):
        bench.init(key, b"")
    for rank in (0, 1):
        bench.declare(rank, 1, "e", "f")
        effects = bench.push_pack(rank, 1, b"", b"")
    assert kinds(effects) == ["Done", "Done"]
    assert bench.units == [["e", "f"]]


def test_slices_of_one_key_are_fused_too() -> None:
    bench = Bench()
    bench.init("w", bytes(4097))
    for rank in (0, 1):
        bench.declare(rank, 1, Place("w", 0), Place("w", 1))
        bench.push_pack(rank, 1, b"\1" * 4096, b"\1")
    assert bench.units == [["w", "w"]]
    assert said(bench.say(1, ClockQuery(9, "w"))) == [Clocks(9, 1, 1, 1, 1)]


def test_others_who_call_the_same_slices_otherwise_part_them_and_no_bytes_are_mixed_up() -> None:
    bench = packed("a", "b")
    bench.declare(1, 2, "b", "a")
    bench.push_pack(0, 1, A, B)
    assert bench.units == [["a", "b"]]
    bench.push_pack(1, 1, b"\x10", b"\x20", pack=2)
    assert bench.units == [["a"], ["b"]]
    assert (bench.value("a"), bench.value("b")) == (b"\x21", b"\x12")


def test_a_new_pack_of_the_slices_of_a_unit_finds_them_together() -> None:
    """All who had declared them were replaced; to part them would be forever for a pack that somebody still has."""
    bench = together("a", "b")
    for rank in (0, 1):
        bench.look(member("worker", rank, life=1))
        bench.attach(rank, life=1)
    for rank in (0, 1):
        bench.declare(rank, 1, "a", "b", life=1)
        effects = bench.push_pack(rank, 2, A, B, life=1)
        assert bench.units == [["a", "b"]]
    assert kinds(effects) == ["Done", "Done"]


# ── parting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_pushes_one_alone_parts_them_for_good() -> None:
    bench = together("a", "b")
    bench.push(0, 2, A, key="a")
    assert bench.units == [["a"], ["b"]]
    bench.push(0, 2, B, key="b")
    effects = bench.push_pack(1, 2, A, B)
    assert kinds(effects, worker_id(0)) == ["Done", "Done"]
    for rank in (0, 1):
        bench.push_pack(rank, 3, A, B)
    assert bench.units == [["a"], ["b"]]
    assert (bench.value("a"), bench.value("b")) == (b"\2", b"\4")


def test_parting_with_two_rounds_staged_and_everyone_waiting() -> None:
    """Rank 0 has staged two rounds and waits, rank 1 comes with one slice only."""
    bench = together("a", "b")
    first = bench.push_pack(0, 2, b"\x10", b"\x20", request=50, pull=True)
    second = bench.push_pack(0, 3, b"\x30", b"\x40", request=51)
    assert kinds(first + second) == ["Staged", "Staged"]
    bench.pull(1, 2, key="b", request=52)
    assert kinds(bench.push(1, 2, A, key="a")) == ["Done"]  # only its own: of the pack, b is still missing
    assert bench.units == [["a"], ["b"]]
    effects = bench.push(1, 2, B, key="b")
    assert values(effects, worker_id(0)) == ((2, 2), [b"\x11", b"\x22"])
    assert kinds(effects, worker_id(1)) == ["Values", "Done"]
    bench.push(1, 3, A, key="a")
    effects = bench.push(1, 3, B, key="b")
    assert [message.request for message in said(effects, worker_id(0))] == [51]
    assert (bench.value("a"), bench.value("b")) == (b"\x31", b"\x42")
    assert bench.value("a", back=1) == b"\x11"
    assert bench.explain()["requests_waiting"] == 0


def test_a_push_of_a_pack_that_is_sent_again_after_parting_counts_once() -> None:
    bench = together("a", "b")
    bench.push_pack(0, 2, b"\x10", b"\x20", request=50)
    bench.push(1, 2, A, key="a")
    assert kinds(bench.push_pack(0, 2, b"\x10", b"\x20", request=50)) == ["Staged"]  # still open
    assert kinds(bench.push_pack(0, 2, request=50, probe=True)) == ["Staged"]
    bench.push(1, 2, B, key="b")
    assert kinds(bench.push_pack(0, 2, b"\x10", b"\x20", request=50)) == ["Done"]  # answered long ago
    assert kinds(bench.push_pack(0, 2, request=53, probe=True)) == ["Done"]
    assert (bench.value("a"), bench.value("b")) == (b"\x11", b"\x22")
    assert len(bench.applied) == 3


def test_a_late_copy_of_a_single_push_parts_but_counts_nothing() -> None:
    bench = packed("a", "b")
    for rank in (0, 1):
        bench.push(rank, 1, A, key="a", request=60 + rank)
        bench.push(rank, 1, B, key="b")
    for rank in (0, 1):
        bench.push_pack(rank, 2, A, B)
    assert bench.units == [["a", "b"]]
    assert kinds(bench.push(0, 1, A, key="a", request=60)) == ["Done"]
    assert [entry.log.version for entry in bench.machine._table.slices.values()] == [2, 2]
    for rank in (0, 1):
        effects = bench.push_pack(rank, 3, A, B)
    assert kinds(effects) == ["Done", "Done"]


def test_nobody_is_parted_while_an_update_is_under_way() -> None:
    bench = together("a", "b")
    bench.hold = True
    for rank in (0, 1):
        bench.push_pack(rank, 2, A, B)
    refused = refusal(bench.push(0, 3, A, key="a"))
    assert (refused.error, refused.key) == ("clock", "a")  # the worker tries again soon
    assert bench.units == [["a", "b"]]
    assert kinds(bench.finish(bench.jobs[0])) == ["Done", "Done"]
    bench.push(0, 3, A, key="a")
    assert bench.units == [["a"], ["b"]]


@pytest.mark.parametrize("message", [FetchState(9, "b", 0), StoreState(9, "b", 0, 1, ())])
def test_nobody_is_parted_while_a_state_goes_out_or_in(message: Any) -> None:
    bench = together("a", "b")
    bench.hold = True
    bench.say(1, message, b"" if isinstance(message, StoreState) else None)
    assert refusal(bench.push(0, 2, A, key="a")).error == "clock"
    job = one(bench.jobs)
    assert isinstance(job, Export | Load)
    for rank in (0, 1):
        bench.push_pack(rank, 2, A, B)
    assert bench.jobs == [job]  # the round waits for it
    bench.finish(job)
    assert len(of(Apply, bench.jobs)) == 1


def test_a_successor_finds_its_predecessor_s_part_of_a_pack_dropped() -> None:
    """Staged by the predecessor for all slices, redone one by one by the successor: other bytes, counted once."""
    bench = together("a", "b")
    bench.push_pack(1, 2, b"\x63", b"\x63")
    bench.push_pack(1, 3, b"\x63", b"\x63")
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)
    assert refusal(bench.push_pack(1, 2, b"\x63", b"\x63")).error == "attach"
    assert refusal(bench.push_pack(1, 2, b"\x63", b"\x63", life=1)).error == "pack"  # its own packs, not those before
    bench.push(1, 2, A, key="a", life=1)
    bench.push(1, 2, B, key="b", life=1)
    bench.push_pack(0, 2, b"\x10", b"\x20")
    assert (bench.value("a"), bench.value("b")) == (b"\x11", b"\x22")
    assert bench.explain()["bytes_staged"] == 0


def test_a_step_is_redone_from_the_previous_version_of_a_unit() -> None:
    bench = together("a", "b")
    for rank in (0, 1):
        bench.push_pack(rank, 2, b"\x10", b"\x20")
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)
    bench.declare(1, 1, "a", "b", life=1)
    versions, (whole,) = values(bench.pull_pack(1, 1, life=1))
    assert (versions, whole[0], whole[8]) == ((1,), 2, 4)
    assert kinds(bench.push_pack(1, 2, b"\x10", b"\x20", life=1)) == ["Done"]
    refused = refusal(bench.pull_pack(1, 0, life=1))
    assert (refused.error, refused.expected) == ("NotAllowed", 2)
    assert values(bench.pull(1, 1, key="b", life=1)) == ((1,), [b"\4"])
    bench.push(1, 3, A, key="a", life=1)  # parts them: both keep both versions
    assert bench.units == [["a"], ["b"]]
    assert values(bench.pull_pack(1, 1, life=1)) == ((1, 1), [b"\2", b"\4"])
    assert values(bench.pull_pack(1, 2, life=1)) == ((2, 2), [b"\x20", b"\x40"])


def test_who_comes_back_for_one_key_parts_it_from_the_others() -> None:
    bench = together("a", "b")
    bench.look(member("worker", 1, "left"))
    bench.push_pack(0, 2, A, B)
    bench.push_pack(0, 3, A, B)
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)
    bench.push_pack(0, 4, A, B)
    assert kinds(bench.say(1, Activate(9, "a", 3), life=1)) == ["Done"]
    assert bench.units == [["a"], ["b"]]
    assert refusal(bench.push(1, 3 + 2, A, key="a", life=1)).expected == 4
    assert kinds(bench.push(1, 4, b"\x10", key="a", life=1)) == ["Done"]
    assert (bench.value("a"), bench.value("b")) == (b"\x11", B)  # the rounds of b wait
    assert kinds(bench.say(1, Activate(9, "b", 3), life=1)) == ["Done"]
    assert kinds(bench.push(1, 4, b"\x20", key="b", life=1), worker_id(0)) == ["Done"]
    assert bench.value("b") == b"\x22"


def test_who_waits_for_the_dead_is_told_once_and_what_was_staged_survives_parting() -> None:
    bench = together("a", "b")
    bench.push_pack(0, 2, b"\x10", b"\x20", request=50)
    effects = bench.look(member("worker", 1, "dead", last_seen_s=3.0))
    assert [(m.request, m.error, m.nodes) for m in said(effects)] == [(50, "NodeLost", ("worker 1",))]
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)
    bench.push(1, 2, A, key="a", life=1)
    bench.push(1, 2, B, key="b", life=1)
    assert kinds(bench.push_pack(0, 2, request=50, probe=True)) == ["Done"]
    assert (bench.value("a"), bench.value("b")) == (b"\x11", b"\x22")


def test_a_round_of_assignment_by_pack_and_by_name() -> None:
    bench = together("a", "b")
    bench.push_pack(1, 2, how=ABSENT)
    bench.push_pack(0, 2, b"\x10", b"\x20", how=ASSIGN)
    assert (bench.value("a"), bench.value("b")) == (b"\x10", b"\x20")
    bench.push_pack(0, 3, b"\x30", b"\x40", how=ASSIGN)
    assert refusal(bench.push_pack(1, 3, A, B)).error == "NotAllowed"
    bench.push(1, 3, None, key="b", how=ABSENT)
    bench.push(1, 3, None, key="a", how=ABSENT)
    assert bench.units == [["a"], ["b"]]
    assert (bench.value("a"), bench.value("b")) == (b"\x30", b"\x40")


# ── failing updates ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_unit_whose_update_fails_gives_all_pushes_back() -> None:
    bench = together("a", "b")
    bench.push_pack(0, 2, A, B, request=50)
    bench.push_pack(0, 3, A, B, request=51)
    bench.error = NotAllowed("no memory")
    effects = bench.push_pack(1, 2, A, B, request=52)
    refused = {message.request: message for message in said(effects)}
    assert {request: message.expected for request, message in refused.items()} == {50: 0, 51: 0, 52: 0}
    assert "no memory" in refused[50].text
    note = next(effect for effect in effects if hasattr(effect, "level"))
    assert "2 slices from 0" in note.text  # type: ignore[union-attr]
    bench.error = None
    bench.push_pack(0, 2, b"\x10", b"\x10")
    bench.push(1, 2, A, key="a")
    bench.push(1, 2, B, key="b")
    assert (bench.value("a"), bench.value("b")) == (b"\x11", b"\x12")


def test_a_message_that_was_carried_out_for_some_of_its_slices_says_so() -> None:
    """Else its worker would use the clock again, for bytes that the other slices take for the ones they know."""
    bench = together("a", "b")
    bench.push_pack(0, 2, A, B, request=50)
    bench.hold = True
    bench.push(1, 2, A, key="a")
    bench.push(1, 2, B, key="b")
    first, second = bench.jobs
    bench.error = NotAllowed("no memory")
    refused = refusal([effect for effect in bench.finish(first) if getattr(effect, "peer", 0) == worker_id(0)])
    assert (refused.request, refused.expected) == (50, 2)
    bench.error = None
    assert kinds(bench.finish(second)) == ["Done"]
    assert bench.value("b") == b"\4"


def test_a_message_of_several_keys_that_fails_in_one_says_that_others_took_it() -> None:
    bench = packed("a", "b", declare=False)
    for rank in (0, 1):
        bench.hold = True
        bench.push_all(rank, [("a", 0, 1), ("b", 0, 1)], [A, B])
    bench.error = NotAllowed("no memory")
    effects = bench.finish(bench.jobs[0])
    assert [message.expected for message in said(effects)] == [1, 1]


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pending_changes_keep_slices_apart_and_go_along_when_they_part() -> None:
    bench = Bench()
    spec = KeySpec("float32", (1,), 4096)
    bench.say(0, SetOptimizer(1, to_wire(SGD(1.0))))
    for key in ("a", "b"):
        bench.init(key, bytes(4), spec)
    for rank in (0, 1):
        bench.declare(rank, 1, "a", "b")
        bench.push_pack(rank, 1, bytes(4), bytes(4))
    bench.push_pack(0, 2, bytes(4), bytes(4))
    bench.say(0, UpdateOptimizer(2, {"learning_rate": 0.5}))
    bench.push(1, 2, bytes(4), key="a")
    bench.push(1, 2, bytes(4), key="b")
    assert [apply.optimizer.learning_rate for apply in bench.applied] == [1.0, 1.0, 1.0]  # type: ignore[attr-defined]
    bench.declare(0, 3, "b", "a")
    bench.declare(1, 3, "b", "a")
    for rank in (0, 1):
        bench.push_pack(rank, 3, bytes(4), bytes(4), pack=3)
    assert bench.units == [["a"], ["b"]]  # at the time of the push the change was still to come
    assert [apply.optimizer.learning_rate for apply in bench.applied[3:]] == [0.5, 0.5]  # type: ignore[attr-defined]
    for rank in (0, 1):
        bench.push_pack(rank, 4, bytes(4), bytes(4), pack=3)
    assert bench.units == [["b", "a"]]
    assert bench.applied[-1].optimizer.learning_rate == 0.5  # type: ignore[attr-defined]


def test_a_change_for_a_unit_takes_effect_for_all_of_it() -> None:
    bench = together("a", "b")
    bench.say(0, SetOptimizer(1, to_wire(SGD(1.0))))
    bench.say(0, UpdateOptimizer(2, {"learning_rate": 0.5}))
    unit = one(list(bench.machine._table.units.values()))
    assert [change.from_round for change in unit.changes] == [2]


# ── async ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_async_a_unit_takes_pushes_in_the_order_of_arrival() -> None:
    bench = packed("a", "b", settings=cluster(2, mode="async"))
    assert kinds(bench.push_pack(0, 1, A, B)) == ["Done"]
    assert bench.units == [["a", "b"]]
    bench.hold = True
    bench.push_pack(0, 2, b"\x10", b"\x20")
    bench.push_pack(1, 1, b"\x30", b"\x40")
    assert bench.explain()["bytes_staged"] == 9
    first = bench.jobs[0]
    bench.finish(first)
    bench.finish(bench.jobs[0])
    assert [[c.rank for c in apply.contributions] for apply in bench.applied] == [[0], [0], [1]]
    assert (bench.value("a"), bench.value("b")) == (b"\x30", b"\x40")


@pytest.mark.parametrize("staleness", [0, 1])
def test_staleness_is_kept_when_a_unit_parts(staleness: int) -> None:
    bench = packed("a", "b", settings=cluster(2, mode="async", staleness=staleness, rounds_ahead=3))
    for clock in range(1, staleness + 2):
        bench.push_pack(0, clock, bytes([clock]), bytes([clock]))
    ahead = staleness + 1
    assert bench.explain()["requests_waiting"] == 1
    assert bench.explain()["waiting_for"] == ["worker 1"]
    effects = bench.push(1, 1, b"\x63", key="a")
    assert bench.units == [["a"], ["b"]]
    assert kinds(effects) == ["Staged", "Done"]  # its own: of worker 0's pack, b still waits
    assert bench.value("b") == bytes([staleness])
    effects = bench.push(1, 1, b"\x63", key="b")
    assert sorted(kinds(effects)) == ["Done", "Done", "Staged"]
    logs = [entry.log for entry in bench.machine._table.slices.values()]
    assert [(log.committed_clock(0), log.committed_clock(1)) for log in logs] == [(ahead, 1)] * 2


def test_async_a_successor_s_clocks_are_those_of_the_unit() -> None:
    bench = packed("a", "b", settings=cluster(2, mode="async"))
    bench.push_pack(1, 1, A, B)
    bench.hold = True
    bench.push_pack(1, 2, A, B)
    bench.push_pack(1, 3, A, B)
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)
    assert refusal(bench.say(1, ClockQuery(8, "a"), life=1)).error == "clock"  # not before the second is applied
    bench.finish(bench.jobs[0])
    for key in ("a", "b"):
        (clocks,) = said(bench.say(1, ClockQuery(9, key), life=1))
        assert (clocks.lowest, clocks.highest) == (2, 2)  # the third was not counted and is dropped
    assert bench.jobs == []


# ── what is wrong ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slice_twice_in_a_push_is_refused_and_harms_nobody() -> None:
    bench = packed("a", "b")
    bench.declare(0, 2, "a", "a")
    bench.declare(0, 3, "a", "b", "a")
    assert refusal(bench.push_pack(0, 1, A, B, pack=2)).error == "ProtocolError"
    assert refusal(bench.push_pack(0, 1, A, B, A, pack=3)).error == "ProtocolError"
    assert refusal(bench.push_all(0, [("a", 0, 1), ("a", 0, 1)], [A, B])).error == "ProtocolError"
    assert values(bench.pull_pack(0, 0, pack=2)) == ((0, 0), [b"\0", b"\0"])  # to pull twice is fine
    for rank in (0, 1):
        effects = bench.push_pack(rank, 1, A, B)
    assert kinds(effects) == ["Done", "Done"]
    assert refusal(bench.push_pack(0, 2, A, A, pack=2)).error == "ProtocolError"
    assert bench.explain()["bytes_staged"] == 0


def test_a_payload_that_does_not_fit_a_unit_is_refused() -> None:
    bench = together("a", "b")
    for payload in ((A,), (A, B, C), ()):
        assert refusal(bench.push_pack(0, 2, *payload)).error == "ProtocolError"
    assert refusal(bench.push_pack(0, 2, A, B, how=ABSENT)).error == "ProtocolError"
    assert refusal(bench.push_pack(0, 4, A, B)).expected == 2
    assert refusal(bench.push_pack(0, 0, A, B)).error == "clock"
    assert refusal(bench.push_pack(0, 2, probe=True)).error == "clock"
    assert bench.explain()["bytes_staged"] == 0


def test_a_key_that_is_made_anew_leaves_its_unit() -> None:
    """Nobody pushes to a key that is not live; if somebody does, it is in use from then on."""
    bench = Bench()
    for key in ("a", "b"):
        bench.init(key, b"\0", publish=False)
    bench.declare(1, 1, "a", "b")
    bench.push_pack(1, 1, A, B)
    bench.say(0, Init(bench.request(), "a", uint8(2), 0), b"\0\0")
    assert bench.units == [["a", "b"]]
    bench.look(member("worker", 1, life=1))
    bench.attach(1, life=1)  # what was staged is dropped: nobody uses it any more
    assert kinds(bench.say(0, Init(bench.request(), "a", uint8(2), 0), b"\0\0")) == ["Done"]
    assert bench.units == [["b"], ["a"]]
    bench.declare(1, 1, "a", "b", life=1)
    bench.push_pack(1, 1, b"\1\1", B, life=1)
    bench.push_all(0, [("b", 0, 1), ("a", 0, 1)], [B, b"\1\1"])
    assert (bench.value("a"), bench.value("b")) == (b"\2\2", b"\4")


def test_a_key_that_is_pushed_to_while_it_is_made_anew_stays_as_it_is() -> None:
    bench = Bench()
    for key in ("a", "b"):
        bench.init(key, b"\0", publish=False)
    for rank in (0, 1):
        bench.declare(rank, 1, "a", "b")
    bench.hold = True
    bench.say(0, Init(bench.request(), "a", uint8(2), 0), b"\0\0")
    for rank in (0, 1):
        bench.push_pack(rank, 1, A, B)
    create, apply = bench.jobs
    assert isinstance(create, Create)
    assert refusal(bench.finish(create)).error == "KeyExists"
    assert kinds(bench.finish(apply)) == ["Done", "Done"]
    assert bench.units == [["a", "b"]]
    assert kinds(bench.say(0, Publish(bench.request(), "b", uint8(1)))) == ["Done"]


def test_contributions_point_into_the_payload_they_came_in() -> None:
    bench = together("a", "b")
    bench.push_pack(0, 2, b"\x10", b"\x20")
    bench.push(1, 2, B, key="b")
    apply = bench.applied[-1]
    spans = [given.span for given in apply.contributions]
    assert spans[0] == Span(b"\x10" + bytes(7) + b"\x20", 8, 1)
    assert spans[1] == Span(B, 0, 1)


def test_a_state_is_fetched_from_a_slice_of_a_unit() -> None:
    bench = together("a", "b")
    effects = bench.say(0, FetchState(9, "b", 0))
    assert kinds(effects) == ["State"]
    assert one(of(Export, effects)).key == "b"
    assert one(of(Send, effects)).peer == worker_id(0)
