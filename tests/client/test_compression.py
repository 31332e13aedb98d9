"""`set_gradient_compression`: what the servers get, in every kind of store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
from kvd.client.cluster.kept_folder import KeptFolder
from kvd.compression import known_compressors
from kvd.core.machine import Send
from kvd.errors import ConfigError, NotAllowed, ShapeMismatch
from kvd.node.shell.sending import MessageSender
from kvd.protocol.messages import Push, PushBatch
from kvd.protocol.specs import KeySpec
from kvd.testing.cluster import LocalCluster
from tests.client.harness import ONE_PUSH

SIZE = 70_001  # floats in slices of 64 KiB: four full ones and a short one
SLICES: dict[str, Any] = {"slice_bytes": "64KiB"}


def gradient(rank: int, step: int) -> np.ndarray[Any, Any]:
    """Multiples of 1/64: float32 calculates exactly with sums of some."""
    random = np.random.default_rng((rank, step))
    values: np.ndarray[Any, Any] = random.integers(-40, 41, SIZE).astype(np.float32) / np.float32(64)
    return values


def two_bit(total: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(np.abs(total) >= 0.5, np.copysign(0.5, total), 0.0)


@pytest.mark.parametrize("store_type", ["dist_sync", "dist_async"])
def test_what_is_left_over_is_counted_in_the_next_push(store_type: str) -> None:
    """Two workers, three pushes and two pushpulls each, against a model in float64."""
    names = ["w", "small", "n"]

    def program(kv: kvd.KVStore) -> Any:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init(names, [np.zeros(SIZE, np.float32), np.zeros(9, np.float32), np.zeros(SIZE, np.int32)])
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        for step in range(3):
            kv.push(names[:2], [gradient(kv.rank, step), gradient(kv.rank, step)[:9]])
        for step in (3, 4):
            values = [gradient(kv.rank, step), gradient(kv.rank, step)[:9]]
            kv.pushpull(names[:2], values, out=[np.empty(SIZE, np.float32), np.empty(9, np.float32)])
            np.testing.assert_array_equal(values[0], gradient(kv.rank, step))
        kv.barrier()
        return kv.pull(names[:2])

    expected = np.zeros(SIZE)
    for rank in (0, 1):
        residual = np.zeros(SIZE)
        for step in range(5):
            total = residual + gradient(rank, step)
            residual = total - two_bit(total)
            expected -= two_bit(total)
    plain = -sum(gradient(rank, step)[:9].astype(float) for rank in (0, 1) for step in range(5))
    with LocalCluster(2, 2, **SLICES) as cluster:
        for weight, small in cluster.run(program, store_type):
            np.testing.assert_array_equal(weight, expected)
            np.testing.assert_array_equal(small, plain)


def test_every_compressor_moves_every_floating_dtype(cluster_of_one: LocalCluster) -> None:
    kv = cluster_of_one.store()
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        key = np.dtype(dtype).name
        kv.init(key, np.zeros((300, 7), dtype))
        for name, compressor in known_compressors().items():
            few = {"k": 0.1} if name == "randomk" else {}  # its default takes 2 bytes per element, so halves are plain
            kv.set_gradient_compression({"type": name, "min_bytes": 0, "ef": "none", **few})
            kv.push(key, np.full((300, 7), 0.625, dtype))
            pulled = kv.pull(key)
            assert (pulled.dtype, pulled.shape) == (np.dtype(dtype), (300, 7))
            values = set(pulled.astype(np.float64).ravel().tolist())
            expected = {"1bit": {1.0}, "topk": {0, 0.625}, "randomk": {0, 0.625}}.get(name, {0.625})
            assert {round(value, 3) for value in values} == expected, compressor
    kv.close()


def test_what_is_not_finite_changes_no_other_element_and_is_gone_after_one_push(cluster_of_one: LocalCluster) -> None:
    kv = cluster_of_one.store()
    shape, bad = (64, 16), [0, 5, 77]
    for name in known_compressors():
        key = f"not finite {name}"
        kv.init(key, np.zeros(shape, np.float32))
        kv.set_gradient_compression({"type": name, "min_bytes": 0, "momentum": "nesterov"})
        gradient_ = np.full(shape, 0.625, np.float32)
        gradient_.reshape(-1)[bad] = np.nan, np.inf, -np.inf
        kv.push(key, gradient_).wait()
        assert np.isfinite(np.delete(kv.pull(key), bad)).all(), name
        kv.push(key, np.full(shape, 0.625, np.float32)).wait()
        assert np.isfinite(kv.pull(key)).all(), name
    kv.close()


@pytest.fixture
def cluster_of_one() -> Any:
    with LocalCluster(1, 1, slice_bytes="1MiB") as cluster:
        yield cluster


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The pushes that leave, each with its method and its bytes."""
    seen: list[tuple[Any, int]] = []
    send = MessageSender.send

    def noted(self: MessageSender, effect: Send, *rest: Any) -> Any:
        if isinstance(effect.message, Push | PushBatch):
            coding = getattr(effect.message, "coding", None)
            seen.append((coding and coding.method, sum(span.nbytes for span in effect.payload)))
        return send(self, effect, *rest)

    monkeypatch.setattr(MessageSender, "send", noted)
    return seen


