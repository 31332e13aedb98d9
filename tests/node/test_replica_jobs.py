"""What replication asks of the jobs: merged gradients that a replica applies, and slices that move with states."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from kvd.compute.compiled import Loop, kernels_in_use, warm_up
from kvd.compute.merge import accumulator_dtype
from kvd.compute.tensors import named_dtype
from kvd.core.machine import Apply, Contribution, Extent, Span
from kvd.errors import DtypeMismatch, KvdError, NotAllowed, ShapeMismatch
from kvd.node.jobs.runner import JobRunner
from kvd.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, schedule
from kvd.protocol.messages import ADD
from tests.compute.compiled_harness import FLOATS, needs_numba
from tests.compute.test_custom_optimizers import Failing, SignDescent
from tests.node.states_harness import ADAM, MOMENTUM, Server, gradients, started

OPTIMIZERS: list[Optimizer] = [
    SGD(0.1, wd=0.01),
    MOMENTUM,
    SGD(0.05, momentum=0.8, nesterov=True, clip_gradient=0.5, rescale_grad=0.5),
    Adam(schedule.Warmup(schedule.Cosine(0.2, 20), 5)),
    AdamW(0.05, wd=0.3),
    Adagrad(0.1, lr_decay=0.05),
    RMSProp(0.01, alpha=0.8, centered=True, momentum=0.5),
    SignDescent(0.1),
]


def cut(server: Server, keys: list[str], key: str, merged: Any) -> bytes:
    """A slice's part of what was merged for a group."""
    wider = accumulator_dtype(named_dtype(server.dtype)).itemsize // named_dtype(server.dtype).itemsize
    entry = next(entry for entry in server.layout(keys) if entry.key == key)
    return bytes(merged)[wider * entry.offset : wider * (entry.offset + entry.nbytes)]


def copy_of(server: Server) -> Server:
    """Another server, which was sent all slices with their states."""
    other = Server(server.dtype)
    for key in server.current:
        install(other, server, key)
    return other


def install(target: Server, source: Server, key: str) -> None:
    target.create(key, source.value(key).copy())
    step, arrays = source.state(key)
    slots = {name: np.frombuffer(data, _slot_dtype(source, name)) for name, data in arrays.items()}
    assert target.load(key, step, slots) is None


def _slot_dtype(server: Server, name: str) -> Any:
    return np.float32 if name == "master" else accumulator_dtype(named_dtype(server.dtype))


# ── checksums ──


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_checksum_is_of_all_that_an_update_changes(dtype: str) -> None:
    """The bytes, and every array of the state, and the number of steps: one flipped bit makes another one."""
    server = started(dtype, {"w": 5, "v": 3})
    for _ in range(2):
        server.push(["w", "v"], {"w": np.ones(5), "v": np.ones(3)}, optimizer=ADAM)
    before, others = server.checksum("w"), server.checksum("v")
    step, slots = server.state("w")
    arrays: dict[str, Any] = {name: np.frombuffer(data, _slot_dtype(server, name)) for name, data in slots.items()}
    assert len(arrays) == (3 if dtype in ("float16", "bfloat16") else 2)
    for name in arrays:
        flipped = arrays[name].copy()
        flipped.view(np.uint8)[-1] ^= 0x80
        assert server.load("w", step, {**arrays, name: flipped}) is None
        assert server.checksum("w") != before
    assert server.load("w", step + 1, arrays) is None
    assert server.checksum("w") != before
    assert server.load("w", step, arrays) is None
    assert server.checksum("w") == before
    span = server.current["w"]
    np.frombuffer(span.buffer, np.uint8)[span.offset] ^= 1
    assert server.checksum("w") != before
    assert server.checksum("v") == others


# ── the merged gradient ───────────────────────────────────────────────────────────────────────────────────────────────


