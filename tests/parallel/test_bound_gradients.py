"""A group on CPUs computes its gradients where the servers of its host read them: a push copies nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.client.cluster.engine import Engine
from kvd.errors import ConfigError, DtypeMismatch, NotAllowed, ShapeMismatch
from kvd.optimizer import SGD
from kvd.parallel import DataBatch, DataDesc, DataParallelExecutorGroup, Model, Sequential, TorchModel
from kvd.parallel.group.pipeline import Update
from kvd.parallel.models.numpy.layers import Dense, Tanh
from kvd.parallel.models.numpy.losses import SoftmaxCrossEntropy
from kvd.testing.cluster import LocalCluster
from tests.parallel.group_harness import Groups, assert_close, assert_same, torch_network, torch_weights, weights_of
from tests.waiting import wait_until_inside

STEPS, SIZE, WIDTH, HIDDEN = 5, 8, 5, 1200  # the first weight is large enough for shared memory
GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(size=(STEPS, SIZE, WIDTH)).astype(np.float32)
Y = GENERATOR.integers(0, 3, (STEPS, SIZE))
BATCHES = [DataBatch([x], [y]) for x, y in zip(X, Y, strict=True)]
NETWORK = Sequential(Dense(HIDDEN), Tanh(), Dense(3), SoftmaxCrossEntropy())
PARAMS = NETWORK.initialize((SIZE, WIDTH), seed=2)
RULE = SGD(0.2, momentum=0.9, wd=0.01)
group_of = Groups(NETWORK, (WIDTH,), PARAMS, devices=1, size=SIZE)


def jax_model() -> Model:
    jax = pytest.importorskip("jax")
    from kvd.parallel import JaxModel

    def apply(params: Any, x: Any) -> Any:
        first, first_bias, second, second_bias = params
        return jax.numpy.tanh(x @ first.T + first_bias) @ second.T + second_bias

    def loss(outputs: Any, label: Any) -> Any:
        return -jax.nn.log_softmax(outputs)[jax.numpy.arange(len(label)), label].mean()

    return JaxModel(apply, list(PARAMS.values()), loss)


MODELS: dict[str, Callable[[], Model]] = {
    "sequential": lambda: NETWORK,
    "torch": lambda: TorchModel(torch_network(PARAMS), torch.nn.CrossEntropyLoss()),
    "jax": jax_model,
}


def gradients_of(group: DataParallelExecutorGroup) -> list[list[Any]]:
    """For each parameter the gradient of each device: live."""
    return [[array for array in arrays if array is not None] for arrays in group.grad_arrays]


def expected(batches: list[DataBatch]) -> list[Any]:
    """The weights after these steps."""
    return torch_weights(PARAMS, [(batch.data[0], batch.label[0]) for batch in batches if batch.label], RULE)


class Copies:
    """How much memory stores took for copies of what they send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = Engine.memory

        def counted(engine: Engine, nbytes: int) -> Any:
            self.count += 1
            return real(engine, nbytes)

        monkeypatch.setattr(Engine, "memory", counted)


