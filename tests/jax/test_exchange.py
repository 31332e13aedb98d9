"""Trees of JAX through a store, outside of ``jax.jit`` and inside it, compared with NumPy and with one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import DtypeMismatch, NotAllowed, NotResumed, ShapeMismatch, StoreClosed
from kvd.testing.cluster import LocalCluster

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax optax")
optax = pytest.importorskip("optax", reason="optax is not installed: pip install jax optax")

import kvd.jax  # noqa: E402  needs JAX

jnp: Any = jax.numpy
DTYPES = ["float16", "float32", "bfloat16", "int8", "int32", "uint8"]


def tree_of(rank: int) -> dict[str, Any]:
    """A tree with each dtype, an array without dimensions, None and an array of NumPy."""
    return {
        "by dtype": [jnp.arange(6).reshape(2, 3).astype(dtype) + rank for dtype in DTYPES],
        "scalar": jnp.float32(rank + 0.5),
        "nothing": None,
        "numpy": np.full(3, float(rank)),
        "nested": ({"w": jnp.full((4,), float(rank))},),
    }


def test_a_tree_is_summed_or_averaged_and_keeps_its_structure_and_dtypes() -> None:
    def program(kv: kvd.KVStore) -> Any:
        total = kvd.jax.pushpull(tree_of(kv.rank), store=kv, op="sum")
        kvd.jax.pushpull(tree_of(kv.rank), store=kv, op="sum")
        mean = kvd.jax.pushpull(tree_of(kv.rank), store=kv, op="mean", prefix="mean.")
        empty = kvd.jax.pushpull({"a": None}, store=kv, op="sum", prefix="empty.")
        alone = kvd.jax.pushpull(jnp.ones(2), store=kv, op="sum", prefix="alone.")
        begun = kvd.jax.broadcast(tree_of(kv.rank + 1), store=kv)
        np.testing.assert_array_equal(begun["nested"][0]["w"], [1.0] * 4)
        np.testing.assert_array_equal(begun["numpy"], [1.0] * 3)
        assert [leaf.dtype.name for leaf in begun["by dtype"]] == DTYPES
        return total, mean, empty, alone, kv.pull("nested.0.w").tolist(), kv.version("nested.0.w")

    with LocalCluster(3, 2) as cluster:
        results = cluster.run(program)
    for total, mean, empty, alone, stored, version in results:
        for place, dtype in enumerate(DTYPES):
            parts = [np.arange(6).reshape(2, 3) + rank for rank in range(3)]
            assert total["by dtype"][place].dtype == dtype
            np.testing.assert_array_equal(np.asarray(total["by dtype"][place], np.float64), sum(parts))
            np.testing.assert_array_equal(np.asarray(mean["by dtype"][place], np.float64), parts[1])
        assert float(total["scalar"]) == 4.5
        assert total["scalar"].shape == ()
        assert total["nothing"] is mean["nothing"] is None
        assert isinstance(total["numpy"], np.ndarray)
        assert total["numpy"].dtype == np.float64
        np.testing.assert_array_equal(total["numpy"], [3.0, 3.0, 3.0])
        assert isinstance(mean["nested"][0]["w"], jax.Array)
        np.testing.assert_array_equal(mean["nested"][0]["w"], [1.0] * 4)
        assert empty == {"a": None}
        np.testing.assert_array_equal(alone, [3.0, 3.0])
        assert stored == [3.0] * 4
        assert version == 2


def test_a_result_may_be_donated_and_stays_as_it_is() -> None:
    """Results lie in memory of the server where they can: XLA must not write there."""
    size = 1 << 18

    def program(kv: kvd.KVStore) -> Any:
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        seen = []
        for step in range(4):
            result = kvd.jax.pushpull({"w": jnp.full((size,), float(step))}, store=kv, op="mean")["w"]
            kept = np.array(result)
            seen.append((float(add(result)[-1]), float(kept[0]), kv.pull("w")[[0, -1]].tolist()))
        return seen

    with LocalCluster(2, 1) as cluster:
        for seen in cluster.run(program):
            assert seen == [(step + 1.0, step, [step, step]) for step in range(4)]


def test_bad_trees_are_named_and_lose_nothing() -> None:
    with kvd.create("local") as kv:

        def pushpull(tree: Any, op: Any = "mean", prefix: Any = "", store: Any = kv) -> Any:
            return kvd.jax.pushpull(tree, store=store, op=op, prefix=prefix)

        first = {"a": jnp.ones(2), "b": [jnp.ones(3)]}
        pushpull(first)
        with pytest.raises(NotAllowed, match="has a leaf 'c' that it did not have before"):
            pushpull({**first, "c": jnp.ones(1)})
        with pytest.raises(NotAllowed, match=r"has lost its leaf 'b\.0'"):
            pushpull({"a": jnp.ones(2), "b": []})
        with pytest.raises(ShapeMismatch, match=r"'b\.0' has the shape \(4,\), and had \(3,\) before") as shape:
            pushpull({"a": jnp.ones(2), "b": [jnp.ones(4)]})
        assert shape.value.key == "b.0"
        with pytest.raises(DtypeMismatch, match="'a' has the dtype float16, and had float32 before"):
            pushpull({**first, "a": jnp.ones(2, jnp.float16)})
        with pytest.raises(NotAllowed, match=r"op='mean': give op='sum' another prefix"):
            pushpull(first, op="sum")
        with pytest.raises(NotAllowed, match='op is "mean" or "sum", not \'max\''):
            pushpull(first, op="max", prefix="x")
        with pytest.raises(NotAllowed, match="prefix is a str, not int"):
            pushpull(first, prefix=3)
        with pytest.raises(DtypeMismatch, match=r"key 'x\.mask': the dtype bool is not supported"):
            pushpull({"mask": jnp.ones(2, bool)}, prefix="x.")
        with pytest.raises(NotAllowed, match=r"'x\.a' is a float, not an array"):
            pushpull({"a": 1.0}, prefix="x.")
        with pytest.raises(NotAllowed, match=r"two leaves of the tree are called 'x\.a\.b'"):
            pushpull({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, prefix="x.")
        with pytest.raises(NotAllowed, match="store is a dict"):
            pushpull(first, store={})
        with pytest.raises(NotAllowed, match=r"use kvd\.jax\.mean_over_workers there"):
            jax.jit(pushpull)(first)
        np.testing.assert_array_equal(pushpull(first)["b"][0], np.ones(3))
        kv.init("taken.a", np.ones(2, np.float32), merge="mean")
        with pytest.raises(kvd.KeyExists) as exists:
            pushpull({"a": jnp.ones(2)}, prefix="taken.")
        assert "another prefix" in exists.value.__notes__[0]


def test_a_store_without_rounds_is_refused() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store("dist_async")
        with pytest.raises(NotAllowed, match="of type 'dist_async' has no rounds"):
            kvd.jax.mean_over_workers(kv)


def test_an_array_of_several_processes_is_refused() -> None:
    """Asked of JAX's own class: a real one needs several processes with devices of their own."""

    class Elsewhere(jax.Array):  # type: ignore[misc, name-defined]
        shape, dtype, is_fully_addressable = (2,), np.dtype(np.float32), False

    Elsewhere.__abstractmethods__ = frozenset()
    with kvd.create("local") as kv, pytest.raises(NotAllowed, match="a part of the leaf 'w' is in another process"):
        kvd.jax.pushpull({"w": Elsewhere()}, store=kv, op="mean")


