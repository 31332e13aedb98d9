"""The server: each key is merged in its own way."""

from __future__ import annotations

from kvd.optimizer import SGD, to_wire
from kvd.protocol.messages import SetOptimizer
from kvd.protocol.specs import KeySpec
from tests.core.fakes import cluster
from tests.core.server_harness import Harness


def test_a_round_is_merged_as_its_key_says_else_as_the_cluster_says() -> None:
    harness = Harness(cluster(merge="mean"))
    specs = {merge: KeySpec("float32", (1,), 4096, merge) for merge in ("", "sum", "weighted")}
    for merge, spec in specs.items():
        harness.init(f"key {merge}", bytes(4), spec)
        for rank in (0, 1):
            harness.push(rank, 1, bytes(4), key=f"key {merge}")
    assert [apply.merge for apply in harness.applied] == ["mean", "sum", "weighted"]


def test_a_push_of_keys_with_different_merges_is_applied_key_by_key() -> None:
    harness = Harness()
    names = {"a": "mean", "b": "sum", "c": "mean"}
    for name, merge in names.items():
        harness.init(name, bytes(8), KeySpec("float64", (1,), 4096, merge))
    for rank in (0, 1):
        harness.declare(rank, 1, *names)
        harness.push_batch(rank, 1, bytes(8), bytes(8), bytes(8))
    assert harness.groups == [["a"], ["b"], ["c"]]
    assert [apply.merge for apply in harness.applied] == ["mean", "sum", "mean"]


def test_a_key_of_integers_with_its_own_merge_is_not_updated_by_the_optimizer() -> None:
    harness = Harness()
    harness.init("n", b"\0", KeySpec("uint8", (1,), 4096, "sum"))
    harness.init("w", bytes(4), KeySpec("float32", (1,), 4096, "mean"))
    harness.say(0, SetOptimizer(harness.request(), to_wire(SGD(1.0))))
    for rank in (0, 1):
        harness.push(rank, 1, b"\3", key="n")
        harness.push(rank, 1, bytes(4), key="w")
    assert [(apply.merge, apply.optimizer) for apply in harness.applied] == [("sum", None), ("mean", SGD(1.0))]
    assert harness.value("n") == b"\6"
