"""Handles: what they promise, how their errors are told, and in which order calls happen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.client.calls.handle import Handle
from kvd.errors import KeyNotFound, KvdError, NotAllowed, RequestTimeout, ShapeMismatch, StoreClosed
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from tests.client.harness import Pair, ones


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, 2) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: LocalCluster) -> kvd.KVStore:
    return cluster.store()


def test_a_handle_waits_and_can_be_waited_for_again(pair: Pair) -> None:
    one, other = pair
    handle = one.pushpull_async("w", ones())
    for wait in (handle.wait, handle.result, handle.exception):
        begun = time.monotonic()
        with pytest.raises(RequestTimeout, match="pushpull is not done") as caught:
            wait(0.05)
        assert caught.value.outcome == "unknown"
        assert time.monotonic() - begun < 1
    assert not handle.done()
    other.push("w", ones())
    assert handle.wait(10).tolist() == [2] * 4
    assert handle.done()
    assert handle.exception() is None
    assert handle.result(0).tolist() == [2] * 4


def test_a_handle_can_be_awaited_in_any_loop_and_cancelled_there(pair: Pair) -> None:
    one, other = pair

    async def program(handle: Handle) -> Any:
        return await asyncio.wait_for(handle, 0.05)

    handle = one.pushpull_async("w", ones())
    with pytest.raises(TimeoutError):
        asyncio.run(program(handle))
    fresh = one.pull_async("w")
    with pytest.raises(TimeoutError):
        asyncio.run(program(fresh))
    other.push("w", ones())
    assert handle.wait(10).tolist() == [2] * 4
    assert fresh.wait(10).tolist() == [2] * 4

    async def later() -> Any:
        return await handle

    assert asyncio.run(later()).tolist() == [2] * 4


def test_a_promise_that_ends_while_the_wait_times_out_is_delivered() -> None:
    """The wait times out, and before that is noticed the call ends."""
    from kvd.client.calls.promise import Promise

    class Late(Promise):
        def result(self, timeout: float | None = None) -> Any:
            if not self.done():
                self.set_result("value")
                raise TimeoutError
            return super().result(timeout)

    assert Handle(Late()).wait(1) == "value"


def test_pulls_are_ordered_before_later_pushes(kv: kvd.KVStore) -> None:
    kv.init("w", np.zeros(4, np.float32))
    for step in range(50):
        out = np.empty(4, np.float32)
        into, fresh = kv.pull_async("w", out=out), kv.pull_async("w")
        push = kv.push("w", np.full(4, step + 1, np.float32))
        assert into.wait()[0] == step
        assert fresh.wait()[0] == step, "a pull without out was overtaken by the push after it"
        push.wait()


def test_the_error_of_an_unclaimed_push_is_raised_by_the_next_call_on_its_key(kv: kvd.KVStore) -> None:
    kv.init(["w", "v"], [ones(), ones()])

    def spoil(key: str) -> None:
        handle = kv.push(key, ones(5))
        wait_until(handle.done, "the push fails")

    for call in (
        lambda: kv.push("w", ones()),
        lambda: kv.pull("w"),
        lambda: kv.pushpull("w", ones()),
        lambda: kv.pull(["v", "w"]),
        lambda: kv.broadcast("w", ones()),
    ):
        spoil("w")
        kv.pull("v")  # another key: not its business
        with pytest.raises(ShapeMismatch):
            call()
        kv.pull("w")  # raised once


def test_flush_raises_the_first_error_with_the_others_as_notes(kv: kvd.KVStore) -> None:
    kv.init(["w", "v"], [ones(), ones()])
    kv.push("w", ones(5))
    kv.push("v", ones(6))
    with pytest.raises(ShapeMismatch) as caught:
        kv.flush()
    assert "(5,)" in str(caught.value)
    first, also = caught.value.__notes__
    assert first == "the call that failed is an earlier push of 'w', which nobody waited for"
    assert "(6,)" in also
    kv.flush()


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_an_unobserved_error_says_which_call_it_was(kind: str, cluster: LocalCluster) -> None:
    kv = kvd.create("local") if kind == "local" else cluster.store()
    kv.init("w", ones())
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    calls: dict[str, Any] = {"push": kv.push, "pushpull": kv.pushpull_async, "init": kv.init_async}
    for step in kv.steps(2):
        for name, call in calls.items() if step else ():
            handle = call("w", ones(5))
            wait_until(handle.done, f"the {name} fails")
            with pytest.raises(ShapeMismatch) as caught:
                kv.pull("w")
            text = f"the call that failed is an earlier {name} of 'w' in step 1, which nobody waited for"
            assert caught.value.__notes__ == [text]
        kv.pushpull("w", ones())
    kv.set_barrier_before_exit(False)
    kv.close()


def test_close_raises_unobserved_errors() -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store()
        kv.init("w", ones())
        kv.push("w", ones(5))
        with pytest.raises(ShapeMismatch):
            kv.close()
        with pytest.raises(StoreClosed):
            kv.pull("w")
        kv.close()


def test_an_observed_error_is_not_raised_again(kv: kvd.KVStore) -> None:
    kv.init("w", ones())
    handle = kv.push("w", ones(5))
    with pytest.raises(ShapeMismatch):
        handle.wait()
    assert isinstance(kv.push("w", ones(6)).exception(), ShapeMismatch)
    kv.flush()
    kv.pull("w")


def test_a_wait_that_gave_up_does_not_swallow_the_error(pair: Pair) -> None:
    one, _ = pair
    handle = one.push("w", ones())
    with pytest.raises(RequestTimeout):
        handle.wait(0.01)
    assert not handle.claimed


def test_errors_of_the_other_async_forms_are_not_lost(kv: kvd.KVStore) -> None:
    kv.init("w", ones())
    handle = kv.init_async("w", ones())
    wait_until(handle.done, "the init fails")
    with pytest.raises(kvd.KeyExists):
        kv.flush()
    broadcast = kv.broadcast_async("w", ones(5))
    wait_until(broadcast.done, "the broadcast fails")
    with pytest.raises(ShapeMismatch):
        kv.pull("w")


def test_calls_behind_an_init_that_is_under_way_wait_for_it(pair: Pair) -> None:
    one, other = pair

    def program(store: kvd.KVStore) -> list[Handle]:
        return [
            store.init_async("v", ones()),
            store.push("v", ones()),
            store.pull_async("v"),
            store.pushpull_async(["w", "v"], [ones(), 2 * ones()], [ones(), ones()]),
        ]

    handles = program(other)
    assert not any(handle.done() for handle in handles)
    for _, _, pulled, both in (program(one), handles):
        assert pulled.wait(60).tolist() == [2] * 4
        assert [value.tolist() for value in both.wait(60)] == [[2] * 4, [4] * 4]


def test_calls_behind_an_init_that_fails_get_its_error(pair: Pair) -> None:
    one, other = pair
    init = other.init_async("v", ones(3))
    calls = [
        other.push("v", ones(3)),
        other.pull_async("v"),
        other.pushpull_async(["w", "v"], [ones(), ones(3)], [ones(), ones(3)]),
    ]
    one.init("v", ones(5))
    for handle in (init, *calls):
        with pytest.raises(ShapeMismatch, match=r"key 'v' has shape \(5,\), the given value has \(3,\)"):
            handle.wait(60)
    assert other.pull("v").tolist() == [1] * 5


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_calls_behind_an_init_in_one_worker(kind: str, cluster: LocalCluster) -> None:
    with kvd.create("local") if kind == "local" else cluster.store() as kv:
        kv.init_async(["a", "b"], [ones(), ones()])
        kv.push("a", 2 * ones())
        assert [value.tolist() for value in kv.pushpull(["a", "b"], [3 * ones(), ones()])] == [[3] * 4, [1] * 4]
        with pytest.raises(ShapeMismatch, match=r"key 'a' has shape \(4,\), the given value has \(5,\)"):
            kv.init("a", ones(5))
        assert kv.pull("a").tolist() == [3] * 4


def test_threads_push_different_keys_at_once(kv: kvd.KVStore) -> None:
    keys = [f"k{number}" for number in range(8)]
    kv.init(keys, [np.zeros(3000, np.float32)] * 8)
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    errors: list[BaseException] = []

    def work(key: str) -> None:
        try:
            for step in range(40):
                if step % 4:
                    kv.push(key, np.full(3000, -1, np.float32))
                else:
                    value = kv.pushpull(key, np.full(3000, -1, np.float32))
                    assert (value == step + 1).all()
        except BaseException as error:  # noqa: BLE001  reported by the test below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert all((value == 40).all() for value in kv.pull(keys))


def test_threads_push_one_key_at_once(kv: kvd.KVStore) -> None:
    kv.init("w", np.zeros(3000, np.float32))
    kv.set_optimizer(kvd.optimizer.SGD(1.0))
    threads = [
        threading.Thread(target=lambda: [kv.push("w", np.full(3000, -1, np.float32)) for _ in range(25)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (kv.pull("w") == 100).all()
    assert kv.clock("w") == 100


def test_a_timeout_that_is_no_number_is_refused(kv: kvd.KVStore) -> None:
    for wrong in (float("nan"), -1, "soon", True):
        with pytest.raises(NotAllowed, match="timeout"):
            kv.barrier("b", timeout=wrong)  # type: ignore[arg-type]
        with pytest.raises(NotAllowed, match="timeout"):
            kv.flush(timeout=wrong)  # type: ignore[arg-type]
    kv.barrier("b", timeout=float("inf"))
    kv.flush(timeout=0.5)


def test_an_internal_error_ends_its_call_and_the_store_goes_on(
    kv: kvd.KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv.init("w", ones())
    engine = engine_of(kv)

    def broken(call: Any, request: Any) -> None:
        raise RuntimeError("a bug")

    kinds = engine.machine._call_table
    from kvd.core.requests import Rewind

    monkeypatch.setitem(kinds, Rewind, broken)
    with pytest.raises(kvd.KvdError, match="a bug"):
        kv.rewind(0)
    assert kv.pull("w").tolist() == [1] * 4


def test_a_key_that_is_unknown_to_a_pull_in_the_background(kv: kvd.KVStore) -> None:
    handles = [kv.pull_async("nobody"), kv.pull_async("nobody", out=ones()), kv.pull_async(["nobody", "either"])]
    for handle in handles:
        with pytest.raises(KeyNotFound):
            handle.wait(10)


def test_handles_without_a_future_of_a_store() -> None:
    assert Handle.of(3).wait() == 3
    assert Handle.of(3).done()
    assert issubclass(RequestTimeout, TimeoutError)
    assert issubclass(StoreClosed, KvdError)
    assert subprocess.run([sys.executable, "-c", "import kvd"], check=False, cwd="/").returncode in (0, 1)
