"""Small values that are pushed and pulled again and again: prepared frames are sent, and change no result."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvd
from kvd.client.calls.values import spec_of
from kvd.client.cluster import small_calls
from kvd.client.cluster.small_calls import SmallCall, SmallCalls
from kvd.client.cluster.small_frames import PreparedCall, PushFrame
from kvd.core.requests import Item
from kvd.core.worker.machine import WorkerMachine
from kvd.testing.cluster import LocalCluster, engine_of, wait_until
from kvd.transport import host
from tests.client.harness import init_all

STEPS = 30


class Taken:
    """How many calls ended with the bytes that their threads waited for, and in another way."""

    def __init__(self) -> None:
        self.to_its_end = self.left = 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    taken, run = Taken(), SmallCalls.run

    def counting(way: SmallCalls, *arguments: Any) -> Any:
        promise = run(way, *arguments)
        if promise is None:
            taken.to_its_end += 1
        else:
            taken.left += 1
        return promise

    monkeypatch.setattr(SmallCalls, "run", counting)
    return taken


def sums(store: kvd.KVStore, key: str, steps: int, dtype: Any = np.float32, shape: Any = (3, 5)) -> None:
    """Each step has the sum of the two workers, in an array of its own or in place."""
    value, out = np.empty(shape, dtype), np.empty(shape, dtype)
    for step in range(steps):
        value[...] = step + store.rank
        given = out if step % 3 else None
        result = store.pushpull(key, value, given)
        assert result is (value if given is None else out)
        assert (result == np.asarray(2 * step + 1, dtype)).all(), (step, result)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "float16", ml_dtypes.bfloat16])
def test_values_of_every_dtype(taken: Taken, dtype: Any) -> None:
    def program(store: kvd.KVStore) -> None:
        store.init("w", np.zeros((3, 5), dtype))
        sums(store, "w", STEPS, dtype)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.to_its_end > STEPS


@pytest.mark.parametrize("servers", [1, 3])
def test_many_keys_in_turn_and_lists_of_one(taken: Taken, servers: int) -> None:
    def program(store: kvd.KVStore) -> None:
        names = [f"w{number}" for number in range(7)]
        store.init(names, [np.zeros(number + 1, np.float32) for number in range(7)])
        for step in range(STEPS):
            for number, name in enumerate(names):
                value = np.full(number + 1, step + store.rank, np.float32)
                if step % 2:
                    assert store.pushpull(name, value) is value
                else:
                    (value,) = store.pushpull([name], [value])
                assert (value == 2 * step + 1).all()

    with LocalCluster(2, servers) as cluster:
        cluster.run(program)
    assert taken.to_its_end > STEPS


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_an_optimizer_updates_as_with_messages(taken: Taken, kind: str) -> None:
    weights = {}

    def program(store: kvd.KVStore) -> Any:
        store.init("w", np.arange(8, dtype=np.float32))
        store.set_optimizer(kvd.optimizer.Adam(0.1))
        out = np.empty(8, np.float32)
        for step in range(STEPS):
            store.pushpull("w", np.linspace(-1, 1 + step, 8, dtype=np.float32), out)
        return out.tobytes()

    settings: list[dict[str, Any]] = [{}, {"path": "tcp"}]  # small calls take a link
    for number, setting in enumerate(settings):
        with LocalCluster(1, 1, **setting) as cluster:
            weights[number] = cluster.run(program, kind)
    assert weights[0] == weights[1]
    assert taken.to_its_end > STEPS // 2


@pytest.mark.parametrize(
    "pushpull",
    [
        pytest.param(lambda store, value: store.pushpull(7, value), id="a number as key"),
        pytest.param(lambda store, value: store.pushpull([7], [value])[0], id="a list of one"),
        pytest.param(lambda store, value: store.pushpull((7,), (value,))[0], id="a tuple of one"),
        pytest.param(lambda store, value: store.pushpull("7", value, priority=-3), id="with a priority"),
        pytest.param(lambda store, value: store.pushpull("7", value, copy=False), id="read-only"),
        pytest.param(lambda store, value: store.pushpull([7], [value], copy=False)[0], id="read-only, of a list"),
    ],
)
def test_forms_of_the_call(taken: Taken, pushpull: Callable[[kvd.KVStore, Any], Any]) -> None:
    def program(store: kvd.KVStore) -> list[Any]:
        store.init(7, np.zeros((3, 5), np.float32))
        results = []
        for step in range(STEPS):
            value = np.full((3, 5), step + store.rank, np.float32)
            results.append(pushpull(store, value))
            assert (results[-1] is value) == results[-1].flags.writeable
            if results[-1] is not value:
                assert (value == step + store.rank).all()
        return results

    with LocalCluster(2, 1) as cluster:
        for results in cluster.run(program):
            for step, result in enumerate(results):
                assert result.dtype == np.float32
                assert (result == np.full((3, 5), 2 * step + 1)).all()
    assert taken.to_its_end > STEPS


def odd_values() -> list[Callable[[kvd.KVStore], Any]]:
    """Calls between repeated ones that the prepared frame does not fit."""
    even = np.ones((3, 10), np.float32)

    def refused(store: kvd.KVStore, value: Any) -> None:
        with pytest.raises((kvd.errors.ShapeMismatch, kvd.errors.DtypeMismatch)):
            store.pushpull("w", value)

    return [
        lambda store: store.pushpull("w", even[:, ::2], np.empty((3, 5), np.float32)),
        lambda store: store.pushpull("w", [np.ones((3, 5), np.float32)] * 2, np.empty((3, 5), np.float32)),
        lambda store: store.pushpull("w", np.ones((3, 5), np.float32), np.empty((3, 5), np.float64), cast=True),
        lambda store: store.pushpull("w", np.ones((3, 5), np.float32), copy=False),
        lambda store: store.pushpull("w", np.ones((3, 5), np.float32), samples=3),
        lambda store: store.push("w", np.ones((3, 5), np.float32)).wait(),
        lambda store: store.pull("w"),
        lambda store: store.barrier(),
        lambda store: refused(store, np.ones((5, 3), np.float32)),
        lambda store: refused(store, np.ones((3, 5), np.float64)),
        lambda store: store.pushpull_async("w", np.ones((3, 5), np.float32)).wait(),
    ]


@pytest.mark.parametrize("number", range(len(odd_values())))
def test_other_calls_come_between(taken: Taken, number: int) -> None:
    def program(store: kvd.KVStore) -> None:
        store.init("w", np.zeros((3, 5), np.float32))
        odd = odd_values()[number]
        for _ in range(3):
            sums(store, "w", 6)
            odd(store)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.to_its_end > 6


def test_a_bound_key_goes_another_way(taken: Taken) -> None:
    def program(store: kvd.KVStore) -> None:
        store.init("w", np.zeros((3, 5), np.float32))
        for _ in range(6):
            store.pushpull("w", np.ones((3, 5), np.float32))
        before = taken.to_its_end
        gradient, weight = store.bind("w")
        for step in range(4):
            gradient[...] = step
            store.pushpull("w", gradient, weight)
            assert (weight == step).all()
        assert taken.to_its_end == before > 0

    with LocalCluster(1, 1) as cluster:
        cluster.run(program)


@pytest.mark.parametrize("servers", [1, 3])
def test_threads_of_one_program(servers: int) -> None:
    """One of them reads at a time; calls of the others come between."""

    def program(store: kvd.KVStore) -> None:
        names = [f"w{number}" for number in range(4)]
        store.init(names, [np.zeros((3, 5), np.float32)] * 4)
        errors: list[BaseException] = []

        def work(name: str) -> None:
            try:
                sums(store, name, STEPS)
            except BaseException as error:  # noqa: BLE001  the thread that waits raises it
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    with LocalCluster(2, servers) as cluster:
        cluster.run(program)


def test_calls_of_the_loop_that_steps_again_are_told(taken: Taken) -> None:
    """Within `steps` the pushes carry the step, and each key is pushed once."""

    def program(store: kvd.KVStore) -> None:
        store.init("w", np.zeros(4, np.float32))
        value = np.ones(4, np.float32)
        for _ in store.steps(STEPS, keys=["w"]):
            value[:] = 1
            store.pushpull("w", value)
        assert store.version("w") == STEPS
        for _ in store.steps(1, keys=["w"]):
            store.pushpull("w", value)
            with pytest.raises(kvd.errors.NotAllowed):
                store.pushpull("w", value)

    with LocalCluster(1, 1) as cluster:
        cluster.run(program)
    assert taken.to_its_end > STEPS // 2


def test_whatever_the_machine_does_meanwhile_the_answer_is_taken(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third answer is taken by a step of the machine."""
    end, calls = WorkerMachine.answered, iter(range(1 << 30))

    def ending(machine: WorkerMachine, *arguments: Any) -> Any:
        return None if next(calls) % 3 == 0 else end(machine, *arguments)

    monkeypatch.setattr(WorkerMachine, "answered", ending)

    def program(store: kvd.KVStore) -> None:
        store.init("w", np.zeros((3, 5), np.float32))
        sums(store, "w", STEPS)

    with LocalCluster(2, 1) as cluster:
        cluster.run(program)
    assert taken.to_its_end > 10
    assert taken.left > 10


