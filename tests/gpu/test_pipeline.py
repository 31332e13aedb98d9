"""Feeding a store from GPUs: the numbers of the CPU, copies that overlap, sums on the device."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.optimizer import SGD
from kvd.parallel import DataBatch, DataDesc, DataParallelExecutorGroup, Model, Sequential, TorchModel
from kvd.parallel.models.numpy.layers import Dense, Tanh
from kvd.parallel.models.numpy.losses import SoftmaxCrossEntropy
from kvd.testing.cluster import LocalCluster
from tests.gpu.cuda_harness import CUDA, NEEDS_CUDA


def why_not_torch() -> str:
    return "" if torch.cuda.is_available() else "this torch finds no CUDA device"


pytestmark = NEEDS_CUDA

STEPS, SIZE = 5, 16
GENERATOR = np.random.default_rng(1)
X = GENERATOR.normal(size=(STEPS, SIZE, 6)).astype(np.float32)
Y = GENERATOR.integers(0, 3, (STEPS, SIZE))
RULE = SGD(0.2, momentum=0.9)


def model_of(kind: str) -> Model:
    if kind == "sequential":
        return Sequential(Dense(32), Tanh(), Dense(3), SoftmaxCrossEntropy())
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    return TorchModel(module, torch.nn.CrossEntropyLoss())


def trained(kv: kvd.KVStore, kind: str, devices: list[str]) -> list[Any]:
    model = model_of(kind)
    group = DataParallelExecutorGroup(
        model, devices, [DataDesc("data", (SIZE, 6))], [DataDesc("label", (SIZE,), "int64")]
    )
    if isinstance(model, Sequential):
        group.set_params(model.initialize((SIZE, 6), seed=5))
    group.bind_to(kv, optimizer=RULE)
    for x, y in zip(X, Y, strict=True):
        group.forward_backward(DataBatch([x], [y]))
    values = {n: np.empty(a[0].shape, np.float32) for n, a in zip(group.param_names, group.param_arrays, strict=True)}
    group.get_params(values, {})
    return list(values.values())


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync", "local", "device"])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cpu"]])
@pytest.mark.parametrize("kind", ["sequential", "torch"])
def test_the_weights_are_those_of_the_cpu_and_repeat_bit_for_bit(kind: str, devices: list[str], store: str) -> None:
    if kind == "torch" and why_not_torch():
        pytest.skip(why_not_torch())
    with kvd.create("local") as kv:
        expected = trained(kv, kind, ["cpu"])
    runs = []
    for _ in range(2):
        if store.startswith("dist"):
            with LocalCluster(1, 2) as cluster:
                runs += cluster.run(lambda kv: trained(kv, kind, devices), store)
        else:
            with kvd.create(store) as kv:
                runs.append(trained(kv, kind, devices))
    for first, second, wanted in zip(*runs, expected, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, wanted, rtol=1e-4, atol=1e-5)


def test_the_host_receives_one_sum_from_a_device_store() -> None:
    with kvd.create("device") as kv:
        seen: list[int] = []
        send = kv.pushpull_async

        def counted(key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            seen.append(len(value))
            assert all(isinstance(array, np.ndarray) for array in value)
            return send(key, value, *arguments, **options)

        kv.pushpull_async = counted  # type: ignore[method-assign]
        trained(kv, "sequential", ["cuda:0", "cuda:0"])
    assert set(seen) == {1}


def test_copies_overlap_with_backward() -> None:
    """The last layer's gradient is on the host before the first layer's, which takes long, is computed."""
    cupy = importlib.import_module("cupy")
    wide = 4096
    model = Sequential(Dense(wide), Tanh(), Dense(wide), Tanh(), Dense(3), SoftmaxCrossEntropy())
    size = 8192
    group = DataParallelExecutorGroup(
        model, ["cuda:0"], [DataDesc("data", (size, wide))], [DataDesc("label", (size,), "int64")]
    )
    batch = DataBatch([np.ones((size, wide), np.float32)], [np.zeros(size, np.int64)])
    with kvd.create("local") as kv:
        group.bind_to(kv, optimizer=SGD(0.0))
        group.forward_backward(batch)
        order: list[str] = []
        pipeline: Any = group.pipeline
        send = pipeline._downloads._send

        def noted(name: str, hosts: Any) -> None:
            order.append(name)
            send(name, hosts)

        pipeline._downloads._send = noted
        done = cupy.cuda.Event()
        pending: list[bool] = []

        def last(index: int, name: str) -> None:
            if name == "dense0_weight":
                done.record()
                pending.append("dense2_weight" in order or not done.done)

        group.forward(batch)
        group.backward(on_gradient=last)
    assert order[0].startswith("dense2")
    assert pending == [True]


@pytest.mark.skipif(bool(why_not_torch()), reason=why_not_torch())
def test_a_torch_group_of_one_gpu_has_the_gradients_of_torch() -> None:
    model = model_of("torch")
    assert isinstance(model, TorchModel)
    group = DataParallelExecutorGroup(
        model, ["cuda:0"], [DataDesc("data", (SIZE, 6))], [DataDesc("label", (SIZE,), "int64")], inputs_need_grad=True
    )
    group.forward_backward(DataBatch([X[0]], [Y[0]]))
    reference: Any = copy.deepcopy(model.module).double()
    x = torch.from_numpy(X[0]).double().requires_grad_()
    loss: Any = torch.nn.functional.cross_entropy(reference(x), torch.from_numpy(Y[0]))
    loss.backward()
    for (array,), parameter in zip(group.grad_arrays, reference.parameters(), strict=True):
        np.testing.assert_allclose(CUDA.to_host(array), parameter.grad.numpy(), rtol=1e-3, atol=1e-4)
    assert x.grad is not None
    np.testing.assert_allclose(CUDA.to_host(group.get_input_grads_merged()[0]), x.grad.numpy(), rtol=1e-3, atol=1e-4)
