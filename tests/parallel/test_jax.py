"""JaxModel: a group of it calculates what torch calculates on the whole batch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvd
from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.optimizer import SGD
from kvd.parallel import DataBatch, DataDesc, DataParallelExecutorGroup
from tests.parallel.group_harness import Groups, summed_gradients

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

from kvd.parallel import JaxModel  # noqa: E402  needs JAX

F: Any = torch.nn.functional
GENERATOR = np.random.default_rng(8)
SIZE = 13
X = GENERATOR.normal(size=(SIZE, 5)).astype(np.float32)
Y = GENERATOR.integers(0, 3, SIZE)
PARAMS = [
    {"weight": GENERATOR.normal(size=(5, 4)).astype(np.float32), "bias": np.zeros(4, np.float32)},
    {"weight": GENERATOR.normal(size=(4, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)},
]
NAMES = ["0.bias", "0.weight", "1.bias", "1.weight"]
BATCH = DataBatch([X], [Y])


def apply(params: Any, x: Any) -> Any:
    hidden = jax.numpy.tanh(x @ params[0]["weight"] + params[0]["bias"])
    return hidden @ params[1]["weight"] + params[1]["bias"]


def loss(outputs: Any, labels: Any) -> Any:
    return -jax.numpy.mean(jax.nn.log_softmax(outputs)[jax.numpy.arange(len(labels)), labels])


def losses(outputs: Any, labels: Any) -> Any:
    return -jax.nn.log_softmax(outputs)[jax.numpy.arange(len(labels)), labels]


def group_of(devices: int = 3, function: Any = loss, **arguments: Any) -> DataParallelExecutorGroup:
    model = JaxModel(apply, PARAMS, function)
    return Groups(model, (5,), size=SIZE, label="int32" if function else None)(devices=devices, **arguments)


def expected(heads: Any = None) -> tuple[dict[str, Any], Any, Any]:
    """Gradients by name, of the data, and outputs: torch in float64."""
    tensors = {
        f"{i}.{n}": torch.from_numpy(v).double().requires_grad_() for i, p in enumerate(PARAMS) for n, v in p.items()
    }
    x = torch.from_numpy(X).double().requires_grad_()
    hidden: Any = torch.tanh(x @ tensors["0.weight"] + tensors["0.bias"])
    outputs = hidden @ tensors["1.weight"] + tensors["1.bias"]
    if heads is None:
        F.cross_entropy(outputs, torch.from_numpy(Y)).backward()
    else:
        outputs.backward(torch.from_numpy(heads).double())
    return {n: t.grad.numpy() for n, t in tensors.items() if t.grad is not None}, x.grad, outputs.detach().numpy()


@pytest.mark.parametrize("function", [loss, losses])
@pytest.mark.parametrize("devices", [1, 3, 5])
def test_gradients_equal_those_of_torch_on_the_whole_batch(devices: int, function: Any) -> None:
    group = group_of(devices, function, inputs_need_grad=True)
    group.forward_backward(BATCH)
    assert group.param_names == NAMES
    wanted, of_data, outputs = expected()
    for name in NAMES:
        np.testing.assert_allclose(summed_gradients(group)[name], wanted[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(group.get_input_grads_merged()[0], of_data, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(group.get_outputs_merged()[0], outputs, rtol=1e-5, atol=1e-5)
    total = sum(executor.loss for executor in group.executors)  # type: ignore[attr-defined]
    assert total == pytest.approx(float(F.cross_entropy(torch.from_numpy(outputs), torch.from_numpy(Y))), rel=1e-5)


def test_head_gradients_where_there_is_no_loss() -> None:
    heads = GENERATOR.normal(size=(SIZE, 3)).astype(np.float32)
    group = group_of(2, None)
    told: list[str] = []
    group.forward(DataBatch([X]))
    group.backward(heads, lambda index, name: told.append(name) if index == 0 else None)
    wanted, _, _ = expected(heads)
    for name in NAMES:
        np.testing.assert_allclose(summed_gradients(group)[name], wanted[name], rtol=1e-5, atol=1e-5)
    assert told == NAMES[::-1]


def test_several_inputs_and_outputs_with_the_batch_elsewhere() -> None:
    def both(params: Any, x: Any, y: Any) -> Any:
        return {"product": x * y * params, "sum": x.sum(0) + params}

    x, y = (GENERATOR.normal(size=(3, SIZE)).astype(np.float32) for _ in range(2))
    group = DataParallelExecutorGroup(
        JaxModel(both, np.float32(2.0)),
        ["cpu"] * 2,
        [DataDesc("x", x.shape, layout="CN"), DataDesc("y", y.shape, layout="CN")],
    )
    assert group.param_names == ["params"]
    assert group.get_output_shapes() == [("product", (3, SIZE)), ("sum", (SIZE,))]
    group.forward(DataBatch([x, y]))
    np.testing.assert_allclose(group.get_outputs_merged()[0], x * y * 2, rtol=1e-6)
    group.backward([np.ones((3, SIZE), np.float32), np.ones(SIZE, np.float32)])
    np.testing.assert_allclose(summed_gradients(group)["params"], (x * y).sum() + SIZE, rtol=1e-5)


def test_requests_and_shared_arrays() -> None:
    group = group_of(2, fixed_param_names=["0.bias"], grad_req={"1.bias": "add"})
    other = group_of(2, shared_group=group)
    assert other.executors[1].params["1.weight"] is group.executors[1].params["1.weight"]
    group.forward_backward(BATCH)
    group.forward_backward(BATCH)
    wanted, _, _ = expected()
    assert "0.bias" not in group.executors[0].grads
    own = {name: sum(executor.grads[name] for executor in group.executors) for name in ("1.bias", "1.weight")}
    np.testing.assert_allclose(own["1.bias"], 2 * wanted["1.bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own["1.weight"], wanted["1.weight"], rtol=1e-5, atol=1e-6)
    group.set_params({"1.bias": np.full(3, 1.0)})
    group.forward(BATCH, is_train=False)
    other.forward(BATCH, is_train=False)
    np.testing.assert_array_equal(group.get_outputs_merged()[0], other.get_outputs_merged()[0])


def test_it_trains_through_a_store() -> None:
    with kvd.create("local") as kv:
        group = group_of(2)
        group.bind_to(kv, optimizer=SGD(0.5))
        group.forward_backward(BATCH)
        wanted, _, _ = expected()
        values = {name: np.empty(a[0].shape) for name, a in zip(NAMES, group.param_arrays, strict=True)}
        group.get_params(values, {})
        np.testing.assert_allclose(values["1.weight"], PARAMS[1]["weight"] - 0.5 * wanted["1.weight"], atol=1e-6)


def test_the_same_bits_every_time_and_a_monitor() -> None:
    seen: list[tuple[int, str]] = []
    runs = []
    for _ in range(2):
        group = group_of(4)
        group.install_monitor(lambda index, device, name, array: seen.append((index, name)))
        group.forward_backward(BATCH)
        runs.append([array.copy() for arrays in group.grad_arrays for array in arrays if array is not None])
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)
    assert sorted(seen) == sorted([(index, "output") for index in range(4)] * 2)


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="not an array"):
        JaxModel(apply, {"a": "text"})
    with pytest.raises(ConfigError, match="no arrays"):
        JaxModel(apply, {})
    with pytest.raises(ConfigError, match=r"apply cannot take data \(4, 7\)"):
        DataParallelExecutorGroup(JaxModel(apply, PARAMS), ["cpu"], [("data", (4, 7))])
    with pytest.raises(ConfigError, match="has no loss"):
        DataParallelExecutorGroup(JaxModel(apply, PARAMS), ["cpu"], [("data", (4, 5))], [("label", (4,))])
    with pytest.raises(ConfigError, match="has to count the samples"):
        DataParallelExecutorGroup(JaxModel(lambda p, x: x.reshape(-1), PARAMS), ["cpu"], [("data", (4, 5))])
    with pytest.raises(ConfigError, match="one number, or one per sample"):
        group_of(1, lambda outputs, labels: outputs).forward(BATCH)
    descs = [DataDesc("data", X.shape)]
    with pytest.raises(ConfigError, match="no states"):
        JaxModel(apply, PARAMS).bind("cpu", descs, aux={"a": X})
    with pytest.raises(ShapeMismatch, match="the model wants"):
        JaxModel(apply, PARAMS).bind("cpu", descs, params={"0.bias": X})
    with pytest.raises(DtypeMismatch, match="the model float32"):
        JaxModel(apply, PARAMS).bind("cpu", descs, grads={"0.bias": np.zeros(4)})
    with pytest.raises(ConfigError, match="does not need here"):
        JaxModel(apply, PARAMS).bind("cpu", descs, params={"2.bias": X})
    executor = JaxModel(apply, PARAMS).bind("cpu", descs)
    with pytest.raises(NotAllowed, match="run forward first"):
        _ = executor.outputs
    with pytest.raises(KeyNotFound, match="'data' is missing"):
        executor.forward({}, True)
    with pytest.raises(NotAllowed, match="was not bound"):
        executor.forward({"other": X}, True)
    with pytest.raises(ShapeMismatch, match="was bound with"):
        executor.forward({"data": X[:1]}, True)
    with pytest.raises(NotAllowed, match="needs a forward"):
        executor.backward([X])
    executor.forward({"data": X}, True)
    with pytest.raises(NotAllowed, match="head gradients are required"):
        executor.backward()
    with pytest.raises(ShapeMismatch, match="head gradient of output"):
        executor.backward([X])