def test_ctrl_c_gives_the_array_back(taken: Taken) -> None:
    """The other worker has yet to push. What was pushed counts with the value that it had."""
    with ThreadPoolExecutor(2) as pool, LocalCluster(2, 1) as cluster:
        one, other = pool.map(lambda _: cluster.store(), range(2))
        value, out = np.ones(4, np.float32), np.empty(4, np.float32)
        made = pool.submit(other.init, "w", value)
        one.init("w", value)
        made.result(60)
        for _ in range(10):
            pushed = pool.submit(other.pushpull, "w", value.copy())
            one.pushpull("w", value, out)
            pushed.result(60)
        begun, begin = threading.Event(), engine_of(one).machine.begin

        def sending(*arguments: Any) -> Any:
            entry = begin(*arguments)
            begun.set()
            return entry

        machine: Any = engine_of(one).machine
        machine.begin = sending

        def interrupt() -> None:
            begun.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        value[:] = 5
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.pushpull("w", value, out)
        interrupted.result(60)
        value[:] = np.nan
        assert other.pushpull("w", np.full(4, 2, np.float32)).tolist() == [7] * 4
        assert one.pull("w").tolist() == [7] * 4
        for store in (one, other):
            store.set_barrier_before_exit(False)
            store.close()
    assert taken.to_its_end > 5


