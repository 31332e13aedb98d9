"""Fusing slices into groups: many slices are staged, updated and answered as one."""

from __future__ import annotations

from typing import Any

from kvd.core.machine import Create, Export, ScatterList, Send, Span
from kvd.core.server.groups import FusedGroup, Slice, fused, parted
from kvd.core.server.progress import PushRequest, Refusal, WorkerProgress
from kvd.core.server.rounds import SliceLog
from kvd.errors import NotAllowed
from kvd.optimizer import SGD
from kvd.protocol.messages import (
    ABSENT,
    ANY_CLOCK,
    ClockQuery,
    Clocks,
    ErrorCode,
    FetchState,
    NotYetReason,
    SliceId,
    Taken,
)
from kvd.protocol.specs import KeySpec
from tests.core.fakes import init_of, member, of, one, publish_of, read, said, uint8, worker_id
from tests.core.server_harness import Harness, kinds, not_yet, packed, refusal, together, values

A, B, C = b"\1", b"\2", b"\3"
REFUSAL = Refusal(PushRequest(7, 7), ErrorCode.NOT_ALLOWED, "no")


def slice_of(
    key: str, nbytes: int, dtype: str = "uint8", optimizer: Any = None, current: Any = None, merge: str = ""
) -> Slice:
    log = SliceLog(True, 2, -1, current or key.encode() * nbytes)
    group = FusedGroup(0, log, dtype, optimizer)
    made = Slice(key, 0, KeySpec(dtype, (nbytes,), 4096, merge), nbytes, 1, group)
    group.take([made])
    return made


def test_slices_lie_one_after_the_other_at_multiples_of_eight() -> None:
    slices = [slice_of("a", 3), slice_of("b", 0), slice_of("c", 8), slice_of("d", 1)]
    group = fused(7, slices)
    assert group is not None
    assert [(entry.key, entry.offset, entry.nbytes) for entry in group.layout] == [
        ("a", 0, 3),
        ("b", 8, 0),
        ("c", 8, 8),
        ("d", 16, 1),
    ]
    assert group.nbytes == 17
    assert all(entry.group is group for entry in slices)
    assert [read(entry.span(group.log.current)) for entry in slices] == [b"aaa", b"", b"cccccccc", b"d"]
    whole = bytes(range(17))
    assert [read(entry.span(whole)) for entry in slices] == [whole[:3], b"", whole[8:16], whole[16:]]


def test_slices_of_keys_that_are_merged_otherwise_are_not_fused() -> None:
    assert fused(7, [slice_of("a", 8, merge="sum"), slice_of("b", 8, merge="mean")]) is None
    assert fused(7, [slice_of("a", 8), slice_of("b", 8, merge="mean")]) is None
    group = fused(7, [slice_of("a", 8, merge="mean"), slice_of("b", 8, merge="mean")])
    assert group is not None
    assert group.merge == "mean"


def test_slices_that_are_not_equally_far_are_not_fused() -> None:
    def differs(change: Any) -> bool:
        first, second = slice_of("a", 1), slice_of("b", 1)
        old = second.group
        change(second)
        return fused(1, [first, second]) is None and not first.group.is_gone and not old.is_gone

    assert not differs(lambda entry: None)
    for name, value in (("version", 1), ("closed", 1), ("previous", b"v"), ("closing", object())):
        assert differs(lambda entry, name=name, value=value: setattr(entry.group.log, name, value)), name
    for changes in ({"staged": 1}, {"counted": 1}, {"committed": 1}, {"skipped": 1}, {"last_refusal": REFUSAL}):
        progress = WorkerProgress(**changes)
        assert differs(lambda entry, progress=progress: entry.group.log.progress.update({1: progress})), changes
    for like_new in (WorkerProgress(), WorkerProgress(last_request=PushRequest(7, 7))):
        assert not differs(lambda entry, like_new=like_new: entry.group.log.progress.update({1: like_new}))
    for name in ("waiting", "changes", "tasks"):
        assert differs(lambda entry, name=name: getattr(entry.group, name).append(object())), name
    assert differs(lambda entry: setattr(entry.group, "working", True))
    assert differs(lambda entry: setattr(entry.group, "dtype", "int8"))
    assert differs(lambda entry: setattr(entry.group, "optimizer", SGD(0.5)))


