"""The setting `check_bound`: a push tells whether its bound gradients were written to before it was done."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed
from kvd.testing.cluster import LocalCluster, wait_until
from tests.client.harness import Pair, init_all

LARGE = (600, 500)  # more than what goes through the socket in any case


@pytest.fixture(params=["shm", "tcp"])
def checking(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A worker that checks its gradients, and another without which its pushes are not done."""
    with LocalCluster(2, 2, path=request.param) as cluster:
        checked, other = cluster.open_stores(each=[{"check_bound": True}, {}])
        init_all([checked, other], ["w", "v"], [np.zeros(LARGE, np.float32)] * 2)
        yield checked, other


def give(kv: kvd.KVStore, value: float = 0) -> None:
    """The contribution that the other worker's rounds wait for."""
    kv.push(["w", "v"], [np.full(LARGE, value, np.float32)] * 2)


def test_gradients_that_are_left_alone_pass(checking: Pair) -> None:
    kv, other = checking
    gradients, weights = kv.bind(["w", "v"])
    for turn in range(3):
        for gradient in gradients:
            gradient[:] = turn
        moved = kv.pushpull_async(["w", "v"], gradients, weights)
        give(other, 1)
        moved.wait()
        assert all((weight == turn + 1).all() for weight in weights)
    pushed = kv.push("w", gradients[0])
    gradients[1][:] = 9  # it is not under way
    give(other)
    pushed.wait()
    copied = kv.push("v", np.ones(LARGE, np.float32))
    gradients[1][:] = 10
    copied.wait()
    kv.flush()
    gradients[0][:] = 11  # after the end of its push
    assert copied.exception() is None


def test_a_gradient_that_is_written_to_too_early_is_named(checking: Pair) -> None:
    kv, other = checking
    gradients, weights = kv.bind(["w", "v"])
    for pulls in (False, True):
        handle = kv.pushpull_async(["w", "v"], gradients, weights) if pulls else kv.push(["w", "v"], gradients)
        gradients[1][-1, -1] += 1
        give(other)
        with pytest.raises(NotAllowed, match="the gradient of 'v' was written to before its push was done") as caught:
            handle.wait()
        assert caught.value.key == "v"
        assert isinstance(handle.exception(), NotAllowed)
    kv.flush()  # it has been told
    again = kv.push(["w", "v"], gradients)
    give(other)
    again.wait()


@pytest.mark.parametrize("asks", ["the next call", "flush", "close"])
def test_a_handle_that_nobody_asks_is_not_forgotten(checking: Pair, asks: str) -> None:
    kv, other = checking
    gradient, weight = kv.bind("w")
    push = kv.push("w", gradient)
    gradient[0, 0] = 1
    other.push("w", np.zeros(LARGE, np.float32)).wait()
    wait_until(push.done, "the push is done")
    kv.pull("v")  # another key
    for store in (kv, other):
        store.set_barrier_before_exit(False)
    with pytest.raises(NotAllowed, match="'w' was written to"):
        {"the next call": lambda: kv.pull("w", weight), "flush": kv.flush, "close": kv.close}[asks]()


def test_an_answer_that_is_written_into_the_gradient_is_no_mistake(checking: Pair) -> None:
    kv, other = checking
    gradient, _ = kv.bind("w")
    gradient[:] = 1
    moved = kv.pushpull_async("w", gradient)
    other.push("w", np.full(LARGE, 2, np.float32))
    assert moved.wait() is gradient
    assert (gradient == 3).all()
    kv.flush()


def test_without_the_setting_nothing_is_checked() -> None:
    with LocalCluster(2, 1, path="tcp") as cluster:
        kv, other = cluster.open_stores()
        init_all([kv, other], "w", np.zeros(LARGE, np.float32))
        gradient, _ = kv.bind("w")
        push = kv.push("w", gradient)
        gradient[:] = 1
        other.push("w", np.zeros(LARGE, np.float32))
        push.wait()
        kv.flush()
        assert push.exception() is None


def test_other_errors_of_a_push_come_first() -> None:
    with LocalCluster(2, 1, path="shm") as cluster:
        kv, other = cluster.open_stores(each=[{"check_bound": True}, {}])
        init_all([kv, other], "w", np.zeros(LARGE, np.float32))
        gradient, _ = kv.bind("w")
        push = kv.push("w", gradient)
        gradient[:] = 1
        kv.__exit__(RuntimeError, None, None)
        with pytest.raises(kvd.StoreClosed):
            push.wait(10)