def test_bytes_on_the_way(sent: list[tuple[Any, int]], cluster_of_one: LocalCluster) -> None:
    kv = cluster_of_one.store()
    kv.init(["w", "n", "s"], [np.zeros(1 << 18, np.float32), np.zeros(1 << 18, np.int32), np.zeros(4095, np.float32)])
    two, value = ["2bit", {"threshold": 0.5}], np.ones(1 << 18, np.float32)

    def pushed(*args: Any, **options: Any) -> list[tuple[Any, int]]:
        sent.clear()
        kv.push(*args, **options).wait()
        return sorted(sent, key=str)

    plain = [(None, 1 << 20)]
    assert pushed("w", value) == plain
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_bytes": 16384})
    assert pushed("w", value) == [(two, 1 << 16)]
    assert pushed("n", np.ones(1 << 18, np.int32)) == plain  # integers never
    assert pushed("s", value[:4095]) == [(None, 16380)]  # too small
    assert sum(nbytes for _, nbytes in pushed(["w", "s"], [value, value[:4095]])) == (1 << 16) + 16380
    assert pushed("w", value, cast=True) == plain  # the program says how it travels
    kv.set_gradient_compression({"type": "fp16"})
    assert pushed("w", value) == [(["fp16", {}], 1 << 19)]
    kv.init("half", np.zeros(1 << 18, np.float16))
    assert pushed("half", np.ones(1 << 18, np.float16)) == [(None, 1 << 19)]  # nothing is gained
    kv.set_gradient_compression({"type": "none"})
    assert pushed("w", value) == plain
    kv.close()


def test_the_files_for_a_restart_know_the_clocks(cluster_of_one: LocalCluster, tmp_path: Path) -> None:
    kv = cluster_of_one.store()
    kv.init(["v", "w"], [np.zeros(SIZE, np.float32)] * 2)
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "state_dir": tmp_path})
    third = np.full(SIZE, 0.375, np.float32)
    kv.push("v", third, cast=True).wait()
    kv.push(["w", "v"], [third, third]).wait()
    kv.pushpull("w", third, np.empty(SIZE, np.float32))
    folder, spec = KeptFolder(tmp_path, 0), KeySpec("float32", (SIZE,), 1 << 20)
    for key, clock, expected in (("w", 2, 0.25), ("w", 1, 0.375), ("v", 2, 0.375)):
        found = folder.read(key, spec, (SIZE, 0, 0), lambda _, clock=clock: clock)  # type: ignore[misc]
        assert found is not None
        (ordinal, (residual, _, _)), of_clock = found
        assert (ordinal, of_clock) == (2 if (key, clock) == ("w", 2) else 1, clock)
        assert (residual == expected).all()
    kv.set_gradient_compression({"type": "none"})
    assert list((tmp_path / "worker-0").iterdir()) == []
    kv.close()