def without_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores give arrays that they know nothing of: every push is copied."""

    def bind(kv: kvd.KVStore, keys: Any) -> Any:
        values = kv.pull(keys)
        return [np.zeros_like(value) for value in values], values

    monkeypatch.setattr(kvd.KVStore, "bind", bind)


@pytest.fixture
def kv() -> Iterator[kvd.KVStore]:
    with LocalCluster(1, 2) as cluster:
        yield cluster.store()


@pytest.mark.parametrize("update", ["server", "local"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_pushes_copy_nothing_and_the_weights_are_those_of_pushes_that_do(
    kind: str, devices: int, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for is_bound in (True, False):
        with LocalCluster(1, 2) as cluster, monkeypatch.context() as patch:
            if not is_bound:
                without_bind(patch)
            group = group_of(MODELS[kind](), devices=devices)
            group.bind_to(cluster.store(), optimizer=RULE, update=update)
            copies = Copies(patch)
            for batch in BATCHES:
                group.forward_backward(batch)
            results.append(weights_of(group))
            assert copies.count == (0 if is_bound else len(PARAMS) * STEPS)
    assert_same(*results)
    assert_close(results[0], expected(BATCHES))


@pytest.mark.parametrize("kind", MODELS)
def test_on_one_device_the_gradients_are_the_stores_and_stay_so(kind: str, kv: kvd.KVStore) -> None:
    group = group_of(MODELS[kind]())
    group.bind_to(kv, optimizer=RULE)
    bound = kv.bind(group.param_names)[0]
    group.forward_backward(BATCHES[0])
    before = [gradient.copy() for gradient in bound]
    assert all(gradient.any() for gradient in bound)
    group.forward_backward(BATCHES[1])
    for gradient, old, (own,) in zip(bound, before, gradients_of(group), strict=True):
        assert own is gradient
        assert not np.array_equal(gradient, old)
    group.reshape([DataDesc("data", (4, WIDTH))], [DataDesc("label", (4,), "int64")])
    small = group_of(group.model, shared_group=group)
    for mine in (group, small):
        assert all(own is gradient for (own,), gradient in zip(gradients_of(mine), bound, strict=True))


def test_on_several_devices_the_sum_is_the_stores(kv: kvd.KVStore) -> None:
    group = group_of(devices=2)
    group.bind_to(kv, optimizer=RULE)
    group.forward_backward(BATCHES[0])
    for gradient, (first, second) in zip(kv.bind(group.param_names)[0], gradients_of(group), strict=True):
        np.testing.assert_array_equal(gradient, np.add(first, second))
        assert not np.shares_memory(gradient, first)


def test_fixed_parameters_and_layers_that_a_bucket_lacks_are_not_sent(kv: kvd.KVStore) -> None:
    group = group_of(fixed_param_names=["dense0_weight"])
    group.bind_to(kv, optimizer=RULE)
    small = group_of(size=4, shared_group=group, fixed_param_names=["dense0_weight", "dense1_bias"])
    for each, batch in ((group, BATCHES[0]), (small, DataBatch([X[1, :4]], [Y[1, :4]]))):
        each.forward_backward(batch)
    weights_of(group)
    assert [kv.clock(name) for name in group.param_names] == [0, 2, 2, 1]
    np.testing.assert_array_equal(kv.pull("dense0_weight"), PARAMS["dense0_weight"])


def test_a_second_group_on_the_same_keys_has_gradients_of_its_own(kv: kvd.KVStore) -> None:
    """Neither waits for the other's pushes before it writes its gradients."""
    first, second = group_of(), group_of()
    first.bind_to(kv, optimizer=RULE)
    second.bind_to(kv)
    for batch in BATCHES[:2]:
        first.forward(batch)
        second.forward(batch)
        first.backward()
        second.backward()
    for (mine,), (theirs,) in zip(gradients_of(first), gradients_of(second), strict=True):
        assert not np.shares_memory(mine, theirs)
    weights_of(first), weights_of(second)
    assert kv.clock("dense0_weight") == 4
    for name, weight in zip(first.param_names, weights_of(second), strict=True):
        np.testing.assert_array_equal(kv.pull(name), weight)


