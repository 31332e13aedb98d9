"""Parts of the store of a cluster alone, without one."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.client.calls.deadline import Deadline
from kvd.client.calls.handle import Handle
from kvd.client.calls.keys import WrittenKeys
from kvd.client.calls.memory_budget import MemoryBudget
from kvd.client.calls.program_steps import ProgramSteps
from kvd.client.calls.promise import Promise
from kvd.client.calls.unobserved_errors import MOST_KEPT, MOST_NOTES, UnobservedErrors
from kvd.client.cluster.arguments import Arguments
from kvd.client.cluster.closing import ClusterClosing
from kvd.client.cluster.nodes import ClusterNodes
from kvd.client.cluster.observer import SAME_VERSION_TRIES, Observer
from kvd.client.cluster.rounds import ClusterRounds
from kvd.core import requests
from kvd.core.worker.step_loops import StepLoops
from kvd.errors import KvdError, NotAllowed, RequestTimeout
from kvd.protocol.messages import KeyEntry, MemberState, Quiet, TableEntry
from kvd.protocol.specs import ANY_ROW, KeySpec


def failed(error: KvdError) -> Handle:
    promise = Promise()
    promise.set_exception(error)
    return Handle(promise)


def member(role: str, rank: int, state: str) -> Any:
    return SimpleNamespace(role=role, rank=rank, node_id=f"{role}-{rank}", state=state, reason="gone", last_seen_s=7.0)


def test_a_silent_node_counts_as_dead_only_after_the_given_time() -> None:
    members = [
        member("worker", 0, MemberState.ACTIVE),
        member("worker", 1, MemberState.DEAD),
        member("server", 0, MemberState.ACTIVE),
    ]
    quiet = (Quiet("worker", 0, 3.0), Quiet("server", 0, 1.0))
    engine: Any = SimpleNamespace(
        check_usable=lambda: None,
        machine=SimpleNamespace(view=SimpleNamespace(members={(m.role, m.rank): m for m in members})),
        session=SimpleNamespace(quiet=quiet),
    )
    nodes = ClusterNodes(engine)
    dead = {timeout_s: [node.node_id for node in nodes.dead_nodes(timeout_s)] for timeout_s in (0, 0.5, 2, 4)}
    assert dead == {
        0: ["worker-1"],
        0.5: ["server-0", "worker-0", "worker-1"],
        2: ["worker-0", "worker-1"],
        4: ["worker-1"],
    }


EARLIER = "the call that failed is an earlier call {}, which nobody waited for"


def test_the_first_unobserved_error_is_raised_once_with_the_others_as_notes() -> None:
    unobserved = UnobservedErrors()
    first, other, elsewhere = NotAllowed("first"), NotAllowed("other"), NotAllowed("elsewhere")
    for names, error in ((["a"], first), (["b"], elsewhere), (["a", "c"], other)):
        unobserved.watch(names, failed(error))
    seen = unobserved.watch(["a"], failed(NotAllowed("seen")))
    assert seen.exception() is not None
    with pytest.raises(NotAllowed, match="first") as caught:
        unobserved.raise_for(["a", "c"])
    assert caught.value.__notes__ == [EARLIER.format("of 'a'"), "also: other"]
    unobserved.raise_for(["a", "c"])
    with pytest.raises(NotAllowed, match="elsewhere"):
        unobserved.raise_for(None)
    assert not unobserved


class CountedHandle(Handle):
    """Counts how often somebody looks whether it is claimed."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "claimed":
            CountedHandle.looks += 1
        return super().__getattribute__(name)


def test_a_call_looks_at_the_failed_calls_on_its_own_keys_only() -> None:
    unobserved = UnobservedErrors()
    for number in range(100):
        promise = Promise()
        promise.set_exception(NotAllowed("elsewhere"))
        unobserved.watch([f"k{number}"], CountedHandle(promise))
    CountedHandle.looks = 0
    for _ in range(10):
        unobserved.raise_for(["mine"])
    assert CountedHandle.looks == 0
    with pytest.raises(NotAllowed):
        unobserved.raise_for(["mine", "k7"])
    assert CountedHandle.looks == 1
    assert len(unobserved) == 99


def test_the_failed_calls_that_are_kept_are_bounded_and_a_call_on_any_key_raises_them_then() -> None:
    unobserved = UnobservedErrors()
    for number in range(MOST_KEPT + 5):
        unobserved.watch([f"k{number}"], failed(NotAllowed(f"call {number}")))
    assert len(unobserved) == MOST_KEPT
    with pytest.raises(NotAllowed, match="call 0") as caught:
        unobserved.raise_for(["mine"])
    also = caught.value.__notes__[1:]
    assert also[: MOST_NOTES + 1] == [
        *(f"also: call {number}" for number in range(1, MOST_NOTES + 1)),
        f"also: {MOST_KEPT + 5 - 1 - MOST_NOTES} more calls failed",
    ]
    assert len(also) == MOST_NOTES + 1
    assert len(unobserved) == 0
    unobserved.raise_for(None)


def test_failed_calls_that_were_observed_do_not_count_at_the_bound() -> None:
    unobserved = UnobservedErrors()
    for number in range(MOST_KEPT):
        handle = unobserved.watch([f"k{number}"], failed(NotAllowed("seen")))
        assert handle.exception() is not None
    unobserved.raise_for(["mine"])
    assert len(unobserved) == 0