def compare_replicas(optimizer: Any, dtype: str, seed: int, steps: int = 12) -> None:
    """An ordinary server, one that keeps what it merges, a replica with its groups, and one that has only single
    slices: whatever is pushed together, they are the same."""
    random = Random(seed)
    sizes = {key: random.choice([0, 1, 3, 8, 17]) for key in "abcdef"}
    alone, leader, replica, single = (started(dtype, sizes) for _ in range(4))
    servers = (alone, leader, replica, single)
    keys = list(sizes)
    for step in range(steps):
        if random.random() < 0.3:
            random.shuffle(keys)
        group = keys[: random.randrange(1, len(keys) + 1)] if random.random() < 0.4 else keys
        if random.random() < 0.15:
            for server in servers:
                server.runner.reset([(key, 0) for key in group])
        given = [gradients(100 * step + rank, sizes) for rank in range(random.randrange(1, 6))]
        merge = random.choice(["sum", "mean", "weighted"])
        assert alone.try_push(group, *given, optimizer=optimizer, merge=merge) is None
        assert leader.try_push(group, *given, optimizer=optimizer, merge=merge, keeps_merged=True) is None
        assert replica.hold(group, leader.merged, optimizer) is None
        for key in group:
            assert single.hold([key], cut(leader, group, key, leader.merged), optimizer) is None
        for server in servers[1:]:
            for key in sizes:
                assert server.value(key).tobytes() == alone.value(key).tobytes(), (step, key)
                if sizes[key]:
                    assert server.state(key) == alone.state(key), (step, key)
                    assert server.checksum(key) == alone.checksum(key), (step, key)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_replica_that_applies_what_was_merged_is_the_same_in_every_bit(optimizer: Optimizer, dtype: str) -> None:
    for seed in range(3):
        compare_replicas(optimizer, dtype, seed)