def test_parting_gives_each_its_bytes_of_both_versions() -> None:
    slices = [slice_of("a", 2), slice_of("b", 1)]
    group = fused(1, slices)
    assert group is not None
    group.log.previous, group.log.current = group.log.current, b"xx......y"
    numbers = iter((8, 9))
    parts = parted(group, lambda: next(numbers))
    assert group.is_gone
    assert [(part.number, part.nbytes, [entry.key for entry in part.slices]) for part in parts] == [
        (8, 2, ["a"]),
        (9, 1, ["b"]),
    ]
    assert [entry.group for entry in slices] == parts
    assert [read(entry.span(entry.log.current)) for entry in slices] == [b"xx", b"y"]
    assert [read(entry.span(entry.log.previous)) for entry in slices] == [b"aa", b"b"]
    again = fused(10, list(reversed(slices)))
    assert again is not None
    assert isinstance(again.log.current, ScatterList)
    assert [read(entry.span(again.log.current)) for entry in slices] == [b"xx", b"y"]


def test_a_batch_is_one_apply_and_one_answer() -> None:
    harness = packed("a", "b", "c")
    assert harness.groups == [["a"], ["b"], ["c"]]
    assert kinds(harness.push_batch(0, 1, A, B, C)) == ["Staged"]
    effects = harness.push_batch(1, 1, A, B, C, pull=True)
    apply = one(harness.applied)
    assert [tuple(entry) for entry in apply.layout] == [("a", 0, 0, 1), ("b", 0, 8, 1), ("c", 0, 16, 1)]
    assert apply.nbytes == 17
    assert [read(span) for span in apply.current.spans] == [b"\0"] * 3
    assert kinds(effects, worker_id(0)) == ["Done"]
    versions, parts = values(effects, worker_id(1))
    assert versions == (1,)
    assert parts == [b"\2" + bytes(7) + b"\4" + bytes(7) + b"\6"]
    assert harness.groups == [["a", "b", "c"]]


def test_a_pull_by_name_and_by_batch_see_the_same_bytes() -> None:
    harness = together("a", "b")
    assert values(harness.pull(0, 1, key="b")) == ((1,), [b"\4"])
    versions, (whole,) = values(harness.pull_batch(0, 1))
    assert (versions, whole[0], whole[8]) == ((1,), 2, 4)
    assert values(harness.pull_batch(0, 0)) == ((0,), [b"\0", b"\0"])  # the version before: it lay in two buffers
    assert values(harness.pull(0, 0, key="b")) == ((0,), [b"\0"])
    harness.declare(1, 2, "b", "a")
    assert values(harness.pull_batch(1, 1, batch=2)) == ((1, 1), [b"\4", b"\2"])
    assert values(harness.pull_batch(1, ANY_CLOCK, batch=2)) == ((1, 1), [b"\4", b"\2"])
    assert harness.groups == [["a", "b"]]  # a pull parts nobody


def test_keys_of_different_dtypes_are_pushed_together_and_stay_apart() -> None:
    harness = Harness()
    harness.init("a", b"\0")
    harness.init("f", bytes(4), KeySpec("float32", (1,), 4096))
    for rank in (0, 1):
        harness.declare(rank, 1, "a", "f")
        effects = harness.push_batch(rank, 1, A, b"\1\1\1\1")
    assert kinds(effects) == ["Done", "Done"]
    assert harness.groups == [["a"], ["f"]]
    assert harness.value("f") == b"\2\2\2\2"


def test_empty_slices_are_fused_like_any_other() -> None:
    harness = packed("a")
    for key in ("e", "f"):
        harness.init(key, b"")
    for rank in (0, 1):
        harness.declare(rank, 2, "e", "a", "f")
        effects = harness.push_batch(rank, 1, b"", A, b"", batch=2, pull=True)
    assert harness.groups == [["e", "a", "f"]]
    assert values(effects, worker_id(0))[0] == (1,)
    assert (harness.value("a"), harness.value("e"), harness.value("f")) == (b"\2", b"", b"")
    harness.push(0, 2, b"", key="e")
    assert kinds(harness.push(1, 2, b"", key="e")) == ["Done", "Done"]
    assert harness.groups == [["e"], ["a"], ["f"]]


