"""TorchModel: a group of it calculates what torch calculates on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from kvd.errors import ConfigError, DtypeMismatch, KeyNotFound, NotAllowed, ShapeMismatch
from kvd.parallel import DataBatch, DataDesc, DataParallelExecutorGroup, Device, TorchModel
from tests.parallel.group_harness import Groups, summed_gradients

F: Any = torch.nn.functional
GENERATOR = np.random.default_rng(5)
SIZE = 13
IMAGES = GENERATOR.normal(size=(SIZE, 2, 6, 5)).astype(np.float32)
CLASSES = GENERATOR.integers(0, 3, SIZE)


def convolutions() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(120, 3)
    )


def group_of(
    module: torch.nn.Module, devices: int = 3, loss: Any = None, *, loss_reduction: Any = None, **arguments: Any
) -> DataParallelExecutorGroup:
    model = TorchModel(module, loss or torch.nn.CrossEntropyLoss(), loss_reduction=loss_reduction)
    return Groups(model, IMAGES.shape[1:], size=SIZE, names=("images", "classes"))(devices=devices, **arguments)


BATCH = DataBatch([IMAGES], [CLASSES])


@pytest.mark.parametrize("devices", [1, 3, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_equal_those_of_torch_on_the_whole_batch_in_float64(devices: int, reduction: str) -> None:
    module = convolutions()
    reference: Any = copy.deepcopy(module).double()
    x = torch.from_numpy(IMAGES).double().requires_grad_()
    whole = "sum" if reduction == "sum" else "mean"  # one loss per sample is averaged
    F.cross_entropy(reference(x), torch.from_numpy(CLASSES), reduction=whole).backward()
    group = group_of(module, devices, torch.nn.CrossEntropyLoss(reduction=reduction), inputs_need_grad=True)
    group.forward_backward(BATCH)
    assert group.param_names == [name for name, _ in module.named_parameters()]
    for name, parameter in reference.named_parameters():
        np.testing.assert_allclose(summed_gradients(group)[name], parameter.grad.numpy(), rtol=1e-5, atol=1e-6)
    assert x.grad is not None
    np.testing.assert_allclose(group.get_input_grads_merged()[0], x.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(group.get_outputs_merged()[0], reference(x).detach().numpy(), rtol=1e-5, atol=1e-5)
    losses = [executor.loss for executor in group.executors]  # type: ignore[attr-defined]
    assert sum(losses) == pytest.approx(
        float(F.cross_entropy(reference(x), torch.from_numpy(CLASSES), reduction=whole).detach()), rel=1e-5
    )


def test_data_whose_batch_axis_is_not_the_first() -> None:
    """A recurrent net takes (time, batch, features); its outputs have the batch on axis 1 as well."""
    torch.manual_seed(2)
    rnn = torch.nn.GRU(3, 4)
    x = GENERATOR.normal(size=(6, SIZE, 3)).astype(np.float32)
    heads = [GENERATOR.normal(size=shape).astype(np.float32) for shape in ((6, SIZE, 4), (1, SIZE, 4))]
    model = TorchModel(rnn)
    group = DataParallelExecutorGroup(model, ["cpu"] * 3, [DataDesc("x", x.shape, layout="TNC")])
    assert group.get_output_shapes() == [("output0", (6, SIZE, 4)), ("output1", (1, SIZE, 4))]
    group.forward(DataBatch([x]))
    group.backward(heads)
    reference = copy.deepcopy(rnn).double()
    outputs = reference(torch.from_numpy(x).double())
    torch.autograd.backward(outputs, [torch.from_numpy(head).double() for head in heads])
    for merged, output in zip(group.get_outputs_merged(), outputs, strict=True):
        np.testing.assert_allclose(merged, output.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(summed_gradients(group)[name], parameter.grad.numpy(), rtol=1e-5, atol=1e-5)


class TwoTowers(torch.nn.Module):
    """Several inputs, of which one is ids, and outputs by name; one parameter has no part in the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.nn.Embedding(7, 4)
        self.dense = torch.nn.Linear(3, 4)
        self.idle = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = self.ids(ids) * self.frozen, self.dense(x)
        return {"score": (first * second).sum(1), "first": first}


