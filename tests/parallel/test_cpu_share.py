"""How the CPU devices of a group share the cores: turns, and the threads of the BLAS."""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

import numpy as np
import pytest

from kvd.parallel import DataBatch, Dense, Device, Sequential, SoftmaxCrossEntropy, device_threads
from kvd.parallel.device_threads import (
    CpuDevices,
    DeviceThread,
    cpu_devices_in_group,
    outside_of_turn,
    run_on_all,
    turn_of_cpu_device,
)
from kvd.parallel.models.numpy import blas
from kvd.parallel.models.numpy.blas import BlasThreads, blas_of_numpy
from tests.parallel.group_harness import Groups

NETWORK = Sequential(Dense(4), Dense(3), SoftmaxCrossEntropy())
group_of = Groups(NETWORK, (5,), NETWORK.initialize((8, 5), seed=1))
BATCH = DataBatch([np.ones((8, 5), np.float32)], [np.arange(8) % 3])


class Pool:
    """The setting of a BLAS, and how it was set."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.history: list[int] = []

    def put(self, threads: int) -> None:
        self.threads = threads
        self.history.append(threads)

    def blas(self) -> BlasThreads:
        return BlasThreads(lambda: self.threads, self.put)


@pytest.mark.parametrize(
    ("threads", "devices", "inside"), [(4, 4, 1), (2, 4, 1), (8, 4, 8), (4, 1, 4), (1, 4, 1), (2, 2, 1)]
)
def test_products_have_one_thread_if_there_is_a_device_for_each(threads: int, devices: int, inside: int) -> None:
    pool = Pool(threads)
    with pool.blas().limited(devices):
        assert pool.threads == inside
    assert pool.threads == threads
    assert pool.history == ([1, threads] if inside != threads else [])


def test_the_last_device_puts_the_number_back() -> None:
    pool = Pool(4)
    blas_threads = pool.blas()
    first, second, third = (blas_threads.limited(4) for _ in range(3))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert pool.threads == 1
    third.__enter__()
    second.__exit__(None, None, None)
    assert pool.threads == 1
    third.__exit__(None, None, None)
    assert pool.threads == 4
    with pytest.raises(KeyError), blas_threads.limited(4):
        raise KeyError
    assert pool.history == [1, 4, 1, 4]


def test_a_group_limits_the_threads_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(2)
    threads = pool.blas()
    monkeypatch.setattr(blas, "blas_of_numpy", lambda: threads)
    seen: list[int] = []
    group = group_of(devices=2)
    group.install_monitor(lambda *_: seen.append(pool.threads))
    group.forward(BATCH)
    assert seen
    group.backward(on_gradient=lambda *_: seen.append(pool.threads))
    assert set(seen) == {1}
    assert pool.threads == 2
    alone = group_of(devices=1)
    alone.forward_backward(BATCH)
    assert pool.history == [1, 2] * (len(pool.history) // 2)


def test_a_group_computes_the_same_without_a_blas_to_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Any]:
        group = group_of(devices=3)
        group.forward_backward(BATCH)
        return [array for arrays in group.grad_arrays for array in arrays]

    before = gradients()
    monkeypatch.setattr(blas, "blas_of_numpy", lambda: None)
    for one, other in zip(before, gradients(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_blas_of_numpy_is_found_if_it_is_openblas() -> None:
    found = blas_of_numpy()
    name = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    if "openblas" not in name:
        pytest.skip(f"this NumPy has {name}")
    assert found is not None
    before = found._get()
    assert before >= 1
    with found.limited(max(before, 2)):
        assert found._get() == 1
    assert found._get() == before


@pytest.mark.parametrize("fails", [ImportError, OSError])
def test_no_blas_is_found_where_nothing_can_be_looked_up(
    monkeypatch: pytest.MonkeyPatch, fails: type[Exception]
) -> None:
    def refuse(_: Any) -> Any:
        raise fails

    if fails is ImportError:
        monkeypatch.setattr(importlib, "import_module", refuse)
    else:
        monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert blas_of_numpy.__wrapped__() is None


def devices(count: int) -> list[DeviceThread]:
    shared = CpuDevices(count)
    return [DeviceThread(Device("cpu"), index, shared) for index in range(count)]


class Crowd:
    """How many are inside at once, at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1


@pytest.fixture(name="two_cores")
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_threads, "processors", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_no_more_devices_compute_than_there_are_cores() -> None:
    crowd, pair = Crowd(), threading.Barrier(2, timeout=20)

    def compute(_: int) -> int:
        for _ in range(20):
            with turn_of_cpu_device(), crowd:
                pair.wait()  # nobody computes alone
        return cpu_devices_in_group()

    assert run_on_all(devices(4), compute) == [4] * 4
    assert crowd.most == 2


@pytest.mark.usefixtures("two_cores")
def test_a_device_that_waits_in_a_hook_lets_others_compute() -> None:
    meeting, crowd = threading.Barrier(5, timeout=20), Crowd()

    def repeat(name: str, times: int) -> str:
        meeting.wait()
        return name * times

    def compute(index: int) -> str:
        hook = outside_of_turn(repeat)
        with turn_of_cpu_device():
            answer = hook("ab", times=index)
            with crowd:
                return answer

    assert run_on_all(devices(5), compute) == ["", "ab", "abab", "ababab", "abababab"]
    assert crowd.most <= 2


@pytest.mark.usefixtures("two_cores")
def test_a_hook_that_fails_and_one_that_computes_itself_leave_the_turns_right() -> None:
    pool = devices(3)

    def refuse() -> None:
        with turn_of_cpu_device():  # another model, in the hook of this one
            raise ValueError("no")

    def compute(_: int) -> None:
        with turn_of_cpu_device():
            for _ in range(2):
                with pytest.raises(ValueError, match="no"):
                    outside_of_turn(refuse)()

    for _ in range(3):
        run_on_all(pool, compute)
    everyone = pool[0]._pool.submit(lambda: device_threads._of_thread.cpu_devices.turns._value).result()
    assert everyone == 2


def test_a_thread_that_is_no_device_waits_for_nothing() -> None:
    with turn_of_cpu_device(), turn_of_cpu_device():
        assert outside_of_turn(lambda: 3)() == 3
    assert cpu_devices_in_group() == 1


@pytest.mark.usefixtures("two_cores")
def test_gradient_hooks_of_a_group_may_wait_for_all_devices() -> None:
    group, meeting = group_of(devices=4), threading.Barrier(4, timeout=20)
    met: list[int] = []
    group.forward(BATCH)
    group.backward(on_gradient=lambda *_: met.append(meeting.wait()))
    assert sorted(met) == sorted([0, 1, 2, 3] * 4)