def test_only_empty_slices() -> None:
    harness = Harness()
    for key in ("e", "f"):
        harness.init(key, b"")
    for rank in (0, 1):
        harness.declare(rank, 1, "e", "f")
        effects = harness.push_batch(rank, 1, b"", b"")
    assert kinds(effects) == ["Done", "Done"]
    assert harness.groups == [["e", "f"]]


def test_slices_of_one_key_are_fused_too() -> None:
    harness = Harness()
    harness.init("w", bytes(4097))
    for rank in (0, 1):
        harness.declare(rank, 1, SliceId("w", 0), SliceId("w", 1))
        harness.push_batch(rank, 1, b"\1" * 4096, b"\1")
    assert harness.groups == [["w", "w"]]
    assert said(harness.say(1, ClockQuery(9, "w"))) == [Clocks(9, 1, 1, 1, 1)]


def test_another_order_of_the_same_slices_parts_them_and_no_bytes_are_mixed_up() -> None:
    harness = packed("a", "b")
    harness.declare(1, 2, "b", "a")
    harness.push_batch(0, 1, A, B)
    assert harness.groups == [["a", "b"]]
    harness.push_batch(1, 1, b"\x10", b"\x20", batch=2)
    assert harness.groups == [["a"], ["b"]]
    assert (harness.value("a"), harness.value("b")) == (b"\x21", b"\x12")


def test_a_new_batch_of_the_slices_of_a_group_finds_them_together() -> None:
    """All who had declared them were replaced; to part them would be forever for a batch that somebody still has."""
    harness = together("a", "b")
    for rank in (0, 1):
        harness.look(member("worker", rank, life=1))
        harness.attach(rank, life=1)
    for rank in (0, 1):
        harness.declare(rank, 1, "a", "b", life=1)
        effects = harness.push_batch(rank, 2, A, B, life=1)
        assert harness.groups == [["a", "b"]]
    assert kinds(effects) == ["Done", "Done"]


def test_a_failed_update_of_a_group_refuses_all_its_pushes() -> None:
    harness = together("a", "b")
    harness.push_batch(0, 2, A, B, request=50)
    harness.push_batch(0, 3, A, B, request=51)
    harness.error = NotAllowed("no memory")
    effects = harness.push_batch(1, 2, A, B, request=52)
    refused = {message.request: message for message in said(effects)}
    assert {request: message.taken for request, message in refused.items()} == dict.fromkeys(
        (50, 51, 52), Taken.NOTHING
    )
    assert "no memory" in refused[50].text
    note = next(effect for effect in effects if hasattr(effect, "level"))
    assert "2 slices from 0" in note.text  # type: ignore[union-attr]
    harness.error = None
    harness.push_batch(0, 2, b"\x10", b"\x10")
    harness.push(1, 2, A, key="a")
    harness.push(1, 2, B, key="b")
    assert (harness.value("a"), harness.value("b")) == (b"\x11", b"\x12")


def test_a_message_that_was_carried_out_for_some_of_its_slices_says_so() -> None:
    """Else its worker would use the clock again, for bytes that the other slices take for the ones they know."""
    harness = together("a", "b")
    harness.push_batch(0, 2, A, B, request=50)
    harness.hold = True
    harness.push(1, 2, A, key="a")
    harness.push(1, 2, B, key="b")
    first, second = harness.jobs
    harness.error = NotAllowed("no memory")
    refused = refusal([effect for effect in harness.finish(first) if getattr(effect, "peer", 0) == worker_id(0)])
    assert (refused.request, refused.taken) == (50, Taken.PART)
    harness.error = None
    assert kinds(harness.finish(second)) == ["Done"]
    assert harness.value("b") == b"\4"


def test_a_message_of_several_keys_that_fails_in_one_says_that_others_took_it() -> None:
    harness = packed("a", "b", declare=False)
    for rank in (0, 1):
        harness.hold = True
        harness.push_all(rank, [("a", 0, 1), ("b", 0, 1)], [A, B])
    harness.error = NotAllowed("no memory")
    effects = harness.finish(harness.jobs[0])
    assert [message.taken for message in said(effects)] == [Taken.PART, Taken.PART]