@needs_numba
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=repr)
def test_replicas_are_the_same_where_any_of_them_calculates_with_compiled_loops(
    optimizer: Optimizer, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warm_up(optimizer, named_dtype(dtype), keeps_merged=True), kernels_in_use()
    random, compiled = Random(7), Loop.ready
    monkeypatch.setattr(Loop, "ready", lambda loop, n: compiled(loop, n) if random.random() < 0.5 else None)
    for seed in range(6):
        compare_replicas(optimizer, dtype, seed)


def test_what_was_merged_is_the_sum_in_the_wide_dtype_and_defined_between_the_slices() -> None:
    kept = []
    for dirt in (0xAB, 0x11):  # what the memory held before
        server = Server("float16", JobRunner(allocate=partial(np.full, fill_value=dirt, dtype=np.uint8)))
        for key, size in (("a", 1), ("b", 3), ("c", 1)):
            server.create(key, np.zeros(size))
        given: list[dict[str, Any]] = [{"a": [value], "b": [value, 0, 0], "c": [0]} for value in (2048, 1)]
        for _ in range(2):
            assert server.try_push(list("abc"), *given, optimizer=MOMENTUM, keeps_merged=True) is None
            merged = server.merged.view(np.float32)
            assert [merged[0], *merged[4:7], merged[8]] == [2049, 2049, 0, 0, 0]  # 2049 is no float16
            kept.append((merged.tobytes(), server.current["a"].buffer.tobytes()))
            assert server.load("b", 9, {}) is None  # the group has states of two steps now
    assert kept[:2] == kept[2:]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_update_that_fails_changes_neither_a_leader_nor_a_replica(dtype: str) -> None:
    for wrong in (False, True):
        leader, replica = started(dtype), started(dtype)
        keys = list("abcd")
        first = gradients(1)
        for server in (leader, replica):
            assert server.try_push(keys, first, optimizer=Failing(0.1), keeps_merged=True) is None
            if wrong:  # each slice has a state of its own
                assert server.load("b", 7, {}) is None
        before = leader.everything()
        bad = {**gradients(2), "a": np.array([13.0, 0, 0], np.float32)}
        error = leader.try_push(keys, bad, optimizer=Failing(0.1), keeps_merged=True)
        assert isinstance(error, NotAllowed)
        assert "ZeroDivisionError" in str(error)
        length = sum(entry.nbytes for entry in leader.layout(keys)[-1:]) + leader.layout(keys)[-1].offset
        wide = np.full(length // named_dtype(dtype).itemsize, 13, np.float32)
        assert replica.hold(keys, wide.view(np.uint8), Failing(0.1)) is not None
        assert leader.everything() == replica.everything() == before


def test_a_merged_gradient_that_does_not_fit_is_refused() -> None:
    server = started("float16", {"a": 4})
    server.push(["a"], gradients(1, {"a": 4}), optimizer=MOMENTUM)
    before = server.everything()
    expected: list[tuple[type[KvdError], Any, Any]] = [
        (ShapeMismatch, np.zeros(4, np.float16), MOMENTUM),
        (ShapeMismatch, np.zeros(5, np.float32), MOMENTUM),
        (NotAllowed, np.zeros(4, np.float32), None),
    ]
    for kind, merged, optimizer in expected:
        assert isinstance(server.hold(["a"], merged.view(np.uint8), optimizer), kind)
    assert isinstance(server.try_push(["a"], gradients(1, {"a": 4}), optimizer=None, keeps_merged=True), NotAllowed)
    assert server.everything() == before
    integers = started("int32", {"a": 4})
    assert isinstance(integers.hold(["a"], bytes(16), MOMENTUM), DtypeMismatch)


def test_the_memory_of_what_was_merged_comes_from_where_versions_are_made() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> Any:
        asked.append(nbytes)
        return np.full(nbytes, 0xAB, np.uint8)

    server = Server("bfloat16", JobRunner(allocate=allocate))
    server.create("a", np.zeros(8))
    layout = (Extent("a", 0, 0, 16),)
    given = Contribution(0, 1, Span(bytes(16), 0, 16), 1, ADD)
    current = server.current["a"].buffer
    job = Apply(2, 1, layout, "bfloat16", 16, current, (given,), False, "sum", MOMENTUM, keeps_merged=True)
    made, merged = server.runner.run(job).result
    assert asked == [16, 16, 32]
    assert (made.tobytes(), merged.buffer.tobytes(), merged.nbytes) == (bytes(16), bytes(32), 32)


# ── slices that move ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_slices_that_were_made_and_loaded_elsewhere_go_on_with_the_same_bits(optimizer: Optimizer, dtype: str) -> None:
    for seed in range(3):
        random = Random(seed)
        sizes = {key: random.choice([0, 1, 3, 8, 17]) for key in "abcde"}
        server = started(dtype, sizes)
        keys = list(sizes)
        copies: list[Server] = []
        for step in range(10):
            if step in (0, 3, 6):  # new; fused; and fused with steps that differ
                copies.append(copy_of(server))
            if step == 5:
                for one in (server, *copies):
                    one.push(keys[:2], gradients(500, sizes), optimizer=optimizer)
            if random.random() < 0.2:
                random.shuffle(keys)
            given = [gradients(100 * step + rank, sizes) for rank in range(2)]
            for one in (server, *copies):
                one.push(keys, *given, optimizer=optimizer)
            for one in copies:
                assert [one.value(key).tobytes() for key in sizes] == [server.value(key).tobytes() for key in sizes]
                assert all(one.state(key) == server.state(key) for key in sizes if sizes[key]), step


def test_a_state_is_read_without_parting_the_group_that_its_slice_is_in() -> None:
    server = started()
    keys = list("abcd")
    server.push(keys, gradients(1), optimizer=ADAM)
    (before,) = server.runner._states.of_group(1, server.layout(keys), 4)
    assert [server.state(key)[0] for key in keys] == [1] * 4
    (after,) = server.runner._states.of_group(1, server.layout(keys), 4)
    assert after.state is before.state
    step, arrays = server.state("c")
    server.push(keys, gradients(2), optimizer=ADAM)
    assert server.state("c") != (step, arrays), "what was read is a copy"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slice_that_is_installed_again_replaces_the_one_before_and_leaves_its_group_as_it_was(dtype: str) -> None:
    source, target = started(dtype), started(dtype)
    keys = list("abcd")
    for step in range(3):
        source.push(keys, gradients(step), optimizer=ADAM)
    target.push(keys, gradients(50), optimizer=ADAM)
    others = {key: target.state(key) for key in "acd"}
    install(target, source, "b")
    assert {key: target.state(key) for key in "acd"} == others
    assert target.state("b") == source.state("b")
    for key in "acd":
        install(target, source, key)
    install(target, source, "b")
    source.push(keys, gradients(9), optimizer=ADAM)
    target.push(keys, gradients(9), optimizer=ADAM)
    assert target.everything() == source.everything()


def test_a_group_that_goes_on_under_its_number_after_one_of_its_slices_was_installed_again() -> None:
    source, target = started(), started()
    keys = list("abcd")
    for server in (source, target):
        server.push(keys, gradients(1), optimizer=ADAM)
    groups = dict(target.groups)
    install(target, source, "b")
    target.groups = groups
    for server in (source, target):
        server.push(keys, gradients(2), optimizer=ADAM)
    assert target.everything() == source.everything()