# ── a worker that dies ──


def test_a_restarted_worker_continues_from_its_own_checkpoint() -> None:
    total, stopped = 6, 3
    checkpoints: dict[tuple[int, int], Any] = {}
    is_back = Event()

    def gradient(w: Any, rank: int, step: int) -> Any:
        return {"w": (rank + 1) * w + step}

    def train(kv: kvd.KVStore, last: int, w: Any) -> Any:
        for step in kv.steps(total, restored=kv.restarted):
            w = checkpoints[kv.rank, step] if kv.restarted else w
            if step == last:
                kv.__exit__(RuntimeError, None, None)
                return None
            if step == stopped:
                assert is_back.wait(60)  # a push would wait for a dead worker
            checkpoints[kv.rank, step + 1] = w = (
                w - 0.1 * kvd.jax.pushpull(gradient(w, kv.rank, step), store=kv, op="mean")["w"]
            )
        return w

    with LocalCluster(2, 1, request_timeout_s=30.0) as cluster:
        stores = cluster.open_stores("dist_sync", [{"node_id": f"worker-{number}"} for number in range(2)])
        zero, one = sorted(stores, key=lambda store: store.rank)
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(train, zero, total, jnp.ones(3))
            pool.submit(train, one, stopped, jnp.ones(3)).result()
            successor = cluster.store(node_id=f"worker-{stores.index(one)}")
            is_back.set()
            results = [pool.submit(train, successor, total, None).result(), other.result()]
    w = np.ones(3)
    for step in range(total):
        w = w - 0.1 * (1.5 * w + step)
    for result in results:
        np.testing.assert_allclose(result, w, rtol=1e-5)


def test_a_restarted_worker_of_a_program_without_steps_is_refused() -> None:
    with LocalCluster(2, 1) as cluster:
        stores = cluster.open_stores("dist_sync", [{"node_id": f"worker-{number}"} for number in range(2)])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda kv: kvd.jax.pushpull({"w": jnp.ones(3)}, store=kv, op="mean"), stores))
        stores[1].__exit__(RuntimeError, None, None)
        successor = cluster.store(node_id="worker-1")
        with pytest.raises(NotResumed) as raised:
            kvd.jax.pushpull({"w": jnp.ones(3)}, store=successor, op="mean")
        assert raised.value.key == "w"


# ── inside jax.jit ──

X = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 2)).astype(np.float32)