def test_a_failed_call_does_not_keep_its_arrays() -> None:
    class Out:
        def fill(self, _: Any) -> None:
            raise AssertionError("a call that failed has no result")

    out = Out()
    gone, promise, unobserved = weakref.ref(out), Promise(), UnobservedErrors()
    unobserved.watch(["w"], Handle(promise, out.fill))
    del out
    promise.set_exception(NotAllowed("refused"))
    assert gone() is None
    with pytest.raises(NotAllowed, match="refused"):
        unobserved.raise_for(["w"])


@pytest.mark.parametrize("is_watched", [True, False])
def test_close_raises_the_unobserved_error_first_and_notes_its_own(is_watched: bool) -> None:
    stopped: list[Any] = []
    engine: Any = SimpleNamespace(stop=lambda *_: stopped.append("stopped"))
    snapshots: Any = SimpleNamespace(give_up=lambda: None)
    unobserved = UnobservedErrors()
    if is_watched:
        unobserved.watch(["a"], failed(NotAllowed("the push")))
    with pytest.raises(NotAllowed) as caught:
        ClusterClosing(engine, unobserved, snapshots, ProgramSteps(StepLoops(None, is_strict=True), Promise)).end_close(
            failed(NotAllowed("the flush"))
        )
    assert str(caught.value) == ("the push" if is_watched else "the flush")
    notes = [EARLIER.format("of 'a'"), "also: the flush"] if is_watched else []
    assert getattr(caught.value, "__notes__", []) == notes
    assert stopped == ["stopped"]


def test_arrays_that_are_given_away_count_against_the_memory_budget() -> None:
    budget = MemoryBudget(limit_bytes=1 << 20, timeout_s=0.05)
    arguments = Arguments(None, None, budget, UnobservedErrors(), 1 << 20)  # type: ignore[arg-type]
    given = arguments.given_sources([np.zeros(1 << 19, np.uint8), np.zeros(1 << 19, np.uint8)])
    with pytest.raises(RequestTimeout, match="1 MiB of pushes are under way"):
        arguments.given_sources([np.zeros(1, np.uint8)])
    given.clear()
    assert len(arguments.given_sources([np.zeros(1, np.uint8)])) == 1


def test_the_version_of_a_key_on_several_servers_is_the_smallest() -> None:
    observer = Observer.__new__(Observer)
    view = SimpleNamespace(shards=[0], settings=SimpleNamespace(mode="sync", merge="mean"))
    observer._engine = SimpleNamespace(machine=SimpleNamespace(view=view))  # type: ignore[assignment]
    rows: dict[str, dict[str, Any]] = {}
    for rank, version in ((0, 3), (1, 2), (2, 4)):
        observer._add_entry(rows, rank, KeyEntry("w", "float32", (5, 2), 1, 40, version, True))
    assert rows["w"] == {
        "key": "w",
        "dtype": "float32",
        "shape": [5, 2],
        "merge": "mean",
        "version": 2,
        "slices": 3,
        "bytes": 40,
        "updated_rows": None,
        "shard": 0,
        "servers": [0, 1, 2],
    }
    for rank, updated in ((0, 3), (1, 4)):
        for name, bound in (("t", 10), ("u", ANY_ROW)):
            entry = KeyEntry(name, "float32", (5,), 1, 100 * updated, 1, True, "", TableEntry(bound, updated))
            observer._add_entry(rows, rank, entry)
    assert [rows[name]["shape"] for name in "tu"] == [[10, 5], [None, 5]]
    assert [(rows[name]["updated_rows"], rows[name]["bytes"], rows[name]["slices"]) for name in "tu"] == [
        (7, 700, 2)
    ] * 2


@pytest.mark.parametrize("mixed", [0, 1, SAME_VERSION_TRIES])
def test_in_asynchronous_training_an_observer_reads_a_key_of_several_versions_again(mixed: int) -> None:
    """But not for ever: the slices of a large key are rarely of one version."""
    asked: list[list[str]] = []

    async def call(request: Any, timeout: float) -> Any:
        asked.append([item.key for item in request.items])
        newest = 4 if len(asked) <= mixed else 3
        return [requests.Versions(3, newest if item.key == "large" else 3) for item in request.items]

    observer = Observer.__new__(Observer)
    observer._engine = SimpleNamespace(call=call)  # type: ignore[assignment]
    items = tuple(requests.Item(name, None) for name in ("small", "large"))
    versions = asyncio.run(observer._read_async(items, Deadline(60.0)))
    assert asked == [["small", "large"], *[["large"]] * min(mixed, SAME_VERSION_TRIES - 1)]
    assert versions == [requests.Versions(3, 3), requests.Versions(3, 4 if mixed == SAME_VERSION_TRIES else 3)]


def test_the_version_of_a_key_is_the_oldest_of_all_its_servers() -> None:
    async def call(request: Any) -> Any:
        if isinstance(request, requests.DescribeKey):
            return KeySpec("uint8", (3 << 20,), 1 << 20)
        assert request.partitions == (0, 1, 2)
        return [(SimpleNamespace(oldest_version=version), None, 0) for version in (5, 3, 4)]

    def run(coroutine: Any) -> Promise:
        promise = Promise()
        promise.set_result(asyncio.run(coroutine))
        return promise

    view = SimpleNamespace(partition_of=lambda name, index: index)
    engine: Any = SimpleNamespace(run=run, call=call, machine=SimpleNamespace(view=view), written=WrittenKeys())
    assert (
        ClusterRounds(engine, UnobservedErrors(), ProgramSteps(StepLoops(None, is_strict=True), Promise))
        .version("w")
        .wait()
        == 3
    )