def test_a_server_that_dies_ends_the_call() -> None:
    with LocalCluster(1, 1, processes=True, request_timeout_s=30.0) as cluster:
        store = cluster.store()
        store.init("w", np.zeros(4, np.float32))
        value = np.ones(4, np.float32)
        for _ in range(10):
            store.pushpull("w", value)
        cluster.kill_server(0)
        with pytest.raises(kvd.errors.NodeLost):
            store.pushpull("w", value)


def begun_alone(cluster: LocalCluster, pool: ThreadPoolExecutor, value: Any) -> tuple[kvd.KVStore, Any]:
    """One of two workers has begun a small call that the other one has yet to join: its store, and its future."""
    one, other = pool.map(lambda _: cluster.store(), range(2))
    init_all([one, other])
    for _ in range(10):
        calls = [pool.submit(one.pushpull, "w", value), pool.submit(other.pushpull, "w", np.ones(4, np.float32))]
        for call in calls:
            call.result(60)
    waiter = engine_of(one)._waiter
    waiting = pool.submit(one.pushpull, "w", value)
    wait_until(lambda: waiter._reader or waiting.done(), "the call waits")
    return one, waiting


def test_the_end_of_the_store_ends_the_call(taken: Taken) -> None:
    with ThreadPoolExecutor(3) as pool, LocalCluster(2, 1) as cluster:
        value = np.ones(4, np.float32)
        one, waiting = begun_alone(cluster, pool, value)
        engine_of(one).stop()
        with pytest.raises(kvd.StoreClosed):
            waiting.result(60)
        with pytest.raises(kvd.StoreClosed):
            one.pushpull("w", value)
    assert taken.to_its_end > 5