def towers_loss(outputs: Any, labels: Any) -> torch.Tensor:
    score, wanted = labels
    return F.mse_loss(outputs["score"], score) + F.mse_loss(outputs["first"], wanted)  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [1, 2])
def test_several_inputs_outputs_and_labels(devices: int) -> None:
    torch.manual_seed(3)
    module = TwoTowers()
    ids, x = GENERATOR.integers(0, 7, 8), GENERATOR.normal(size=(8, 3)).astype(np.float32)
    labels = [GENERATOR.normal(size=8).astype(np.float32), GENERATOR.normal(size=(8, 4)).astype(np.float32)]
    group = DataParallelExecutorGroup(
        TorchModel(module, towers_loss, loss_reduction="mean"),
        ["cpu"] * devices,
        [DataDesc("ids", (8,), "int64"), DataDesc("x", (8, 3))],
        [DataDesc("score", (8,)), DataDesc("wanted", (8, 4))],
    )
    assert [name for name, _ in group.get_output_shapes()] == ["score", "first"]
    assert group.aux_names == ["frozen"]  # no gradient trains it
    told: list[tuple[int, str]] = []
    group.forward(DataBatch([ids, x], labels))
    group.backward(on_gradient=lambda index, name: told.append((index, name)))
    assert sorted(told) == sorted(
        (i, n) for i in range(devices) for n in ("ids.weight", "dense.weight", "dense.bias", "idle")
    )
    reference = copy.deepcopy(module).double()
    outputs = reference(torch.from_numpy(ids), torch.from_numpy(x).double())
    towers_loss(outputs, [torch.from_numpy(label).double() for label in labels]).backward()  # type: ignore[no-untyped-call]
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            np.testing.assert_allclose(summed_gradients(group)[name], parameter.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(summed_gradients(group)["idle"], 0)


def test_the_last_layers_gradient_is_announced_first_and_complete() -> None:
    group = group_of(convolutions(), 1)
    seen: list[tuple[str, Any]] = []
    group.forward(BATCH)
    group.backward(on_gradient=lambda _, name: seen.append((name, group.executors[0].grads[name].copy())))
    names = [name for name, _ in seen]
    assert {"3.weight", "3.bias"} == set(names[:2])
    assert {"0.weight", "0.bias"} == set(names[2:])
    for name, value in seen:
        np.testing.assert_array_equal(value, group.executors[0].grads[name])


def test_devices_share_nothing_with_each_other_nor_with_the_module() -> None:
    module = convolutions()
    group = group_of(module, 2)
    group.set_params({"3.bias": np.full(3, 9.0)})
    arrays = group.param_arrays[group.param_names.index("3.bias")]
    assert [float(array[0]) for array in arrays] == [9.0, 9.0]
    assert not np.shares_memory(arrays[0], arrays[1])
    assert float(module[3].bias.detach()[0]) != 9.0  # type: ignore[index]
    arrays[0][...] = 1.0
    own: Any = group.executors[0].passes.module  # type: ignore[attr-defined]
    assert float(own[3].bias.detach()[0]) == 1.0  # the arrays are the parameters' memory


def test_a_shared_group_uses_the_same_arrays_and_reshape_keeps_them() -> None:
    group = group_of(convolutions(), 2, reshape="auto")
    other = group_of(convolutions(), 2, shared_group=group)
    for mine, theirs in zip(group.executors, other.executors, strict=True):
        assert all(mine.params[name] is theirs.params[name] for name in group.param_names)
        assert all(mine.grads[name] is theirs.grads[name] for name in group.param_names)
    group.set_params({"3.bias": np.full(3, 2.0)})
    own: Any = other.executors[1].passes.module  # type: ignore[attr-defined]
    assert float(own[3].bias.detach()[0]) == 2.0
    before = group.param_arrays
    group.forward_backward(DataBatch([IMAGES[:5]], [CLASSES[:5]]))
    assert group.get_batch_size() == 5
    assert all(
        a is b for old, new in zip(before, group.param_arrays, strict=True) for a, b in zip(old, new, strict=True)
    )
    whole: Any = copy.deepcopy(convolutions()).double()
    whole[3].bias.data[:] = 2.0
    F.cross_entropy(whole(torch.from_numpy(IMAGES[:5]).double()), torch.from_numpy(CLASSES[:5])).backward()
    np.testing.assert_allclose(summed_gradients(group)["0.weight"], whole[0].weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_requests() -> None:
    group = group_of(convolutions(), 2, fixed_param_names=["0.weight"], grad_req={"3.bias": "add"})
    assert "0.weight" not in group.executors[0].grads
    group.forward_backward(BATCH)
    once = gradients_of(group)
    group.forward_backward(BATCH)
    twice = gradients_of(group)
    np.testing.assert_allclose(twice["3.bias"], 2 * once["3.bias"], rtol=1e-6)
    np.testing.assert_array_equal(twice["3.weight"], once["3.weight"])


def gradients_of(group: DataParallelExecutorGroup) -> dict[str, Any]:
    return {name: executor.grads[name].copy() for executor in group.executors[:1] for name in executor.grads}


def test_states_and_evaluation() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 3))
    group = group_of(module, 1)
    assert group.aux_names == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    group.forward_backward(BATCH)
    reference: Any = copy.deepcopy(module)
    reference(torch.from_numpy(IMAGES))
    group.forward(BATCH, is_train=False)
    targets = {name: np.empty(parameter.shape, np.float32) for name, parameter in module.named_parameters()}
    states = {name: np.empty(buffer.shape, np.float64) for name, buffer in module.named_buffers()}
    group.get_params(targets, states)
    for name, buffer in reference.named_buffers():
        np.testing.assert_allclose(states[name], buffer.numpy(), rtol=1e-6)
    reference.eval()
    np.testing.assert_allclose(
        group.get_outputs_merged()[0], reference(torch.from_numpy(IMAGES)).detach().numpy(), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(NotAllowed, match="needs a forward with is_train=True"):
        group.backward()


def test_a_buffer_that_is_replaced_instead_of_written_to() -> None:
    class Counts(torch.nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(2, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)
            return self.dense(x)  # type: ignore[no-any-return]

    group = DataParallelExecutorGroup(TorchModel(Counts()), ["cpu"] * 2, [DataDesc("x", (7, 2))])
    for _ in range(3):
        group.forward(DataBatch([np.zeros((7, 2), np.float32)]))
    assert [float(array[0]) for array in group.aux_arrays[0]] == [12.0, 9.0]


def test_dropout_depends_on_seed_device_and_step_and_leaves_the_generator_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(60, 3))

    def outputs(group: DataParallelExecutorGroup) -> list[Any]:
        group.forward(BATCH, is_train=True)
        return [parts.copy() for parts in group.get_outputs()[0]]

    torch.manual_seed(77)
    before = torch.get_rng_state()
    group = group_of(module, 4, seed=3)
    runs = [outputs(group) for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state())
    again = group_of(module, 4, seed=3)
    for run in runs:
        for mine, theirs in zip(run, outputs(again), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(runs[0][0], runs[1][0])
    assert not np.array_equal(runs[0][0], outputs(group_of(module, 4, seed=4))[0])
    for executor in group.executors:
        executor.step = 1
    np.testing.assert_array_equal(outputs(group)[2], runs[1][2])


def test_the_same_bits_every_time() -> None:
    results = []
    for _ in range(2):
        group = group_of(convolutions(), 4)
        for _ in range(3):
            group.forward_backward(BATCH)
        results.append([array.copy() for arrays in group.grad_arrays for array in arrays if array is not None])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_monitor_shows_the_modules_outputs_with_the_device() -> None:
    group = group_of(convolutions(), 2)
    seen: list[tuple[int, str, tuple[int, ...]]] = []
    group.install_monitor(lambda index, device, name, array: seen.append((index, name, array.shape)))
    group.forward(BATCH)
    assert (0, "3_output", (7, 3)) in seen
    assert (1, "0_output", (6, 4, 6, 5)) in seen
    group.install_monitor(None)
    count = len(seen)
    group.forward(BATCH)
    assert len(seen) == count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_modules_of_other_dtypes(dtype: torch.dtype) -> None:
    module: Any = torch.nn.Linear(3, 2).to(dtype)
    x = GENERATOR.normal(size=(4, 3))
    name = str(dtype).removeprefix("torch.")
    model = TorchModel(module, lambda y, _: (y.float() ** 2).mean(), loss_reduction="mean")
    group = DataParallelExecutorGroup(model, ["cpu"] * 2, [DataDesc("x", (4, 3), name)], [DataDesc("none", (4,))])
    cast = np.empty((4, 3), np.dtype(group.data_shapes[0].dtype))
    cast[...] = x
    group.forward_backward(DataBatch([cast], [np.zeros(4, np.float32)]))
    assert group.grad_arrays[0][0] is not None
    assert group.grad_arrays[0][0].dtype.name == name
    (module(torch.from_numpy(x).to(dtype)).float() ** 2).mean().backward()
    np.testing.assert_allclose(
        np.asarray(summed_gradients(group)["bias"], np.float64), module.bias.grad.double().numpy(), rtol=0.02, atol=0.02
    )


def test_what_a_module_cannot_take() -> None:
    with pytest.raises(ConfigError, match=r"not a torch\.nn\.Module"):
        TorchModel("net")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no shape yet"):
        TorchModel(torch.nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"cannot take x \(4, 5\)"):
        DataParallelExecutorGroup(TorchModel(torch.nn.Linear(3, 2)), ["cpu"], [("x", (4, 5))])
    with pytest.raises(ConfigError, match="has no loss"):
        DataParallelExecutorGroup(TorchModel(torch.nn.Linear(3, 2)), ["cpu"], [("x", (4, 3))], [("y", (4,))])
    with pytest.raises(ConfigError, match="has to count the samples"):
        DataParallelExecutorGroup(TorchModel(torch.nn.Flatten(0)), ["cpu"], [("x", (4, 3))])
    with pytest.raises(ConfigError, match="one number, or one per sample"):
        group_of(convolutions(), 1, lambda outputs, labels: outputs).forward(BATCH)


def test_misuse_of_an_executor() -> None:
    executor = TorchModel(convolutions()).bind("cpu", [DataDesc("images", IMAGES.shape)])
    with pytest.raises(NotAllowed, match="run forward first"):
        _ = executor.outputs
    with pytest.raises(KeyNotFound, match="'images' is missing"):
        executor.forward({}, True)
    with pytest.raises(NotAllowed, match="was not bound"):
        executor.forward({"other": IMAGES}, True)
    with pytest.raises(ShapeMismatch, match="was bound with"):
        executor.forward({"images": IMAGES[:2]}, True)
    executor.forward({"images": IMAGES}, True)
    with pytest.raises(NotAllowed, match="head gradients are required"):
        executor.backward()
    with pytest.raises(ShapeMismatch, match="head gradient of output"):
        executor.backward([np.zeros((1, 3), np.float32)])
    with pytest.raises(NotAllowed, match="there is no loss"):
        _ = executor.loss
    with pytest.raises(ConfigError, match="does not need here"):
        TorchModel(convolutions()).bind("cpu", [DataDesc("images", IMAGES.shape)], params={"no": np.zeros(1)})
    with pytest.raises(ShapeMismatch, match="the model wants"):
        TorchModel(convolutions()).bind(
            "cpu", [DataDesc("images", IMAGES.shape)], params={"3.bias": np.zeros(1, np.float32)}
        )
    with pytest.raises(DtypeMismatch, match="the model float32"):
        TorchModel(convolutions()).bind("cpu", [DataDesc("images", IMAGES.shape)], grads={"3.bias": np.zeros(3)})
    with pytest.raises(ConfigError, match="int64, which has no gradient"):
        TorchModel(torch.nn.Embedding(3, 2)).bind("cpu", [DataDesc("ids", (4,), "int64")], grad_req={"ids": "write"})
    frozen = TorchModel(convolutions()).bind(Device("cpu"), [DataDesc("images", IMAGES.shape)], for_training=False)
    frozen.forward({"images": IMAGES}, True)
    with pytest.raises(NotAllowed, match="for_training=True"):
        frozen.backward()