def test_what_is_left_over_goes_with_the_key_or_the_compression(cluster_of_one: LocalCluster) -> None:
    kv = cluster_of_one.store()
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    third = np.full(SIZE, 0.375, np.float32)

    def after(*changes: Callable[[], object]) -> float:
        """What becomes of 0 with a push of 0.375 before the changes and one after them."""
        kv.delete("w") if "w" in made else None
        made.add("w")
        kv.init("w", np.zeros(SIZE, np.float32))
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.push("w", third)
        for change in changes:
            change()
        kv.push("w", third)
        pulled = kv.pull("w")
        assert (pulled == pulled[0]).all()
        return float(pulled[0])

    made: set[str] = set()
    assert after() == -0.5
    assert after(lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0.75})) == -0.75
    assert after(lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "ef": "none"})) == 0
    off_and_on = [
        lambda: kv.set_gradient_compression({"type": "none"}),
        lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0.5}),
    ]
    assert after(*off_and_on) == 0
    assert after(lambda: kv.delete("w"), lambda: kv.init("w", np.zeros(SIZE, np.float32))) == 0
    kv.close()


def test_momentum_comes_before_compression_also_in_values_that_are_sent_plain(cluster_of_one: LocalCluster) -> None:
    kv = cluster_of_one.store()
    names = ["w", "small", "n"]
    kv.init(names, [np.zeros(SIZE, np.float32), np.zeros(3, np.float64), np.zeros(3, np.int32)])
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "momentum": "nesterov", "mu": 0.5})
    values: list[np.ndarray[Any, Any]] = [np.full(SIZE, 0.25, np.float32), np.ones(3)]
    gradients = [0.375, 0.4375, 0.46875]  # g + m / 2
    for step in range(3):
        if step == 1:
            kv.pushpull(names[:2], values, out=[np.empty(SIZE, np.float32), np.empty(3)])
        else:
            kv.push(names[:2], values)
    weight, small = kv.pull(names[:2])
    residual, sent = 0.0, 0.0
    for gradient_ in gradients:
        residual += gradient_
        sent, residual = (sent + 0.5, residual - 0.5) if residual >= 0.5 else (sent, residual)
    assert weight.tolist() == [-sent] * SIZE
    assert small.tolist() == [-4 * sum(gradients)] * 3
    assert values[1].tolist() == [1] * 3  # the program's array is its own
    kv.set_gradient_compression({"type": "fp16"})
    kv.push("small", np.ones(3))
    assert kv.pull("small").tolist() == [-4 * sum(gradients) - 1] * 3
    kv.close()