@pytest.mark.parametrize("update", ["server", "local"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", ["dist", "local"])
def test_keys_of_another_model_are_refused_and_the_gradients_stay_the_groups(
    kind: str, devices: int, update: Update
) -> None:
    with LocalCluster(1, 1) as cluster:
        kv = cluster.store() if kind == "dist" else kvd.create("local")
        kv.init("dense0_bias", np.zeros(1, np.float32), merge="mean")  # which could be broadcast
        group = group_of(devices=devices)
        own = [gradients[0] for gradients in gradients_of(group)]
        with pytest.raises(ShapeMismatch, match="dense0_bias"):
            group.bind_to(kv, optimizer=RULE, update=update)
        assert group.pipeline is None
        assert all(mine is before for (mine, *_), before in zip(gradients_of(group), own, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_an_executor_takes_no_arrays_that_do_not_fit(kind: str) -> None:
    (executor,) = group_of(MODELS[kind]()).executors
    name, before = next(iter(executor.grads.items()))
    for given, error in (
        ({"nobody": np.zeros(3, np.float32)}, ConfigError),
        ({name: np.zeros(3, np.float32)}, ShapeMismatch),
        ({name: np.zeros(before.shape)}, DtypeMismatch),
    ):
        with pytest.raises(error):
            executor.use_gradients(given)
        assert executor.grads[name] is before


class Gated(kvd.KVStore):
    """A local store that reads what it is given, and answers, only once its gate is open."""

    def __init__(self) -> None:
        self.__dict__.update(kvd.create("local").__dict__)
        self.gate = threading.Event()
        self.gate.set()

    def pushpull_async(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, *, samples: int = 1, **options: Any
    ) -> Any:
        return LateAnswer(self, lambda: super(Gated, self).pushpull_async(key, value, out, priority, samples=samples))


class LateAnswer:
    """The handle of such a call."""

    def __init__(self, kv: Gated, call: Callable[[], Any]) -> None:
        self.kv, self.call = kv, call
        self.answer: Any = None

    def wait(self) -> Any:
        assert self.kv.gate.wait(10)
        self.answer = self.answer or self.call()
        return self.answer.wait()


@pytest.mark.parametrize("update", ["server", "local"])
def test_backward_waits_until_the_gradients_of_the_step_before_are_read(update: Update) -> None:
    kv = Gated()
    group = group_of()
    group.bind_to(kv, optimizer=RULE, update=update)
    bucket = group_of(size=4, shared_group=group)
    group.forward(BATCHES[0])
    bucket.forward(DataBatch([X[1, :4]], [Y[1, :4]]))
    kv.gate.clear()
    group.backward()
    sent = [gradient.copy() for (gradient,) in gradients_of(group)]
    waits = threading.Thread(target=bucket.backward)
    waits.start()
    wait_until_inside(waits, "wait")
    for (gradient,), value in zip(gradients_of(group), sent, strict=True):
        np.testing.assert_array_equal(gradient, value)
    kv.gate.set()
    waits.join(10)
    weights = weights_of(group)
    first, second = (step_of(BATCHES[0]), step_of(DataBatch([X[1, :4]], [Y[1, :4]])))
    for got, start, one, other in zip(weights, PARAMS.values(), first, second, strict=True):
        after, momentum = sgd(start.astype(np.float64), one, 0.0)
        np.testing.assert_allclose(got, sgd(after, other, momentum)[0], rtol=0, atol=2e-6)


def step_of(batch: DataBatch) -> list[Any]:
    """The gradients at `PARAMS`, in float64."""
    net = torch_network(PARAMS).double()
    assert batch.label is not None
    x, y = torch.from_numpy(batch.data[0]).double(), torch.from_numpy(batch.label[0])
    loss: Any = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return [parameter.grad.numpy() for parameter in net.parameters()]


def sgd(weight: Any, gradient: Any, momentum: Any) -> tuple[Any, Any]:
    """`RULE`: the weight after a step, and its momentum."""
    momentum = 0.9 * momentum + gradient + 0.01 * weight
    return weight - 0.2 * momentum, momentum


def test_a_backward_that_was_refused_changes_nothing(kv: kvd.KVStore) -> None:
    group = group_of()
    group.bind_to(kv, optimizer=RULE)
    group.forward_backward(BATCHES[0])
    with pytest.raises(NotAllowed, match="needs a forward"):
        group.backward()
    group.forward_backward(BATCHES[1])
    assert_close(weights_of(group), expected(BATCHES[:2]))


def test_gradients_outlive_the_store() -> None:
    with LocalCluster(1, 1) as cluster:
        group = group_of()
        with cluster.store() as kv:
            group.bind_to(kv, optimizer=RULE)
            group.forward_backward(BATCHES[0])
            gradients = [gradient.copy() for (gradient,) in gradients_of(group)]
            weights_of(group)
    for (gradient,), value in zip(gradients_of(group), gradients, strict=True):
        np.testing.assert_array_equal(gradient, value)
    group.forward(BATCHES[1], is_train=False)
