"""`forward_backward` in one: the bits of forward and then backward, and what an error of one device leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import NotAllowed
from kvd.optimizer import SGD
from kvd.parallel import (
    BatchNorm,
    DataBatch,
    Dense,
    Device,
    Dropout,
    Embedding,
    Flatten,
    Sequential,
    SoftmaxCrossEntropy,
)
from kvd.parallel.device import HostArray
from kvd.parallel.device_threads import DeviceThread
from kvd.parallel.group.downloads import Downloads
from tests.parallel.group_harness import Groups, assert_same, weights_of

WORDS, SIZE = 9, 8
NETWORK = Sequential(
    Embedding(WORDS, 4), Flatten(), Dense(6), BatchNorm(), Dropout(0.4), Dense(3), SoftmaxCrossEntropy()
)
group_of = Groups(NETWORK, (2,), NETWORK.initialize((SIZE, 2), seed=2), devices=2, size=SIZE)
GENERATOR = np.random.default_rng(4)
BATCHES = [
    DataBatch([GENERATOR.integers(0, WORDS, (SIZE, 2)).astype(np.float32)], [GENERATOR.integers(0, 3, SIZE)])
    for _ in range(4)
]
BAD = DataBatch([np.concatenate([BATCHES[0].data[0][:-1], [[0, WORDS]]])], BATCHES[0].label)


def gradients_of(group: Any) -> list[Any]:
    return [array.copy() for arrays in group.grad_arrays for array in arrays]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_it_gives_the_bits_of_forward_and_then_backward(devices: int) -> None:
    one, other = group_of(devices=devices), group_of(devices=devices)
    for batch in BATCHES:
        one.forward_backward(batch)
        other.forward(batch)
        other.backward()
        assert_same(gradients_of(one), gradients_of(other))
        assert_same(one.get_outputs_merged(), other.get_outputs_merged())
    for arrays, others in zip(one.aux_arrays, other.aux_arrays, strict=True):
        assert_same(arrays, others)


def test_a_device_does_not_wait_for_the_others_between_the_two() -> None:
    group, done = group_of(), threading.Event()
    first, second = (vars(executor) for executor in group.executors)
    backward, forward = group.executors[0].backward, group.executors[1].forward

    def first_backward(*given: Any) -> None:
        backward(*given)
        done.set()

    def second_forward(*given: Any) -> Any:
        assert done.wait(20)
        return forward(*given)

    first["backward"], second["forward"] = first_backward, second_forward
    group.forward_backward(BATCHES[0])
    assert done.is_set()


def test_an_error_in_the_forward_of_one_device_sends_nothing_and_the_next_batch_is_trained() -> None:
    learned = []
    for batches in ([BATCHES[0], BAD, BATCHES[1]], BATCHES[:2]):
        with kvd.create("local") as kv:
            group = group_of(Sequential(Embedding(WORDS, 4), Flatten(), Dense(3), SoftmaxCrossEntropy()))
            group.set_params(group.model.initialize((SIZE, 2), seed=5))  # type: ignore[attr-defined]
            group.bind_to(kv, optimizer=SGD(0.5))
            for batch in batches:
                if batch is BAD:
                    with pytest.raises(ValueError, match="embedding0: id 9"):
                        group.forward_backward(batch)
                    with pytest.raises(NotAllowed, match="no outputs"):
                        group.get_outputs()
                else:
                    group.forward_backward(batch)
            learned.append(weights_of(group))
            assert kv.clock("dense0_weight") == 2
    assert_same(*learned)


def test_it_is_refused_where_there_are_no_gradients() -> None:
    group = group_of(for_training=False)
    with pytest.raises(NotAllowed, match="re-bind with for_training=True"):
        group.forward_backward(BATCHES[0])
    headless = Groups(Sequential(Dense(3)), (2,), label=None)()
    with pytest.raises(NotAllowed, match="head gradients are required"):
        headless.forward_backward(DataBatch([np.ones((SIZE, 2), np.float32)]))


def test_a_gradient_of_a_backward_that_failed_is_not_sent_with_those_of_the_next() -> None:
    sent: list[Sequence[HostArray]] = []
    threads = [DeviceThread(Device("cpu"), index) for index in range(2)]
    downloads = Downloads(threads, sum_on_device=False, send=lambda _, gradients: sent.append(gradients))
    stale, fresh = [np.zeros(1), np.zeros(1)], [np.ones(1), np.ones(1)]
    downloads.begin()
    downloads.completed(0, "a", stale)  # and device 1 fails
    downloads.begin()
    downloads.completed(1, "a", fresh)
    downloads.drain()
    assert not sent
    downloads.completed(0, "a", fresh)
    downloads.drain()
    assert sent == [fresh]