def test_matrices_travel_as_products(sent: list[tuple[Any, int]], cluster_of_one: LocalCluster) -> None:
    """In two slices, of which the second begins within a row: a matrix of one direction has two there."""
    kv = cluster_of_one.store()
    shape = (1100, 300)
    gradient_ = np.outer(np.arange(1100) % 7 - 3, np.arange(300) % 5 - 2).astype(np.float32)
    kv.init(["w", "bias"], [np.zeros(shape, np.float32), np.zeros(SIZE, np.float32)])
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    kv.set_gradient_compression({"type": "powersgd", "rank": 2})
    sent.clear()
    for _ in range(3):
        kv.push("w", gradient_).wait()
    first, second = 1 << 18, 1100 * 300 - (1 << 18)
    rows = [-(-first // 300), -(-(first % 300 + second) // 300)]
    method = ["powersgd", {"rank": 2, "seed": 0}]
    assert sorted(nbytes for _, nbytes in sent) == sorted(3 * [8 + 8 * (count + 300) for count in rows])
    assert all(coding == method for coding, _ in sent)
    np.testing.assert_allclose(kv.pull("w"), -3 * gradient_, atol=1e-4)
    sent.clear()
    kv.push("bias", np.ones(SIZE, np.float32)).wait()
    assert sent == [(None, 4 * SIZE)]  # it has no columns
    kv.close()


def test_compression_changes_while_pushes_are_under_way() -> None:
    ways = [{"type": name} for name in ("fp16", "2bit", "bf16", "1bit", "none")]

    def program(kv: kvd.KVStore) -> Any:
        kv.init("w", np.zeros(SIZE, np.float32))
        kv.set_optimizer(kvd.optimizer.SGD(1.0))
        handles = []
        for step in range(10):
            kv.set_gradient_compression(ways[(step + kv.rank) % len(ways)])
            handles.append(kv.push("w", np.ones(SIZE, np.float32)))
        for handle in handles:
            handle.wait()
        return kv.pull("w")

    with LocalCluster(2, 2, **SLICES) as cluster:
        first, second = cluster.run(program)
        np.testing.assert_array_equal(first, second)
        assert (first < 0).all()


def test_bound_gradients_and_lists_of_devices_are_compressed(
    sent: list[tuple[Any, int]], cluster_of_one: LocalCluster
) -> None:
    kv = cluster_of_one.store()
    kv.init("w", np.zeros(SIZE, np.float32))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    bound, _ = kv.bind("w")
    bound[:] = 1
    sent.clear()
    kv.push("w", bound).wait()
    kv.push("w", [np.full(SIZE, 0.25, np.float32), np.full(SIZE, 0.25, np.float32)]).wait()
    assert {nbytes for _, nbytes in sent} == {-(-SIZE // 4)}
    assert kv.pull("w").tolist() == [0.5] * SIZE
    kv.close()


@pytest.mark.asyncio
async def test_the_other_facade_waits_for_memory_without_encoding_twice(cluster_of_one: LocalCluster) -> None:
    settings = {"scheduler": cluster_of_one.address, "slice_bytes": "1MiB", **ONE_PUSH}
    async with await kvd.aio.create("dist_sync", **settings) as kv:
        await kv.init("w", np.zeros(1 << 22, np.float32))
        await kv.set_optimizer(kvd.optimizer.SGD(1.0))
        await kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        third = np.full(1 << 22, 0.375, np.float32)
        for _ in range(3):  # each takes the whole budget
            await kv.push("w", third)
        await kv.flush()
        assert ((await kv.pull("w")) == -1).all()


# ── bad input ──


def test_bad_parameters_change_nothing(cluster_of_one: LocalCluster) -> None:
    kv = cluster_of_one.store()
    kv.init("w", np.zeros(SIZE, np.float32))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.25})
    for bad in ({"type": "3bit"}, {"type": "2bit", "threshold": 0}, {}, None):
        with pytest.raises(ConfigError):
            kv.set_gradient_compression(bad)  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch):
        kv.push("w", np.ones(SIZE + 1, np.float32)).wait()
    kv.push("w", np.ones(SIZE, np.float32))
    assert kv.pull("w").tolist() == [0.25] * SIZE
    kv.close()


def test_a_compressor_that_a_server_does_not_have_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, cluster_of_one: LocalCluster
) -> None:
    kv = cluster_of_one.store()
    kv.init("w", np.zeros(SIZE, np.float32))
    less = {"fp16": known_compressors()["fp16"]}
    with monkeypatch.context() as patch:
        patch.setattr("kvd.compression.wire.known_compressors", lambda: less)  # where the server looks it up
        with pytest.raises(
            NotAllowed, match="server 0: no compressor is called '2bit'; known are fp16: install the same"
        ):
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr("kvd.compression.wire.known_compressors", lambda: less)  # it was replaced by an older one
        with pytest.raises(
            kvd.KvdError, match="a push of key 'w' cannot be decoded here: no compressor is called '2bit'"
        ):
            kv.push("w", np.ones(SIZE, np.float32)).wait()
    kv.push("w", np.ones(SIZE, np.float32)).wait()  # nothing of it was taken
    assert kv.clock("w") == 1
    kv.close()


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_in_one_process_has_none(kind: str) -> None:
    kv = kvd.create(kind)
    kv.set_gradient_compression({"type": "none"})
    with pytest.raises(ConfigError, match="no compressor is called '3bit'"):
        kv.set_gradient_compression({"type": "3bit"})
    with pytest.raises(NotAllowed, match="this store is within one process: use a dist_ type"):
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.close()


def test_a_push_that_is_refused_leaves_nothing_over(cluster_of_one: LocalCluster) -> None:
    """A value of another shape, with as many elements or not, is of no key: it is not fed back into the next push."""
    kv = cluster_of_one.store()
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5, "min_bytes": 0})
    kv.init("refused", np.zeros(64, np.float32))
    kv.push("refused", np.full(64, 0.25, np.float32)).wait()
    for shape in ((8, 8), (32,)):
        with pytest.raises(ShapeMismatch):
            kv.push("refused", np.full(shape, 0.4375, np.float32)).wait()
    kv.push("refused", np.full(64, 0.125, np.float32))
    assert (kv.pull("refused") == 0).all()
    kv.push("refused", np.full(64, 0.125, np.float32))
    assert (kv.pull("refused") == 0.5).all()
