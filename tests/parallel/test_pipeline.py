"""The gradient pipeline: several workers end with the weights of one process on the whole batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.client.calls.handle import Handle
from kvd.errors import ConfigError, GradientAnomaly, InputMismatch, MergeMismatch, NotAllowed
from kvd.optimizer import SGD, Adam, Optimizer
from kvd.parallel import BatchNorm, DataBatch, DataParallelExecutorGroup, Model, Sequential, TorchModel
from kvd.parallel.group.parameter_slot import make_slot
from kvd.parallel.group.pipeline import Update
from kvd.parallel.models.numpy.layers import Dense, Tanh
from kvd.parallel.models.numpy.losses import SoftmaxCrossEntropy
from kvd.testing.cluster import LocalCluster, wait_until
from tests.parallel.group_harness import Groups, assert_close, assert_same, torch_network, torch_weights, weights_of
from tests.waiting import wait_until_inside

WORKERS, DEVICES, STEPS, SIZE = 2, 2, 6, 8
GENERATOR = np.random.default_rng(11)
X = GENERATOR.normal(size=(STEPS, WORKERS * SIZE, 5)).astype(np.float32)
Y = GENERATOR.integers(0, 3, (STEPS, WORKERS * SIZE))
NETWORK = Sequential(Dense(16), Tanh(), Dense(3), SoftmaxCrossEntropy())
PARAMS = NETWORK.initialize((SIZE, 5), seed=2)
RULE = SGD(0.2, momentum=0.9, wd=0.01)
group_of = Groups(NETWORK, (5,), devices=DEVICES, size=SIZE)


def train(model: Model, update: Update, sizes: Sequence[int] = (SIZE, SIZE)) -> Any:
    """The program of a worker: its part of every batch."""

    def program(kv: kvd.KVStore) -> Any:
        starts = np.cumsum([0, *sizes])
        own = slice(starts[kv.rank], starts[kv.rank + 1])
        group = group_of(model, size=sizes[kv.rank])
        if isinstance(model, Sequential):
            group.set_params(PARAMS if kv.rank == 0 else {})  # the others get them
        pipeline = group.bind_to(kv, optimizer=RULE, update=update)
        assert pipeline.clock == 0
        for x, y in zip(X, Y, strict=True):
            group.forward_backward(DataBatch([x[own]], [y[own]]))
        weights = weights_of(group)
        assert all(np.array_equal(a, b) for arrays in group.param_arrays for a, b in itertools.pairwise(arrays))
        assert kv.clock(pipeline.keys[group.param_names[0]]) == STEPS
        return weights

    return program


@pytest.mark.parametrize("update", ["server", "local"])
@pytest.mark.parametrize("merge", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("kind", ["sequential", "torch"])
def test_two_workers_with_two_devices_equal_one_process_and_repeat_bit_for_bit(
    kind: str, merge: str, update: Update
) -> None:
    whole = torch_weights(PARAMS, zip(X, Y, strict=True), RULE)
    results = []
    for _ in range(2):
        model: Model = (
            NETWORK if kind == "sequential" else TorchModel(torch_network(PARAMS), torch.nn.CrossEntropyLoss())
        )
        with LocalCluster(WORKERS, 2, merge=merge) as cluster:
            results += cluster.run(train(model, update))
    for weights in results:
        assert_close(weights, whole, atol=1e-6)
        assert_same(weights, results[0])


def test_unequal_batches_of_the_workers_merged_by_samples() -> None:
    with LocalCluster(WORKERS, 1, merge="weighted") as cluster:
        results = cluster.run(train(NETWORK, "server", sizes=(11, 5)))
    for weights in results:
        assert_close(weights, torch_weights(PARAMS, zip(X, Y, strict=True), RULE), atol=1e-6)


@pytest.mark.parametrize("update", ["server", "local"])
def test_a_worker_that_joins_later_binds_a_group_with_the_optimizer_of_the_others(update: Update) -> None:
    """The number of workers is another one when it comes, and the gradient is the mean of those that take part."""
    batches = [(X[0], Y[0]), (X[1][:SIZE], Y[1][:SIZE]), (X[2], Y[2])]

    def step(group: DataParallelExecutorGroup, number: int, own: slice) -> None:
        group.forward_backward(DataBatch([X[number][own]], [Y[number][own]]))

    def bound(kv: kvd.KVStore) -> DataParallelExecutorGroup:
        group = group_of(NETWORK)
        group.set_params(PARAMS if kv.rank == 0 else {})
        group.bind_to(kv, optimizer=RULE, update=update)
        return group

    with ThreadPoolExecutor(WORKERS) as threads, LocalCluster(WORKERS, 2, max_workers=WORKERS + 1) as cluster:
        first, other = cluster.open_stores()
        mine, theirs = threads.map(bound, (first, other))
        list(threads.map(step, (mine, theirs), (0, 0), (slice(SIZE), slice(SIZE, None))))
        other.set_barrier_before_exit(False)
        other.close()
        wait_until(lambda: first.num_workers == 1, "worker 1 has left")
        step(mine, 1, slice(SIZE))
        if update == "local":  # whoever joins has no weights to begin with
            batches.pop()
        else:
            late = cluster.store()
            assert late.num_workers == 1
            group = bound(late)
            late.resume()
            wait_until(lambda: first.num_workers == 2, "the new worker takes part")
            list(threads.map(step, (mine, group), (2, 2), (slice(SIZE), slice(SIZE, None))))
            assert_same(weights_of(group), weights_of(mine))
        assert_close(weights_of(mine), torch_weights(PARAMS, batches, RULE), atol=1e-6)


def test_a_group_with_an_optimizer_refuses_a_key_that_is_summed() -> None:
    def program(kv: kvd.KVStore) -> None:
        kv.init("dense0_weight", PARAMS["dense0_weight"])
        with pytest.raises(MergeMismatch, match="'dense0_weight' exists with another merge") as raised:
            group_of(NETWORK).bind_to(kv, optimizer=RULE)
        assert raised.value.key == "dense0_weight"
        kv.set_optimizer(RULE)
        group_of(NETWORK).bind_to(kv)  # which leaves the scale of the gradient to the program

    with LocalCluster(WORKERS, 1) as cluster:
        cluster.run(program)


def test_device_types_and_asynchronous_stores_take_a_group_too() -> None:
    whole = [(x[:SIZE], y[:SIZE]) for x, y in zip(X, Y, strict=True)]

    def program(kv: kvd.KVStore) -> Any:
        group = group_of(NETWORK)
        group.set_params(PARAMS)
        group.bind_to(kv, optimizer=RULE)
        for x, y in whole:
            group.forward_backward(DataBatch([x], [y]))
        return weights_of(group)

    results = []
    for kind in ("dist_device_sync", "dist_async"):
        with LocalCluster(1, 2) as cluster:
            results += cluster.run(program, kind)
    for kind in ("local", "device"):
        with kvd.create(kind) as kv:
            results.append(program(kv))
    for weights in results:
        assert_close(weights, torch_weights(PARAMS, whole, RULE), atol=1e-6)


class Recorder(kvd.KVStore):
    """A local store that writes down what it is asked, and can answer late."""

    def __init__(self) -> None:
        self.__dict__.update(kvd.create("local").__dict__)
        self.calls: list[tuple[str, int, int, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def pushpull_async(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, *, samples: int = 1, **options: Any
    ) -> Any:
        self.calls.append((key, priority, samples, threading.current_thread().name))
        result = super().pushpull_async(key, value, np.empty_like(out), priority, samples=samples).wait()
        return LateAnswer(self.gate, out, result)


@dataclass
class LateAnswer:
    """A handle whose result is not there before the gate is open."""

    gate: threading.Event
    out: Any
    result: Any

    def wait(self) -> Any:
        assert self.gate.wait(10)
        self.out[...] = self.result
        return self.out


def test_gradients_leave_during_backward_with_the_first_layer_at_the_highest_priority() -> None:
    kv = Recorder()
    group = group_of(NETWORK)
    group.set_params(PARAMS)
    group.bind_to(kv, optimizer=RULE, names={"dense0_weight": 7})
    sent_at: list[int] = []
    group.forward(DataBatch([X[0, :SIZE]], [Y[0, :SIZE]]))
    group.backward(on_gradient=lambda index, name: sent_at.append(len(kv.calls)))
    assert [(key, priority) for key, priority, _, _ in kv.calls][2:] in (
        [("dense0_bias", -1), (7, 0)],
        [(7, 0), ("dense0_bias", -1)],
    )
    assert {samples for _, _, samples, _ in kv.calls} == {SIZE}
    assert all(thread.startswith("kvd-cpu") for *_, thread in kv.calls)
    assert sent_at[-1] >= 2  # those of the last layer had left when the first layer's were complete


def test_the_old_weights_stay_on_the_devices_until_they_are_needed() -> None:
    kv = Recorder()
    group = group_of(NETWORK)
    group.set_params(PARAMS)
    group.bind_to(kv, optimizer=SGD(1.0))
    kv.gate.clear()
    batch = DataBatch([X[0, :SIZE]], [Y[0, :SIZE]])
    group.forward_backward(batch)
    np.testing.assert_array_equal(group.param_arrays[0][1], PARAMS["dense0_weight"])
    waits = threading.Thread(target=group.forward, args=(batch, False))
    waits.start()
    wait_until_inside(waits, "wait")
    kv.gate.set()
    waits.join(10)
    assert not np.array_equal(group.param_arrays[0][1], PARAMS["dense0_weight"])
    np.testing.assert_array_equal(group.param_arrays[0][1], kv.pull("dense0_weight"))


def test_fixed_parameters_and_states_come_from_rank_0_and_are_not_sent() -> None:
    model = Sequential(Dense(4), BatchNorm(), Dense(3), SoftmaxCrossEntropy())
    params = model.initialize((SIZE, 5), seed=4)

    def program(kv: kvd.KVStore) -> Any:
        group = group_of(model, fixed_param_names=["dense0_weight"])
        group.set_params({name: value + kv.rank for name, value in params.items()})
        group.set_params({}, {"batchnorm0_running_mean": np.full(4, 3.0 + kv.rank)})
        pipeline = group.bind_to(kv, optimizer=RULE)
        assert float(group.aux_arrays[0][1][0]) == 3.0
        group.forward_backward(DataBatch([X[kv.rank, :SIZE]], [Y[kv.rank, :SIZE]]))
        pipeline.receive()
        np.testing.assert_array_equal(group.param_arrays[0][0], params["dense0_weight"])
        assert kv.clock("dense0_weight") == 0
        pipeline.share_states()
        return [array.copy() for arrays in group.aux_arrays for array in arrays]

    with LocalCluster(WORKERS, 1) as cluster:
        first, second = cluster.run(program)
    assert_same(first, second)


def test_groups_that_share_parameters_feed_one_store() -> None:
    with kvd.create("local") as kv:
        group = group_of(NETWORK)
        group.set_params(PARAMS)
        group.bind_to(kv, optimizer=RULE)
        small = group_of(size=4, shared_group=group)
        assert small.pipeline is group.pipeline
        group.forward_backward(DataBatch([X[0, :SIZE]], [Y[0, :SIZE]]))
        small.forward_backward(DataBatch([X[1, :4]], [Y[1, :4]]))
        weights = weights_of(group)
        larger = Sequential(Dense(16), Tanh(), Dense(3), Dense(3), SoftmaxCrossEntropy())
        with pytest.raises(NotAllowed, match="without dense2_weight, dense2_bias"):
            group_of(larger, shared_group=group)
    batches = [(X[0, :SIZE], Y[0, :SIZE]), (X[1, :4], Y[1, :4])]
    assert_close(weights, torch_weights(PARAMS, batches, RULE), atol=1e-6)


def test_a_second_group_takes_over_what_the_store_has() -> None:
    with kvd.create("local") as kv:
        first = group_of(NETWORK)
        first.set_params(PARAMS)
        first.bind_to(kv, optimizer=RULE)
        first.forward_backward(DataBatch([X[0, :SIZE]], [Y[0, :SIZE]]))
        second = group_of(NETWORK)
        assert second.bind_to(kv).clock == 1
        assert_same(weights_of(second), weights_of(first))
        with pytest.raises(NotAllowed, match="the store holds no weights"):
            group_of(NETWORK).bind_to(kv, optimizer=RULE, update="local")


def test_two_local_updates_on_the_same_keys_each_have_a_gradient_and_weights_of_their_own() -> None:
    with kvd.create("local") as kv:
        first, second = group_of(), group_of()
        first.set_params(PARAMS)
        for group in (first, second):
            group.bind_to(kv, optimizer=RULE, update="local")
        for x, y in zip(X[:2], Y[:2], strict=True):
            second.forward_backward(DataBatch([x[:SIZE]], [y[:SIZE]]))
        weights = weights_of(second)
    batches = [(x[:SIZE], y[:SIZE]) for x, y in zip(X[:2], Y[:2], strict=True)]
    assert_close(weights, torch_weights(PARAMS, batches, RULE), atol=1e-6)


def test_nothing_leaves_when_a_gradient_is_not_finite() -> None:
    kv = Recorder()
    group = group_of(NETWORK, detect_anomaly=True)
    group.set_params(PARAMS)
    group.bind_to(kv, optimizer=RULE)
    poisoned = X[0, :SIZE].copy()
    poisoned[0, 0] = np.nan
    with pytest.raises(GradientAnomaly):
        group.forward_backward(DataBatch([poisoned], [Y[0, :SIZE]]))
    assert kv.calls == []
    group.forward_backward(DataBatch([X[0, :SIZE]], [Y[0, :SIZE]]))
    assert len(kv.calls) == 4
    assert_close(weights_of(group), torch_weights(PARAMS, [(X[0, :SIZE], Y[0, :SIZE])], RULE), atol=1e-6)


def test_a_backward_that_fails_halfway_is_not_followed_by_another() -> None:
    group = group_of(NETWORK)
    group.set_params(PARAMS)
    group.bind_to(Recorder(), optimizer=RULE)

    def fail(index: int, name: str) -> None:
        if name == "dense0_bias":
            raise RuntimeError("broken")

    group.forward(DataBatch([X[0, :SIZE]], [Y[0, :SIZE]]))
    with pytest.raises(RuntimeError, match="broken"):
        group.backward(on_gradient=fail)
    with pytest.raises(NotAllowed, match="restart this worker"):
        group.forward_backward(DataBatch([X[0, :SIZE]], [Y[0, :SIZE]]))


@pytest.mark.parametrize(
    ("arguments", "group_arguments", "error", "message"),
    [
        ({"update": "remote"}, {}, ConfigError, 'neither "server" nor "local"'),
        ({"update": "local"}, {}, ConfigError, "needs the optimizer"),
        ({"names": {"dense9": "w"}}, {}, InputMismatch, "names has dense9"),
        ({"names": {"dense0_bias": "dense0_weight"}}, {}, ConfigError, "two parameters have one key"),
        ({}, {"grad_req": "add"}, ConfigError, "whose end only the program knows"),
        ({}, {"for_training": False}, NotAllowed, "no gradients to send"),
    ],
)
def test_what_cannot_be_bound(
    arguments: dict[str, Any], group_arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with kvd.create("local") as kv, pytest.raises(error, match=message):
        group_of(NETWORK, **group_arguments).bind_to(kv, **arguments)


def test_what_a_bound_group_refuses() -> None:
    with kvd.create("local") as kv:
        group = group_of(NETWORK)
        assert group.pipeline is None
        pipeline = group.bind_to(kv, optimizer=RULE, update="local")
        with pytest.raises(NotAllowed, match="before bind_to"):
            group.set_params(PARAMS)
        with pytest.raises(NotAllowed, match="before bind_to"):
            group.bind_to(kv)
        with pytest.raises(NotAllowed, match="before bind_to"):
            group.bind_exec(group.data_shapes, group.label_shapes, group_of(NETWORK), reshape=True)
        with pytest.raises(NotAllowed, match="holds gradients"):
            pipeline.pull()


@pytest.mark.parametrize("optimizer", [RULE, Adam(0.01)])
def test_the_state_of_a_local_update_can_be_saved_and_loaded(optimizer: Optimizer) -> None:
    batches = [DataBatch([x[:SIZE]], [y[:SIZE]]) for x, y in zip(X, Y, strict=True)]

    def run(start: Any, states: Any, steps: list[DataBatch]) -> tuple[list[Any], Any]:
        with kvd.create("local") as kv:
            group = group_of(NETWORK)
            group.set_params(start)
            pipeline = group.bind_to(kv, optimizer=optimizer, update="local")
            if states:
                pipeline.load_local_states(states)
            for batch in steps:
                group.forward_backward(batch)
            return weights_of(group), pipeline.local_states()

    whole, _ = run(PARAMS, None, batches)
    half, states = run(PARAMS, None, batches[:3])
    rest, _ = run(dict(zip(PARAMS, half, strict=True)), states, batches[3:])
    assert_same(rest, whole)
    with pytest.raises(InputMismatch, match="not those of this group"):
        run(PARAMS, {"other|step": np.asarray(3)}, [])


def test_a_local_update_is_made_once_however_often_the_answer_is_waited_for() -> None:
    slot = make_slot("w", 0, np.full(3, 5, np.float32), None, SGD(1.0), is_trained=True)
    for step in (1, 2):
        slot.incoming[...] = 1
        slot.handle = Handle.of(None)
        for _ in range(3):
            slot.wait()
            np.testing.assert_array_equal(slot.weights, np.full(3, 5 - step))
