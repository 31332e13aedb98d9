"""What workers pull where the servers encode what they have merged: the same bits for everyone, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvd
from kvd.core.machine import Send
from kvd.node.shell.sending import MessageSender
from kvd.protocol.messages import Coding, Pull, Values
from kvd.testing.cluster import LocalCluster

SIZE = 20_001  # floats in slices of 16 KiB: four full ones and a short one
SLICES: dict[str, Any] = {"slice_bytes": "16KiB"}
TWO_BIT: dict[str, Any] = {"type": "2bit", "threshold": 0.5}
Array = np.ndarray[Any, Any]


def gradient(rank: int, step: int, size: int = SIZE) -> Array:
    """Multiples of 1/64, none larger than the threshold: float32 calculates exactly with sums of some."""
    random = np.random.default_rng((rank, step))
    values: Array = random.integers(-30, 31, size).astype(np.float32) / np.float32(64)
    return values


def ternary(total: Array, threshold: float) -> Array:
    return np.where(np.abs(total) >= threshold, np.copysign(threshold, total), 0.0)


class Model:
    """In float64: two workers with `2bit` and a threshold of 0.5, and their servers, which have one of 1."""

    def __init__(self) -> None:
        self.left_over = [np.zeros(SIZE), np.zeros(SIZE)]
        self.left_over_at_servers = np.zeros(SIZE)

    def merged(self, step: int, sent_plain: int | None = None) -> Array:
        total = np.zeros(SIZE)
        for rank in (0, 1):
            if rank == sent_plain:
                total += gradient(rank, step)
                continue
            wanted = self.left_over[rank] + gradient(rank, step)
            sent = ternary(wanted, 0.5)
            self.left_over[rank] = wanted - sent
            total += sent
        return total

    def encoded(self, step: int) -> Array:
        wanted = self.left_over_at_servers + self.merged(step)
        value = ternary(wanted, 1.0)
        self.left_over_at_servers = wanted - value
        return value

    def plain(self, step: int, sent_plain: int | None = None) -> Array:
        value = self.left_over_at_servers + self.merged(step, sent_plain)
        self.left_over_at_servers = np.zeros(SIZE)
        return value


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Coding | None, int]]:
    """How the values that leave the servers are encoded, and their bytes."""
    seen: list[tuple[Coding | None, int]] = []
    send = MessageSender.send

    def noted(self: MessageSender, effect: Send, *rest: Any) -> Any:
        if isinstance(effect.message, Values):
            seen.append((effect.message.coding, sum(span.nbytes for span in effect.payload)))
        return send(self, effect, *rest)

    monkeypatch.setattr(MessageSender, "send", noted)
    return seen


def test_100_rounds_are_those_of_a_model_and_nothing_is_lost() -> None:
    """Each value is that of the model in float64, and their mean goes to that of the gradients: what both have left
    over is below their thresholds, 0.5 + 0.5 + 1."""

    def program(kv: kvd.KVStore) -> Any:
        kv.set_gradient_compression(TWO_BIT)
        kv.init("w", np.zeros(SIZE, np.float32))
        model, value, total, wanted = Model(), np.empty(SIZE, np.float32), np.zeros(SIZE), np.zeros(SIZE)
        for step in range(100):
            kv.pushpull("w", gradient(kv.rank, step), out=value)
            np.testing.assert_array_equal(value, model.encoded(step))
            total += value
            wanted += gradient(0, step) + gradient(1, step).astype(float)
        return np.abs(total - wanted).max() / 100

    with LocalCluster(2, 2, **SLICES) as cluster:
        for error in cluster.run(program):
            assert error < 0.02


def test_all_who_pull_get_the_same_bits_and_few_bytes(answers: list[tuple[Coding | None, int]]) -> None:
    kept: list[Array] = []

    def program(kv: kvd.KVStore) -> Any:
        kv.set_gradient_compression(TWO_BIT)
        kv.init(["w", "small"], [np.zeros(SIZE, np.float32), np.zeros(9, np.float32)])
        values = [np.empty(SIZE, np.float32), np.empty(9, np.float32)]
        for step in range(3):
            gradients = [gradient(kv.rank, step), gradient(kv.rank, step, 9)]
            kv.pushpull(["w", "small"], gradients, out=values)
            np.testing.assert_array_equal(values[1], gradient(0, step, 9) + gradient(1, step, 9))
        kv.barrier()
        if kv.rank == 0:
            del answers[:]
        kv.barrier("counted")
        got = [kv.pull("w"), kv.pull("w", out=np.empty(SIZE, np.float32)), kv.pull(["small", "w"])[1]]
        kv.barrier("pulled")
        if kv.rank == 0:
            sizes = [nbytes for coding, nbytes in answers if coding is not None]
            assert sorted(sizes) == sorted(6 * ([1024] * 4 + [905]))  # a quarter of a byte per element
            kept.append(got[0])
        kv.set_gradient_compression({"type": "none"})
        got.append(kv.pull("w"))
        kv.set_gradient_compression({"type": "int8"})  # of another kind than the value was encoded with
        got.append(kv.pull("w"))
        return [values[0], *got]

    with LocalCluster(2, 2, **SLICES) as cluster:
        found = [array.tobytes() for arrays in cluster.run(program) for array in arrays]
        with cluster.observer() as observer:
            found.append(observer.pull("w").tobytes())
    assert set(found) == {kept[0].tobytes()}


def test_a_round_that_is_not_encoded_takes_what_was_left_over() -> None:
    """Settings that differ, change, or ask for plain values: then the sum is exact, with all that was left over."""
    settings: list[list[dict[str, Any]]] = [
        [TWO_BIT, TWO_BIT],
        [TWO_BIT, TWO_BIT],
        [TWO_BIT, {**TWO_BIT, "min_bytes": 1 << 30}],  # one sends plain
        [TWO_BIT, TWO_BIT],
        [TWO_BIT, {**TWO_BIT, "pull": "plain"}],
        [TWO_BIT, TWO_BIT],
    ]

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(SIZE, np.float32))
        model, value = Model(), np.empty(SIZE, np.float32)
        for step, of_ranks in enumerate(settings):
            kv.set_gradient_compression(of_ranks[kv.rank])
            kv.pushpull("w", gradient(kv.rank, step), out=value)
            sent_plain = 1 if "min_bytes" in of_ranks[1] else None
            are_alike = of_ranks[0] == of_ranks[1]
            expected = model.encoded(step) if are_alike else model.plain(step, sent_plain)
            np.testing.assert_array_equal(value, expected)
        return None

    with LocalCluster(2, 1, **SLICES) as cluster:
        cluster.run(program)


def test_an_optimizer_is_applied_to_what_was_pushed_and_its_weights_come_plain(
    answers: list[tuple[Coding | None, int]],
) -> None:
    """What was left over when it is set is gone, as in a key that is new."""

    def program(kv: kvd.KVStore) -> Any:
        kv.set_gradient_compression(TWO_BIT)
        kv.init("w", np.zeros(SIZE, np.float32))
        model, value = Model(), np.empty(SIZE, np.float32)
        kv.pushpull("w", gradient(kv.rank, 0), out=value)
        weight = model.encoded(0)
        np.testing.assert_array_equal(value, weight)
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        if kv.rank == 0:
            del answers[:]
        kv.barrier()
        for step in (1, 2):
            kv.pushpull("w", gradient(kv.rank, step), out=value)
            weight = weight - model.merged(step)
            np.testing.assert_array_equal(value, weight)
        kv.barrier("pulled")
        assert all(coding is None for coding, _ in answers)
        kv.set_optimizer(None)
        model.left_over_at_servers = np.zeros(SIZE)
        kv.pushpull("w", gradient(kv.rank, 3), out=value)
        np.testing.assert_array_equal(value, model.encoded(3))

    with LocalCluster(2, 1, **SLICES) as cluster:
        cluster.run(program)


def test_what_is_not_finite_changes_no_other_element_and_is_gone_after_one_round() -> None:
    bad, types = [0, 5, 77], ["fp16", "bf16", "fp8", "int8", "2bit", "1bit", "onebit", "topk", "randomk", "dithering"]
    names = [f"key of {name}" for name in types]

    def program(kv: kvd.KVStore) -> Any:
        kv.init(names, [np.zeros(1024, np.float32) for _ in names])
        for name, key in zip(types, names, strict=True):
            kv.set_gradient_compression({"type": name, "min_bytes": 0})
            value = np.full(1024, 0.625, np.float32)
            value[bad] = np.nan, np.inf, -np.inf
            kv.pushpull(key, value if kv.rank else np.full(1024, 0.625, np.float32), out=value)
            assert np.isfinite(np.delete(value, bad)).all(), name
            kv.pushpull(key, np.full(1024, 0.625, np.float32), out=value)
            assert np.isfinite(value).all(), name

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)


@pytest.mark.parametrize(("store_type", "takes"), [("dist_sync", "2bit"), ("dist_async", "")])
def test_what_a_pull_asks_for(store_type: str, takes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    send = MessageSender.send

    def noted(self: MessageSender, effect: Send, *rest: Any) -> Any:
        if isinstance(effect.message, Pull):
            asked.append(effect.message.takes)
        return send(self, effect, *rest)

    monkeypatch.setattr(MessageSender, "send", noted)

    def program(kv: kvd.KVStore) -> None:
        kv.set_gradient_compression(TWO_BIT)
        kv.init("w", np.zeros(SIZE, np.float32))
        kv.push("w", gradient(0, 0))
        assert set(np.unique(kv.pull("w"))) <= {-0.5, 0.0, 0.5}

    with LocalCluster(1, 1) as cluster:
        cluster.run(program, store_type)
    assert asked == [takes]