def loss(params: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2).mean()


def start() -> dict[str, Any]:
    generator = np.random.default_rng(2)
    shapes = {"w": (5, 4), "v": (4, 2), "b": (2,)}
    return {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def trained(mean: Any, x: Any, y: Any, *, inside: bool = True, steps: int = 20) -> Any:
    """The parameters after some steps of Adam; `mean` transforms the gradients, inside of ``jax.jit`` or outside."""
    adam = optax.adam(0.05)

    def apply(gradients: Any, params: Any, state: Any) -> Any:
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def exchanged(gradients: Any) -> Any:
        return mean.update(gradients, optax.EmptyState())[0]

    params = start()
    state = adam.init(params)
    if inside:
        step = jax.jit(lambda params, state: apply(exchanged(jax.grad(loss)(params, x, y)), params, state))
        for _ in range(steps):
            params, state = step(params, state)
    else:
        gradients_of, apply = jax.jit(jax.grad(loss)), jax.jit(apply)
        for _ in range(steps):
            params, state = apply(exchanged(gradients_of(params, x, y)), params, state)
    return params


JOB = """
import sys
import kvd, kvd.jax, numpy as np, optax
from tests.jax.test_exchange import X, Y, jax, jnp, trained, start

with kvd.create("dist_sync") as kv:
    mine = slice(kv.rank, None, kv.num_workers)
    mean = kvd.jax.mean_over_workers(kv)
    inside = trained(mean, X[mine], Y[mine])
    outside = trained(mean, X[mine], Y[mine], inside=False)

    # several steps in one jitted loop, whose losses are exchanged by another transformation
    other = kvd.jax.mean_over_workers(kv, "loss.")
    def body(total, rank):
        mean, _ = other.update({"x": rank + total}, optax.EmptyState())
        return mean["x"], mean["x"]
    scanned = jax.jit(lambda: jax.lax.scan(body, 0.0, jnp.full(3, float(kv.rank))))()[1]

    # in a loop over steps, which a restarted worker continues
    third = kvd.jax.mean_over_workers(kv, "third.")
    mean_of = jax.jit(lambda x: third.update(x, optax.EmptyState())[0])
    seen = [float(jax.block_until_ready(mean_of(jnp.float32(kv.rank + step)))) for step in kv.steps(3)]
    large = jax.jit(lambda x: kvd.jax.mean_over_workers(kv, "large.").update(x, optax.EmptyState())[0])
    big = large({"x": jnp.full((3 << 20,), kv.rank, jnp.bfloat16)})["x"]
    np.savez(sys.argv[1] + f"/{kv.rank}.npz", scanned=scanned, seen=seen, big=np.asarray(big[-3:], np.float32),
             **{"inside " + name: value for name, value in inside.items()},
             **{"outside " + name: value for name, value in outside.items()})
"""


def test_workers_train_as_one_process_with_the_whole_batch() -> None:
    with LocalCluster(2, 1) as cluster:
        workers = [cluster.script(JOB, number, str(cluster.folder)) for number in range(2)]
        for worker in workers:
            output, _ = worker.communicate(timeout=100)
            assert worker.returncode == 0, output.decode()
        results = [dict(np.load(cluster.folder / f"{rank}.npz")) for rank in range(2)]
    whole = trained(optax.identity(), X, Y)
    for name, value in whole.items():
        for kind in ("inside", "outside"):
            np.testing.assert_array_equal(results[0][f"{kind} {name}"], results[1][f"{kind} {name}"])
            np.testing.assert_allclose(results[0][f"{kind} {name}"], value, rtol=0, atol=1e-6)
    for result in results:
        assert result["scanned"].tolist() == [0.5, 1.0, 1.5]
        assert result["seen"].tolist() == [0.5, 1.5, 2.5]
        assert result["big"].tolist() == [0.5] * 3


def test_the_typed_error_of_a_failed_callback_is_raised_by_the_next_call() -> None:
    kv = kvd.create("local")
    transformation = kvd.jax.mean_over_workers(kv)
    state = transformation.init(start())
    update = jax.jit(lambda x: transformation.update(x, state)[0])
    np.testing.assert_array_equal(update({"w": jnp.ones(2)})["w"], np.ones(2))
    kv.delete("gradient.w")
    for _ in range(2):  # the second time it is the kept error
        with pytest.raises(Exception, match=r"no key is called 'gradient\.w'"):
            jax.block_until_ready(update({"w": jnp.ones(2)}))
    with pytest.raises(kvd.KeyNotFound) as raised:
        kv.flush()
    assert raised.value.key == "gradient.w"
    kv.flush()  # it is raised once
    with pytest.raises(ShapeMismatch, match=r"'gradient.w' has the shape \(3,\)"):  # when it is traced
        update({"w": jnp.ones(3)})
    kv.close()
    with pytest.raises(StoreClosed):
        kvd.jax.pushpull({"w": jnp.ones(2)}, store=kv, op="mean", prefix="other.")