def test_a_slice_twice_in_a_request_is_refused_and_changes_nothing() -> None:
    harness = packed("a", "b")
    for twice in (("a", "a"), ("a", "b", "a")):
        assert refusal(harness.declare(0, 2, *twice)).error is ErrorCode.PROTOCOL_ERROR
    parts = [("a", 0, 1), ("a", 0, 1)]
    for effects in (harness.push_all(0, parts, [A, B]), harness.pull_all(0, parts)):
        assert refusal(effects).error is ErrorCode.PROTOCOL_ERROR
        assert "twice" in refusal(effects).text
    for rank in (0, 1):
        effects = harness.push_batch(rank, 1, A, B)
    assert kinds(effects) == ["Done", "Done"]
    assert harness.explain()["bytes_staged"] == 0


def test_a_payload_that_does_not_fit_a_group_is_refused() -> None:
    harness = together("a", "b")
    for payload in ((A,), (A, B, C), ()):
        assert refusal(harness.push_batch(0, 2, *payload)).error is ErrorCode.PROTOCOL_ERROR
    assert refusal(harness.push_batch(0, 2, A, B, how=ABSENT)).error is ErrorCode.PROTOCOL_ERROR
    assert not_yet(harness.push_batch(0, 4, A, B)).next_clock == 2
    assert not_yet(harness.push_batch(0, 0, A, B)).reason is NotYetReason.OUT_OF_TURN
    assert not_yet(harness.push_batch(0, 2, probe=True)).reason is NotYetReason.OUT_OF_TURN
    assert harness.explain()["bytes_staged"] == 0


def test_a_key_that_is_made_again_leaves_its_group() -> None:
    """Nobody pushes to a key that is not live; if somebody does, it is in use from then on."""
    harness = Harness()
    for key in ("a", "b"):
        harness.init(key, b"\0", publish=False)
    harness.declare(1, 1, "a", "b")
    harness.push_batch(1, 1, A, B)
    harness.say(0, init_of(harness.request(), "a", uint8(2), 0), b"\0\0")
    assert harness.groups == [["a", "b"]]
    harness.look(member("worker", 1, life=1))
    harness.attach(1, life=1)  # what was staged is dropped: nobody uses it any more
    assert kinds(harness.say(0, init_of(harness.request(), "a", uint8(2), 0), b"\0\0")) == ["Done"]
    assert harness.groups == [["b"], ["a"]]
    harness.declare(1, 1, "a", "b", life=1)
    harness.push_batch(1, 1, b"\1\1", B, life=1)
    harness.push_all(0, [("b", 0, 1), ("a", 0, 1)], [B, b"\1\1"])
    assert (harness.value("a"), harness.value("b")) == (b"\2\2", b"\4")


def test_a_key_that_is_pushed_to_while_it_is_made_again_stays_as_it_is() -> None:
    harness = Harness()
    for key in ("a", "b"):
        harness.init(key, b"\0", publish=False)
    for rank in (0, 1):
        harness.declare(rank, 1, "a", "b")
    harness.hold = True
    harness.say(0, init_of(harness.request(), "a", uint8(2), 0), b"\0\0")
    for rank in (0, 1):
        harness.push_batch(rank, 1, A, B)
    create, apply = harness.jobs
    assert isinstance(create, Create)
    assert refusal(harness.finish(create)).error is ErrorCode.KEY_EXISTS
    assert kinds(harness.finish(apply)) == ["Done", "Done"]
    assert harness.groups == [["a", "b"]]
    assert kinds(harness.say(0, publish_of(harness.request(), "b", uint8(1)))) == ["Done"]


def test_contributions_point_into_the_payload_they_came_in() -> None:
    harness = together("a", "b")
    harness.push_batch(0, 2, b"\x10", b"\x20")
    harness.push(1, 2, B, key="b")
    apply = harness.applied[-1]
    spans = [given.span for given in apply.contributions]
    assert spans[0] == Span(b"\x10" + bytes(7) + b"\x20", 8, 1)
    assert spans[1] == Span(B, 0, 1)


def test_a_state_is_fetched_from_a_slice_of_a_group() -> None:
    harness = together("a", "b")
    effects = harness.say(0, FetchState(9, "b", 0))
    assert kinds(effects) == ["State"]
    assert one(of(Export, effects)).key == "b"
    assert one(of(Send, effects)).peer == worker_id(0)