def test_nothing_keeps_the_arrays_of_a_call(taken: Taken) -> None:
    def program(store: kvd.KVStore) -> None:
        store.init("w", np.zeros(4, np.float32))
        for _ in range(10):
            value = np.ones(4, np.float32)
            gone = weakref.ref(value)
            store.pushpull("w", value)
            del value
            assert gone() is None

    gc.disable()
    try:
        with LocalCluster(1, 1) as cluster:
            cluster.run(program)
    finally:
        gc.enable()
    assert taken.to_its_end > 5


def test_workers_that_wait_for_each_other_are_told(taken: Taken) -> None:
    def program(store: kvd.KVStore) -> Any:
        value = np.ones(4, np.float32)
        store.init(["a", "b"], [value, value])
        for _ in range(5):
            for key in "ab":
                store.pushpull(key, value)
        with pytest.raises(kvd.errors.Deadlock) as raised:
            store.pushpull("ab"[store.rank], value)
        store.barrier()  # both were told: the push of one would end the call of the other
        store.push("ba"[store.rank], value)
        return raised.value.waits

    with LocalCluster(2, 1, notice_s=0.3) as cluster:
        waits, same = cluster.run(program)
    assert waits == same
    assert "pushpull of 'a' (push 6) waits for worker 1 to push 'a'" in waits[0]
    assert taken.left == 2


def test_answers_to_other_calls_are_read_between_small_calls() -> None:
    """The loop, which stays paused between calls that follow each other, reads on as soon as another call is made."""

    def program(store: kvd.KVStore) -> None:
        value = np.ones(4, np.float32)
        store.init(["a", "b"], [value, value])
        pause, stayed = engine_of(store).transport.reader.pause, 0
        for step in range(STEPS):
            store.pushpull("a", value)
            store.pushpull("a", value)
            stayed += pause.may_stay
            ended = threading.Event()
            handle = store.pushpull_async("b", np.full(4, step, np.float32))
            assert not pause.may_stay
            handle.on_end(lambda _, ended=ended: ended.set())  # type: ignore[misc]
            assert ended.wait(60)
        assert stayed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "STAY_S", 3600.0)
        patch.setattr(small_calls, "OFTEN_S", 3600.0)
        with LocalCluster(1, 1) as cluster:
            cluster.run(program)


def test_two_threads_that_ask_for_the_request_of_a_call_get_the_same() -> None:
    """One gives the call up, and names its arrays; the other makes its message."""
    value = np.ones(4, np.float32)
    requests: list[Any] = []

    class SlowItem(Item):
        def _replace(self, **changes: Any) -> Any:
            if not asks:
                asks.append(threading.Thread(target=lambda: requests.append(call.request())))
                asks[0].start()
                asks[0].join(0.2)  # it waits for this thread, or makes another request
            return super()._replace(**changes)

    asks: list[threading.Thread] = []
    plan: Any = None
    prepared = PreparedCall("w", SlowItem("w", spec_of(value.dtype, value.shape, 1 << 20)), value, plan, 0)
    call = SmallCall(prepared, PushFrame(value), value, 0, 0, None)
    requests.append(call.request())
    asks[0].join(60)
    first, second = requests
    assert first is second
